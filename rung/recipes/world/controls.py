"""The controls the model gets for each step, computed from poses or taken from recorded controls.

Row t says what led from the frame before to frame t. Where several recorded controls lie between two kept frames (every
n-th frame is kept, or a picture was broken) their mean is taken; of poses only those of the two frames matter. An
unknown control, such as the first row of every record, is all zeros, including its last channel, valid.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rung.recipes.world import geometry

POSE_INTENTS = {
    "forward": ["forward", 1], "right": ["right", 1], "turn": ["turn_right", 1], "look": ["look_up", 1],
}  # fmt: skip
# What a visitor wants, and the words in a recorded channel's name that mean it; the first that fits takes the channel.
WORDS = {
    "turn": {"turn", "yaw", "angle", "steering", "steer"},
    "look": {"pitch", "look"},
    "right": {"strafe", "right", "left", "sideways"},
    "forward": {"forward", "throttle", "speed", "backward", "backwards", "reverse"},
}
AGAINST, ALONG = {"left", "down", "back", "backward", "backwards", "reverse"}, {"right", "up", "forward"}
CONSTANT = 1e-6  # a std below it is the rounding of float64 times since 1970 (2.4e-7 s), not a control
POSE_UNITS = (slice(0, 3), slice(3, 6))  # lengths and angles, whose own units are not known to be of size 1
TINY = 1e-9  # of any unit
ROUNDING = 1e-4  # of the largest std with the same unit: the other axes of a camera that only goes ahead


def lead_to_kept(controls: np.ndarray, kept: np.ndarray, lag: int) -> np.ndarray:
    """(K, C): the mean of the controls that led from each kept frame to the next; NaN where unknown.

    `controls` are those of an uncut stretch of frames, `kept` the numbers of the frames in it that remain, `lag` how
    many frames lie between a control and the frame it leads to.
    """
    led = np.full_like(controls, np.nan)
    led[lag:] = controls[: max(0, len(controls) - lag)]
    led[~_fits(led)] = np.nan  # before sums are taken, which one huge number would spoil
    sums = np.concatenate([np.zeros((1, controls.shape[1])), np.cumsum(np.nan_to_num(led), axis=0)])
    holes = np.concatenate([[0], np.cumsum(np.isnan(led).any(1))])
    out = np.full((len(kept), controls.shape[1]), np.nan)
    first, last = kept[:-1] + 1, kept[1:] + 1
    whole = holes[last] == holes[first]
    single = whole & (last - first == 1)
    mean = (sums[last] - sums[first]) / (last - first)[:, None]
    out[1:][whole] = mean[whole]
    out[1:][single] = led[kept[1:]][single]  # the very number, not a difference of sums
    return out


def pose_controls(poses: np.ndarray, times: np.ndarray, up: np.ndarray) -> np.ndarray:
    """(N, 10) of one record, in the order of geometry.CHANNELS; all 0 where a pose is missing, and in the first row."""
    led = np.full((len(poses), len(geometry.CHANNELS) - 2), np.nan)
    known = np.isfinite(poses).all((1, 2))
    after = np.flatnonzero(known[1:] & known[:-1]) + 1
    led[after, :6] = geometry.move_between(poses[after - 1], poses[after])
    led[after, 6:] = geometry.roll_and_pitch(poses[after], up)
    return recorded_controls(led, times)


def recorded_controls(led: np.ndarray, times: np.ndarray) -> np.ndarray:
    """(N, C + 2) of one record: as recorded, dt, valid; all 0 where a control is missing, and in the first row."""
    rows = np.zeros((len(led), led.shape[1] + 2))
    after = np.flatnonzero(np.isfinite(led[1:]).all(1)) + 1
    rows[after, :-2] = led[after]
    rows[after, -2] = times[after] - times[after - 1]
    rows[after, -1] = 1
    rows[~_fits(rows)] = 0
    return rows.astype(np.float32)


def _fits(rows: np.ndarray) -> np.ndarray:
    """Which rows are finite in the type of the store."""
    with np.errstate(over="ignore"):
        return np.asarray(np.isfinite(rows.astype(np.float32)).all(1))


def intents(names: Sequence[str]) -> dict[str, list[Any]]:
    """What a visitor may want -> [channel, sign], for the recorded channels whose names say what they do."""
    found: dict[str, list[Any]] = {}
    for name in names:
        parts = set(re.findall(r"[a-z]+", name.lower()))
        wanted = next((intent for intent, meaning in WORDS.items() if parts & meaning), None)
        if wanted is not None:
            found.setdefault(wanted, [name, -1 if parts & AGAINST and not parts & ALONG else 1])
    return {intent: found[intent] for intent in POSE_INTENTS if intent in found}


def statistics(rows: np.ndarray, names: Sequence[str], units: Sequence[slice] = ()) -> dict[str, list[Any]]:
    """Of the valid rows (N, C) of training. A channel that does not vary is named, and its std is 1.

    `units` are channels that can be compared: one that hardly varies beside its fellows does not vary.
    """
    rows = rows.astype(np.float64)
    mean, std = rows.mean(0), rows.std(0)
    least = CONSTANT * np.maximum(1, np.abs(mean))
    for unit in units:
        least[unit] = np.maximum(TINY, ROUNDING * std[unit].max())
    is_constant = std <= least
    low, high = np.percentile(rows, [0.1, 99.9], axis=0)
    return {
        "mean": mean.tolist(),
        "std": np.where(is_constant, 1, std).tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "brisk": np.percentile(np.abs(rows), 90, axis=0).tolist(),
        "constant": [name for name, constant in zip(names, is_constant) if constant],
    }
