"""The steps at which a curve changed, and what else happened there.

A change point is a step at which loss, norm or the share of clipped steps jumped to another level and stayed there, or
from which the loss rose. Four windows of equal length are compared, two before the step and two after, at several
lengths. A steady fall is no change, nor is a single wild step, which is a spike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rung.doctor.history import EMPTY, History, Series
from rung.robust import SIGMA

LENGTHS = (16, 32, 64, 128, 256)
LEAST = 50  # steps before which everything changes
CLEAR = 8.0  # robust sigmas, as for a spike: curves of healthy runs reach 4
MOST = 3  # change points per signal; a curve with more has no level to jump from
TOLERANCE = 0.05  # of the step
EXACT = 2  # steps by which an event of a dense kind may miss, as rows are written after the step
SIGNALS = ("loss", "norm", "clip rate")


class Coincidence(NamedTuple):
    """`before` and `after` are medians of the signal on both sides of the step (means for the clip rate)."""

    step: int
    signal: str
    before: float
    after: float
    events: list[str]


class Change(NamedTuple):
    step: int
    kind: str  # jump or rise
    length: int
    score: float


def coincidences(history: History) -> list[Coincidence]:
    """Change points in order of steps, each with the events within 5 % of it."""
    first = max(LEAST, int(0.95 * history.warmup_steps))
    found = []
    for name in SIGNALS:
        series, is_share = signal(history, name).between(first, history.end), name == "clip rate"
        for change in changes(series, rises=name == "loss", is_share=is_share):
            middle = np.mean if is_share else np.median
            at, near = int(np.searchsorted(series.steps, change.step)), LENGTHS[0]
            before, later = series.values[max(0, at - near) : at], series.values[at:]
            after = later[:near] if change.kind == "jump" else later[: 2 * change.length][-near:]  # a rise: its end
            events = events_near(history, change.step)
            found.append(Coincidence(change.step, name, float(middle(before)), float(middle(after)), events))
    return sorted(found, key=lambda c: (c.step, SIGNALS.index(c.signal)))


def signal(history: History, name: str) -> Series:
    if name != "clip rate":
        return history[name].finite
    norm, clipped = history["norm"], history["norm_clipped"]
    if len(norm) != len(clipped):
        return EMPTY
    # Clipping multiplies by a rounded factor: only what shrank by more than that was clipped.
    return Series(norm.steps, (clipped.values < norm.values * (1 - 1e-5)).astype(np.float64))


def changes(series: Series, rises: bool = False, is_share: bool = False) -> list[Change]:
    """The clear jumps of a series, and with `rises` also where it begins to rise; few, in order of steps."""
    values, kept = series.values, list[Change]()
    for kind in ("jump", "rise") if rises else ("jump",):  # what jumps up also rises: jumps first
        candidates = [c for length in LENGTHS for c in _candidates(values, length, kind, is_share)]
        for place, length, score in sorted(candidates, key=lambda c: -c[2]):
            step = int(series.steps[place])
            if len(kept) < MOST and all(abs(step - old.step) > 3 * max(length, old.length) for old in kept):
                kept.append(Change(step, kind, length, score))
    return sorted(kept)


def _candidates(values: np.ndarray, length: int, kind: str, is_share: bool) -> Iterator[tuple[int, int, float]]:
    """Positions at which windows of this length differ more than elsewhere, with scores."""
    stride = length // 8
    if len(values) < 4 * length:
        return
    # Level and noise of the windows that begin at every stride; the noise of neighbours is free of any trend.
    windows = sliding_window_view(values, length)[::stride]
    middle = np.mean if is_share else np.median
    levels = middle(windows, axis=1)
    if is_share:
        noise = np.sqrt(np.maximum(levels * (1 - levels), 1 / length))
    else:
        noise = SIGMA * np.median(np.abs(np.diff(windows, axis=1)), axis=1) / np.sqrt(2)
    # Each window with the three that follow it without a gap; a window is eight strides long.
    four = [slice(i * 8, len(levels) - (3 - i) * 8) for i in range(4)]
    a, b, c, d = (levels[part] for part in four)
    before, across, after = b - a, c - b, d - c
    jump = np.maximum(across - np.maximum(before, after), np.minimum(before, after) - across)
    # The difference of such windows at an ordinary step; larger for a curve that wanders.
    of_noise = np.max([noise[part] for part in four], axis=0) * np.sqrt(np.pi / length)
    of_curve = SIGMA * np.quantile(np.maximum(jump, 0.0), 0.75)  # about half of them are 0 by construction
    typical = np.maximum(of_noise, max(of_curve, 1e-9))
    if kind == "rise":  # a loss that turns upwards, however slowly, and does not recover at once
        jump = np.where(after > -0.5 * across, across - np.maximum(before, 0.0), 0.0)
    for i in np.flatnonzero(jump > CLEAR * typical):
        place, size = int(i) * stride + 2 * length, float(jump[i])
        if kind == "rise":  # from where the curve was lowest before it rose
            near, first = length // 2, max(0, place - 2 * length)
            medians = np.median(sliding_window_view(values[first : place + length], near), axis=1)
            lowest = first + int(np.argmin(medians)) + near // 2
            yield lowest, length, size / float(typical[i])
        elif size > 0.3 or not is_share:
            # Two levels fit the values around the place best with their edge here: the least sum of distances.
            first = max(0, place - length)
            part = values[first : place + length]
            low, high = np.median(part[: length // 2]), np.median(part[-(length // 2) :])
            edge = first + int(np.argmin(np.cumsum(np.abs(part - low) - np.abs(part - high)))) + 1
            # Windows of a few steps show most of the jump at its edge; those of a slope do not.
            near = min(max(length // 4, 6), 16)
            parts = [values[max(0, edge + k * near) : edge + (k + 1) * near] for k in (-2, -1, 0, 1)]
            if min(map(len, parts)) >= near:
                rise_before, rise_across, rise_after = np.diff([middle(part) for part in parts])
                over = rise_across - max(rise_before, rise_after)
                under = min(rise_before, rise_after) - rise_across
                if max(over, under) > 0.6 * size:
                    yield edge, length, size / float(typical[i])


def events_near(history: History, step: int) -> list[str]:
    """What happened within 5 % of a step, nearest first: `save at 960`."""
    tolerance = max(EXACT, round(TOLERANCE * step))
    found = []
    for name, steps in _happenings(history):
        if not len(steps):
            continue
        nearest = int(steps[np.abs(steps - step).argmin()])
        # What happens all the time coincides with everything: it counts only at that very step.
        is_dense = len(steps) > 1 and float(np.median(np.diff(steps))) <= 2 * tolerance
        if abs(nearest - step) <= (EXACT if is_dense else tolerance):
            found.append((abs(nearest - step), f"{name} at {nearest}"))
    return [text for _, text in sorted(found, key=lambda pair: pair[0])]


def _happenings(history: History) -> Iterator[tuple[str, np.ndarray]]:
    """What can coincide: a name, and the steps at which it happened, in order."""
    if history.warmup_steps:
        yield "end of warm-up", np.array([history.warmup_steps])
    lr = history["lr"]
    if len(lr) and lr.values.max() > lr.values.min():
        peak = int(lr.steps[int(np.argmax(lr.values))])
        if abs(peak - history.warmup_steps) > EXACT:
            yield "rate peak", np.array([peak])
    if np.isfinite(history.steps_per_epoch):
        num_epochs = int(history.end / history.steps_per_epoch)
        yield "epoch boundary", np.round(np.arange(1, num_epochs + 1) * history.steps_per_epoch).astype(int)
    evals = [series.steps for of_set in history.evals.values() for series in of_set.values()]
    if evals:
        yield "eval", np.unique(np.concatenate(evals))
    for kind in ("resume", "save", "spike", "skip", "rollback"):
        yield kind, np.unique(np.asarray(history.steps_of(kind), np.int64))
    scale, skipped = history["scale"], history["skipped"]
    if len(scale) > 1:
        yield "scale change", scale.steps[1:][np.diff(scale.values) != 0]
    yield "skipped step", skipped.steps[skipped.values > 0]
