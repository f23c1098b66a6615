"""What the figures of a study say: differences against the smallest x, within a seed and per component; curves; fits.

The seed picks the components and the weights, and moves the loss far more than the axis does. So a difference is taken
between two runs of one seed, over the components that both have, and seeds are averaged last: n seeds are n values. The
unpaired difference is computed as well, to show beside it what the pairing gains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rung.compare.lineage import value_text
from rung.compare.scaling.fit import (
    Interval,
    LineFit,
    Points,
    PowerFit,
    joint_interval,
    line,
    mean_interval,
    power,
    unpaired,
)
from rung.compare.scaling.study import COMPONENTS, Member, Study


class Paired(NamedTuple):
    """A run less the run of the same seed at the smallest x; `se` is that over windows, as if they were two draws."""

    difference: float
    se: float | None
    components: list[str]  # shared; empty where the figures are not by component
    level: float  # of the first run, over the shared components


@dataclass(frozen=True)
class Delta:
    """The difference between two places on the axis."""

    at: Any
    baseline: Any
    by_seed: Mapping[str, Paired]
    paired: Interval  # by itself, if seeds vary normally
    unpaired: Interval
    joint: Interval  # together with those of the other places, if they may be skewed

    @property
    def se(self) -> float | None:
        """Of the mean: over seeds, or over windows where there is one seed."""
        found = [one.difference for one in self.by_seed.values()]
        if len(found) > 1:
            return stdev(found) / math.sqrt(len(found))
        return next(iter(self.by_seed.values())).se if found else None


class Fits(NamedTuple):
    """What was fitted, the line and the power law, and why there is none where one could be expected."""

    of: str
    line: LineFit | None
    power: PowerFit | None
    why_no_power: str
    num_points: int


class Best(NamedTuple):
    """The best place of a series, its runner-up, and the paired difference of the two."""

    at: Any
    mean: float
    num_seeds: int
    is_edge: bool
    second: Any
    difference: Interval | None
    joint: Interval | None  # wider: best and second were picked out of all places, as one pair of many


@dataclass
class Series:
    """The runs of a study that differ in x and seed alone, and what their figures say."""

    label: str
    is_control: bool
    cells: dict[tuple[str, str], Member]  # by place and seed
    places: list[Any]  # the values on the axis, numbers in order
    seeds: list[str]
    deltas: list[Delta] = field(default_factory=list)
    unpaired_seeds: list[str] = field(default_factory=list)  # without a run at the smallest x
    # Place -> the loss by position, averaged over its seeds, and how many those are.
    positions: dict[str, tuple[list[float | None], int]] = field(default_factory=dict)
    fit: Fits | None = None
    best: Best | None = None

    def cell(self, place: Any, seed: str) -> Member | None:
        return self.cells.get((value_text(place), seed))

    def at(self, place: Any) -> list[Member]:
        return [member for seed in self.seeds if (member := self.cell(place, seed)) is not None]

    def values(self, place: Any) -> list[float]:
        return [member.value for member in self.at(place)]


def all_series(study: Study) -> list[Series]:
    """What is no control comes first."""
    by_label: dict[str, list[Member]] = {}
    for member in sorted(study.members, key=lambda member: member.is_control):
        by_label.setdefault(member.label, []).append(member)
    found = []
    for label, members in by_label.items():
        cells = {(value_text(member.at), member.seed): member for member in members}
        by_place = {value_text(member.at): member for member in members}
        ordered = list(by_place.values())
        if all(member.x is not None for member in ordered):
            ordered.sort(key=lambda member: (member.x, value_text(member.at)))
        names = dict.fromkeys(member.seed for member in members)
        seeds = sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
        one = Series(label, members[0].is_control, cells, [member.at for member in ordered], seeds)
        one.positions, one.fit, one.best = _position_curves(one), _fits(study, one), _best(study, one)
        found.append(one)
        if not study.is_numeric or len(one.places) < 2:
            continue
        baseline = one.places[0]
        one.unpaired_seeds = [seed for seed in seeds if one.cell(baseline, seed) is None]
        for place in one.places[1:]:
            by_seed = {}
            for seed in seeds:
                before, after = one.cell(baseline, seed), one.cell(place, seed)
                if before is not None and after is not None and (pair := _paired(before, after)) is not None:
                    by_seed[seed] = pair
            moves = [pair.difference for pair in by_seed.values()]
            unlike = unpaired(one.values(baseline), one.values(place))
            joint = joint_interval(moves, len(one.places) - 1)
            one.deltas.append(Delta(place, baseline, by_seed, mean_interval(moves), unlike, joint))
    return found


def _paired(before: Member, after: Member) -> Paired | None:
    """Over the components that both runs have; None where they have none in common."""
    a, b = before.reading.groups, after.reading.groups
    shared = [name for name in a if name in b]
    if a and b and not shared:
        return None
    figures = [side[name] for side in (a, b) for name in shared] or [before.reading.figure, after.reading.figure]
    errors = [figure.se for figure in figures if figure.se is not None]
    is_known = len(errors) == len(figures)
    se = math.sqrt(sum(error**2 for error in errors)) / max(len(shared), 1) if is_known else None
    if not shared:
        return Paired(after.value - before.value, se, [], before.value)
    difference = fmean(b[name].value - a[name].value for name in shared)
    return Paired(difference, se, shared, fmean(a[name].value for name in shared))


def amounts_of_data(study: Study) -> tuple[float, float] | None:
    """The least and the most unique training tokens, of the seed for which they move most; None where not all say."""
    found: dict[tuple[str, str], list[float]] = {}
    for member in study.members:
        if member.unique_tokens is None:
            return None
        found.setdefault((member.label, member.seed), []).append(member.unique_tokens)
    return max(((min(one), max(one)) for one in found.values()), key=lambda ends: ends[1] / max(ends[0], 1.0))


def _position_curves(series: Series) -> dict[str, tuple[list[float | None], int]]:
    """Of each run the components that the run of its seed at the smallest x has too: others are harder or easier."""
    found = {}
    for place in series.places:
        given: list[Sequence[float | None]] = []
        for member in series.at(place):
            by_component = member.reading.positions
            if not any(by_component):
                given.append(by_component.get("", ()))
                continue
            first = series.cell(series.places[0], member.seed)
            shared = [by_component[name] for name in (first.reading.groups if first else ()) if name in by_component]
            given.append(_mean_curve(shared))
        given = [curve for curve in given if curve]
        if given:
            found[value_text(place)] = (_mean_curve(given), len(given))
    return found


def _mean_curve(curves: Sequence[Sequence[float | None]]) -> list[float | None]:
    """None where one of them has no value."""
    means: list[float | None] = []
    for values in itertools.zip_longest(*curves):
        known = [value for value in values if value is not None]
        means.append(fmean(known) if len(known) == len(values) else None)
    return means


def _fits(study: Study, series: Series) -> Fits | None:
    """The movement along an axis of amounts, on the components of the smallest x; None where there is no such axis."""
    if not study.is_of_amounts or not study.is_numeric or len(series.places) < 2:
        return None
    # By seed: x and the loss over the components that its run at the smallest x has too.
    is_by_component = any(member.reading.groups for member in series.cells.values())
    lists: list[Points] = []
    for seed in series.seeds:
        first, points = series.cell(series.places[0], seed), []
        for member in (series.cell(place, seed) for place in series.places):
            if member is None or member.x is None:
                continue
            if not is_by_component:
                points.append((member.x, member.value))
            elif first is not None and (one := _paired(first, member)) is not None:
                points.append((member.x, one.level + one.difference))
        if len(points) > 1:
            lists.append(points)
    if not lists or min(x for points in lists for x, _ in points) <= 0:
        return None
    of = "on the components of the smallest x" if is_by_component else "of all targets"
    num_points = sum(map(len, lists))
    found = line([[(math.log2(x), y) for x, y in points] for points in lists])
    if study.x == COMPONENTS:  # no amount of data or parameters: nothing says that it should follow such a law
        return Fits(of, found, None, "", num_points)
    law = power(lists)
    num = len({x for points in lists for x, _ in points})
    why = "" if law else f"{num} values of x and {num_points} points are too few; it takes 4 and one to spare per seed"
    return Fits(of, found, law, why, num_points)


def _best(study: Study, series: Series) -> Best | None:
    """By the mean over the seeds that all places have, else over whatever each has; None where there is one place."""
    if len(series.places) < 2:
        return None

    def values_of_seeds(places: Sequence[Any], place: Any) -> list[float]:
        """At one of these places, of the seeds that have all of them."""
        shared = [seed for seed in series.seeds if all(series.cell(at, seed) is not None for at in places)]
        return [series.cells[value_text(place), seed].value for seed in shared]

    values = {value_text(at): values_of_seeds(series.places, at) or series.values(at) for at in series.places}
    sign = 1.0 if study.is_lower_better else -1.0
    first, second = sorted(series.places, key=lambda place: sign * fmean(values[value_text(place)]))[:2]
    one, other = (values_of_seeds((first, second), at) for at in (first, second))
    moves = [after - before for before, after in zip(one, other)]
    x, xs = series.at(first)[0].x, {*study.tried, *(member.x for member in study.members if member.x is not None)}
    is_edge = x is not None and len(xs) > 2 and not min(xs) < x < max(xs)
    found = values[value_text(first)]
    difference = mean_interval(moves) if moves else None
    joint = joint_interval(moves, math.comb(len(series.places), 2)) if moves else None
    return Best(first, fmean(found), len(found), is_edge, second, difference, joint)
