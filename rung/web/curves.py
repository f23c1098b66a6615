"""Curves as a page draws them: any metric over steps, targets, epochs or seconds, smoothed, then thinned.

Smoothing looks at every value, before anything is thinned: an exponential moving average, divided by the weight that
it has gathered so far, so that the first values are not pulled towards zero. Thinning cuts the values into as many
stretches as there are points to draw and keeps of each the lowest, the highest and the mean, so a spike of one step
stays where it was; a stretch that holds a NaN or an infinity is named.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rung.compare.reading import COUNTED
from rung.errors import RunError, UserError
from rung.runs.columns import stamp
from rung.runs.files import name_of
from rung.runs.query import Run, nearest

AXES = ("step", "targets", "epochs", "time")
MOST_POINTS = 20_000
_BLOCK = 64  # values that are smoothed by one product of matrices
_ENCODE = msgspec.json.Encoder().encode


class Points(NamedTuple):
    """All values of a metric over one axis, in the order of the axis."""

    x: np.ndarray
    values: np.ndarray

    @property
    def num_bytes(self) -> int:
        return int(self.x.nbytes + self.values.nbytes)


class Cache:
    """Keeps what was used last, up to so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made, size(made)
                self._num_bytes += size(made)
            while self._num_bytes > self._most_bytes and len(self._kept) > 1:
                self._num_bytes -= self._kept.popitem(last=False)[1][1]
        return made


class Curves:
    """The curves of a lab, kept as arrays and as they were last sent."""

    def __init__(self, most_bytes: int = 256 << 20) -> None:
        self._points = Cache(most_bytes)
        self._sent = Cache(most_bytes // 8)

    def series(
        self,
        run: Run,
        metric: str,
        axis: str = "step",
        first: float | None = None,
        last: float | None = None,
        num_points: int = 1000,
        smooth: float = 0.0,
    ) -> msgspec.Raw:
        """One curve as JSON. RunError for a metric or an axis that the run does not have."""
        mark = stamp(run.path / "metrics")
        key = (str(run.path), mark, metric, axis, first, last, num_points, smooth)

        def make() -> msgspec.Raw:
            points = self._points.get(
                (str(run.path), mark, metric, axis), lambda: points_of(run, metric, axis), lambda one: one.num_bytes
            )
            found = {"run": run.id, **thinned(points, first, last, num_points, smooth)}
            return msgspec.Raw(_ENCODE({**found, "baselines": baselines(run, metric)}))

        made: msgspec.Raw = self._sent.get(key, make, lambda raw: len(bytes(raw)))
        return made


def whole_curve(run: Run, metric: str, num_points: int) -> dict[str, Any]:
    """A curve over every axis that the run knows, thinned but not smoothed: what a static copy of the page holds."""
    points = points_of(run, metric, "step")
    found = thinned(points, None, None, num_points, 0.0)
    x = {"step": found.pop("x")}
    for axis in AXES[1:]:
        try:
            other = points_of(run, metric, axis)
        except RunError:
            continue
        if np.array_equal(other.values, points.values, equal_nan=True):  # in the same order
            x[axis] = thinned(other, None, None, num_points, 0.0)["x"]
    return {"run": run.id, "metric": metric, "x": x, **found, "baselines": baselines(run, metric)}


def check(axis: str, num_points: int, smooth: float) -> None:
    if axis not in AXES:
        raise UserError(f"x={axis} is not an axis; {', '.join(AXES)} are.", code="bad-value")
    if not 1 <= num_points <= MOST_POINTS:
        raise UserError(f"points={num_points} is out of range; 1 to {MOST_POINTS} can be drawn.", code="bad-range")
    if not 0 <= smooth < 1:
        raise UserError(f"smooth={smooth:g} is out of range; give a weight from 0 to below 1.", code="bad-range")


def points_of(run: Run, metric: str, axis: str) -> Points:
    counted = [name for name in ("unix_s", "epoch", *COUNTED) if name != metric] if axis != "step" else []
    arrays = run.arrays([metric, *counted])
    rows, values = arrays.columns[metric]
    if not len(rows):
        known = run.names()
        if metric not in known:
            raise RunError(f"{run.id} recorded no {metric}; {nearest(metric, known)}", code="no-metric")
    steps = arrays.steps[rows]
    x = steps.astype(np.float64)
    if axis == "time":
        at, seconds = arrays.columns["unix_s"]
        if not len(at):
            raise RunError(f"the rows of {run.id} do not say when they were written.", code="no-metric")
        x = np.interp(rows, at, seconds - seconds[0])
    elif axis == "targets":
        name = next((name for name in COUNTED if name in arrays.columns and len(arrays.columns[name][0])), None)
        if metric in COUNTED:
            name, (at, counts) = metric, arrays.columns[metric]
        elif name is not None:
            at, counts = arrays.columns[name]
        else:
            raise RunError(f"the rows of {run.id} do not say how many targets it saw.", code="no-metric")
        # What was seen before each step: an eval at step t measures the state after t updates.
        order = np.argsort(arrays.steps[at], kind="stable")
        total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(counts[order], posinf=0.0, neginf=0.0))])
        x = total[np.searchsorted(arrays.steps[at][order], steps, side="left")]
    elif axis == "epochs":
        x = _epochs(run, steps, arrays.columns.get("epoch"), arrays.steps)
    if len(x) > 1 and (x[1:] < x[:-1]).any():  # steps that a script counts in its own way
        order = np.argsort(x, kind="stable")
        x, values = x[order], values[order]
    return Points(x, values)


def _epochs(
    run: Run, steps: np.ndarray, recorded: tuple[np.ndarray, np.ndarray] | None, all_steps: np.ndarray
) -> np.ndarray:
    derived = run.document.get("derived") or {}
    a_step, an_epoch = derived.get("rows_per_step"), derived.get("epoch_rows")
    if isinstance(a_step, int | float) and isinstance(an_epoch, int | float) and a_step > 0 and an_epoch > 0:
        return steps * (a_step / an_epoch)
    if recorded is not None and len(recorded[0]):
        return np.interp(steps, all_steps[recorded[0]], recorded[1])
    raise RunError(f"{run.id} does not say how long an epoch is.", code="no-metric")


def thinned(points: Points, first: float | None, last: float | None, num_points: int, smooth: float) -> dict[str, Any]:
    """The values between two places of the axis as at most so many points; smoothed over all that came before."""
    x, values = points
    mean = smoothed(values, smooth)
    low = 0 if first is None else max(int(np.searchsorted(x, first, side="left")) - 1, 0)
    high = len(x) if last is None else min(int(np.searchsorted(x, last, side="right")) + 1, len(x))
    x, values, mean = x[low:high], values[low:high], mean[low:high]
    is_finite = np.isfinite(values)
    out: dict[str, Any] = {
        "num_points": len(x),
        "num_nonfinite": int(len(values) - is_finite.sum()),
        "last": _numbers(points.values[-1:])[0] if len(points.values) else None,
        "last_x": _numbers(points.x[-1:])[0] if len(points.x) else None,
    }
    bad = x[~is_finite]
    if len(x) <= num_points:
        raw = _numbers(values)
        smooth_line = raw if smooth == 0 else _numbers(mean)
        return {"x": _numbers(x), "min": raw, "max": raw, "mean": smooth_line, "has_nonfinite": _numbers(bad), **out}
    edges = (np.arange(num_points) * len(x)) // num_points
    whole = np.where(is_finite, values, np.nan)
    counts = np.diff(np.append(edges, len(x)))
    usable = np.isfinite(mean)
    num_usable = np.add.reduceat(usable.astype(np.int64), edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.add.reduceat(np.where(usable, mean, 0.0), edges) / num_usable
    # The middle of each stretch; the ends of the curve stay where they are.
    middle = x[edges + (counts - 1) // 2]
    middle[0], middle[-1] = x[0], x[-1]
    has_bad = np.add.reduceat((~is_finite).astype(np.int64), edges) > 0
    return {
        "x": _numbers(middle),
        "min": _numbers(np.fmin.reduceat(whole, edges)),
        "max": _numbers(np.fmax.reduceat(whole, edges)),
        "mean": _numbers(means),
        "has_nonfinite": _numbers(middle[has_bad]),
        **out,
    }


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """The debiased moving average. A value that is not finite stays as it is and counts for nothing."""
    if weight == 0 or not len(values):
        return values
    is_finite = np.isfinite(values)
    found = values[is_finite]
    num = len(found)
    if not num:
        return values
    # y[i] = w y[i-1] + (1-w) v[i], a block at a time: within a block it is a product with a triangle of powers.
    size = min(_BLOCK, num)
    powers = weight ** np.arange(size)
    triangle = np.where(np.tri(size, dtype=bool), (1 - weight) * weight ** (_lags(size)), 0.0)
    padded = np.concatenate([found, np.zeros(-num % size)]).reshape(-1, size)
    inside = padded @ triangle.T
    carries = np.empty(len(inside))
    carry, whole = 0.0, float(weight**size)
    for i, end in enumerate(inside[:, -1].tolist()):
        carries[i] = carry
        carry = whole * carry + end
    average = (inside + np.outer(carries, weight * powers)).reshape(-1)[:num]
    average /= -np.expm1(np.arange(1, num + 1) * np.log(weight))
    out = values.astype(np.float64, copy=True)
    out[is_finite] = average
    return out


def _lags(size: int) -> np.ndarray:
    lags: np.ndarray = np.maximum(np.subtract.outer(np.arange(size), np.arange(size)), 0)
    return lags


def baselines(run: Run, metric: str) -> list[dict[str, Any]]:
    """What a trivial model loses on the set that the metric is about."""
    parts = metric.split("/")
    if parts[-1] != "loss" or len(parts) > 3:
        return []
    data = run.data()
    about = data.get(parts[1] if parts[0] == "eval" and len(parts) == 3 else "train")
    found = about.get("baselines") if isinstance(about, dict) else None
    if not isinstance(found, dict):
        return []
    return [
        {"name": str(name), "value": float(value)}
        for name, value in found.items()
        if isinstance(value, int | float) and np.isfinite(value)
    ]


def _numbers(values: np.ndarray) -> list[Any]:
    """As JSON has them: what is not finite by its name, whole numbers without a point."""
    if not np.isfinite(values).all():
        return [value if np.isfinite(value) else name_of(value) for value in values.tolist()]
    found: list[Any] = values.tolist()
    return found
