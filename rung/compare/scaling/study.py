"""The runs of a sweep as one study: what each gave, at which value of the axis, under which seed, and who is left out.

A run counts if it finished what it planned, gave a finite figure, and was measured on the same rows as the others;
any other is named with its reason, and so is a point of the plan that has no run. What the figures say is left to
effects, fit and scaling.

The surprising thing: which rows were evaluated is compared component by component. Runs on one and on eleven
components never share an eval set, but the rows of the components that they share must be the same ones.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rung.compare.align import evals_of, is_lower_better
from rung.compare.difference import part_of
from rung.compare.endpoint import fell_short
from rung.compare.factors import compare
from rung.compare.lineage import unreadable, value_text
from rung.compare.reading import UNREADABLE
from rung.compare.scaling.measured import Reading, default_metric, examined_names, is_examined, reading
from rung.errors import RunError
from rung.runs.files import read_json, to_json
from rung.runs.query import Run
from rung.text import one_line
from rung.units import Budget

COMPONENTS = "dataset.num_components"
CONTROL = "dataset.shuffle_labels"
# Keys that say how much there is of something: components, tokens, layers, steps.
_AMOUNT = re.compile(r"(.*\.)?(n_|num_|max_)\w+|(.*\.)?(width|layers|depth|dim|hidden\w*|vocab_size|context_size)")
_BUDGET = ("optimizer.max_iters", "optimizer.gradient_accumulation", "data.", "lr.lr_decay_iters")
RECORDED = ("parameters", "unique_tokens", "targets")  # what may stand on the axis besides a key


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
    members: list[Member] = field(default_factory=list)
    left_out: list[Left] = field(default_factory=list)
    confounds: list[Confound] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    moves_along: list[str] = field(default_factory=list)  # varied keys that have one value for each x

    @property
    def is_of_amounts(self) -> bool:
        """Whether the axis is an amount of something, of which more may help more and more slowly."""
        return self.x in RECORDED or _AMOUNT.fullmatch(self.x) is not None

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
    usable, varies = [], _varies(runs)
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
    axis = _axis(x, varies, usable)
    readings, study = _read(usable, metric, name, axis, left_out)
    study.left_out = left_out
    for run in (run for run in usable if run.path in readings):
        try:
            study.members.append(_member(run, readings[run.path], axis, varies))
        except UNREADABLE as error:
            left_out.append(Left(run.id, unreadable(run, error)))
    _drop_other_rows(study)
    if not study.members:
        raise RunError(f"no run of {name} has a finite {study.metric}; `rung sweep show {name}` lists them.")
    _name_series(study, varies)
    _look_for_confounds(study, varies)
    return study


def _varies(runs: Sequence[Run]) -> dict[Path, Mapping[str, Any]]:
    """What each point sets, of the keys that have several values; of runs without a sweep, the keys that differ."""
    given = {run.path: part_of(run, "sweep").get("varies") for run in runs}
    found = {path: value if isinstance(value, dict) else {} for path, value in given.items()}
    if not any(found.values()):
        found = {run.path: dict(_set_keys(run)) for run in runs}
    distinct: dict[str, set[bytes]] = {}
    for one in found.values():
        for key, value in one.items():
            distinct.setdefault(key, set()).add(to_json(value))
    absent = {key for key in distinct for one in found.values() if key not in one}
    return {
        path: {key: value for key, value in one.items() if len(distinct[key]) > 1 or key in absent}
        for path, one in found.items()
    }


def _set_keys(run: Run) -> Iterator[tuple[str, Any]]:
    sources = run.sources()
    for key, value in _leaves(run.config()):
        if not str(sources.get(key, "")).startswith("derived"):
            yield key, value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
    return f"did {short}" if (short := fell_short(run)) else ""


def _one_per_point(runs: Sequence[Run], left_out: list[Left]) -> Iterator[Run]:
    """The latest run of each point."""
    last: dict[Any, Run] = {}
    for run in runs:
        key = part_of(run, "sweep").get("point") or run.path
        if (before := last.pop(key, None)) is not None:
            left_out.append(Left(before.id, f"{run.id} is a later run of the same point"))
        last[key] = run
    yield from last.values()


def is_seed_key(key: str) -> bool:
    return key.rpartition(".")[2] == "seed" or key.endswith("_seed")


def _axis(x: str | None, varies: Mapping[Path, Mapping[str, Any]], runs: Sequence[Run]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in varies[run.path]))
    if x is not None:
        if x in keys or x in RECORDED:
            return x
        raise RunError(f"{one_line(x)} is not varied; on the axis may stand {', '.join([*keys, *RECORDED])}.")
    others = [key for key in keys if not is_seed_key(key) and key != CONTROL]
    if COMPONENTS in others:
        return COMPONENTS
    numeric = [key for key in others if all(number_of(varies[run.path].get(key)) is not None for run in runs)]
    return (numeric or others or ["seed"])[0]


def number_of(value: Any) -> float | None:
    """A number, also out of text such as 1e-3 or "10M tokens"; None where it is none."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    try:
        budget = Budget.parse(str(value))
    except ValueError:
        return None
    given = [part for part in (budget.steps, budget.targets, budget.epochs, budget.seconds) if part is not None]
    return float(given[0]) if len(given) == 1 else None


def _member(run: Run, found: Reading, axis: str, varies: Mapping[Path, Mapping[str, Any]]) -> Member:
    mine = varies[run.path]
    about = (run.data().get("train") or {}).get("about") or {}
    unique = about.get("unique_tokens", about.get("tokens")) if isinstance(about, dict) else None
    tokens = float(unique) if isinstance(unique, int | float) and not isinstance(unique, bool) else None
    if axis in RECORDED:
        at = {"parameters": part_of(run, "derived").get("parameters"), "unique_tokens": tokens}.get(axis)
        at = part_of(run, "totals").get("targets") if axis == "targets" else at
    else:
        at = mine.get(axis, run.document.get("seed") if axis == "seed" else None)
    named = [f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in mine.items()
             if is_seed_key(key) and key != "seed"]  # fmt: skip
    seed = ", ".join([value_text(run.document.get("seed")), *named])
    is_control = dict(_leaves(run.config())).get(CONTROL) is True
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
    return found, Study(name, axis, chosen, is_lower, notes=notes)


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
        Member(**{**vars(member), "series": _words(varies[member.run.path], apart)}) for member in study.members
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
    if not study.members:
        return
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
