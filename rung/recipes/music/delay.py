"""Delay patterns: channel c of a frame is predicted D[c] steps after the frame's own place.

A row has one step before the first (all BOS) and then S steps; step s of channel c holds the code of frame s - D[c]. In
the full form S is long enough for every code of every channel, and for the end where it is marked; the valid form
stops after as many steps as frames. What lies before a channel's first code is BOS; after its last come EOS, where the
piece ends there, and PAD. That is also what a generator emits.

Shapes: B rows, T frames, C channels, S steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rung.errors import ConfigError

NAMES = ("musicgen", "dia", "parallel")


class Specials(NamedTuple):
    """Ids above the codes, in Dia's order; Dia's vocabulary has a fourth one that nothing uses."""

    eos: int
    pad: int
    bos: int
    vocab_size: int

    @classmethod
    def of(cls, codebook_size: int) -> Specials:
        return cls(codebook_size, codebook_size + 1, codebook_size + 2, codebook_size + 4)


def parse_delays(pattern: Any, num_codebooks: int, num_sides: int = 1) -> tuple[int, ...]:
    """One delay per channel. `num_codebooks` 0 checks the pattern alone."""
    if isinstance(pattern, str):
        if pattern not in NAMES:
            raise ConfigError(
                f"delay.pattern={pattern!r} is not a pattern; give {', '.join(NAMES)} or a list of numbers",
                code="bad-value",
            )
        if pattern == "parallel":
            return (0,) * num_codebooks * num_sides
        later = itertools.count(1 if pattern == "musicgen" else 8)
        return (0, *itertools.islice(later, max(num_codebooks - 1, 0))) * num_sides
    is_list = isinstance(pattern, Sequence) and len(pattern) > 0
    if not is_list or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in pattern):
        problem = f"delay.pattern={pattern!r} must be a name or a list of whole numbers from 0"
        raise ConfigError(problem, code="bad-value")
    if min(pattern) != 0:
        raise ConfigError(
            f"delay.pattern={list(pattern)} begins {min(pattern)} steps late for nothing; subtract it from all",
            code="bad-value",
        )
    if num_codebooks and len(pattern) == num_codebooks:
        return tuple(pattern) * num_sides
    if num_codebooks and len(pattern) != num_codebooks * num_sides:
        sides = f" or {num_codebooks * num_sides}, for both sides" if num_sides > 1 else ""
        raise ConfigError(
            f"delay.pattern has {len(pattern)} numbers; give {num_codebooks}, one per codebook{sides}", code="bad-value"
        )
    return tuple(pattern)


class DelayPattern:
    """Lays out frames of codes, and takes them out again."""

    def __init__(
        self, delays: Sequence[int], num_frames: int, specials: Specials, *, is_full: bool = True, has_end: bool = True
    ) -> None:
        self.delays_C = np.asarray(delays, dtype=np.int64)
        self.num_frames, self.specials, self.has_end = num_frames, specials, has_end
        self.num_steps = num_frames + (int(self.delays_C.max()) + int(has_end) if is_full else 0)
        # The frame of each step and channel; the step before the first has none in any channel.
        self._frame_SC = np.arange(-1, self.num_steps)[:, None] - self.delays_C
        self._frame_SC[0] = -1

    def lay_out(self, codes_BTC: np.ndarray, lengths_B: np.ndarray, ends_B: np.ndarray) -> np.ndarray:
        """(B, S + 1, C): rows of `lengths_B` frames, of which some are the end of a piece."""
        frame_BSC = np.broadcast_to(self._frame_SC, (len(codes_BTC), *self._frame_SC.shape))
        inside_BSC = frame_BSC.clip(0, codes_BTC.shape[1] - 1)
        rows_BSC = np.take_along_axis(codes_BTC, inside_BSC, axis=1)
        length_B11 = np.asarray(lengths_B)[:, None, None]
        is_end_BSC = (frame_BSC == length_B11) & np.asarray(ends_B)[:, None, None]
        after = np.where(is_end_BSC & self.has_end, self.specials.eos, self.specials.pad)
        rows_BSC = np.where(frame_BSC >= length_B11, after, rows_BSC)
        return np.where(frame_BSC < 0, self.specials.bos, rows_BSC).astype(np.uint16)


def undo_delay(steps_SC: np.ndarray, delays: Sequence[int], num_frames: int) -> np.ndarray:
    """Frames out of steps, without the one before the first: code[t, c] = steps[t + D[c], c], (T, C).

    In the valid form the last frames are not all there: ask for as many as the steps and the largest delay allow.
    """
    assert len(steps_SC) >= num_frames + max(delays), "these steps do not hold so many frames"
    return np.stack([steps_SC[late : late + num_frames, c] for c, late in enumerate(delays)], axis=1)
