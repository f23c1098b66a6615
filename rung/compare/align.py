"""Lines up two runs: at equal steps and at equal targets for a reader, at their ends for a verdict.

Values that are not finite are kept and reported, never averaged away: one NaN makes an endpoint NaN. The second run is
interpolated only between two neighbouring finite evals, and nothing is extrapolated.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

from rung.compare.reading import (
    TRAINING,
    Curve,
    column,
    curve_of,
    evals_of,
    is_lower_better,
    main_metric,
    targets_at,
)
from rung.errors import RunError
from rung.runs.query import Run

TAIL = 0.2  # of training, by targets where they are known
_CLOSE = 5e-3  # rows differ in length, so two runs never see exactly the same targets


class Point(NamedTuple):
    step: float
    value: float


class Shared(NamedTuple):
    """Both runs at one place; at equal targets `b` may lie between two of its evals."""

    at: float  # step, or targets
    a: float
    b: float
    step: float  # of `a`


@dataclass
class Side:
    """One run's own figures; None where there are none."""

    final: Point | None = None  # the last value, whatever it is
    best: Point | None = None  # among the finite ones
    num_values: int = 0
    num_not_finite: int = 0
    targets: float | None = None  # in all
    targets_per_s: float | None = None  # median over steps
    steps_per_s: float | None = None


@dataclass
class Outcome:
    metric: str  # full_val/loss; "loss" is that of the training rows
    is_lower_better: bool
    a: Side
    b: Side
    at_steps: list[Shared] = field(default_factory=list)
    at_targets: list[Shared] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what could not be aligned, and why


def outcome(a: Run, b: Run, metric: str | None = None) -> Outcome:
    """Both runs by one metric, that of `a` unless one is named; raises RunError where neither run has it."""
    metric = (metric or main_metric(a)).removeprefix("eval/")
    curves = [curve_of(run, metric) for run in (a, b)]
    if not any(curve.steps for curve in curves) and metric != TRAINING:
        names = list(dict.fromkeys([*evals_of(a), *evals_of(b)]))
        near = difflib.get_close_matches(metric, names, n=3, cutoff=0.4) or names[:8]
        hint = f"there are {', '.join(near)}" if near else "neither has evals"
        raise RunError(f"neither {a.id} nor {b.id} has a metric {metric}; {hint}.", code="no-metric")

    problems: list[str] = []
    directions = [is_lower_better(run, metric) for run in (a, b)]
    known = [one for one in directions if one is not None]
    if len(set(known)) > 1:
        problems.append(f"the runs disagree on whether a higher {metric} is better; going by {a.id}")
    if not known and not metric.rpartition("/")[2].endswith("loss"):
        problems.append(f"neither run says whether a higher {metric} is better; assuming that lower is")
    is_lower = known[0] if known else True

    sides = []
    for run, curve in zip((a, b), curves):
        points = [Point(*pair) for pair in zip(curve.steps, curve.values)]
        finite = [point for point in points if math.isfinite(point.value)]
        sign = 1.0 if is_lower else -1.0
        targets, seconds = column(run, "targets"), column(run, "step_s")
        counts = [value for value in targets.values if math.isfinite(value)]
        times = {row: s for row, s in zip(seconds.rows, seconds.values) if 0 < s < math.inf}
        rates = [t / times[row] for row, t in zip(targets.rows, targets.values) if 0 < t < math.inf and row in times]
        side = Side(
            final=points[-1] if points else None,
            best=min(finite, key=lambda point: sign * point.value, default=None),
            num_values=len(points),
            num_not_finite=len(points) - len(finite),
            targets=float(sum(counts)) if counts else None,
            targets_per_s=median(rates) if rates else None,
            steps_per_s=median(1.0 / s for s in times.values()) if times else None,
        )
        sides.append(side)
        if not curve.steps:
            problems.append(f"{run.id} has no {metric}")
        elif side.num_not_finite:
            problems.append(f"{side.num_not_finite} of {side.num_values} values of {run.id} are not finite")
    found = Outcome(metric, is_lower, sides[0], sides[1], problems=problems)
    if not all(curve.steps for curve in curves):
        return found

    by_step = [dict(zip(curve.steps, curve.values)) for curve in curves]
    found.at_steps = [Shared(x, by_step[0][x], by_step[1][x], x) for x in curves[0].steps if x in by_step[1]]
    if not found.at_steps:
        spans = [f"{run.id} has it at {curve.steps[0]:g} to {curve.steps[-1]:g}" for run, curve in zip((a, b), curves)]
        problems.append(f"no step has a {metric} of both runs: {', '.join(spans)}")

    by_targets = []
    for run, curve in zip((a, b), curves):
        at = targets_at(run)
        placed = [(at(step), value, step) for step, value in zip(curve.steps, curve.values)]
        by_targets.append([(t, value, step) for t, value, step in placed if t is not None])
        if not by_targets[-1]:
            problems.append(f"the rows of {run.id} do not say how many targets it saw: no points at equal targets")
    if all(by_targets):
        xs, values = [t for t, _, _ in by_targets[1]], [value for _, value, _ in by_targets[1]]
        for t, value, step in by_targets[0]:
            there = interpolated(xs, values, t)
            if there is not None:
                found.at_targets.append(Shared(t, value, there, step))
        if not found.at_targets:
            problems.append("no eval of the first run lies between two finite evals of the second, by targets")
    return found


def interpolated(xs: list[float], values: list[float], x: float) -> float | None:
    """The value at `x`: that of a point, or on the line between two finite neighbours; None elsewhere."""
    right = bisect_left(xs, x)
    if right < len(xs) and xs[right] == x:
        return values[right]
    if right in (0, len(xs)):
        return None
    (x0, x1), (y0, y1) = xs[right - 1 : right + 1], values[right - 1 : right + 1]
    if not (math.isfinite(y0) and math.isfinite(y1)):
        return None
    share = (x - x0) / (x1 - x0)
    return y0 * (1.0 - share) + y1 * share


# One number per pair of runs: the mean of B - A over the evals that both have in the last fifth of training, by steps
# or targets and not by evals. The evals of one run are not replicates: they share its seed and its weights, and a test
# over them finds a difference between two runs of one config in every second case. So they are averaged, and the seed
# is the unit. Runs of two lengths are each taken at their own end.


class Endpoint(NamedTuple):
    """Of two runs: the mean of B - A, of A and of B over `num_evals` shared evals."""

    difference: float
    a: float
    b: float
    num_evals: int


def metric_curve(run: Run, metric: str) -> Curve:
    """The curve with the targets at each of its steps and the end of the training; empty where there is none."""
    curve, at = curve_of(run, metric), targets_at(run)
    known = [float(value) for value in map(at, curve.steps) if value is not None]
    targets = known if known and len(known) == len(curve.steps) and known[-1] > 0 else None
    last = max(run.step or 0, curve.steps[-1] if curve.steps else 0)
    return curve._replace(targets=targets, end=last if targets is None else targets[-1] * last / curve.steps[-1])


def endpoint(a: Curve, b: Curve) -> Endpoint | None:
    """None where the two share no eval in the last fifth."""
    is_same_unit = (a.targets is None) == (b.targets is None)
    end = max(a.end, b.end) if is_same_unit else a.end
    if is_same_unit and min(a.end, b.end) < (1 - TAIL) * end:
        ends, num = (own_endpoint(a), own_endpoint(b)), min(len(own_tail(a)), len(own_tail(b)))
        return Endpoint(ends[1] - ends[0], *ends, num) if num else None
    last = [(one, two) for x, one, two in _shared(a, b) if _is_in_tail(x, end)]
    if not last:
        return None
    return Endpoint(fmean(b - a for a, b in last), fmean(a for a, _ in last), fmean(b for _, b in last), len(last))


def own_endpoint(curve: Curve) -> float:
    """The mean of a run's own evals in the last fifth; NaN where it has none, or where one is not finite."""
    last = own_tail(curve)
    return fmean(last) if last else math.nan


def own_tail(curve: Curve) -> list[float]:
    """A run's own evals in the last fifth."""
    return [value for x, value in zip(curve.x, curve.values) if _is_in_tail(x, curve.end)]


def _is_in_tail(x: float, end: float) -> bool:
    # With some room: an eval at four fifths of the steps must not belong to it with one seed and not with the next.
    return x >= (1 - TAIL) * end * (1 - _CLOSE)


def _shared(a: Curve, b: Curve) -> list[tuple[float, float, float]]:
    """x and both values where the runs have equal targets; where their steps have other targets, B is interpolated."""
    is_equal_pace = a.targets is None or b.targets is None
    if a.targets is not None and b.targets is not None:
        other = dict(zip(b.steps, b.targets))
        both = [(x, other[step]) for step, x in zip(a.steps, a.targets) if step in other]
        is_equal_pace = bool(both) and all(abs(x - y) <= _CLOSE * max(x, y) for x, y in both)
    if is_equal_pace:
        values = dict(zip(b.steps, b.values))
        return [(x, value, values[step]) for step, x, value in zip(a.steps, a.x, a.values) if step in values]
    found = []
    for x, value in zip(a.x, a.values):
        # On the line between the neighbours of B: NaN if one of them is. Nothing outside of what was measured.
        if not b.x or x < b.x[0] * (1 - _CLOSE) or x > b.x[-1] * (1 + _CLOSE):
            continue
        right = min(bisect_left(b.x, x), len(b.x) - 1)
        there = b.values[right]
        if right > 0 and x < b.x[right]:
            share = (x - b.x[right - 1]) / (b.x[right] - b.x[right - 1])
            there = b.values[right - 1] + share * (there - b.values[right - 1])
        found.append((x, value, there))
    return found


def reached(curve: Curve, level: float, is_lower_better: bool) -> float | None:
    """Where a curve first comes to a level, between two finite evals; None where it never does."""
    before: tuple[float, float] | None = None
    for x, value in zip(curve.x, curve.values):
        if not math.isfinite(value):
            before = None
        elif value <= level if is_lower_better else value >= level:
            return x if before is None else before[0] + (x - before[0]) * (level - before[1]) / (value - before[1])
        else:
            before = (x, value)
    return None
