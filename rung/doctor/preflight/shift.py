"""Whether the eval sets are prepared as train is, and train as its store says.

What is looked for is another scale, another type, another order of channels; not other content, which is what a
held-out set is for. So the limits count from what stretches of train differ from each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rung.doctor.preflight.arrays import NUM_ROWS, NUM_STRETCHES, QUICK_ROWS, Look, declared, look_at, rows_of
from rung.doctor.preflight.result import Bench, Check, Result

LEAST_ROWS = 32  # of a set; fewer say nothing about it
SHIFT, RATIO = 0.5, 2.0  # of means, in standard deviations, and of those, between train and an eval set


def same_as_in_training(bench: Bench) -> Iterator[Result]:
    """Each eval set against train, and train against what its store says."""
    num_rows = QUICK_ROWS if bench.is_quick else NUM_ROWS
    train = {name: look_at(name, np.asarray(a)) for name, a in rows_of(bench, "train", num_rows).items()}
    known = declared(bench)
    for look in train.values():
        yield from _against_store(look, known)
    for stream in bench.setup.evaluator.streams:
        held = {name: look_at(name, np.asarray(a)) for name, a in rows_of(bench, stream, num_rows).items()}
        faults = [fault for name in train if name in held for fault in _shifted(train[name], held[name], known)]
        faults += [f"{name} is missing" for name in train if name not in held]
        if faults:
            remedy = f"prepare {stream} exactly as train: same scale, same order of channels"
            yield Result(f"train against {stream}", "warn", "; ".join(faults), remedy, "D4")
        else:
            num_rows_held = max((len(look.array) for look in held.values()), default=0)
            seen = f"{len(train)} arrays of the same types; scales differ no more than parts of train do"
            if num_rows_held < LEAST_ROWS:
                seen = f"{len(train)} arrays of the same types; {num_rows_held} rows are too few to compare scales"
            yield Result(f"train against {stream}", "pass", seen, rule="D4")


def _shifted(train: Look, held: Look, known: Mapping[str, Any]) -> Iterator[str]:
    """How a set differs from train beyond what stretches of train differ from each other: held-out episodes are of
    other places, and their means may well be half a deviation away (measured: 0.8 in a walk of several rooms)."""
    name = train.name
    if train.array.dtype != held.array.dtype:
        yield f"{name} is {train.array.dtype} in train and {held.array.dtype} here"
    if train.is_ids or train.is_mask or train.channels.shape[1] != held.channels.shape[1]:
        return
    ok = ~train.still & ~_constant(known, len(train.still)) & ~_is_pinned(train)
    is_finite = np.isfinite(train.channels).all() and np.isfinite(held.channels).all()
    if not ok.any() or not is_finite or len(held.array) < LEAST_ROWS:
        return
    std = np.where(ok, train.std, 1)
    usual_shift, usual_ratio = _between_stretches(train, std)
    shift = np.where(ok, np.abs(held.mean - train.mean) / std, 0)
    ratio = np.where(ok, np.abs(np.log(np.maximum(held.std, 1e-12) / std)), 0)
    if ((shift - usual_shift) > SHIFT).any():
        c = int((shift - usual_shift).argmax())
        if _is_other_order(train, held):
            yield f"the channels of {name} fit train in reverse order, and not as they are"
        means = f"mean {train.mean[c]:.4g} in train and {held.mean[c]:.4g} here"
        yield f"{name}[{c}] has {means}, {shift[c]:.1f} deviations apart"
    if ((ratio - usual_ratio) > np.log(RATIO)).any():
        c = int((ratio - usual_ratio).argmax())
        yield f"{name}[{c}] has deviation {train.std[c]:.4g} in train and {held.std[c]:.4g} here"
    if (ranges := (_range(train), _range(held)))[0] != ranges[1] and all(ranges):
        yield f"{name} lies in {ranges[0]} in train and in {ranges[1]} here"


def _between_stretches(look: Look, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest shift and log ratio that a stretch of train has against all of it, by channel."""
    each = len(look.channels) // NUM_STRETCHES
    if not each:
        return np.zeros(len(std)), np.zeros(len(std))
    parts = look.channels[: each * NUM_STRETCHES].reshape(NUM_STRETCHES, each, -1)
    shift = np.abs(parts.mean(1) - look.mean) / std
    ratio = np.abs(np.log(np.maximum(parts.std(1), 1e-12) / std))
    return shift.max(0), np.where(parts.std(1).min(0) > 0, ratio.max(0), 0)


def _is_pinned(look: Look) -> np.ndarray:
    """Channels that lie at one value most of the time, as a throttle does: a deviation is no scale of these."""
    return np.asarray(np.percentile(look.channels, 25, axis=0) == np.percentile(look.channels, 75, axis=0))


def _range(look: Look) -> str:
    """The usual range that pictures and sound fill to the brim, if it is one."""
    if look.array.ndim < 3 or not np.issubdtype(look.array.dtype, np.floating):
        return ""
    low, high = float(look.array.min()), float(look.array.max())
    for a, b in ((0, 255), (0, 1), (-1, 1)):
        if abs(low - a) <= 0.02 * (b - a) and abs(high - b) <= 0.02 * (b - a):
            return f"[{a}, {b}]"
    return ""


def _is_other_order(train: Look, held: Look) -> bool:
    straight = float(np.abs(held.mean - train.mean).sum())
    return train.channels.shape[1] == 3 and float(np.abs(held.mean[::-1] - train.mean).sum()) < straight / 3


def _constant(known: Mapping[str, Any], num_channels: int) -> np.ndarray:
    names: Sequence[str] = known.get("names", ())
    if len(names) != num_channels:
        return np.zeros(num_channels, bool)
    return np.array([name in known.get("constant", ()) for name in names])


def _against_store(look: Look, known: Mapping[str, Any]) -> Iterator[Result]:
    mean, std = np.array(known.get("mean", ())), np.array(known.get("std", ()))
    if look.is_ids or look.channels.shape[1] != len(mean) or len(mean) < 2 or not np.isfinite(look.channels).all():
        return
    # A store may leave out rows that do not count, and few rows of the sample may be of one kind: twice the limit.
    far = np.abs(look.mean - mean) / std
    if far.max() > 2 * SHIFT:
        c = int(far.argmax())
        seen = f"{look.name}[{c}] has mean {look.mean[c]:.4g}, the store says {mean[c]:.4g} with deviation {std[c]:.4g}"
        yield Result("inputs against the store", "warn", seen, "prepare the data again; its statistics are stale", "D4")


CHECKS: list[Check] = [Check("train against eval sets", same_as_in_training)]
