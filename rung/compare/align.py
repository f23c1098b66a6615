"""What happened in two runs, brought to common points: equal steps and equal targets.

A value that is not finite is kept and told, never averaged away. Between two evals the second run is interpolated
only where both are finite and neighbours; nothing is continued beyond the last eval. Whether a difference means
anything is left to judge.

The surprising thing: targets at a step are those seen before it, because an eval at step t is of the state that t
updates made.
"""

from __future__ import annotations

import bisect
import difflib
import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rung.compare.reading import column, evals
from rung.errors import RunError
from rung.runs.query import Run

TRAINING = "loss"  # of the rows of training, where there are no evals


class Curve(NamedTuple):
    x: list[float]  # steps or targets, rising
    values: list[float]


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


def main_metric(run: Run) -> str:
    """The loss of the set that `best` names, else of the first set; else the first eval metric; else "loss"."""
    names = list(evals_of(run))
    of_best = f"{(run.best or {}).get('set')}/loss"
    losses = [name for name in names if name.endswith("/loss")]
    return of_best if of_best in names else (losses or names or [TRAINING])[0]


def evals_of(run: Run) -> dict[str, Curve]:
    """set/name -> its curve over steps, in the order in which they were first seen."""
    found: dict[str, dict[float, float]] = {}
    for row in evals(run):
        for name, value in row.items():
            if name not in ("step", "set") and _is_number(value):
                found.setdefault(f"{row['set']}/{name}", {})[row["step"]] = float(value)
    return {name: _curve(values) for name, values in found.items()}


def curve_of(run: Run, metric: str) -> Curve:
    """The curve of an eval metric, else of a metric of the rows; empty where there is none."""
    of_evals = evals_of(run)
    if metric in of_evals:
        return of_evals[metric]
    rows = column(run, metric)
    return _curve({step: float(value) for step, value in zip(rows.steps, rows.values)})


def targets_at(run: Run) -> Callable[[float], float | None]:
    """step -> targets seen before it; None where a row on the way there does not say."""
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


def is_lower_better(run: Run, metric: str) -> bool | None:
    """What the run's definitions say; None where they say nothing."""
    definitions = run.definitions()
    for name in (f"eval/{metric}", metric, metric.rpartition("/")[2], f"eval/{metric.partition('/')[0]}"):
        said = definitions.get(name)
        if isinstance(said, dict) and said.get("better") in ("higher", "lower"):
            return bool(said["better"] == "lower")
    return None


def outcome(a: Run, b: Run, metric: str | None = None) -> Outcome:
    """Both runs by one metric, that of `a` unless one is named; raises RunError where neither run has it."""
    metric = (metric or main_metric(a)).removeprefix("eval/")
    curves = [curve_of(run, metric) for run in (a, b)]
    if not any(curve.x for curve in curves) and metric != TRAINING:
        raise _unknown(a, b, metric)
    problems: list[str] = []
    is_lower = _direction(a, b, metric, problems)
    targets = [targets_at(run) for run in (a, b)]
    sides = [_side(run, curve, is_lower) for run, curve in zip((a, b), curves)]
    for run, curve, side in zip((a, b), curves, sides):
        if not curve.x:
            problems.append(f"{run.id} has no {metric}")
        elif side.num_not_finite:
            problems.append(f"{side.num_not_finite} of {side.num_values} values of {run.id} are not finite")
    found = Outcome(metric, is_lower, sides[0], sides[1], problems=problems)
    if all(curve.x for curve in curves):
        _align(found, curves, targets, (a.id, b.id))
    return found


def _align(found: Outcome, curves: list[Curve], targets: list[Callable[[float], float | None]], ids: Any) -> None:
    by_step = [dict(zip(curve.x, curve.values)) for curve in curves]
    found.at_steps = [Shared(x, by_step[0][x], by_step[1][x], x) for x in curves[0].x if x in by_step[1]]
    if not found.at_steps:
        spans = [f"{name} has it at {curve.x[0]:g} to {curve.x[-1]:g}" for name, curve in zip(ids, curves)]
        found.problems.append(f"no step has a {found.metric} of both runs: {', '.join(spans)}")
    by_targets = []
    for name, curve, at in zip(ids, curves, targets):
        known = [(at(x), value, x) for x, value in zip(*curve)]
        by_targets.append([(t, value, x) for t, value, x in known if t is not None])
        if not by_targets[-1]:
            found.problems.append(f"the rows of {name} do not say how many targets it saw: no points at equal targets")
    if all(by_targets):
        other = Curve([t for t, _, _ in by_targets[1]], [value for _, value, _ in by_targets[1]])
        for t, value, step in by_targets[0]:
            there = interpolated(other, t)
            if there is not None:
                found.at_targets.append(Shared(t, value, there, step))
        if not found.at_targets:
            found.problems.append("no eval of the first run lies between two finite evals of the second, by targets")


def interpolated(curve: Curve, x: float) -> float | None:
    """The value at `x`: a point of the curve, or on the line between two finite neighbours; None elsewhere."""
    right = bisect.bisect_left(curve.x, x)
    if right < len(curve.x) and curve.x[right] == x:
        return curve.values[right]
    if right in (0, len(curve.x)):
        return None
    (x0, x1), (y0, y1) = curve.x[right - 1 : right + 1], curve.values[right - 1 : right + 1]
    if not (math.isfinite(y0) and math.isfinite(y1)):
        return None
    share = (x - x0) / (x1 - x0)
    return y0 * (1.0 - share) + y1 * share


def _side(run: Run, curve: Curve, is_lower: bool) -> Side:
    points = [Point(*pair) for pair in zip(*curve)]
    finite = [point for point in points if math.isfinite(point.value)]
    sign = 1.0 if is_lower else -1.0
    targets, seconds = column(run, "targets"), column(run, "step_s")
    counts = [value for value in targets.values if math.isfinite(value)]
    times = {place: s for place, s in zip(seconds.places, seconds.values) if 0 < s < math.inf}
    rates = [t / times[place] for place, t in zip(targets.places, targets.values)
             if 0 < t < math.inf and place in times]  # fmt: skip
    return Side(
        final=points[-1] if points else None,
        best=min(finite, key=lambda point: sign * point.value, default=None),
        num_values=len(points),
        num_not_finite=len(points) - len(finite),
        targets=float(sum(counts)) if counts else None,
        targets_per_s=statistics.median(rates) if rates else None,
        steps_per_s=statistics.median(1.0 / s for s in times.values()) if times else None,
    )


def _direction(a: Run, b: Run, metric: str, problems: list[str]) -> bool:
    said = [is_lower_better(run, metric) for run in (a, b)]
    if None not in said and said[0] != said[1]:
        problems.append(f"the runs disagree on whether a higher {metric} is better; taken as in {a.id}")
    known = next((word for word in said if word is not None), None)
    if known is None and not metric.rpartition("/")[2].endswith("loss"):
        problems.append(f"neither run says whether a higher {metric} is better; a lower one is taken to be")
    return True if known is None else known


def _unknown(a: Run, b: Run, metric: str) -> RunError:
    names = list(dict.fromkeys([*evals_of(a), *evals_of(b)]))
    near = difflib.get_close_matches(metric, names, n=3, cutoff=0.4) or names[:8]
    hint = f"there are {', '.join(near)}" if near else "neither has evals"
    return RunError(f"neither {a.id} nor {b.id} has a metric {metric}; {hint}.")


def _curve(values: Mapping[float, float]) -> Curve:
    steps = sorted(values)
    return Curve([float(step) for step in steps], [values[step] for step in steps])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
