"""Puts poses and controls on the clock of the frames.

Poses are interpolated, controls are not: a button is pressed or it is not. Neither is made up where the nearest one is
too far away in time; NaN stands there.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rung.recipes.world import geometry
from rung.recipes.world.sources.episode import Episode


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


def poses_at_frames(episode: Episode, max_gap_s: float) -> np.ndarray | None:
    """(N, 4, 4): interpolated between the poses around a frame, NaN where none is near enough."""
    if episode.poses is None or episode.pose_times is None:
        return episode.poses
    known = np.isfinite(episode.poses).all((1, 2))
    poses, times = episode.poses[known], episode.pose_times[known]
    out = np.full((episode.num_frames, 4, 4), np.nan)
    if len(times) == 0:
        return out
    order = np.argsort(times, kind="stable")
    poses, times = poses[order], times[order]
    after = np.searchsorted(times, episode.times).clip(1, max(1, len(times) - 1))
    pair = np.stack([after - 1, np.minimum(after, len(times) - 1)], axis=1)
    span = np.diff(times[pair], axis=1)[:, 0]
    # before the first pose and after the last one there is nothing to interpolate with: the end is held
    share = np.where(span > 0, (episode.times - times[pair[:, 0]]) / np.where(span > 0, span, 1), 0).clip(0, 1)
    near = np.abs(times[pair] - episode.times[:, None]).min(1) <= max_gap_s
    out[near] = geometry.interpolate(poses[pair[near]], share[near])
    return out


def controls_at_frames(episode: Episode, max_gap_s: float) -> np.ndarray | None:
    """(N, C): the recorded control nearest in time to each frame, NaN where none is near enough."""
    if episode.controls is None or episode.control_times is None:
        return episode.controls
    known = np.isfinite(episode.controls).all(1)
    controls, times = episode.controls[known], episode.control_times[known]
    out = np.full((episode.num_frames, episode.controls.shape[1]), np.nan)
    if len(times) == 0:
        return out
    order = np.argsort(times, kind="stable")
    controls, times = controls[order], times[order]
    after = np.searchsorted(times, episode.times).clip(0, len(times) - 1)
    before = np.maximum(after - 1, 0)
    nearest = np.where(np.abs(times[before] - episode.times) <= np.abs(times[after] - episode.times), before, after)
    near = np.abs(times[nearest] - episode.times) <= max_gap_s
    out[near] = controls[nearest[near]]
    return out
