"""Windows of a token file per second: rung's prefetcher and gathering in the caller's thread / torch's DataLoader.

What each hands to a training step is compared: rung's rows in uint16, cast on the device, and pairs of int64, as a
DataLoader's items are usually written.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rung.data.store import Store, StoreWriter
from rung.data.stream import Windows
from rung.engine.prefetch import BatchLayout, Prefetcher, to_device
from rung.random import Draw

CONTEXT, ROWS, SEED = 1024, 32, 1337
RECORD_IDS = 100_000  # a long document; rung never lets a window cross two
VOCAB_SIZE = 50_257
CATEGORIES = [f"component {number:02d}" for number in range(11)]
CPU = torch.device("cpu")

Batches = Generator[Sequence[Tensor], None, None]


class MappedWindows(Dataset[tuple[Tensor, ...]]):
    """What one writes with torch: an item is cut out of the memory map."""

    def __init__(self, ids: np.ndarray, kind: str) -> None:
        self.ids, self.kind = ids, kind

    def __len__(self) -> int:
        return (len(self.ids) - 1) // CONTEXT

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        row = self.ids[number * CONTEXT : number * CONTEXT + CONTEXT + 1]
        if self.kind == "uint16":
            return (torch.from_numpy(row.copy()),)
        return torch.from_numpy(row[:-1].astype(np.int64)), torch.from_numpy(row[1:].astype(np.int64))


def write_store(path: Path, num_ids: int) -> Store:
    numbers = np.random.default_rng(SEED)
    with StoreWriter(path, kind="bench") as writer:
        writer.array("tokens", np.uint16)
        for start in range(0, num_ids, RECORD_IDS):
            length = min(RECORD_IDS, num_ids - start)
            writer.append("tokens", numbers.integers(0, VOCAB_SIZE, length, dtype=np.uint16))
            category = CATEGORIES[start // RECORD_IDS % len(CATEGORIES)]
            writer.record("train", start, length, id=f"train_{start // RECORD_IDS}", category=category)
        writer.info = {"vocab_size": VOCAB_SIZE, "tokenizer": {"hash": "none"}}
    store = Store.open(path)
    store.arrays["tokens"].max()  # into the page cache
    return store


def through_feed(store: Store, kind: str) -> Batches:
    prefetcher = Prefetcher(Windows(store, "train", CONTEXT), BatchLayout(ROWS, ROWS), SEED, CPU, workers=1)
    try:
        for step in itertools.count():
            yield goods(prefetcher.take(step)[0].batch["tokens"], kind)
    finally:
        prefetcher.close()


def gathered(store: Store, kind: str) -> Batches:
    windows = Windows(store, "train", CONTEXT)
    for step in itertools.count():
        ids = windows.ids(step * ROWS, ROWS, SEED)
        batch, _ = to_device(windows.gather(ids, Draw(SEED, step, np.arange(ROWS))), CPU)
        yield goods(batch["tokens"], kind)


def goods(tokens: Tensor, kind: str) -> Sequence[Tensor]:
    if kind == "uint16":
        return (tokens,)
    wide = tokens.long()
    return wide[:, :-1], wide[:, 1:]


def through_loader(store: Store, kind: str, workers: int) -> Batches:
    yield from DataLoader(MappedWindows(store.arrays["tokens"], kind), ROWS, shuffle=True, num_workers=workers)


def rate(make: Callable[[], Batches], num_batches: int) -> float:
    """Windows per second of wall time, from the second batch on: starting workers is not what is asked."""
    batches = make()
    next(batches)
    begun = time.perf_counter()
    num_rows = sum(len(batch[0]) for batch in itertools.islice(batches, num_batches))
    seconds = time.perf_counter() - begun
    batches.close()
    return num_rows / seconds
