"""What the model remembers: some past frames at each of several sizes, newest last.

Training, rollout and play all use it, so that they cannot differ: only `shrink` shrinks frames, and only `push` adds
one. A memory is uint8 at every size. Means of blocks are rounded with integers, so they are the same to the bit on
every device, and a generated frame is remembered with the 8 bits of a recorded one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rung.recipes.world.config import Scale

# B rows, N remembered frames, H x W pixels; a frame is H W 3 when remembered and 3 H W when computed with
Memory = list[Tensor]  # one B N h w 3 uint8 per scale, finest first


def shrink(frames: Tensor, factor: int) -> Tensor:
    """(..., H, W, 3) uint8 to (..., H / factor, W / factor, 3), by halves: means of four, halves rounded up.

    By halves, so that shrinking what was shrunk before is the same as shrinking at once: a model that makes frames of
    half the stored size remembers its own as the store remembers the real ones.
    """
    while factor > 1:
        *rest, height, width, channels = frames.shape
        fours = frames.reshape(*rest, height // 2, 2, width // 2, 2, channels)
        frames = ((fours.sum(dim=(-4, -2), dtype=torch.int32) + 2) >> 2).to(torch.uint8)
        factor //= 2
    return frames


def factors(scales: Sequence[Scale]) -> list[int]:
    """By how much a full frame is shrunk for each scale."""
    return [scales[0].width // scale.width for scale in scales]


def recall(frames: Tensor, scales: Sequence[Scale]) -> Memory:
    """The memory after these frames (B, T, H, W, 3), oldest first; T is at least `span(scales)`."""
    return [shrink(frames[:, frames.shape[1] - s.frames :], f) for s, f in zip(scales, factors(scales))]


def push(memory: Memory, frame: Tensor) -> Memory:
    """The memory one frame later: `frame` (B, H, W, 3) uint8 comes in, the oldest of each scale goes."""
    width = frame.shape[-2]
    return [torch.cat([level[:, 1:], shrink(frame, width // level.shape[-2])[:, None]], dim=1) for level in memory]


def span(scales: Sequence[Scale]) -> int:
    """How many past frames are remembered at all."""
    return max(scale.frames for scale in scales)


def to_signal(frames: Tensor) -> Tensor:
    """(..., H, W, 3) uint8 to (..., 3, H, W) in [-1, 1]."""
    return frames.movedim(-1, -3).float().sub_(127.5).div_(127.5)


def to_frame(signal: Tensor) -> Tensor:
    """The inverse, with 8 bits and no gradient: what is shown, and what is remembered."""
    levels = (signal.detach().float() * 127.5 + 127.5).round_().clamp_(0, 255)
    return levels.to(torch.uint8).movedim(-3, -1).contiguous()
