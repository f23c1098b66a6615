"""Which rows a step took: whether they follow each other, whether they are new in this epoch, and their name.

Host work on the ids alone. A stream may give any order it likes; this only writes down what it gave.
"""

from __future__ import annotations

import hashlib

import numpy as np

MOST_ROWS = 50_000_000  # of which one byte each is kept


class Coverage:
    def __init__(self, epoch_rows: int) -> None:
        self._epoch_rows, self._epoch = epoch_rows, -1
        self._seen: np.ndarray | None = None

    def note(self, ids: np.ndarray, position: int) -> dict[str, float]:
        """`position` is that of the first row. An epoch that was entered in the middle counts from there."""
        row = {"batch_hash": float(name_of(ids))}
        if len(ids) > 1:
            row["follows"] = float(np.mean(np.diff(ids) == 1))
        if self._epoch_rows <= MOST_ROWS and len(ids) and ids.min() >= 0 and ids.max() < self._epoch_rows:
            row["fresh"] = self._fresh(ids, position) / len(ids)
        return row

    def _fresh(self, ids: np.ndarray, position: int) -> int:
        """How many of the rows were not seen before in their epoch, this step included."""
        fresh, end = 0, position + len(ids)
        while position < end:
            epoch = position // self._epoch_rows
            if epoch != self._epoch or self._seen is None:
                self._epoch, self._seen = epoch, np.zeros(self._epoch_rows, bool)
            stop = min(end, (epoch + 1) * self._epoch_rows)
            distinct = np.unique(ids[len(ids) - (end - position) : len(ids) - (end - stop)])
            fresh += int((~self._seen[distinct]).sum())
            self._seen[distinct] = True
            position = stop
        return fresh


def name_of(ids: np.ndarray) -> int:
    """A number below 2**53, which a float holds exactly; the same for the same rows in the same order."""
    digest = hashlib.blake2b(np.ascontiguousarray(ids, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11
