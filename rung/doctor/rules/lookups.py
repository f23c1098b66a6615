"""What several rules ask of a history, and the commands that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rung.advice import in_own_words
from rung.doctor.history import History, Series
from rung.runs.metricnames import usual_name

GOALS = r"reward|return|advantage|policy|accuracy$"  # names of what is logged beside losses that say little


def at(series: Series, steps: np.ndarray) -> np.ndarray:
    """The values at these steps; NaN where there is none."""
    if not len(series):
        return np.full(len(steps), np.nan)
    places = np.clip(np.searchsorted(series.steps, steps), 0, len(series) - 1)
    return np.where(series.steps[places] == steps, series.values[places], np.nan)


def value(series: Series, step: int) -> float:
    return float(at(series, np.asarray([step]))[0])


def event_at(history: History, kind: str, step: int) -> dict[str, Any]:
    """The event of this kind at this step; empty where there is none."""
    return next((event for event in history.events_of(kind) if event.get("step") == step), {})


def own_diagnosis(history: History, step: int) -> str:
    """The diagnosis that the run itself made of a step that failed, as evidence; empty where it made none."""
    event = event_at(history, "diverged", step)
    diagnosis = event.get("diagnosis") or event.get("origin")
    return f"the run's own diagnosis at step {step}: {diagnosis}" if diagnosis else ""


def micro_and_rank(event: Mapping[str, Any]) -> str:
    """Where in its step something failed, in brackets; empty where the event does not say."""
    named = ", ".join(f"{key} {event[key]}" for key in ("micro", "rank") if event.get(key) is not None)
    return f" ({named})" if named else ""


def losses(history: History) -> dict[str, Series]:
    """The losses of all objectives, by name; the first one's has no prefix. A script's train/loss is that one."""
    others = (n for n in history.rows if n.endswith("/loss") and n != "logits/loss" and usual_name(n) != "loss")
    return {n: history[n] for n in ("loss", *others) if n in history}


def norms(history: History) -> dict[str, Series]:
    return {n: s for n, s in history.rows.items() if n == "norm" or n.endswith("/norm")}


def before(history: History, name: str, step: int) -> str:
    values = history[name].between(0, step).last(4).values
    return f"{name} before step {step}: {', '.join(f'{v:.4g}' for v in values) or 'none recorded'}"


def replay(history: History, step: int) -> str:
    """How to have a step taken again; empty where that cannot be, as in a loop whose guard has not captured it."""
    command = f"rung replay {history.run_id or 'RUN'}@{step}"
    if not history.is_script:
        return command
    event = event_at(history, "diverged", step)
    if not event.get("capture"):
        return ""
    return command if event.get("build") else f"{command} --build FILE:FUNCTION"


def names_the_cause(history: History, step: int, what: str) -> str:
    """The remedy where a replay of a step that failed names the cause, or what it takes to have one."""
    if command := replay(history, step):
        needs = " (FUNCTION returns model, optimizer and loss as the script makes them)" if "FILE:" in command else ""
        return f"run `{command}`{needs}: it names {what}"
    return (
        f"put run.guard(model, optimizer, loss) around the step and start the script again: it keeps the step that "
        f"fails, and a replay of it names {what}"
    )


def captured(history: History, step: int) -> bool:
    """Whether the step was kept when it failed, so that a replay names a cause and does not only compare."""
    return bool(event_at(history, "diverged", step).get("capture"))


def train(history: History, key: str, value: float) -> str:
    """How to try another value of a key; a script has to be started by its author."""
    if history.is_script:
        return in_own_words(f"start the script again with {key}={value:g}")
    return f"rung train --parent {history.run_id} {key}={value:g}"


def again(history: History) -> str:
    """How to go on once an error is fixed."""
    if history.is_script:
        return "start the script again"
    run = history.run_id or "RUN"
    if history.events_of("save"):
        return f"continue from the last save with `rung resume {run}`"
    return f"start again with `rung train --parent {run}`: nothing was saved"


def check(history: History) -> str:
    """The checks before step 0, which need a recipe."""
    return "" if history.is_script else f"rung check {history.run_id or 'RUN'}"


def half_weights(history: History) -> str:
    """The type of the weights where it is half of float32; in a recipe trained weights are always float32."""
    dtype = str(history.derived.get("dtype", ""))
    return dtype if history.is_script and dtype in ("float16", "bfloat16") else ""


def listed(items: Sequence[object] | np.ndarray) -> str:
    """The first five, and how many more there are."""
    return ", ".join(map(str, items[:5])) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def two_digits(number: float) -> float:
    """As one would type it."""
    return float(f"{number:.2g}")
