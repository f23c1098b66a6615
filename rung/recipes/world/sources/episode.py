"""One recording as a source has it, before it is cut, scaled and split.

Poses are interpolated at the times of the frames, controls are not: a button is pressed or it is not. Neither is made
up where the nearest one is too far away in time; NaN stands there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rung.recipes.world import geometry

Frame = np.ndarray | None  # (H, W, 3) uint8 RGB, of any size; None where a picture does not decode


@dataclass
class Episode:
    """A recording without a known break: any size, any rate, with its pauses.

    `times` must be known before the frames are read; `poses` and `controls` may be filled while they are (nobody looks
    at them before the last frame is out). `frames` is gone through once, in order.
    """

    label: str  # short, for people: a map, a file's name
    times: np.ndarray  # (N,) float64 seconds, one per frame
    frames: Iterable[Frame]  # N of them
    poses: np.ndarray | None = None  # (M, 4, 4) float64 camera to world, x right, y down, z ahead; NaN where unknown
    pose_times: np.ndarray | None = None  # (M,) seconds on the clock of `times`; None: one pose per frame
    up: tuple[float, float, float] = (0.0, -1.0, 0.0)  # in the world of the poses
    controls: np.ndarray | None = None  # (M, C) as recorded, NaN where unknown
    control_times: np.ndarray | None = None  # as pose_times
    control_names: list[str] = field(default_factory=list)
    split: str | None = None  # the split that all of it belongs to; None: to be chosen
    breaks: np.ndarray | None = None  # numbers of frames that do not follow the one before: some between are gone
    notes: list[str] = field(default_factory=list)  # what was assumed, in sentences for the summary
    dropped: dict[str, int] = field(default_factory=dict)  # what the source itself left out, by reason

    @property
    def num_frames(self) -> int:
        return len(self.times)

    def poses_at_frames(self, max_gap_s: float) -> np.ndarray | None:
        """(N, 4, 4): interpolated between the poses around a frame, NaN where none is near enough."""
        if self.poses is None or self.pose_times is None:
            return self.poses
        poses, times = _known_in_order(self.poses, self.pose_times)
        out = np.full((self.num_frames, 4, 4), np.nan)
        if len(times) == 0:
            return out
        after = np.searchsorted(times, self.times).clip(1, max(1, len(times) - 1))
        pair = np.stack([after - 1, np.minimum(after, len(times) - 1)], axis=1)
        span = np.diff(times[pair], axis=1)[:, 0]
        # before the first pose and after the last one there is nothing to interpolate with: the end is held
        share = np.where(span > 0, (self.times - times[pair[:, 0]]) / np.where(span > 0, span, 1), 0).clip(0, 1)
        near = np.abs(times[pair] - self.times[:, None]).min(1) <= max_gap_s
        out[near] = geometry.interpolate(poses[pair[near]], share[near])
        return out

    def controls_at_frames(self, max_gap_s: float) -> np.ndarray | None:
        """(N, C): the recorded control nearest in time to each frame, NaN where none is near enough."""
        if self.controls is None or self.control_times is None:
            return self.controls
        controls, times = _known_in_order(self.controls, self.control_times)
        out = np.full((self.num_frames, self.controls.shape[1]), np.nan)
        if len(times) == 0:
            return out
        after = np.searchsorted(times, self.times).clip(0, len(times) - 1)
        before = np.maximum(after - 1, 0)
        nearest = np.where(np.abs(times[before] - self.times) <= np.abs(times[after] - self.times), before, after)
        near = np.abs(times[nearest] - self.times) <= max_gap_s
        out[near] = controls[nearest[near]]
        return out


def _known_in_order(values: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known = np.flatnonzero(np.isfinite(values.reshape(len(values), -1)).all(1))
    order = known[np.argsort(times[known], kind="stable")]
    return values[order], times[order]


def cut(times: np.ndarray, gap_s: float, breaks: np.ndarray | None = None) -> tuple[list[slice], int]:
    """Stretches without a pause longer than `gap_s`, and how often time ran backwards, which ends one too, as do the
    `breaks` of an episode."""
    steps = np.diff(times)
    ends = np.flatnonzero((steps > gap_s) | (steps < 0)) + 1
    if breaks is not None:
        ends = np.union1d(ends, breaks)
    bounds = [0, *ends.tolist(), len(times)]
    return [slice(a, b) for a, b in pairwise(bounds) if b > a], int((steps < 0).sum())


def onward(times: np.ndarray) -> np.ndarray:
    """The same clock, with each step back replaced by a usual step: how far apart frames were recorded."""
    steps = np.diff(times)
    is_back = steps < 0
    usual_s = np.median(steps[~is_back]) if not is_back.all() else 0.0
    return times + np.concatenate([[0.0], np.cumsum(np.where(is_back, usual_s - steps, 0.0))])
