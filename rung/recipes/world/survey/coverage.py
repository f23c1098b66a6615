"""What the controls of a store are like: which ways were gone, how strongly, how evenly in time.

A model learns no way that nobody went. A step counts as going some way when its control is more than a tenth of a brisk
one (the 90th percentile of its size); a step that goes no way at all stands still, which is also something to learn:
it is what a visitor does most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rung.recipes.world.geometry import MOVES

SLIGHT = 0.1  # of a brisk control; less is standing still
FAR_OUT = 5.0  # half-widths of the middle 98 %
LONG = 2.5  # times the usual distance of two frames: a gap
_WORDS = {
    "forward": ("forward", "backward"),
    "right": ("right", "left"),
    "down": ("down", "up"),
    "turn": ("turn right", "turn left"),
    "look": ("look up", "look down"),
    "lean_right": ("lean right", "lean left"),
}
_ORDER = [*_WORDS]


class Axis(NamedTuple):
    """A channel that moves the camera, and what its two ways are called."""

    name: str
    channel: int
    sign: float
    ways: tuple[str, str]
    unit: float  # times this for people: degrees in place of radians


def moving_channels(info: Mapping[str, Any]) -> list[int]:
    """Channels that say how the camera moved and are not always the same."""
    names, constant = info["controls"], info["statistics"]["constant"]
    wanted = MOVES if info["control_kind"] == "pose" else [name for name in names if name not in ("dt", "valid")]
    return [k for k, name in enumerate(names) if name in wanted and name not in constant]


def slight_controls(info: Mapping[str, Any]) -> list[float]:
    """Per channel: what is no movement yet."""
    statistics = info["statistics"]
    # A way that is rarely gone has a brisk control of 0: there the spread says what is more than rounding.
    return [SLIGHT * max(brisk, SLIGHT * std) for brisk, std in zip(statistics["brisk"], statistics["std"])]


def axes_of(info: Mapping[str, Any]) -> list[Axis]:
    """The channels with a direction, in the order in which people name them; those that never move are left out."""
    names, is_pose = info["controls"], info["control_kind"] == "pose"
    intents = {channel: (intent, float(sign)) for intent, (channel, sign) in info["intents"].items()}
    found = []
    for k in moving_channels(info):
        intent, sign = intents.get(names[k], (names[k] if is_pose else f"channel {names[k]}", 1.0))
        ways = _WORDS.get(intent, (f"positive {names[k]}", f"negative {names[k]}"))
        is_angle = is_pose and names[k] in MOVES[3:]
        found.append(Axis(intent, k, sign, ways, float(np.degrees(1)) if is_angle else 1.0))
    return sorted(found, key=lambda axis: _ORDER.index(axis.name) if axis.name in _ORDER else len(_ORDER))


def directions(controls: np.ndarray, axes: Sequence[Axis], slight: Sequence[float]) -> dict[str, Any]:
    """Of some valid rows: the share of steps that go each way and how far in all; forward and back against turns."""
    where = {axis.name: _signs(controls, axis, slight) for axis in axes}
    ways = {}
    for axis in axes:
        amount = controls[:, axis.channel].astype(np.float64) * axis.sign * axis.unit
        for side, way in zip((1, -1), axis.ways):
            total = float(np.maximum(amount * side, 0).sum())
            ways[way] = {"share": float((where[axis.name] == side).mean()) if len(controls) else 0.0, "total": total}
    is_still = np.all([signs == 0 for signs in where.values()], axis=0) if where else np.ones(len(controls), bool)
    found: dict[str, Any] = {
        "steps": len(controls),
        "ways": ways,
        "still": float(is_still.mean()) if len(controls) else 0,
    }
    if "forward" in where and "turn" in where and len(controls):
        # rows: forward, neither, backward; columns: left, straight, right
        found["forward_by_turn"] = [
            [float(((where["forward"] == a) & (where["turn"] == b)).mean()) for b in (-1, 0, 1)] for a in (1, 0, -1)
        ]
    return found


def _signs(controls: np.ndarray, axis: Axis, slight: Sequence[float]) -> np.ndarray:
    amount = controls[:, axis.channel] * axis.sign
    return np.where(np.abs(amount) > slight[axis.channel], np.sign(amount), 0).astype(int)


def has_moved(controls: np.ndarray, axes: Sequence[Axis], slight: Sequence[float]) -> np.ndarray:
    """Which rows say that the camera went somewhere."""
    return (
        np.any([_signs(controls, axis, slight) != 0 for axis in axes], axis=0)
        if axes
        else np.zeros(len(controls), bool)
    )


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
