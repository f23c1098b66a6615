"""Windows of a flat array of ids, as a stream; and several streams as one.

Each record of a split is tiled by windows of `context` predictions: a row holds context + 1 ids, the next row of the
same record begins with the last id of this one, and no row crosses a record. So each id but the first of a record is
predicted exactly once per epoch. The last window of a record is filled up with `pad`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rung.data.store import Store
from rung.errors import DataError
from rung.random import Draw
from rung.recipe import Arrays, Stream


def chosen_of(store: Store, split: str, records: np.ndarray) -> str:
    """What tells some records of a split from all of them, in a fingerprint."""
    if np.array_equal(records, store.split(split)):
        return ""
    return f"/{hashlib.blake2b(records.astype('<i8').tobytes(), digest_size=8).hexdigest()}"


class Joined(Stream):
    """Several streams as one: the rows of the first, then those of the second, and so on; shuffled all together."""

    def __init__(self, parts: Sequence[Stream]) -> None:
        self.parts = list(parts)
        rows = np.array([part.num_rows for part in parts])
        self._first_row = np.concatenate(([0], np.cumsum(rows)))
        self.num_rows = int(rows.sum())
        self.targets_per_row = float((rows * [part.targets_per_row for part in parts]).sum() / self.num_rows)
        self.fingerprint = " + ".join(part.fingerprint for part in parts)
        self.stores = [store for part in parts for store in part.stores]
        self.about = {"parts": [dict(part.about) for part in parts]}

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        gathered: Arrays = {}
        part_of = self._first_row.searchsorted(ids, side="right") - 1
        for number in np.unique(part_of).tolist():
            rows = np.flatnonzero(part_of == number)
            own_ids = ids[rows] - self._first_row[number]
            for name, values in self.parts[number].gather(own_ids, replace(draw, rows=draw.rows[rows])).items():
                whole = gathered.setdefault(name, np.empty((len(ids), *values.shape[1:]), values.dtype))
                whole[rows] = values
        return gathered


class Windows(Stream):
    """Rows {"tokens": (rows, context + 1)} in the type of the store; cast them on the device."""

    def __init__(
        self,
        store: Store,
        split: str,
        context: int,
        pad: int = 0,
        array: str = "tokens",
        group: str | None = None,
        records: np.ndarray | None = None,
        end: int | None = None,
    ) -> None:
        """`group` names a field of the records that rows are told apart by, such as the composer; `records` are those
        of the split to use, where not all of them. `end` is an id that follows each record and is predicted too."""
        records = store.split(split) if records is None else records
        self.stores = [store]
        self._store, self._records = store, records
        self._named = [str(store.index[number].get(group) or "") for number in records] if group else []
        self.groups = sorted({name for name in self._named if name})
        predictions = np.maximum(store.lengths[records] - 1, 0) + (end is not None)
        windows = -(-predictions // context)
        self.num_rows = int(windows.sum())
        if self.num_rows == 0:
            problem = f"split {split!r} of {store.path} has no record with two ids or more"
            raise DataError(f"{problem}; nothing to predict", code="data-empty")
        self.targets_per_row = float(predictions.sum()) / self.num_rows
        self.fingerprint = f"{store.fingerprint}/{split}/windows-{context}{chosen_of(store, split, records)}"
        if end is not None:
            self.fingerprint += f"/end-{end}"
        self.context, self.pad, self.end = context, pad, end
        self._first_row = np.concatenate(([0], np.cumsum(windows)))
        self._shift = store.starts[records] - self._first_row[:-1] * context  # row * context + shift is where it starts
        self._ends = store.starts[records] + store.lengths[records]
        ids = store.arrays[array]
        if len(ids) < context + 1:  # too small a file to slide over
            ids = np.concatenate((ids, np.full(context + 1 - len(ids), pad, ids.dtype)))
        self._ids = ids
        self._view = np.lib.stride_tricks.sliding_window_view(ids, context + 1)

    def group_of(self, ids: np.ndarray) -> np.ndarray:
        if not self.groups:
            return super().group_of(ids)
        number_of = {name: number for number, name in enumerate(self.groups)}
        by_record = np.array([number_of.get(name, -1) for name in self._named])
        return by_record[self._record_of(ids)]

    def _record_of(self, ids: np.ndarray) -> np.ndarray:
        return self._first_row.searchsorted(ids, side="right") - 1

    def cluster_of(self, ids: np.ndarray) -> np.ndarray:
        return self._record_of(ids)

    def places(self, ids: np.ndarray) -> list[dict[str, Any]]:
        rows = []
        for number, record in zip(ids.tolist(), self._record_of(ids).tolist()):
            known = self._store.index[int(self._records[record])]
            offset = (number - int(self._first_row[record])) * self.context
            rows.append({"row": number, "source": known.get("source"), "start": known["start"], "offset": offset})
        return rows

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {"tokens": self._rows_at(ids * self.context + self._shift[self._record_of(ids)], self._record_of(ids))}

    def _rows_at(self, start: np.ndarray, record: np.ndarray) -> np.ndarray:
        """Rows that begin at these places of these records."""
        length = self._ends[record] - start  # of what is left of the record, often more than a row
        is_short = length <= self.context
        if not is_short.any():
            return self._view[start]
        rows = self._view[np.minimum(start, len(self._view) - 1)]
        for i in np.flatnonzero(is_short).tolist():
            if start[i] >= len(self._view):  # one of the few that reach past the end of the file
                rows[i, : length[i]] = self._ids[start[i] : start[i] + length[i]]
            rows[i, length[i] :] = self.pad
            if self.end is not None:
                rows[i, length[i]] = self.end
        return rows
