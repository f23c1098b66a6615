"""Whether rows of one set of data are in another, for sets that are arrays in memory: `run.data` is told both.

Each row becomes one number. An array of one axis is text or sound: there each 32 values that follow each other are a
row, in the set that is trained on at every 32nd place, in the other sets at every place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

SPAN = 32  # values of an array of one axis
FEWEST = 20  # rows, below which nothing is said
MOST_BYTES, MOST_PLACES = 1 << 30, 2_000_000
CHUNK_BYTES = 64 << 20


class Rows(NamedTuple):
    """A number for each row; `every` for each place of an array of one axis. `kind` is what a row is made of."""

    keys: np.ndarray
    every: np.ndarray | None
    kind: tuple[str, int]


class Overlap(NamedTuple):
    """Of the rows of an eval set: how many, and which share is in train; the share of train's own that repeat."""

    rows: int
    share: float
    repeats: float


def rows_of(what: Any) -> Rows | None:
    """None for what has no rows, is too large, or only counts rows, as `range` does."""
    if hasattr(what, "detach"):
        # Looked at before it is copied to the host; numpy has no bfloat16.
        if what.numel() * what.element_size() > MOST_BYTES or str(what.dtype) == "torch.bfloat16":
            return None
        what = what.detach().cpu().numpy()
    array = what
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or array.nbytes > MOST_BYTES:
        return None
    if array.ndim != 1:
        if not array.ndim or not array[:1].size:
            return None
        rows = array.reshape(len(array), -1)
        return Rows(_keys(rows), None, (rows.dtype.str, rows.shape[1]))
    head = array[: FEWEST * SPAN]
    if len(head) < FEWEST * SPAN or np.array_equal(head, np.arange(len(head))):
        return None
    spans = array[: len(array) // SPAN * SPAN].reshape(-1, SPAN)
    every = _keys(np.lib.stride_tricks.sliding_window_view(array[:MOST_PLACES], SPAN))
    return Rows(_keys(spans), every, (spans.dtype.str, SPAN))


def overlap(train: Rows, other: Rows) -> Overlap | None:
    """None where they cannot be compared: another kind of rows, or too few."""
    is_alike = train.kind == other.kind and (train.every is None) == (other.every is None)
    if not is_alike or min(len(train.keys), len(other.keys)) < FEWEST:
        return None
    _, counts = np.unique(train.keys, return_counts=True)
    repeats = float(counts[counts > 1].sum() / len(train.keys))
    if other.every is None:
        return Overlap(len(other.keys), float(np.isin(other.keys, train.keys).mean()), repeats)
    # Spans of train that are anywhere in the other set: if all of it is in train, one at each 32nd place.
    found = np.isin(np.unique(train.keys), other.every).sum() * SPAN / len(other.every)  # a silence counts once
    return Overlap(len(other.every), float(min(1.0, found)), repeats)


def _keys(rows: np.ndarray) -> np.ndarray:
    """Sums of the words of a row, each times an odd number of its place: rows that differ hardly ever share one."""
    num_bytes = rows.shape[1] * rows.itemsize
    factors = np.random.default_rng(0).integers(0, 2**63, -(-num_bytes // 8), dtype=np.uint64) * 2 + 1
    keys = np.empty(len(rows), np.uint64)
    step = max(1, CHUNK_BYTES // max(1, num_bytes))
    for first in range(0, len(rows), step):
        chunk = np.ascontiguousarray(rows[first : first + step])
        words = np.zeros((len(chunk), len(factors) * 8), np.uint8)
        words[:, :num_bytes] = chunk.view(np.uint8).reshape(len(chunk), num_bytes)
        keys[first : first + step] = (words.view(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    return keys
