"""The runs of a sweep as one study: what each gave, at which value of the axis, under which seed, and who is left out.

A run counts if it finished what it planned, gave a finite figure, and was measured on the same rows as the others;
any other is named with its reason, and so is a point of the plan that has no run. What the figures say is left to
effects, fit and page.

The surprising thing: which rows were evaluated is compared component by component. Runs on one and on eleven
components never share an eval set, but the rows of the components that they share must be the same ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rung.compare.align import evals_of, is_lower_better
from rung.compare.difference import part_of
from rung.compare.endpoint import fell_short
from rung.compare.factors import compare
from rung.compare.lineage import unreadable, value_text
from rung.compare.reading import UNREADABLE
from rung.compare.scaling.axis import (
    COMPONENTS,
    CONTROL,
    RECORDED,
    ZERO_IS_ALL,
    choose,
    is_amount,
    is_seed_key,
    number_of,
    quantity,
    varied,
)
from rung.compare.scaling.measured import Reading, default_metric, examined_names, is_examined, reading
from rung.errors import RunError
from rung.runs.fields import leaves
from rung.runs.files import read_json
from rung.runs.query import Run
from rung.text import one_line

_BUDGET = ("optimizer.max_iters", "optimizer.gradient_accumulation", "data.", "lr.lr_decay_iters")


@dataclass(frozen=True)
class Member:
    """A run that counts. `x` is None where the value on the axis is no number."""

    run: Run
    at: Any  # the value on the axis, as it was set
    x: float | None
    seed: str
    series: str  # the other keys that vary, in words; "" where none does
    is_control: bool
    reading: Reading
    unique_tokens: float | None
    beside: Mapping[str, Any] = field(default_factory=dict)  # varied keys that have one value for each x

    @property
    def value(self) -> float:
        return self.reading.figure.value


class Left(NamedTuple):
    """A run or a point that does not count."""

    what: str
    reason: str


class Confound(NamedTuple):
    """Something besides the varied keys in which runs differ from the first."""

    what: str
    runs: list[str]


@dataclass
class Study:
    name: str
    x: str
    metric: str
    is_lower_better: bool
    is_examined: bool = False  # whether the figures are of evals of a split, which were kept with the runs
    members: list[Member] = field(default_factory=list)
    left_out: list[Left] = field(default_factory=list)
    confounds: list[Confound] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    moves_along: list[str] = field(default_factory=list)  # varied keys that have one value for each x
    tried: list[float] = field(default_factory=list)  # x of runs that do not count
    diverged: Counter[str] = field(default_factory=Counter)  # by the value on the axis, runs that have no better twin

    @property
    def is_of_amounts(self) -> bool:
        return is_amount(self.x)

    @property
    def is_numeric(self) -> bool:
        return all(member.x is not None for member in self.members)

    def series(self) -> dict[str, list[Member]]:
        """Label -> its runs; what is no control comes first."""
        ordered = sorted(self.members, key=lambda member: member.is_control)
        found: dict[str, list[Member]] = {}
        for member in ordered:
            found.setdefault(label_of(member), []).append(member)
        return found


def label_of(member: Member) -> str:
    """The words for a series; "" for the only one."""
    return ", ".join(filter(None, [member.series, "shuffled labels" if member.is_control else ""]))


def places(members: Sequence[Member]) -> list[Any]:
    """The values on the axis, numbers in order."""
    found = {value_text(member.at): member for member in members}
    if all(member.x is not None for member in found.values()):
        return [member.at for member in sorted(found.values(), key=lambda member: (member.x, value_text(member.at)))]
    return [member.at for member in found.values()]


def seeds(members: Sequence[Member]) -> list[str]:
    names = dict.fromkeys(member.seed for member in members)
    return sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))


def collect(runs: Sequence[Run], x: str | None, metric: str | None, name: str) -> Study:
    """Reads what a report needs of every run; raises RunError where there is nothing to report."""
    if not runs:
        raise RunError(f"{name} has no runs yet; `rung sweep` with its file trains them.")
    left_out = list(_without_run(runs))
    usable, varies = [], varied(runs)
    for run in runs:
        reason = _unfit(run)
        if reason:
            left_out.append(Left(run.id, reason))
        else:
            usable.append(run)
    if not usable:
        reasons = "; ".join(f"{one.what}: {one.reason}" for one in left_out[:4])
        raise RunError(f"no run of {name} can be counted ({reasons}).")
    usable = list(_one_per_point(usable, left_out))
    axis = choose(x, varies, usable)
    readings, study = _read(usable, metric, name, axis, left_out)
    study.left_out = left_out
    _note_tried(study, runs, usable, varies)
    for run in (run for run in usable if run.path in readings):
        try:
            study.members.append(_member(run, readings[run.path], axis, varies))
        except UNREADABLE as error:
            left_out.append(Left(run.id, unreadable(run, error)))
    if len({found[1] for member in study.members if (found := quantity(member.at)) is not None}) > 1:
        study.members = [replace(member, x=None) for member in study.members]  # steps and tokens are no one axis
    _drop_other_rows(study)
    if not study.members:
        raise RunError(f"no run of {name} has a finite {study.metric}; `rung sweep show {name}` lists them.")
    _name_series(study, varies)
    if not study.members:
        raise RunError(f"no run of {name} says its {one_line(axis)}, so nothing can stand on the axis.")
    _look_for_confounds(study, varies)
    return study


def _without_run(runs: Sequence[Run]) -> Iterator[Left]:
    """Points of the kept plan that nobody has begun."""
    names = {str(part_of(run, "sweep").get("name")) for run in runs if part_of(run, "sweep")}
    begun = {part_of(run, "sweep").get("point") for run in runs}
    for name in sorted(names):
        try:
            plan = read_json(runs[0].path.parent.parent / ".sweeps" / name / "sweep.json")
            points = [point for point in plan["points"] if not point.get("retired")]
            missing = [point for point in points if point["key"] not in begun]
        except UNREADABLE:
            continue
        for point in missing:
            words = " ".join(f"{one_line(key)}={value_text(value)}" for key, value in point["varies"].items())
            yield Left(words or str(point["key"]), "no run yet")


def _unfit(run: Run) -> str:
    """Why a run cannot count, whatever it gave; "" where it can."""
    if run.status != "finished":
        return f"{run.status}{'' if run.step is None else f' at step {run.step}'}"
    try:
        may_end_early = bool(run.config().get("eval_patience"))
    except UNREADABLE as error:
        return unreadable(run, error)
    return f"did {short}" if not may_end_early and (short := fell_short(run)) else ""


def _note_tried(
    study: Study, runs: Sequence[Run], usable: Sequence[Run], varies: Mapping[Path, Mapping[str, Any]]
) -> None:
    points, counted = {part_of(run, "sweep").get("point") for run in usable} - {None}, {run.path for run in usable}
    for run in runs:
        at = varies[run.path].get(study.x)
        if run.path not in counted and (x := number_of(at)) is not None and (x or study.x not in ZERO_IS_ALL):
            study.tried.append(x)
        if run.status == "diverged" and part_of(run, "sweep").get("point") not in points:
            study.diverged[value_text(at)] += 1


def _one_per_point(runs: Sequence[Run], left_out: list[Left]) -> Iterator[Run]:
    """The latest run of each point."""
    last: dict[Any, Run] = {}
    for run in runs:
        key = part_of(run, "sweep").get("point") or run.path
        if (before := last.pop(key, None)) is not None:
            left_out.append(Left(before.id, f"{run.id} is a later run of the same point"))
        last[key] = run
    yield from last.values()


def _member(run: Run, found: Reading, axis: str, varies: Mapping[Path, Mapping[str, Any]]) -> Member:
    mine = varies[run.path]
    about = (run.data().get("train") or {}).get("about")
    about = about if isinstance(about, dict) else {}
    unique = about.get("unique_tokens", about.get("tokens"))
    tokens = float(unique) if isinstance(unique, int | float) and not isinstance(unique, bool) else None
    recorded = {"parameters": part_of(run, "derived").get("parameters"), "unique_tokens": tokens,
                "targets": part_of(run, "totals").get("targets")}  # fmt: skip
    at = recorded[axis] if axis in RECORDED else mine.get(axis)
    if axis == "seed":  # nothing else varies: all runs are repeats at one place
        at = "all"
    elif axis in ZERO_IS_ALL and number_of(at) == 0:
        at = len(about.get("components") or found.groups) or None if axis == COMPONENTS else tokens
    named = [f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in mine.items()
             if is_seed_key(key) and key != "seed"]  # fmt: skip
    seed = ", ".join([value_text(run.document.get("seed")), *named])
    is_control = dict(leaves(run.config())).get(CONTROL) is True
    return Member(run, at, number_of(at), seed, "", is_control, found, tokens)


def _read(
    runs: Sequence[Run], metric: str | None, name: str, axis: str, left_out: list[Left]
) -> tuple[dict[Path, Reading], Study]:
    """The figure of every run by one metric; a run without it is left out."""
    notes: list[str] = []
    chosen = metric.removeprefix("eval/") if metric is not None else default_metric(runs, notes)
    examined = is_examined(chosen, runs)
    found: dict[Path, Reading] = {}
    for run in runs:
        try:
            one = reading(run, chosen, examined)
        except UNREADABLE as error:
            left_out.append(Left(run.id, unreadable(run, error)))
            continue
        if one is None:
            left_out.append(Left(run.id, f"has no {chosen}"))
        elif not math.isfinite(one.figure.value):
            left_out.append(Left(run.id, f"its {chosen} is {value_text(one.figure.value)}"))
        else:
            found[run.path] = one
    if metric is not None and not found:
        known = dict.fromkeys(key for run in runs for key in (*evals_of(run), *examined_names(run)))
        raise RunError(f"no run of {name} has {one_line(metric)}; there are {', '.join(known) or 'no evals'}.")
    said = [is_lower_better(run, chosen) for run in runs]
    is_lower = next((word for word in said if word is not None), True)
    return found, Study(name, axis, chosen, is_lower, examined, notes=notes)


def _drop_other_rows(study: Study) -> None:
    """Leaves out runs that were measured on other rows than most of those that measure the same component."""

    def said_by(member: Member) -> Iterator[tuple[tuple[str, str], str]]:
        # With shuffled labels a component is made of other documents, and with another seed of yet others.
        whose = member.seed if member.is_control else ""
        yield from (((whose, name), rows) for name, rows in member.reading.rows_of.items())

    said: dict[tuple[str, str], Counter[str]] = {}
    for member in study.members:
        for name, rows in said_by(member):
            said.setdefault(name, Counter())[rows] += 1
    usual = {name: max(rows, key=rows.__getitem__) for name, rows in said.items()}  # the first of equals
    kept = []
    for member in study.members:
        other = [name[1] for name, rows in said_by(member) if rows != usual[name]]
        if not other:
            kept.append(member)
            continue
        of = f" of {', '.join(map(one_line, other[:3]))}" if any(other) else ""
        reason = f"its {study.metric} was measured on other rows{of}, or in other ways"
        study.left_out.append(Left(member.run.id, reason))
    study.members = kept


def _name_series(study: Study, varies: Mapping[Path, Mapping[str, Any]]) -> None:
    """Tells runs apart by the varied keys that are neither axis nor seed; those that go with the axis are noted."""
    keys = dict.fromkeys(key for member in study.members for key in varies[member.run.path])
    others = [key for key in keys if key not in (study.x, CONTROL) and not is_seed_key(key)]
    values: dict[str, dict[str, set[str]]] = {key: {} for key in others}
    for member in study.members:
        for key in others:
            text = value_text(varies[member.run.path].get(key))
            values[key].setdefault(value_text(member.at), set()).add(text)
    along = [key for key in others if all(len(found) == 1 for found in values[key].values())]
    study.moves_along = [key for key in along if len({v for one in values[key].values() for v in one}) > 1]
    apart = [key for key in others if key not in along]
    study.members = [
        replace(
            member,
            series=_words(varies[member.run.path], apart),
            beside={key: varies[member.run.path].get(key) for key in study.moves_along},
        )
        for member in study.members
    ]
    cells: dict[tuple[str, ...], Member] = {}
    for member in study.members:
        place = (member.series, str(member.is_control), value_text(member.at), member.seed)
        if member.at is None:
            study.left_out.append(Left(member.run.id, f"does not say its {study.x}"))
            continue
        if (before := cells.pop(place, None)) is not None:
            study.left_out.append(Left(before.run.id, f"{member.run.id} has the same {study.x} and seed, and is later"))
        cells[place] = member
    study.members = list(cells.values())


def _words(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{one_line(key)}={value_text(values.get(key))}" for key in keys)


def _look_for_confounds(study: Study, varies: Mapping[Path, Mapping[str, Any]]) -> None:
    """What differs from the first run beyond what was varied."""
    first = study.members[0].run
    keys = dict.fromkeys(key for one in varies.values() for key in one)
    found: dict[str, list[str]] = {}
    for member in study.members[1:]:
        try:
            differences = compare(first, member.run, has_rows=False).of("factor", "hidden", "metric")
        except UNREADABLE as error:
            found.setdefault(unreadable(member.run, error), []).append(member.run.id)
            continue
        for one in differences:
            if not _is_meant(one, keys):
                words = one.detail or f"{value_text(one.before)} -> {value_text(one.after)}"
                found.setdefault(f"{one.part}: {one_line(one.name)} ({one_line(words)})", []).append(member.run.id)
    study.confounds = [Confound(what, ids) for what, ids in found.items()]


def _is_meant(difference: Any, keys: Mapping[str, None]) -> bool:
    """Whether a difference is one of the varied keys, or a consequence of one."""
    if difference.part == "config":
        return difference.name in keys
    if difference.part == "data":  # rows of another cut of the same store
        stores = [str(value).partition("/")[0] for value in (difference.before, difference.after)]
        return stores[0] == stores[1] and any(key.startswith(("dataset.", "data.")) or is_seed_key(key) for key in keys)
    if difference.part == "budget":
        return any(key.startswith(_BUDGET) for key in keys)
    return difference.part in ("seed", "metric") or (difference.part == "pairing" and difference.name != "weights_from")
