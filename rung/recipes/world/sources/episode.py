"""One recording as a source has it, before it is cut, scaled and split. What becomes of it is up to data.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

Frame = np.ndarray | None  # (H, W, 3) uint8 RGB, of any size; None where a picture does not decode


@dataclass
class Episode:
    """One recording without a known break, as a source has it: any size, any rate, with its pauses.

    `times` must be known before the frames are read; `poses` and `controls` may be filled while they are (nobody looks
    at them before the last frame is out). `frames` is gone through once, in order; a Sequence is read by index instead.
    """

    label: str  # short, for people: a map, a file's name
    times: np.ndarray  # (N,) float64 seconds, one per frame
    frames: Iterable[Frame]  # N of them
    poses: np.ndarray | None = None  # (M, 4, 4) float64 camera to world, x right, y down, z ahead; NaN where unknown
    pose_times: np.ndarray | None = (
        None  # (M,) seconds on the clock of `times`; None: the poses are those of the frames
    )
    up: tuple[float, float, float] = (0.0, -1.0, 0.0)  # in the world of the poses
    controls: np.ndarray | None = None  # (M, C) as recorded, NaN where unknown
    control_times: np.ndarray | None = None  # as pose_times
    control_names: list[str] = field(default_factory=list)
    breaks: np.ndarray | None = None  # numbers of frames that do not follow the one before: some between are gone
    notes: list[str] = field(default_factory=list)  # what was assumed, in sentences for the summary
    dropped: dict[str, int] = field(default_factory=dict)  # what the source itself left out, by reason

    @property
    def num_frames(self) -> int:
        return len(self.times)
