"""Rows of a world: what is remembered before a moment, and the frames and controls that follow.

A row is a moment of a record with a full memory before it, and the `length` frames from there on, each with the control
that led to it; frames past the end of the record are not valid. So a row never crosses an episode or a split. Frames
lie on disk at every size a memory may want: gathering is a few plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rung.data.buffers import empty
from rung.data.store import Store
from rung.errors import DataError
from rung.random import Draw
from rung.recipe import Arrays, Stream
from rung.recipes.world.config import Scale
from rung.recipes.world.memory import factors, shrink, span

MOST_TRIVIAL = 2000


class Moments(Stream):
    """Rows {memory_0.. (n, h, w, 3) finest first, frames (length, H, W, 3), controls (length, C), valid (length,)} and
    other_controls (C,), those of another moment, to measure what difference the right ones make.

    `length` is a function of the draw's step, so that a curriculum is as replayable as everything else.
    """

    def __init__(
        self,
        store: Store,
        split: str,
        scales: Sequence[Scale],
        length: Callable[[int], int] = lambda step: 1,
        every: int = 1,
    ) -> None:
        """Moments `every` frames apart."""
        self.stores = [store]
        divisor = divisor_of(store, scales)
        records = store.split(split)
        starts, lengths = store.starts[records], store.lengths[records]
        past = span(scales)
        spans = [np.arange(a + past, a + n, every) for a, n in zip(starts, lengths)]
        self._moments = np.concatenate(spans).astype(np.int64)
        self._ends = np.repeat(starts + lengths, [len(moments) for moments in spans])
        self.num_rows = len(self._moments)
        if not self.num_rows:
            raise DataError(
                f"split {split!r} of {store.path} has no stretch of {past + 1} frames, and model.memory takes {past} "
                "before each prediction; give longer episodes, or a shorter memory",
                code="too-few",
            )
        self.length = length
        remembered = ",".join(f"{s.frames}@{s.width}x{s.height}" for s in scales)
        self.fingerprint = f"{store.fingerprint}/{split}/{remembered}/{every}/{length(-1)}"
        self._levels = [
            (store.arrays[array_of(divisor * factor)], scale.frames) for scale, factor in zip(scales, factors(scales))
        ]
        self._frames = store.arrays[array_of(divisor)]
        self._controls = store.arrays["controls"]

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        first, length = self._moments[ids], self.length(draw.step)
        arrays = {f"memory_{i}": stretches(level, first - n, n) for i, (level, n) in enumerate(self._levels)}
        end, steps = self._ends[ids], first[:, None] + np.arange(length)
        last = end[:, None] - 1
        arrays["frames"] = frames = empty((len(first), length, *self._frames.shape[1:]))
        for row, start, stop in zip(frames, first.tolist(), np.minimum(first + length, end).tolist()):
            row[: stop - start] = self._frames[start:stop]
            row[stop - start :] = self._frames[stop - 1]  # past the end of its record the last frame stands still
        arrays["controls"] = self._controls[np.minimum(steps, last)]
        arrays["valid"] = (steps <= last).astype(np.float32)
        # Not of a neighbour in the batch: then it would depend on how the batch was cut.
        other = (ids + 1 + draw.integers("other", max(1, self.num_rows - 1))) % self.num_rows
        arrays["other_controls"] = self._controls[self._moments[other]]
        return arrays

    def whole(self) -> np.ndarray:
        """The rows of an eval that do not end before their length."""
        return np.flatnonzero(self._moments + self.length(-1) <= self._ends)

    def trivial(self, mean_frame: np.ndarray) -> dict[str, float]:
        """The L1 of copying the last frame and of showing this one, over all moments or MOST_TRIVIAL of them."""
        chosen = self._moments[np.linspace(0, self.num_rows - 1, min(self.num_rows, MOST_TRIVIAL)).astype(int)]
        size = len(mean_frame) // self._frames.shape[1]
        shown = shrink(torch.from_numpy(np.array(mean_frame)), size).numpy().astype(np.int16)
        copied = meant = 0.0
        for t in chosen.tolist():
            frame = self._frames[t].astype(np.int16)
            copied += float(np.abs(frame - self._frames[t - 1]).mean())
            meant += float(np.abs(frame - shown).mean())
        return {"persistence": copied / len(chosen) / 127.5, "mean_frame": meant / len(chosen) / 127.5}


class Dreams(Stream):
    """One row: `num_moments` moments spread over a split, for what can only be measured on all of them together.

    Rows {memory_0.. (moments, n, h, w, 3), frames (moments, horizons, H, W, 3), controls (moments, length, C), valid
    and other_controls}: of the real frames only those after so many steps that something is measured at.
    """

    def __init__(
        self, store: Store, split: str, scales: Sequence[Scale], horizons: Sequence[int], num_moments: int
    ) -> None:
        length = max(horizons)
        self._moments = Moments(store, split, scales, lambda step: length)
        self.stores = [store]
        self.horizons = list(horizons)
        # Those with real frames up to the end; fewer where there are not that many.
        self._chosen = self._moments.whole()
        if num_moments:
            every = np.linspace(0, len(self._chosen) - 1, min(num_moments, len(self._chosen))).astype(int)
            self._chosen = self._chosen[every]
        self.num_rows = min(1, len(self._chosen))
        self.fingerprint = f"{self._moments.fingerprint}/{len(self._chosen)} together"

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        chosen = Draw(draw.seed, draw.step, np.arange(len(self._chosen)))
        arrays = self._moments.gather(self._chosen, chosen)
        at = [horizon - 1 for horizon in self.horizons]
        arrays["frames"], arrays["valid"] = arrays["frames"][:, at], arrays["valid"][:, at]
        return {name: np.repeat(array[None], len(ids), axis=0) for name, array in arrays.items()}


def stretches(frames: np.ndarray, starts: np.ndarray, num_frames: int) -> np.ndarray:
    """(rows, num_frames, H, W, 3): from each start so many frames. One plain copy a row: an index of numpy's, or its
    take, either copies more than that or the whole set."""
    taken = empty((len(starts), num_frames, *frames.shape[1:]), frames.dtype)
    for row, start in zip(taken, starts.tolist()):
        row[...] = frames[start : start + num_frames]
    return taken


def array_of(divisor: int) -> str:
    """The name of the store's frames at a part of their size."""
    return "frames" if divisor == 1 else f"frames_{divisor}"


def divisor_of(store: Store, scales: Sequence[Scale]) -> int:
    """By how much stored frames are larger than those of the model."""
    height, width, found = store.info["height"], store.info["width"], store.info["divisors"]
    finest = scales[0]
    divisor = width // finest.width
    if (finest.width * divisor, finest.height * divisor) != (width, height) or divisor not in found:
        sizes = ", ".join(f"{width // d}x{height // d}" for d in found)
        raise DataError(
            f"model.memory needs frames of {finest.width}x{finest.height}, {store.path} has {sizes}; choose one "
            f"of these, or prepare with dataset.width={finest.width} dataset.height={finest.height}",
            code="size-mismatch",
        )
    missing = [divisor * factor for factor in factors(scales) if divisor * factor not in found]
    if missing:
        sizes = ", ".join(f"{width / d:g}x{height / d:g}" for d in missing)
        raise DataError(
            f"model.memory needs frames of {sizes}, but {width}x{height} cannot be halved to that",
            code="size-mismatch",
        )
    return divisor
