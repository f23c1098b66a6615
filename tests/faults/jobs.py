"""What a life can do besides a verb."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rung.data.store import Store, StoreWriter


def pack(out: str, rows: int) -> None:
    """Prepares data of so many rows, in place of what is there."""
    with StoreWriter(Path(out), kind="toy", replace=True) as writer:
        writer.array("ids", np.int32)
        writer.file("note.txt", b"toy")
        for first in range(0, rows, 5):
            writer.record("train", writer.append("ids", np.arange(first, first + 5, dtype=np.int32)), 5)


def unpacked(out: Path) -> list[int]:
    store = Store.open(out)
    return [int(value) for value in store.arrays["ids"]]
