"""Windows of a token file per second: rung's stream against torch's DataLoader, in turns.

    python -m bench.loader [--quick]

One file of random ids in the page cache, windows of 1024 + 1 ids, 32 a batch, delivered as tensors in main memory, in
the order of training. rung: `Windows` through `Feed` with one worker, as training uses it, and gathered in the caller's
own thread. torch: a map-style data set over the same memory map, a shuffling sampler, the default collate, 0 and 2
workers. There are two kinds of goods:

    int64    ready for an embedding: inputs and targets, as data sets are usually written; rung's rows cast and cut
    uint16   one row as it lies in the file, to be cast on the device: what rung delivers, and the leanest item there is

The ratio that has a bar compares what each hands to its training step: rung's rows in uint16, cast on the device,
against the DataLoader's int64 pairs, which is how loops around it are written. Like against like is printed above it.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bench.report import facts, in_turns, pairwise, spread, verdict
from rung.data.prefetch import Cut, Feed, to_device
from rung.data.store import Store, StoreWriter
from rung.data.stream import Windows
from rung.recipe import Draw

CONTEXT, ROWS, SEED = 1024, 32, 1337
RECORD_IDS = 100_000  # a long document; rung never lets a window cross two
VOCAB_SIZE = 50_257
BAR = 8.0
CPU = torch.device("cpu")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the file and few batches: does it run at all?")
    args = parser.parse_args()
    num_ids, num_batches, num_rounds = (10_000_000, 50, 2) if args.quick else (100_000_000, 600, 7)
    torch.set_num_threads(1)
    size = f"{2 * num_ids / 1e6:.0f} MB"
    print(facts("torch", "numpy", threads=1, file=size, batches=num_batches, rounds=num_rounds), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bench(write_store(Path(folder) / "ids", num_ids), num_batches, num_rounds)


def bench(store: Store, num_batches: int, num_rounds: int) -> None:
    parties: dict[str, Callable[[], float]] = {}
    for kind in ("uint16", "int64"):
        makers = {
            f"rung Feed, {kind}": partial(through_feed, store, kind),
            f"rung direct, {kind}": partial(gathered, store, kind),
            f"DataLoader 0, {kind}": partial(through_loader, store, kind, 0),
            f"DataLoader 2, {kind}": partial(through_loader, store, kind, 2),
        }
        parties |= {name: partial(rate, make, num_batches) for name, make in makers.items()}
    figures = in_turns(num_rounds, parties)
    for name, values in figures.items():
        print(f"{name:<22} {spread(values, ',.0f')} windows/s")
    ratios = {}
    for kind in ("uint16", "int64"):
        best = list(map(max, figures[f"DataLoader 0, {kind}"], figures[f"DataLoader 2, {kind}"]))
        for ours in ("direct", "Feed"):
            ratios[ours, kind] = pairwise(figures[f"rung {ours}, {kind}"], best)
            print(f"{ours} / better DataLoader, {kind}: {spread(ratios[ours, kind], '.2f')}")
    usual = list(map(max, figures["DataLoader 0, int64"], figures["DataLoader 2, int64"]))
    for ours in ("direct", "Feed"):
        name = "loader" if ours == "Feed" else "loader-direct"
        print(verdict(name, pairwise(figures[f"rung {ours}, uint16"], usual), BAR, form=".2f"))


def write_store(path: Path, num_ids: int) -> Store:
    numbers = np.random.default_rng(SEED)
    with StoreWriter(path, kind="bench") as writer:
        writer.array("tokens", np.uint16)
        for start in range(0, num_ids, RECORD_IDS):
            length = min(RECORD_IDS, num_ids - start)
            writer.append("tokens", numbers.integers(0, VOCAB_SIZE, length, dtype=np.uint16))
            writer.record("train", start, length)
    store = Store.open(path)
    store.arrays["tokens"].max()  # into the page cache
    return store


Batches = Generator[Sequence[Tensor], None, None]


def through_feed(store: Store, kind: str) -> Batches:
    feed = Feed(Windows(store, "train", CONTEXT), Cut(ROWS, ROWS), SEED, CPU, workers=1)
    try:
        for step in itertools.count():
            yield goods(feed.take(step)[0].batch["tokens"], kind)
    finally:
        feed.close()


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


if __name__ == "__main__":
    main()
