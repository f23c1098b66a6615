"""Windows of a token file per second: rung's streams against torch's DataLoader and LitData, in turns.

    python -m bench.loader [--quick]

One file of random ids in the page cache, windows of 1024 + 1 ids, 32 a batch, delivered as tensors in main memory, in
the order of training. rung: `Windows` through `Prefetcher` with one worker, as training uses it, and gathered in the
caller's thread; and the text recipe's rows, which draw a component, a document and a start each. torch: a map-style
data set over the same memory map, a shuffling sampler, the default collate, 0 and 2 workers. Rows come in two kinds:

    int64    ready for an embedding: inputs and targets, as data sets are usually written; rung's rows cast and cut
    uint16   one row as it lies in the file, to be cast on the device: what rung delivers, and the leanest item there is

The ratio that has a bar compares what each hands to its training step: rung's rows in uint16, cast on the device,
against the DataLoader's int64 pairs, which is how loops around it are written. Like against like is printed above it.
LitData takes part where it is installed (`pip install --no-deps litdata`, with what it asks for: its own requirements
bring a torchvision that does not fit every torch); it gets the same ids, written by itself as int32 chunks.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import tempfile
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rung.bench.loader import (
    CATEGORIES,
    CONTEXT,
    CPU,
    RECORD_IDS,
    ROWS,
    SEED,
    Batches,
    gathered,
    goods,
    rate,
    through_feed,
    through_loader,
    write_store,
)
from rung.bench.report import facts, in_turns, pairwise, spread, verdict
from rung.data.store import Store
from rung.engine.prefetch import BatchLayout, Prefetcher
from rung.recipes.text.components import pool_of
from rung.recipes.text.stream import training_rows

BAR = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small file and few batches: does it run at all?")
    args = parser.parse_args()
    num_ids, num_batches, num_rounds = (10_000_000, 50, 2) if args.quick else (500_000_000, 600, 5)
    torch.set_num_threads(1)
    size = f"{2 * num_ids / 1e6:.0f} MB"
    print(facts("torch", "numpy", threads=1, file=size, batches=num_batches, rounds=num_rounds), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder) / "ids", num_ids)
        chunks = write_chunks(store, Path(folder) / "chunks") if importlib.util.find_spec("litdata") else None
        bench(store, chunks, num_batches, num_rounds)


def bench(store: Store, chunks: Path | None, num_batches: int, num_rounds: int) -> None:
    parties: dict[str, Callable[[], float]] = {}
    if chunks is None:
        print("LitData is not installed: left out")
    else:
        for workers in (0, 2):
            parties[f"LitData {workers}, int32"] = partial(rate, partial(through_litdata, chunks, workers), num_batches)
    for kind in ("uint16", "int64"):
        makers = {
            f"rung Prefetcher, {kind}": partial(through_feed, store, kind),
            f"rung direct, {kind}": partial(gathered, store, kind),
            f"rung text, {kind}": partial(through_text, store, kind),
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
        for ours in ("direct", "Prefetcher", "text"):
            ratios[ours, kind] = pairwise(figures[f"rung {ours}, {kind}"], best)
            print(f"{ours} / better DataLoader, {kind}: {spread(ratios[ours, kind], '.2f')}")
    if chunks is not None:
        theirs = list(map(max, figures["LitData 0, int32"], figures["LitData 2, int32"]))
        for ours in ("direct", "Prefetcher"):
            print(
                f"{ours}, uint16 / better LitData: {spread(pairwise(figures[f'rung {ours}, uint16'], theirs), '.2f')}"
            )
    usual = list(map(max, figures["DataLoader 0, int64"], figures["DataLoader 2, int64"]))
    for ours, name in (("direct", "loader-direct"), ("text", "loader-text"), ("Prefetcher", "loader")):
        print(verdict(name, pairwise(figures[f"rung {ours}, uint16"], usual), BAR, form=".2f"))


def through_text(store: Store, kind: str) -> Batches:
    rows = training_rows(pool_of(store, "train", CATEGORIES), CONTEXT, "component_uniform", False)
    prefetcher = Prefetcher(rows, BatchLayout(ROWS, ROWS), SEED, CPU, workers=1)
    try:
        for step in itertools.count():
            yield goods(prefetcher.take(step)[0].batch["tokens"], kind)
    finally:
        prefetcher.close()


def write_chunks(store: Store, folder: Path) -> Path:
    """The same ids as LitData writes them, in chunks of whole windows."""
    from litdata import TokensLoader, optimize

    ids = store.path / "tokens.bin"
    optimize(
        fn=partial(chunk_of, str(ids)),
        inputs=list(range(0, len(store.arrays["tokens"]), RECORD_IDS)),
        output_dir=str(folder),
        chunk_size=(CONTEXT + 1) * 8192,
        item_loader=TokensLoader(block_size=CONTEXT + 1),
        num_workers=1,
    )
    return folder


def chunk_of(file: str, start: int) -> Generator[Tensor, None, None]:
    ids = np.memmap(file, dtype=np.uint16, mode="r")
    yield torch.from_numpy(ids[start : start + RECORD_IDS].astype(np.int32))


def through_litdata(folder: Path, workers: int) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    rows = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=CONTEXT + 1), shuffle=True, drop_last=True)
    for batch in StreamingDataLoader(rows, batch_size=ROWS, num_workers=workers):
        yield (batch,)


if __name__ == "__main__":
    main()
