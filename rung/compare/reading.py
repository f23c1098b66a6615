"""What a comparison reads of a run: parts of run.json, its evals, and its metrics over steps.

Evals and a few columns are kept for the last few Runs, so a Run that is compared is one state of a run in progress:
what is said of its evals in one place holds in the next. A Run that was opened anew is read anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rung.errors import RunError
from rung.runs.columns import current, is_long
from rung.runs.metrics import Faults
from rung.runs.query import Run

# Of a file that is damaged, and of one that is whole and holds something else than a record does.
UNREADABLE = (
    RunError, OSError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError,
)  # fmt: skip
TRAINING = "loss"  # of the rows of training, where there are no evals
COUNTED = ("targets", "samples", "tokens", "num_samples", "num_tokens", "examples")  # what scripts count a step by
_SHARED = (*COUNTED, "step_s", "batch_hash")  # what `compare` and `outcome` both look at: read together


class Curve(NamedTuple):
    """A metric of a run by step, where it is a number: of the evals, or of the rows at these places among all rows."""

    steps: Sequence[float]
    values: Sequence[float]
    rows: Sequence[int] = ()
    targets: Sequence[float] | None = None  # seen before each of these steps; None unless all are known
    end: float = math.nan  # of the training, in the unit of x

    @property
    def x(self) -> Sequence[float]:
        return self.steps if self.targets is None else self.targets


def part_of(run: Run, name: str) -> Mapping[str, Any]:
    """A part of run.json that should be a mapping, and may be missing or damaged."""
    return mapping(run.document.get(name))


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def segments_of(run: Run) -> list[Mapping[str, Any]]:
    """The attempts of a run, the first first."""
    return [part for part in list_of(run.document.get("segments")) if isinstance(part, dict)]


def number_of(value: Any) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_of_engine(run: Run) -> bool:
    """Whether the keys of the config are those of rung's own training; a script's keys may mean anything."""
    return not str(run.document.get("recipe")).startswith(("own loop", "import "))


def planned_targets(run: Run) -> float | None:
    """Targets that the declared budget comes to; None where there is none, as in one's own loop."""
    derived = part_of(run, "derived")
    parts = [number_of(derived.get(name)) for name in ("num_steps", "rows_per_step", "targets_per_row")]
    known = [float(part) for part in parts if part is not None]
    return math.prod(known) if len(known) == len(parts) else None


def fell_short(run: Run) -> str:
    """What a run did of its declared steps, where it is less, as after a budget in time; else empty."""
    planned, done = number_of(part_of(run, "derived").get("num_steps")), run.step or 0
    return f"{done} of {planned:g} planned steps" if planned is not None and done < planned else ""


@lru_cache(maxsize=32)
def evals(run: Run) -> Sequence[Mapping[str, Any]]:
    """Run.evals(); RunError where they cannot be read."""
    try:
        return run.evals()
    except UNREADABLE as error:
        raise RunError(f"the evals of {run.path} cannot be read: {error}.", code="run-damaged") from error


def column(run: Run, name: str) -> Curve:
    """A metric of the rows, kept; text and truth values are no numbers. RunError where the rows cannot be read."""
    return _kept_columns(run, _SHARED if name in _SHARED else (name,))[name]


def columns(run: Run, names: Sequence[str], faults: Faults | None = None) -> dict[str, Curve]:
    """Several at once, and not kept; broken lines are counted in `faults`."""
    folder, kinds = run.path / "metrics", (int, float)  # not `int | float`, built anew for each of a million values
    try:
        is_copied = faults is not None and is_long(folder)  # then the copy by column knows what was broken
        found = run.metrics(names, None if is_copied else faults)
        if faults is not None and is_copied:
            faults.broken = current(folder).broken
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RunError(f"the rows of {run.path} cannot be read: {reason}.", code="run-damaged") from error
    out, steps = {}, found["step"]
    for name in names:
        values = found[name]
        rows = [i for i, value in enumerate(values) if type(value) in kinds]
        if len(rows) < len(values):
            out[name] = Curve([steps[i] for i in rows], [values[i] for i in rows], rows)
        else:
            out[name] = Curve(steps, values, rows)
    return out


_kept_columns = lru_cache(maxsize=6)(columns)


def evals_of(run: Run) -> dict[str, Curve]:
    """set/name -> its curve over steps, in the order in which they were first seen."""
    found: dict[str, dict[float, float]] = {}
    for row in evals(run):
        for name, value in row.items():
            if name not in ("step", "set") and number_of(value) is not None:
                found.setdefault(f"{row['set']}/{name}", {})[row["step"]] = float(value)
    return {name: _sorted(values) for name, values in found.items()}


def curve_of(run: Run, metric: str) -> Curve:
    """The curve of an eval metric, else of a metric of the rows; empty where there is none."""
    of_evals = evals_of(run)
    if metric in of_evals:
        return of_evals[metric]
    rows = column(run, metric)
    return _sorted({step: float(value) for step, value in zip(rows.steps, rows.values)})


def _sorted(values: Mapping[float, float]) -> Curve:
    steps = sorted(values)
    return Curve([float(step) for step in steps], [values[step] for step in steps])


def targets_at(run: Run) -> Callable[[float], float | None]:
    """step -> targets seen before it; None where a row on the way there does not have them.

    Before it, because an eval at step t measures the state after t updates.
    """
    rows = column(run, "targets")
    found = {step: value for step, value in zip(rows.steps, rows.values) if math.isfinite(value)}
    first = min(found, default=0)
    if not found or first > 1:  # a loop may count its steps from 1
        return lambda step: None
    known = itertools.takewhile(lambda value: value is not None, map(found.get, itertools.count(first)))
    totals = list(itertools.accumulate(known, initial=0.0))

    def at(step: float) -> float | None:
        place = int(step - first)
        is_there = place == step - first and 0 <= place < len(totals)
        return 0.0 if step == 0 else totals[place] if is_there else None

    return at


def main_metric(run: Run) -> str:
    """The loss of the set that `best` names, else of the first set; else the first eval metric; else "loss"."""
    names = list(evals_of(run))
    of_best = f"{(run.best or {}).get('set')}/loss"
    losses = [name for name in names if name.endswith("/loss")]
    return of_best if of_best in names else (losses or names or [TRAINING])[0]


def definition_of(run: Run, metric: str) -> tuple[str, Any]:
    """Where the run says what an eval metric counts, and what: of this one alone if it does, else of its eval set."""
    definitions, of_set = run.definitions(), f"eval/{metric.partition('/')[0]}"
    name = f"eval/{metric}" if "eval set" in mapping(definitions.get(f"eval/{metric}")) else of_set
    return name, definitions.get(name)


def is_lower_better(run: Run, metric: str) -> bool | None:
    """What the run's definitions say; None where they say nothing."""
    definitions = run.definitions()
    for name in (f"eval/{metric}", metric, metric.rpartition("/")[2], f"eval/{metric.partition('/')[0]}"):
        better = mapping(definitions.get(name)).get("better")
        if better in ("higher", "lower"):
            return bool(better == "lower")
    return None
