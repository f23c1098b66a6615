"""How frames are cut into windows, each of which becomes a few vectors."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

Number = TypeVar("Number", np.ndarray, Tensor)


class Windows(NamedTuple):
    """In frames. What is left after the last whole window is a window of its own (pad), or unused (drop)."""

    size: int
    stride: int
    remainder: Literal["pad", "drop"] = "pad"

    @classmethod
    def of(cls, window_s: float, stride_s: float, frames_per_s: float, remainder: Literal["pad", "drop"]) -> Windows:
        return cls(max(1, round(window_s * frames_per_s)), max(1, round(stride_s * frames_per_s)), remainder)

    def count(self, num_frames: int) -> int:
        return int(self.count_of(np.array([num_frames]))[0])

    def count_of(self, num_frames: Number) -> Number:
        """Of each of these lengths; at least one, which a sound shorter than a window has for itself."""
        beyond = num_frames - self.size
        whole = beyond // self.stride + 1 if self.remainder == "drop" else -(-beyond // self.stride) + 1
        return whole.clip(1)
