"""What a run gave by a metric: out of its eval of a split, or out of the evals of its training.

`test/mean_of_groups` and `test/loss` are read from evals/test-<step>.json, which `rung eval --split test` leaves, and
so for any other split; other names from the run's own evals, at the best of them. A reading also names the rows that
were evaluated and how the loss is defined, so that study can tell figures of different things apart.
"""

from __future__ import annotations

import glob
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rung.compare.lineage import value_text
from rung.compare.reading import UNREADABLE, curve_of, evals, evals_of, is_lower_better, main_metric, mapping
from rung.errors import RunError
from rung.runs.files import from_json, newer, read_json, read_lines, to_json
from rung.runs.paths import inside, stays
from rung.runs.query import Run
from rung.runs.record import EVAL_SCHEMA

MEAN_OF_GROUPS = "mean_of_groups"
_PART = "component/"  # before the name of a component in a run's own evals
_WHICH = ("eval set", "rows", "rows_hash")  # of a definition: the set, which varies with the components


class Figure(NamedTuple):
    value: float
    se: float | None = None


@dataclass(frozen=True)
class Reading:
    """What a run gave by the metric; `rows_of` and `positions` are by component, "" is for all of them."""

    figure: Figure
    step: int | None
    groups: Mapping[str, Figure] = field(default_factory=dict)
    positions: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    rows_of: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""


def default_metric(runs: Sequence[Run], notes: list[str]) -> str:
    """That of a split that every run was evaluated on, test before others; else that of the runs' own evals."""
    splits = sorted({split for run in runs for split in _splits(run)}, key=lambda split: (split != "test", split))
    for split in splits:
        found = [split_eval(run, split) for run in runs]
        if None not in found:
            has_groups = all(figures.get(MEAN_OF_GROUPS) for figures in found if figures is not None)
            return f"{split}/{MEAN_OF_GROUPS}" if has_groups else f"{split}/loss"
    if splits:
        missing = [run.id for run in runs if split_eval(run, splits[0]) is None]
        notes.append(
            f"{len(missing)} of {len(runs)} runs were not evaluated on the {splits[0]} set ({', '.join(missing[:6])}"
            f"{', ...' if len(missing) > 6 else ''}), so the figures are of the runs' own evals; "
            f"`rung eval {missing[0]} --split {splits[0]}` adds one"
        )
    return main_metric(runs[0])


def is_of_split(metric: str, runs: Sequence[Run]) -> bool:
    """Whether a metric is read from evals of a split; not where some runs lack it there, and own evals have it."""
    has = [metric in split_metrics(run) for run in runs]
    return all(has) or (any(has) and not any(metric in evals_of(run) for run in runs))


def split_metrics(run: Run) -> list[str]:
    return [f"{split}/{name}" for split in _splits(run) for name in (MEAN_OF_GROUPS, "loss")]


def _splits(run: Run) -> list[str]:
    files = [path for path in sorted((run.path / "evals").glob("*-*.json")) if stays(run.path, path)]
    return list(dict.fromkeys(path.name.rpartition("-")[0] for path in files))


def split_eval(run: Run, split: str) -> dict[str, Any] | None:
    """The figures of the latest eval of a split with weights of the run itself; None where there is none."""
    found: list[tuple[int, dict[str, Any]]] = []
    for path in sorted((run.path / "evals").glob(f"{glob.escape(split)}-*.json")):
        if not stays(run.path, path):
            continue
        try:
            document = mapping(read_json(path))
        except UNREADABLE:
            continue
        if problem := newer(path, document, EVAL_SCHEMA):
            raise RunError(f"{problem}.", code="version-mismatch")
        try:
            sets = document["sets"]
            figures = sets.get(split) or next(iter(sets.values()))
            if document["split"] == split and not str(document.get("weights", "")).startswith("folder"):
                found.append((int(document["step"]), {**figures, "document": document, "path": path}))
        except UNREADABLE:
            continue
    return max(found, key=lambda one: one[0])[1] if found else None


def reading(run: Run, metric: str, from_split: bool) -> Reading | None:
    """What the run gave in its eval of a split, or in its own evals; None where it has no such figure."""
    if not from_split:
        return _own_eval(run, metric)
    split, _, name = metric.rpartition("/")
    figures = split_eval(run, split)
    whole = (figures.get(name) if name == MEAN_OF_GROUPS else figures) if figures else None
    if figures is None or not isinstance(whole, dict):
        return None
    # Without targets a component has no text in this split.
    all_groups = mapping(figures.get("groups"))
    parts = {name: one for name, one in all_groups.items() if one.get("targets") != 0}
    groups = {str(name): _figure(one) for name, one in parts.items()}
    # The mean over groups passes over those that are not finite, so it is no figure of such a run.
    is_whole = all(math.isfinite(one.value) for one in groups.values())
    curves = {name: (one.get("positions") or {}).get("loss") or () for name, one in {"": figures, **parts}.items()}
    positions = {name: curve for name, curve in curves.items() if curve}
    figure, document = _figure(whole) if is_whole else Figure(math.nan), figures["document"]

    # A name for what was evaluated: where each row lies, how many targets they have, what is counted.
    places: dict[str, list[bytes]] = {}
    windows = inside(run.path, f"evals/{figures['path'].stem}.windows.jsonl")
    for line in read_lines(windows):
        try:
            row = mapping(from_json(line))
        except ValueError:
            continue
        if not row:
            continue
        # What a recipe calls its groups is its own; the number of a row counts those of all groups before it.
        texts = (value for name, value in row.items() if isinstance(value, str) and name not in ("document", "set"))
        group = next((text for text in texts if text in all_groups), "")
        where = {name: value for name, value in sorted(row.items()) if name != "row" and not isinstance(value, float)}
        places.setdefault(group, []).append(repr(where).encode("utf-8", "surrogatepass"))
    definitions = [one for name, one in sorted(run.definitions().items()) if name.startswith("eval/")]
    counted = to_json(_without_set(definitions[0])) if definitions else b""
    rows_of = {}
    for name, one in (all_groups or {"": figures}).items():
        digest = _hash(b"\n".join([*sorted(places.get(name, [])), counted]))
        rows_of[str(name)] = f"{value_text(one.get('rows'))} rows, {value_text(one.get('targets'))} targets, {digest}"
    return Reading(figure, document.get("step"), groups, positions, rows_of, str(document.get("weights", "")))


def _figure(figures: Mapping[str, Any]) -> Figure:
    value, se = figures.get("loss"), figures.get("se", figures.get("loss_se"))
    return Figure(math.nan if value is None else float(value), None if se is None else float(se))


def _without_set(definition: Any) -> dict[str, Any]:
    return {key: value for key, value in mapping(definition).items() if key not in _WHICH}


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _own_eval(run: Run, metric: str) -> Reading | None:
    """The best of a run's own evals by a metric, with the parts that are named after components."""
    curve = curve_of(run, metric)
    finite = [(value, step) for step, value in zip(curve.steps, curve.values) if math.isfinite(value)]
    if not curve.steps:
        return None
    if not finite:
        return Reading(Figure(curve.values[-1]), int(curve.steps[-1]))
    sign = -1.0 if is_lower_better(run, metric) is False else 1.0
    value, step = min(finite, key=lambda one: (sign * one[0], one[1]))
    rows = [row for row in evals(run) if row["step"] == step and metric.startswith(f"{row['set']}/")]
    row = rows[-1] if rows else {"set": ""}
    group, name = row["set"], metric.removeprefix(f"{row['set']}/")
    se = row.get(f"{name}_se")
    groups = {key.removeprefix(_PART): Figure(float(value)) for key, value in row.items()
              if key.startswith(_PART) and isinstance(value, int | float)} if name == "loss" else {}  # fmt: skip
    definition = run.definitions().get(f"eval/{group}")
    if groups or name.startswith(_PART):  # then the set is that of the run's own components, which is what varies
        definition = _without_set(definition)
    figure = Figure(value, se if isinstance(se, float) else None)
    return Reading(figure, int(step), groups, rows_of={"": _hash(to_json(definition))})
