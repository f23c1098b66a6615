"""The runs of a sweep as one study: the figure of each, its value on the axis, its seed, and which runs are left out.

A run counts if it finished what it planned, gave a finite figure, and was measured on the same rows as the others; any
other is named with its reason, and so is a point of the plan that has no run. Rows are compared component by component:
runs on one and on eleven components never share an eval set, but must share the rows of common components.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rung.compare.factors import Difference, compare
from rung.compare.lineage import unreadable, value_text
from rung.compare.reading import UNREADABLE, evals_of, fell_short, is_lower_better, mapping, number_of, part_of
from rung.compare.scaling.measured import Reading, default_metric, is_of_split, reading, split_metrics
from rung.errors import RunError
from rung.runs.fields import leaves
from rung.runs.files import read_json, to_json
from rung.runs.query import Run
from rung.text import one_line
from rung.units import Budget

COMPONENTS = "dataset.num_components"
_ZERO_IS_ALL = (COMPONENTS, "dataset.max_unique_tokens")  # 0 means all there are: it stands at the far end
_CONTROL = "dataset.shuffle_labels"
_RECORDED = ("parameters", "unique_tokens", "targets")  # what may stand on the axis besides a key
# Keys that say how much there is of something: components, tokens, layers, steps.
_AMOUNT = re.compile(r"(.*\.)?(n_|num_|max_)\w+|(.*\.)?(width|layers|depth|dim|hidden\w*|vocab_size|context_size)")
_BUDGET = ("optimizer.max_iters", "optimizer.gradient_accumulation", "data.", "lr.lr_decay_iters")
Varies = Mapping[Path, Mapping[str, Any]]  # by path of the run: the varied keys and their values


@dataclass(frozen=True)
class Member:
    """A run that counts. `x` is None where the value on the axis is no number."""

    run: Run
    at: Any  # the value on the axis, as it was set
    x: float | None
    seed: str
    series: str  # the other keys that vary; "" where none does
    is_control: bool
    reading: Reading
    unique_tokens: float | None
    beside: Mapping[str, Any] = field(default_factory=dict)  # varied keys that have one value for each x

    @property
    def value(self) -> float:
        return self.reading.figure.value

    @property
    def label(self) -> str:
        """The name of its series; "" for the only one."""
        return ", ".join(filter(None, [self.series, "shuffled labels" if self.is_control else ""]))


class Excluded(NamedTuple):
    """A run or a point that does not count."""

    what: str
    reason: str


@dataclass
class Study:
    name: str
    x: str
    metric: str
    is_lower_better: bool
    is_of_split: bool = False  # whether the figures are of evals of a split, which were kept with the runs
    members: list[Member] = field(default_factory=list)
    left_out: list[Excluded] = field(default_factory=list)
    confounds: dict[str, list[str]] = field(default_factory=dict)  # what else differs from the first -> ids of runs
    notes: list[str] = field(default_factory=list)
    moves_along: list[str] = field(default_factory=list)  # varied keys that have one value for each x
    tried: list[float] = field(default_factory=list)  # x of runs that do not count
    diverged: Counter[str] = field(default_factory=Counter)  # by the value on the axis, runs that have no better twin

    @property
    def is_of_amounts(self) -> bool:
        """Whether x is an amount of something, of which more may help more and more slowly."""
        return self.x in _RECORDED or _AMOUNT.fullmatch(self.x) is not None

    @property
    def is_numeric(self) -> bool:
        return all(member.x is not None for member in self.members)


def collect(runs: Sequence[Run], x: str | None, metric: str | None, name: str) -> Study:
    """Reads what a report needs of every run; raises RunError where there is nothing to report."""
    if not runs:
        raise RunError(f"{name} has no runs yet; `rung sweep` with its file trains them.", code="no-run")
    left_out = list(_points_without_run(runs))
    varies = _varied(runs)

    # The last run of each point that finished what it planned.
    reasons = [_unfit(run) for run in runs]
    left_out += [Excluded(run.id, reason) for run, reason in zip(runs, reasons) if reason]
    last: dict[Any, Run] = {}
    for run in (run for run, reason in zip(runs, reasons) if not reason):
        key = part_of(run, "sweep").get("point") or run.path
        if (before := last.pop(key, None)) is not None:
            left_out.append(Excluded(before.id, f"{run.id} is a later run of the same point"))
        last[key] = run
    if not last:
        listed = "; ".join(f"{one.what}: {one.reason}" for one in left_out[:4])
        raise RunError(f"no run of {name} can be counted ({listed}).", code="no-run")
    usable = list(last.values())
    axis = _choose_axis(x, varies, usable)

    # The figure of each by one metric.
    notes: list[str] = []
    chosen = metric.removeprefix("eval/") if metric is not None else default_metric(usable, notes)
    from_split = is_of_split(chosen, usable)
    readings: dict[Path, Reading] = {}
    for run in usable:
        try:
            found = reading(run, chosen, from_split)
        except UNREADABLE as error:
            left_out.append(Excluded(run.id, unreadable(run, error)))
            continue
        if found is None:
            left_out.append(Excluded(run.id, f"has no {chosen}"))
        elif not math.isfinite(found.figure.value):
            left_out.append(Excluded(run.id, f"its {chosen} is {value_text(found.figure.value)}"))
        else:
            readings[run.path] = found
    if metric is not None and not readings:
        known = dict.fromkeys(key for run in usable for key in (*evals_of(run), *split_metrics(run)))
        message = f"no run of {name} has {one_line(metric)}; there are {', '.join(known) or 'no evals'}."
        raise RunError(message, code="no-metric")
    directions = [is_lower_better(run, chosen) for run in usable]
    is_lower = next((one for one in directions if one is not None), True)
    study = Study(name, axis, chosen, is_lower, from_split, left_out=left_out, notes=notes)

    # What was tried and does not count: an optimum at its edge may lie beyond.
    points = {part_of(run, "sweep").get("point") for run in usable} - {None}
    for run in runs:
        at = varies[run.path].get(axis)
        if run not in usable and (number := _number(at)) is not None and (number or axis not in _ZERO_IS_ALL):
            study.tried.append(number)
        if run.status == "diverged" and part_of(run, "sweep").get("point") not in points:
            study.diverged[value_text(at)] += 1

    # Where each run that counts stands: its value on the axis, its seeds, how much there was to learn from.
    for run in (run for run in usable if run.path in readings):
        mine, figures = varies[run.path], readings[run.path]
        try:
            about = mapping((run.data().get("train") or {}).get("about"))
            unique = number_of(about.get("unique_tokens", about.get("tokens")))
            tokens = None if unique is None else float(unique)
            recorded = {"parameters": part_of(run, "derived").get("parameters"), "unique_tokens": tokens,
                        "targets": part_of(run, "totals").get("targets")}  # fmt: skip
            at = recorded[axis] if axis in _RECORDED else mine.get(axis)
            if axis == "seed":  # nothing else varies: all runs are repeats at one place
                at = "all"
            elif axis in _ZERO_IS_ALL and _number(at) == 0:
                at = len(about.get("components") or figures.groups) or None if axis == COMPONENTS else tokens
            seeds = [f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in mine.items()
                     if _is_seed_key(key) and key != "seed"]  # fmt: skip
            seed = ", ".join([value_text(run.document.get("seed")), *seeds])
            is_control = dict(leaves(run.config())).get(_CONTROL) is True
            study.members.append(Member(run, at, _number(at), seed, "", is_control, figures, tokens))
        except UNREADABLE as error:
            left_out.append(Excluded(run.id, unreadable(run, error)))
    if len({quantity[1] for member in study.members if (quantity := _quantity(member.at)) is not None}) > 1:
        study.members = [replace(member, x=None) for member in study.members]  # steps and tokens are no one axis
    _drop_other_rows(study)
    if not study.members:
        message = f"no run of {name} has a finite {study.metric}; `rung sweep show {name}` lists them."
        raise RunError(message, code="no-metric")
    _name_series(study, varies)
    if not study.members:
        message = f"no run of {name} records its {one_line(axis)}, so it cannot be the axis."
        raise RunError(message, code="no-key")
    study.confounds = _confounds(study.members, {key for one in varies.values() for key in one})
    return study


def _points_without_run(runs: Sequence[Run]) -> Iterator[Excluded]:
    """Points of the kept plan that nobody has begun."""
    names = {str(part_of(run, "sweep").get("name")) for run in runs if part_of(run, "sweep")}
    begun = {part_of(run, "sweep").get("point") for run in runs}
    for name in sorted(names):
        try:
            plan = read_json(runs[0].path.parent.parent / ".sweeps" / name / "sweep.json")
            points = [point for point in plan["points"] if not point.get("retired")]
            missing = [point for point in points if point["key"] not in begun and not point.get("run")]
        except UNREADABLE:
            continue
        for point in missing:
            values = " ".join(f"{one_line(key)}={value_text(value)}" for key, value in point["varies"].items())
            yield Excluded(values or str(point["key"]), "no run yet")


def _unfit(run: Run) -> str:
    """Why a run cannot count, whatever it gave; "" where it can."""
    if run.status != "finished":
        return f"{run.status}{'' if run.step is None else f' at step {run.step}'}"
    try:
        may_end_early = bool(run.config().get("eval_patience"))
    except UNREADABLE as error:
        return unreadable(run, error)
    return f"did {short}" if not may_end_early and (short := fell_short(run)) else ""


def _varied(runs: Sequence[Run]) -> Varies:
    """What each point sets, of the keys that have several values; of runs without a sweep, the keys that differ.

    Where only seeds have several values so far, all that a point sets.
    """
    found: dict[Path, Mapping[str, Any]] = {run.path: mapping(part_of(run, "sweep").get("varies")) for run in runs}
    is_swept = any(found.values())
    if not is_swept:
        for run in runs:
            sources = run.sources()
            tree = leaves(run.config())
            found[run.path] = {k: v for k, v in tree if not str(sources.get(k, "")).startswith("derived")}
    distinct: dict[str, set[bytes]] = {}
    for one in found.values():
        for key, value in one.items():
            distinct.setdefault(key, set()).add(to_json(value))
    absent = {key for key in distinct for one in found.values() if key not in one}
    several = {key for key, values in distinct.items() if len(values) > 1 or key in absent}
    if is_swept and all(_is_seed_key(key) or key == _CONTROL for key in several):
        several = set(distinct)
    return {path: {key: value for key, value in one.items() if key in several} for path, one in found.items()}


def _is_seed_key(key: str) -> bool:
    return key.rpartition(".")[2] == "seed" or key.endswith("_seed")


def _choose_axis(x: str | None, varies: Varies, runs: Sequence[Run]) -> str:
    """The axis that was asked for, else the number of components, else the first number that varies, else the seed."""
    keys = list(dict.fromkeys(key for run in runs for key in varies[run.path]))
    if x is not None:
        if x in keys or x in _RECORDED:
            return x
        known = ", ".join([*keys, *_RECORDED])
        raise RunError(f"{one_line(x)} is not varied; the axis can be {known}.", code="no-key")
    others = [key for key in keys if not _is_seed_key(key) and key != _CONTROL]
    if COMPONENTS in others:
        return COMPONENTS
    numeric = [key for key in others if all(_number(varies[run.path].get(key)) is not None for run in runs)]
    # A search gives a continuous key another value each time, and such a key cannot tell series apart.
    scattered = [key for key in numeric if len({_number(varies[run.path][key]) for run in runs}) == len(runs)]
    return (scattered or numeric or others or ["seed"])[0]


def _number(value: Any) -> float | None:
    found = _quantity(value)
    return None if found is None else found[0]


def _quantity(value: Any) -> tuple[float, str] | None:
    """A number and its unit, also out of text such as 1e-3 or "10M tokens"; a plain one counts steps."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return (number, "steps") if math.isfinite(number := float(value)) else None
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        budget = Budget.parse(str(value))
    except ValueError:
        return None
    units = {name: getattr(budget, name) for name in ("steps", "targets", "epochs", "seconds")}
    given = [(float(number), name) for name, number in units.items() if number is not None]
    return given[0] if len(given) == 1 else None


def _drop_other_rows(study: Study) -> None:
    """Leaves out runs that were measured on other rows than most of those that measure the same component."""

    def rows_by(member: Member) -> Iterator[tuple[tuple[str, str], str]]:
        # With shuffled labels a component is made of other documents, and with another seed of yet others.
        whose = member.seed if member.is_control else ""
        yield from (((whose, name), rows) for name, rows in member.reading.rows_of.items())

    counts: dict[tuple[str, str], Counter[str]] = {}
    for member in study.members:
        for name, rows in rows_by(member):
            counts.setdefault(name, Counter())[rows] += 1
    usual = {name: max(rows, key=rows.__getitem__) for name, rows in counts.items()}  # the first of equals
    kept = []
    for member in study.members:
        other = [name[1] for name, rows in rows_by(member) if rows != usual[name]]
        if not other:
            kept.append(member)
            continue
        of = f" of {', '.join(map(one_line, other[:3]))}" if any(other) else ""
        reason = f"its {study.metric} was measured on other rows{of}, or in other ways"
        study.left_out.append(Excluded(member.run.id, reason))
    study.members = kept


def _name_series(study: Study, varies: Varies) -> None:
    """Tells runs apart by the varied keys that are neither axis nor seed; those that go with the axis are noted."""
    keys = dict.fromkeys(key for member in study.members for key in varies[member.run.path])
    others = [key for key in keys if key not in (study.x, _CONTROL) and not _is_seed_key(key)]
    values: dict[str, dict[str, set[str]]] = {key: {} for key in others}
    for member in study.members:
        for key in others:
            text = value_text(varies[member.run.path].get(key))
            values[key].setdefault(value_text(member.at), set()).add(text)
    along = [key for key in others if all(len(found) == 1 for found in values[key].values())]
    study.moves_along = [key for key in along if len({v for one in values[key].values() for v in one}) > 1]

    cells: dict[tuple[str, ...], Member] = {}
    for member in study.members:
        mine = varies[member.run.path]
        if member.at is None:
            study.left_out.append(Excluded(member.run.id, f"does not record its {study.x}"))
            continue
        series = ", ".join(f"{one_line(key)}={value_text(mine.get(key))}" for key in others if key not in along)
        place = (series, str(member.is_control), value_text(member.at), member.seed)
        if (before := cells.pop(place, None)) is not None:
            reason = f"{member.run.id} has the same {study.x} and seed, and is later"
            study.left_out.append(Excluded(before.run.id, reason))
        cells[place] = replace(member, series=series, beside={key: mine.get(key) for key in study.moves_along})
    study.members = list(cells.values())


def _confounds(members: Sequence[Member], keys: set[str]) -> dict[str, list[str]]:
    """What differs from the first run beyond what was varied, and what follows from that -> ids of runs."""
    has_data_key = any(key.startswith(("dataset.", "data.")) or _is_seed_key(key) for key in keys)
    has_budget_key = any(key.startswith(_BUDGET) for key in keys)

    def is_meant(difference: Difference) -> bool:
        match difference.part:
            case "config":
                return difference.name in keys
            case "data":  # rows of another cut of the same store
                stores = {str(value).partition("/")[0] for value in (difference.before, difference.after)}
                return len(stores) == 1 and has_data_key
            case "budget":
                return has_budget_key
            case "pairing":
                return difference.name != "weights_from"
        return difference.part in ("seed", "metric")

    first = members[0].run
    found: dict[str, list[str]] = {}
    for member in members[1:]:
        try:
            differences = compare(first, member.run, has_rows=False).of("factor", "hidden", "metric")
        except UNREADABLE as error:
            found.setdefault(unreadable(member.run, error), []).append(member.run.id)
            continue
        for one in differences:
            if not is_meant(one):
                detail = one.detail or f"{value_text(one.before)} -> {value_text(one.after)}"
                found.setdefault(f"{one.part}: {one_line(one.name)} ({one_line(detail)})", []).append(member.run.id)
    return found
