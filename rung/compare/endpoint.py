"""One number per pair of runs: the mean of B - A over the evals that both have in the last fifth of training.

The evals of one run are no replicates: they share its seed, its weights and its luck, and a test over them finds a
difference between two runs of one config in every second case. So they are averaged, and the seed is the unit.

The last fifth is that of the training, not of the evals: where a run has none there, it has no endpoint, however many
it has before. Runs of two lengths, which somebody must have allowed, are each taken at their own end.

The surprising thing: nothing that is not finite is ever averaged away. One NaN makes the endpoint NaN, and the judge
says what became of the run instead.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rung.compare.align import Curve, curve_of, targets_at
from rung.runs.query import Run

TAIL = 0.2  # of training, by targets where they are known
_CLOSE = 5e-3  # rows differ in length, so two runs never see exactly the same targets


class Course(NamedTuple):
    """A metric of a run over training; `targets` are those seen at each step, None where the record does not say."""

    steps: list[float]
    values: list[float]
    targets: list[float] | None
    end: float  # of training, in the unit of x

    @property
    def x(self) -> list[float]:
        return self.steps if self.targets is None else self.targets


class Point(NamedTuple):
    """An eval of two runs at the same place."""

    x: float
    a: float
    b: float


class Endpoint(NamedTuple):
    """Of two runs: the mean of B - A, of A and of B over `num_evals` shared evals."""

    difference: float
    a: float
    b: float
    num_evals: int


def course(run: Run, metric: str) -> Course:
    """Empty where the run has no such metric."""
    curve = curve_of(run, metric)
    steps, targets = list(curve.x), _targets(run, curve)
    last = max(run.step or 0, steps[-1] if steps else 0)
    return Course(steps, list(curve.values), targets, last if targets is None else targets[-1] * last / steps[-1])


def endpoint(a: Course, b: Course) -> Endpoint | None:
    """None where the two share no eval in the last fifth."""
    is_same_unit = (a.targets is None) == (b.targets is None)
    end = max(a.end, b.end) if is_same_unit else a.end
    if is_same_unit and min(a.end, b.end) < (1 - TAIL) * end:
        ends, num = (own_endpoint(a), own_endpoint(b)), min(len(own_tail(a)), len(own_tail(b)))
        return Endpoint(ends[1] - ends[0], *ends, num) if num else None
    last = tail(shared(a, b), end)
    if not last:
        return None
    return Endpoint(fmean(p.b - p.a for p in last), fmean(p.a for p in last), fmean(p.b for p in last), len(last))


def own_endpoint(found: Course) -> float:
    """The mean of a run's own evals in the last fifth; NaN where it has none, or where one is not finite."""
    last = own_tail(found)
    return fmean(last) if last else math.nan


def own_tail(found: Course) -> list[float]:
    """A run's own evals in the last fifth."""
    return [point.a for point in tail([Point(x, v, v) for x, v in zip(found.x, found.values)], found.end)]


def tail(points: Sequence[Point], end: float) -> list[Point]:
    # With some room: an eval at four fifths of the steps must not belong to it with one seed and not with the next.
    return [point for point in points if point.x >= (1 - TAIL) * end * (1 - _CLOSE)]


def shared(a: Course, b: Course) -> list[Point]:
    """Evals at equal targets. Where a step has other targets in each run, B is read between two of its evals."""
    if a.targets is None or b.targets is None or _is_equal_pace(a, b):
        other = dict(zip(b.steps, b.values))
        return [Point(x, value, other[s]) for s, x, value in zip(a.steps, a.x, a.values) if s in other]
    found = [(x, value, _at(b, x)) for x, value in zip(a.x, a.values)]
    return [Point(x, value, there) for x, value, there in found if there is not None]


def reached(found: Course, level: float, is_lower_better: bool) -> float | None:
    """Where a curve first comes to a level, between two finite evals; None where it never does."""
    before: tuple[float, float] | None = None
    for x, value in zip(found.x, found.values):
        if not math.isfinite(value):
            before = None
        elif value <= level if is_lower_better else value >= level:
            return x if before is None else before[0] + (x - before[0]) * (level - before[1]) / (value - before[1])
        else:
            before = (x, value)
    return None


def _at(found: Course, x: float) -> float | None:
    """The value at x, on the line between its neighbours: NaN if one of them is. None outside of what was measured."""
    xs, values = found.x, found.values
    if not xs or x < xs[0] * (1 - _CLOSE) or x > xs[-1] * (1 + _CLOSE):
        return None
    right = min(bisect_left(xs, x), len(xs) - 1)
    if right == 0 or x >= xs[right]:
        return values[right]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def _is_equal_pace(a: Course, b: Course) -> bool:
    """Whether equal steps mean equal targets."""
    assert a.targets is not None
    assert b.targets is not None
    other = dict(zip(b.steps, b.targets))
    both = [(x, other[s]) for s, x in zip(a.steps, a.targets) if s in other]
    return bool(both) and all(abs(x - y) <= _CLOSE * max(x, y) for x, y in both)


def _targets(run: Run, curve: Curve) -> list[float] | None:
    at = targets_at(run)
    known = [float(value) for value in map(at, curve.x) if value is not None]
    return known if known and len(known) == len(curve.x) and known[-1] > 0 else None


def fell_short(run: Run) -> str:
    """What a run did of its declared steps, where it is less, as after a budget in time; else empty."""
    derived = run.document.get("derived")
    planned = derived.get("num_steps") if isinstance(derived, dict) else None
    is_short = isinstance(planned, int | float) and (run.step or 0) < planned
    return f"{run.step or 0} of {planned:g} planned steps" if is_short else ""


def planned_targets(run: Run) -> float | None:
    """Targets that the declared budget comes to; None where there is none, as in one's own loop."""
    derived = run.document.get("derived")
    named = derived if isinstance(derived, dict) else {}
    parts = [named.get(name) for name in ("num_steps", "rows_per_step", "targets_per_row")]
    numbers = [float(part) for part in parts if isinstance(part, int | float)]
    return math.prod(numbers) if len(numbers) == len(parts) else None
