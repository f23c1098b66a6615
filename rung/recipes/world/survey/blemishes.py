"""Frames that teach the wrong thing: broken, repeated and stray ones, and cuts inside an episode.

A broken frame has nearly one colour at a coarse size, so that the noise of a covered lens does not hide it. A repeated
frame is the one before, although the controls say that the camera moved. A cut is a single change as large as that
between frames that have nothing to do with each other, far above the changes around it; after a stray frame the film
goes on where it was. A fall or a quick turn in a narrow place changes as much, but over several frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rung.data.store import Store
from rung.recipe import Report

FLAT = 2.0  # grey levels of 255: the spread of a coarse frame below which it shows nothing
BLACK = 12.0  # grey levels: the mean of a flat frame that is called black
SAME = 0.25  # grey levels: the mean change below which a frame is the one before, encoded again
UNRELATED = 0.7  # of the change between frames far apart
ABRUPT = 4.0  # times the usual change around it
ALONE = 2.0  # times the change just before and just after
AROUND = 5  # frames on each side
BACK = 0.25  # of the change: so near are the frames around a stray one
CHUNK = 256


def blemishes(store: Store, coarse: np.ndarray, has_moved: np.ndarray, report: Report) -> dict[str, Any]:
    """Row numbers by kind; `coarse` are the frames at a few pixels, `has_moved` what the controls say of each row."""
    flat, mean = _spread(coarse)
    change = _changes(store, report)
    coarse_change = _coarse_changes(store, coarse)
    is_used, is_first = np.zeros(len(change), bool), np.zeros(len(change), bool)
    for start, length in zip(store.starts, store.lengths):  # rows between splits belong to no record
        is_used[start : start + length] = True
    is_first[store.starts] = True
    is_same = is_used & ~is_first & (change < SAME)
    is_broken = is_used & (flat < FLAT)
    is_repeated = is_same & has_moved & ~is_broken
    cuts, strays = _abrupt(store, coarse, coarse_change)
    cuts = [row for row in cuts if not is_broken[max(0, row - 1) : row + 1].any()]
    length, where = _longest_run(is_repeated)
    return {
        "frames": int(is_used.sum()),
        "broken": np.flatnonzero(is_broken).tolist(),
        "black": np.flatnonzero(is_broken & (mean < BLACK)).tolist(),
        "unchanged": int(is_same.sum()),
        "repeated": np.flatnonzero(is_repeated).tolist(),
        "moved": int((has_moved & is_used & ~is_first).sum()),
        "longest_repeat": {"length": length, "row": where},
        "cuts": cuts,
        "strays": [row for row in strays if not is_broken[row]],
    }


def _spread(coarse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest spread of a colour over a frame, and its mean."""
    flat, mean = np.zeros(len(coarse)), np.zeros(len(coarse))
    for at in range(0, len(coarse), CHUNK):
        frames = np.asarray(coarse[at : at + CHUNK], np.float32)
        flat[at : at + CHUNK], mean[at : at + CHUNK] = frames.std((1, 2)).max(-1), frames.mean((1, 2, 3))
    return flat, mean


def _changes(store: Store, report: Report) -> np.ndarray:
    """(N,) mean change from the frame before, at full size; 0 where there is none."""
    frames, change = store.arrays["frames"], np.zeros(len(store.arrays["frames"]), np.float32)
    for at in range(1, len(frames), CHUNK):
        block = np.asarray(frames[at - 1 : at + CHUNK])
        # the larger less the smaller: a difference of bytes would wrap around
        away = np.maximum(block[1:], block[:-1]) - np.minimum(block[1:], block[:-1])
        change[at : at + CHUNK] = away.mean((1, 2, 3), dtype=np.float32)
        report("looking at frames", min(at + CHUNK, len(frames)), len(frames))
    return change


def _coarse_changes(store: Store, coarse: np.ndarray) -> np.ndarray:
    """The same at the coarse size, where a small movement changes little; NaN at the start of a record."""
    change = np.full(len(coarse), np.nan)
    for at in range(1, len(coarse), CHUNK):
        block = np.asarray(coarse[at - 1 : at + CHUNK], np.float32)
        change[at : at + CHUNK] = np.abs(np.diff(block, axis=0)).mean((1, 2, 3))
    change[store.starts] = np.nan
    return change


def _abrupt(store: Store, coarse: np.ndarray, change: np.ndarray) -> tuple[list[int], list[int]]:
    """Rows of cuts and rows of stray frames."""
    num = len(coarse)
    some = np.linspace(0, num - 1, min(num, 500)).astype(int)
    far = np.asarray(coarse[(some + num // 2) % num], np.float32)
    unrelated = float(np.median(np.abs(np.asarray(coarse[some], np.float32) - far).mean((1, 2, 3))))
    cuts, strays = [], []
    for start, length in zip(store.starts, store.lengths):
        for row in start + np.flatnonzero(change[start : start + length] > UNRELATED * unrelated):
            low, high = max(start + 1, row - AROUND), min(start + length, row + AROUND + 1)
            others = np.delete(change[low:high], row - low)
            beside = change[[k for k in (row - 1, row + 1) if low <= k < high]]
            if not len(others) or change[row] <= ABRUPT * np.median(others):
                continue
            if change[row] > ALONE * beside.max():
                cuts.append(int(row))
            elif row + 1 < high and change[row + 1] > UNRELATED * unrelated:
                across = np.abs(coarse[row + 1].astype(np.float32) - coarse[row - 1]).mean()
                if across < BACK * change[row]:
                    strays.append(int(row))
    return cuts, strays


def _longest_run(is_so: np.ndarray) -> tuple[int, int]:
    """Length and first row of the longest run; (0, 0) where there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_so.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(lengths[longest]), int(edges[::2][longest])
