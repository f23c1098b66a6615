"""The frames of a store: written in chunks at every size as they come, then measured from disk.

Sums are whole numbers, so the mean frame and the baselines do not depend on the order or the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from rung.data.store import StoreWriter
from rung.recipe import Report
from rung.recipes.world.memory import shrink
from rung.recipes.world.sources.images import fit
from rung.recipes.world.stream import array_of

CHUNK = 256  # frames in memory at a time
SMALLEST_SIDE = 3


class Record(NamedTuple):
    """A stretch of one episode in one split."""

    split: str
    episode: int
    start: int  # row in the store
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.length)


class Reel:
    """Takes pictures one by one and appends them as frames; shows progress where a total is known."""

    def __init__(self, writer: StoreWriter, width: int, height: int, report: Report, total: int) -> None:
        self.num_rows = 0
        self._writer, self._width, self._height = writer, width, height
        self._report, self._total = report, total
        self._waiting: list[np.ndarray] = []
        for divisor in divisors(width, height):
            writer.array(array_of(divisor), np.uint8, (height // divisor, width // divisor, 3))

    def add(self, image: np.ndarray, where: str) -> None:
        self._waiting.append(fit(image, self._width, self._height, where))
        self.num_rows += 1
        if len(self._waiting) == CHUNK:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            frames = torch.from_numpy(np.stack(self._waiting))
            for divisor in divisors(self._width, self._height):
                self._writer.append(array_of(divisor), shrink(frames, divisor).numpy())
        self._waiting = []
        if self._total:
            self._report("reading frames", self.num_rows, self._total)


def divisors(width: int, height: int) -> list[int]:
    """1, 2, 4, ... while both sides stay whole and not too small."""
    found = [1]
    while not (width % (d := 2 * found[-1]) or height % d) and min(width, height) // d >= SMALLEST_SIDE:
        found.append(d)
    return found


def measure(writer: StoreWriter, records: list[Record], report: Report) -> dict[str, dict[str, float]]:
    """Appends the mean training frame; returns the L1 in [-1, 1] of copying the last frame, and of that mean."""
    frames = writer.written("frames")
    mean = _mean_frame(frames, [record for record in records if record.split == "train"])
    writer.array("mean_frame", np.uint8, mean.shape)
    writer.append("mean_frame", mean[None])
    copied, meant, counts = Counter[str](), Counter[str](), Counter[str]()
    done, total = 0, sum(record.length - 1 for record in records)
    for record in records:
        for chunk in _chunks(frames, record):
            wide = chunk.astype(np.int16)
            copied[record.split] += int(np.abs(wide[1:] - wide[:-1]).sum(dtype=np.int64))
            meant[record.split] += int(np.abs(wide[1:] - mean.astype(np.int16)).sum(dtype=np.int64))
            counts[record.split] += wide[1:].size
            done += len(chunk) - 1
            report("measuring", done, total)
    return {
        name: {"persistence": copied[name] / num / 127.5, "mean_frame": meant[name] / num / 127.5}
        for name, num in counts.items()
    }


def _mean_frame(frames: np.ndarray, records: list[Record]) -> np.ndarray:
    total = np.zeros(frames.shape[1:], np.int64)
    for record in records:
        total += frames[record.start]
        for chunk in _chunks(frames, record):
            total += chunk[1:].sum(0, dtype=np.int64)
    num_frames = sum(record.length for record in records)
    return ((2 * total + num_frames) // (2 * num_frames)).astype(np.uint8)


def _chunks(frames: np.ndarray, record: Record) -> Iterator[np.ndarray]:
    """Each begins with the last frame of the one before it."""
    end = record.start + record.length
    for start in range(record.start, end - 1, CHUNK):
        yield frames[start : min(start + CHUNK + 1, end)]
