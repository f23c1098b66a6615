"""What a run gave by a metric: out of its eval of a held-out split, or out of the evals of its training.

`test/mean_of_groups` and `test/loss` are read from evals/test-<step>.json, which `rung eval --split test` leaves; any
other name from the run's own evals, at the best of them. A reading also names the rows that were evaluated and how the
loss is defined, so that figures of different things can be told apart; who is left out for it is left to study.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rung.compare.align import curve_of, is_lower_better, main_metric
from rung.compare.lineage import value_text
from rung.compare.reading import UNREADABLE, evals
from rung.runs.files import from_json, read_json, read_lines, to_json
from rung.runs.query import Run

MEAN_OF_GROUPS = "mean_of_groups"
_PART = "component/"  # before the name of a component in a run's own evals
_WHICH = ("eval set", "rows", "rows_hash")  # of a definition: the set, which varies with the components


class Figure(NamedTuple):
    value: float
    se: float | None = None


@dataclass(frozen=True)
class Reading:
    """What a run gave by the metric; `rows_of` names the evaluated rows of each component, "" of all."""

    figure: Figure
    step: int | None
    groups: Mapping[str, Figure] = field(default_factory=dict)
    positions: Sequence[float | None] = ()
    rows_of: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""


def default_metric(runs: Sequence[Run], notes: list[str]) -> str:
    """That of the test set where every run has been examined on it, else that of the runs' own evals."""
    examined = [run for run in runs if examined_on(run, "test")]
    if len(examined) == len(runs):
        has_groups = all((examined_on(run, "test") or {}).get(MEAN_OF_GROUPS) for run in runs)
        return f"test/{MEAN_OF_GROUPS}" if has_groups else "test/loss"
    if examined:
        missing = [run.id for run in runs if run not in examined]
        notes.append(
            f"{len(missing)} of {len(runs)} runs were not evaluated on the test set ({', '.join(missing[:6])}"
            f"{', ...' if len(missing) > 6 else ''}), so the figures are of the runs' own evals; "
            f"`rung eval {missing[0]} --split test` adds one"
        )
    return main_metric(runs[0])


def is_examined(metric: str, runs: Sequence[Run]) -> bool:
    """Whether a metric is one of an examined split, rather than of the runs' own evals."""
    return any(metric in examined_names(run) for run in runs)


def reading(run: Run, metric: str, examined: bool) -> Reading | None:
    """None where the run has no such figure."""
    group, _, name = metric.rpartition("/")
    return _examined(run, group, name) if examined else _own_eval(run, metric)


def examined_names(run: Run) -> list[str]:
    splits = dict.fromkeys(path.name.rpartition("-")[0] for path in sorted((run.path / "evals").glob("*-*.json")))
    return [f"{split}/{name}" for split in splits for name in (MEAN_OF_GROUPS, "loss")]


def examined_on(run: Run, split: str) -> dict[str, Any] | None:
    """The figures of the latest eval of a split with weights of the run itself; None where there is none."""
    found: list[tuple[int, dict[str, Any]]] = []
    for path in sorted((run.path / "evals").glob(f"{split}-*.json")):
        try:
            document = read_json(path)
            sets = document["sets"]
            figures = sets.get(split) or next(iter(sets.values()))
            if not str(document.get("weights", "")).startswith("folder"):
                found.append((int(document["step"]), {**figures, "document": document, "path": path}))
        except UNREADABLE:
            continue
    return max(found, key=lambda one: one[0])[1] if found else None


def _examined(run: Run, split: str, name: str) -> Reading | None:
    figures = examined_on(run, split)
    whole = (figures.get(name) if name == MEAN_OF_GROUPS else figures) if figures else None
    if figures is None or not isinstance(whole, dict):
        return None
    groups = _groups(figures)
    document = figures["document"]
    return Reading(
        _figure(whole),
        document.get("step"),
        {str(group): _figure(one) for group, one in groups.items() if one.get("loss") is not None},
        (figures.get("positions") or {}).get("loss") or (),
        _rows_of(run, figures["path"].with_suffix(".windows.jsonl"), figures),
        str(document.get("weights", "")),
    )


def _groups(figures: Mapping[str, Any]) -> dict[str, Any]:
    groups = figures.get("groups")
    return groups if isinstance(groups, dict) else {}


def _figure(figures: Mapping[str, Any]) -> Figure:
    value, se = figures.get("loss"), figures.get("se", figures.get("loss_se"))
    return Figure(math.nan if value is None else float(value), None if se is None else float(se))


def _rows_of(run: Run, file: Path, figures: Mapping[str, Any]) -> dict[str, str]:
    """Component -> a name for what was evaluated: where each row lies, how many targets they have, what is counted."""
    groups = _groups(figures)
    places: dict[str, list[bytes]] = {}
    for line in read_lines(file):
        try:
            row = from_json(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        # What a recipe calls its groups is its own; the number of a row counts those of all groups before it.
        words = {name: value for name, value in row.items() if isinstance(value, str) and name != "document"}
        group = next((word for word in words.values() if word in groups), "")
        where = {name: value for name, value in sorted(row.items()) if name != "row" and not isinstance(value, float)}
        places.setdefault(group, []).append(to_json(where))
    definitions = [one for name, one in sorted(run.definitions().items()) if name.startswith("eval/")]
    counted = to_json(_without_set(definitions[0])) if definitions else b""
    found = {}
    for name, one in (groups or {"": figures}).items():
        rows = b"\n".join([*sorted(places.get(name, [])), counted])
        found[str(name)] = (
            f"{value_text(one.get('rows'))} rows, {value_text(one.get('targets'))} targets, {_hash(rows)}"
        )
    return found


def _without_set(definition: Any) -> dict[str, Any]:
    told = definition if isinstance(definition, dict) else {}
    return {key: value for key, value in told.items() if key not in _WHICH}


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _own_eval(run: Run, metric: str) -> Reading | None:
    """The best of a run's own evals by a metric, with the parts that are named after components."""
    curve = curve_of(run, metric)
    finite = [(value, step) for step, value in zip(curve.x, curve.values) if math.isfinite(value)]
    if not curve.x:
        return None
    if not finite:
        return Reading(Figure(curve.values[-1]), int(curve.x[-1]))
    sign = -1.0 if is_lower_better(run, metric) is False else 1.0
    value, step = min(finite, key=lambda one: (sign * one[0], one[1]))
    group, _, name = metric.rpartition("/")
    row = next((row for row in evals(run) if row["step"] == step and row["set"] == group), {})
    se = row.get(f"{name}_se")
    groups = {key.removeprefix(_PART): Figure(float(value)) for key, value in row.items()
              if key.startswith(_PART) and isinstance(value, int | float)} if name == "loss" else {}  # fmt: skip
    told = run.definitions().get(f"eval/{group}")
    # With components the set is that of the run's own ones, which is what varies.
    counted = _hash(to_json(_without_set(told) if groups else told))
    return Reading(Figure(value, se if isinstance(se, float) else None), int(step), groups, (), {"": counted})
