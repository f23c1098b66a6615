"""What the controls and the frames of a store are like.

A model learns no way that nobody went. A step goes some way when its control is more than a tenth of a brisk one (the
90th percentile of its size); a step that goes no way stands still, which is what a visitor does most. Frames that teach
the wrong thing are broken (nearly one colour), repeated (although the controls move) or stray, or follow a cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rung.data.store import Store
from rung.recipe import Report
from rung.recipes.world.geometry import MOVES

SLIGHT = 0.1  # of a brisk control; less is standing still
FAR_OUT = 5.0  # half-widths of the middle 98 %
LONG = 2.5  # times the usual distance of two frames: a gap
FLAT = 2.0  # grey levels of 255: the spread of a coarse frame below which it shows nothing
BLACK = 12.0  # grey levels: the mean of a flat frame that is called black
SAME = 0.25  # grey levels: the mean change below which a frame is the one before, encoded again
UNRELATED = 0.7  # of the change between frames far apart
ABRUPT = 4.0  # times the usual change around it
ALONE = 2.0  # times the change just before and just after
AROUND = 5  # frames on each side
BACK = 0.25  # of the change: so near are the frames around a stray one
CHUNK = 256
WAYS = {  # in the order in which people name them
    "forward": ("forward", "backward"),
    "right": ("right", "left"),
    "down": ("down", "up"),
    "turn": ("turn right", "turn left"),
    "look": ("look up", "look down"),
    "lean_right": ("lean right", "lean left"),
}


class Axis(NamedTuple):
    """A channel that moves the camera, and what its two ways are called."""

    name: str
    channel: int
    sign: float
    ways: tuple[str, str]
    unit: float  # times this for people: degrees in place of radians
    slight: float  # what is no movement yet

    def signs(self, controls: np.ndarray) -> np.ndarray:
        """(N,) 1 where a row goes the first way, -1 where it goes the other, 0 where it does neither."""
        amount = controls[:, self.channel] * self.sign
        return np.where(np.abs(amount) > self.slight, np.sign(amount), 0).astype(int)


def moving_channels(info: Mapping[str, Any]) -> list[int]:
    """Channels that say how the camera moved and are not always the same."""
    names, constant = info["controls"], info["statistics"]["constant"]
    wanted = MOVES if info["control_kind"] == "pose" else [name for name in names if name not in ("dt", "valid")]
    return [k for k, name in enumerate(names) if name in wanted and name not in constant]


def axes_of(info: Mapping[str, Any]) -> list[Axis]:
    """The channels with a direction; those that never move are left out."""
    names, statistics, is_pose = info["controls"], info["statistics"], info["control_kind"] == "pose"
    intents = {channel: (intent, float(sign)) for intent, (channel, sign) in info["intents"].items()}
    found = []
    for k in moving_channels(info):
        name = names[k]
        intent, sign = intents.get(name, (name if is_pose else f"channel {name}", 1.0))
        ways = WAYS.get(intent, (f"positive {name}", f"negative {name}"))
        unit = float(np.degrees(1)) if is_pose and name in MOVES[3:] else 1.0
        # A way that is rarely gone has a brisk control of 0: there the spread says what is more than rounding.
        slight = SLIGHT * max(statistics["brisk"][k], SLIGHT * statistics["std"][k])
        found.append(Axis(intent, k, sign, ways, unit, slight))
    order = [*WAYS]
    return sorted(found, key=lambda axis: order.index(axis.name) if axis.name in order else len(order))


def directions(controls: np.ndarray, axes: Sequence[Axis]) -> dict[str, Any]:
    """Of some valid rows: the share of steps that go each way and how far in all; forward and back against turns."""
    signs = {axis.name: axis.signs(controls) for axis in axes}
    ways = {}
    for axis in axes:
        amount = controls[:, axis.channel].astype(np.float64) * axis.sign * axis.unit
        for side, way in zip((1, -1), axis.ways):
            total = float(np.maximum(amount * side, 0).sum())
            ways[way] = {"share": float((signs[axis.name] == side).mean()), "total": total}
    still = float(np.all([each == 0 for each in signs.values()], axis=0).mean())
    found: dict[str, Any] = {"steps": len(controls), "ways": ways, "still": still}
    if "forward" in signs and "turn" in signs:
        # rows: forward, neither, backward; columns: left, straight, right
        found["forward_by_turn"] = [
            [float(((signs["forward"] == a) & (signs["turn"] == b)).mean()) for b in (-1, 0, 1)] for a in (1, 0, -1)
        ]
    return found


def channel_figures(values: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    """Of one channel: moments, percentiles, and the rows that lie far outside."""
    values = values.astype(np.float64)
    low, middle, high = np.percentile(values, (1, 50, 99))
    half = (high - low) / 2
    is_out = np.abs(values - middle) > FAR_OUT * half if half > 0 else np.zeros(len(values), bool)
    first, last = np.percentile(values, (0.1, 99.9))
    edges = np.linspace(first, last, 41)
    counts = np.histogram(values, edges)[0] if edges[-1] > edges[0] else np.zeros(40, int)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "p1": float(low),
        "p50": float(middle),
        "p99": float(high),
        "max": float(values.max()),
        "far_out": int(is_out.sum()),
        "far_out_rows": rows[is_out][:10].tolist(),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def timing(times: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """How evenly the frames of a record follow each other."""
    steps = [np.arange(start + 1, start + length) for start, length in zip(starts, lengths)]
    rows = np.concatenate([np.zeros(0, np.int64), *steps])
    dt = times[rows] - times[rows - 1]
    if not len(dt):
        return {"steps": 0}
    usual = float(np.median(dt))
    is_gap, is_back = dt > LONG * usual, dt <= 0
    return {
        "steps": len(dt),
        "median_s": usual,
        "jitter": float(dt[~is_gap].std() / usual) if usual > 0 else 0.0,
        "p1_s": float(np.percentile(dt, 1)),
        "p99_s": float(np.percentile(dt, 99)),
        "longest_s": float(dt.max()),
        "gaps": int(is_gap.sum()),
        "gap_rows": rows[is_gap][:10].tolist(),
        "backward": int(is_back.sum()),
        "backward_rows": rows[is_back][:10].tolist(),
    }


def blemishes(store: Store, coarse: np.ndarray, has_moved: np.ndarray, report: Report) -> dict[str, Any]:
    """Row numbers by kind; `coarse` are the frames at a few pixels, `has_moved` what the controls say of each row."""
    frames, num = store.arrays["frames"], len(coarse)
    flat, mean = np.zeros(num), np.zeros(num)  # the largest spread of a colour over a frame, and its mean
    change = np.zeros(num, np.float32)  # the mean change from the frame before, at full size
    coarse_change = np.full(num, np.nan)  # the same at the coarse size, where a small movement changes little
    for at in range(0, num, CHUNK):
        here, before = slice(at, at + CHUNK), max(0, at - 1)
        small = np.asarray(coarse[before : at + CHUNK], np.float32)
        own = small[at - before :]
        flat[here], mean[here] = own.std((1, 2)).max(-1), own.mean((1, 2, 3))
        block, after = np.asarray(frames[before : at + CHUNK]), slice(before + 1, at + CHUNK)
        # the larger less the smaller: a difference of bytes would wrap around
        away = np.maximum(block[1:], block[:-1]) - np.minimum(block[1:], block[:-1])
        change[after] = away.mean((1, 2, 3), dtype=np.float32)
        coarse_change[after] = np.abs(np.diff(small, axis=0)).mean((1, 2, 3))
        report("looking at frames", min(at + CHUNK, num), num)
    coarse_change[store.starts] = np.nan

    is_used, is_first = np.zeros(num, bool), np.zeros(num, bool)
    for start, length in zip(store.starts, store.lengths):  # rows between splits belong to no record
        is_used[start : start + length] = True
    is_first[store.starts] = True
    is_same = is_used & ~is_first & (change < SAME)
    is_broken = is_used & (flat < FLAT)
    is_repeated = is_same & has_moved & ~is_broken
    cuts, strays = _abrupt(store, coarse, coarse_change)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_repeated.astype(np.int8), [0]])))
    lengths = edges[1::2] - edges[::2]  # of runs of repeated frames
    longest = int(lengths.argmax()) if len(lengths) else None
    return {
        "frames": int(is_used.sum()),
        "broken": np.flatnonzero(is_broken).tolist(),
        "black": np.flatnonzero(is_broken & (mean < BLACK)).tolist(),
        "unchanged": int(is_same.sum()),
        "repeated": np.flatnonzero(is_repeated).tolist(),
        "moved": int((has_moved & is_used & ~is_first).sum()),
        "longest_repeat": {
            "length": 0 if longest is None else int(lengths[longest]),
            "row": 0 if longest is None else int(edges[2 * longest]),
        },
        "cuts": [row for row in cuts if not is_broken[max(0, row - 1) : row + 1].any()],
        "strays": [row for row in strays if not is_broken[row]],
    }


def _abrupt(store: Store, coarse: np.ndarray, change: np.ndarray) -> tuple[list[int], list[int]]:
    """Rows of cuts and rows of stray frames.

    A cut is a single change as large as that between unrelated frames, far above the changes around it; after a stray
    frame the film continues where it was. A fall or a quick turn changes as much, but over several frames.
    """
    num = len(coarse)
    some = np.linspace(0, num - 1, min(num, 500)).astype(int)
    far = np.asarray(coarse[(some + num // 2) % num], np.float32)
    unrelated = float(np.median(np.abs(np.asarray(coarse[some], np.float32) - far).mean((1, 2, 3))))
    cuts, strays = [], []
    for start, length in zip(store.starts, store.lengths):
        for row in start + np.flatnonzero(change[start : start + length] > UNRELATED * unrelated):
            low, high = max(start + 1, row - AROUND), min(start + length, row + AROUND + 1)
            others = np.delete(change[low:high], row - low)
            beside = change[[k for k in (row - 1, row + 1) if low <= k < high]]
            if not len(others) or change[row] <= ABRUPT * np.median(others):
                continue
            if change[row] > ALONE * beside.max():
                cuts.append(int(row))
            elif row + 1 < high and change[row + 1] > UNRELATED * unrelated:
                across = np.abs(coarse[row + 1].astype(np.float32) - coarse[row - 1]).mean()
                if across < BACK * change[row]:
                    strays.append(int(row))
    return cuts, strays
