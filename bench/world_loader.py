"""Frames to learn from per second: rung's world stream against torch's DataLoader over HDF5 and over packed frames.

    python -m bench.world_loader [--quick]

One made-up film of 128x96 in the page cache, and a memory of 4@128x96, 8@64x48, 16@16x12 and 32@4x3 before each frame
that is predicted, 64 a batch. Every party delivers the same rows in the same order, as a model takes them: the memory
and the target in float32 in [-1, 1], channels first, and the controls. Before anything is timed, they are compared.

    rung     `Moments` through `Prefetcher` with one worker, as training uses it: uint8 at every size, then the cast
    packed   one .npy file, memory-mapped, and a DataLoader with 2 workers that makes the pyramid of each row
    hdf      the same over an HDF5 file with gzip, one frame a chunk, as recordings are often kept

The cast counts for rung too, though in training it is done on the device.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from rung.bench.report import facts, in_turns, pairwise, spread, verdict
from rung.data.store import Store, StoreWriter
from rung.engine.prefetch import BatchLayout, Prefetcher
from rung.recipes.world.config import parse_scale
from rung.recipes.world.memory import factors, shrink, span, to_signal
from rung.recipes.world.stream import Moments, array_of

ROWS, SEED, NUM_CONTROLS = 64, 1337, 10
SCALES = [parse_scale(text) for text in ("4@128x96", "8@64x48", "16@16x12", "32@4x3")]
PAST, WIDTH, HEIGHT = span(SCALES), SCALES[0].width, SCALES[0].height
CPU = torch.device("cpu")
BARS = {"hdf": 10.0, "packed": 2.0}

Goods = list[Tensor]  # the memory, finest first: B N 3 h w; the target: B 3 H W; the controls: B C
Batches = Generator[Goods, None, None]


class Film(NamedTuple):
    """The same frames and controls three times over."""

    store: Store
    packed: Path
    controls: Path
    hdf: Path


class Rows(Dataset[Goods]):
    """What one writes with torch: an item is the frames around a moment, and the pyramid made of them."""

    def __init__(self, film: Film, kind: str) -> None:
        self.film, self.kind = film, kind
        self.frames: Any = None  # opened by each worker for itself: an HDF5 handle does not survive a fork
        self.controls: Any = None

    def __getitem__(self, moment: int) -> Goods:
        if self.frames is None:
            self.open()
        frames = torch.from_numpy(np.array(self.frames[moment - PAST : moment + 1]))
        signal = frames.permute(0, 3, 1, 2).float() / 127.5 - 1
        past = [signal[PAST - scale.frames : PAST] for scale in SCALES]
        memory = past[:1] + [
            interpolate(level, (s.height, s.width), mode="area") for level, s in zip(past[1:], SCALES[1:])
        ]
        return [*memory, signal[PAST], torch.from_numpy(np.array(self.controls[moment]))]

    def open(self) -> None:
        if self.kind == "hdf":
            import h5py

            file = h5py.File(self.film.hdf, "r")
            self.frames, self.controls = file["frames"], file["controls"]
        else:
            self.frames, self.controls = np.load(self.film.packed, mmap_mode="r"), np.load(self.film.controls)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short film and few batches: does it run at all?")
    args = parser.parse_args()
    num_frames, num_batches, num_rounds = (300, 3, 1) if args.quick else (3000, 12, 5)
    torch.set_num_threads(1)
    print(facts("torch", "numpy", "h5py", threads=1, frames=num_frames, rounds=num_rounds), flush=True)
    peers = ["hdf", "packed"]
    if find_spec("h5py") is None:
        peers.remove("hdf")
        print("h5py is absent, so HDF5 is left out; pip install 'rung[bench]'")
    with tempfile.TemporaryDirectory() as folder:
        film = write_film(Path(folder), num_frames, with_hdf="hdf" in peers)
        bench(film, peers, num_batches, num_rounds)


def bench(film: Film, peers: list[str], num_batches: int, num_rounds: int) -> None:
    makers: dict[str, Callable[[], Batches]] = {"rung": partial(through_feed, film)}
    makers |= {kind: partial(through_loader, film, kind) for kind in peers}
    compare(makers)
    # Ours is asked for more batches, so that its time is not too short to be measured.
    figures = in_turns(
        num_rounds,
        {name: partial(rate, make, num_batches * (8 if name == "rung" else 1)) for name, make in makers.items()},
    )
    for name, values in figures.items():
        print(f"{name:<8} {spread(values, ',.0f')} frames/s")
    for kind in peers:
        print(verdict(f"world-loader-{kind}", pairwise(figures["rung"], figures[kind]), BARS[kind], form=".2f"))


def write_film(folder: Path, num_frames: int, with_hdf: bool) -> Film:
    """A view that slides over a blocky texture with some noise, which gzip can pack to about half."""
    rng = np.random.default_rng(SEED)
    texture = np.kron(rng.integers(0, 240, (80, 120, 3)), np.ones((8, 8, 1), int)) + rng.integers(0, 16, (640, 960, 1))
    places = (np.array([[5, 7]]) * np.arange(num_frames)[:, None]) % (640 - HEIGHT, 960 - WIDTH)
    frames = np.stack([texture[y : y + HEIGHT, x : x + WIDTH] for y, x in places]).astype(np.uint8)
    controls = rng.normal(size=(num_frames, NUM_CONTROLS)).astype(np.float32)
    film = Film(write_store(folder / "store", frames, controls), *(folder / n for n in ("f.npy", "c.npy", "f.h5")))
    np.save(film.packed, frames)
    np.save(film.controls, controls)
    if with_hdf:
        import h5py

        with h5py.File(film.hdf, "w") as file:
            file.create_dataset("frames", data=frames, chunks=(1, HEIGHT, WIDTH, 3), compression="gzip")
            file.create_dataset("controls", data=controls)
    return film


def write_store(path: Path, frames: np.ndarray, controls: np.ndarray) -> Store:
    with StoreWriter(path, kind="world") as writer:
        for factor in factors(SCALES):
            writer.array(array_of(factor), np.uint8, (HEIGHT // factor, WIDTH // factor, 3))
            writer.append(array_of(factor), shrink(torch.from_numpy(frames), factor).numpy())
        writer.array("controls", np.float32, (NUM_CONTROLS,))
        writer.append("controls", controls)
        writer.record("train", 0, len(frames))
        writer.info = {"height": HEIGHT, "width": WIDTH, "divisors": factors(SCALES)}
    return Store.open(path)


def through_feed(film: Film) -> Batches:
    prefetcher = Prefetcher(Moments(film.store, "train", SCALES), BatchLayout(ROWS, ROWS), SEED, CPU, workers=1)
    try:
        for step in itertools.count():
            batch = prefetcher.take(step)[0].batch
            frames = [*(batch[f"memory_{level}"] for level in range(len(SCALES))), batch["frames"][:, 0]]
            yield [*map(to_signal, frames), batch["controls"][:, 0]]
    finally:
        prefetcher.close()


def through_loader(film: Film, kind: str) -> Batches:
    order = Moments(film.store, "train", SCALES).ids(0, 200 * ROWS, SEED) + PAST  # there is one record
    yield from DataLoader(Rows(film, kind), ROWS, sampler=order.tolist(), num_workers=2)


def compare(makers: dict[str, Callable[[], Batches]]) -> None:
    """The first batch of each. Peers round nothing; rung rounds to 8 bits at each of the 5 halvings."""
    first = {}
    for name, make in makers.items():
        batches = make()
        first[name] = next(batches)
        batches.close()
    for name, goods in first.items():
        for ours, theirs in zip(first["rung"], goods, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=0, atol=2.51 / 127.5, msg=lambda m, n=name: f"{n}: {m}")


def rate(make: Callable[[], Batches], num_batches: int) -> float:
    """Predicted frames per second of wall time, from the second batch on: starting workers is not what is asked."""
    batches = make()
    next(batches)
    begun = time.perf_counter()
    num_rows = sum(len(goods[-1]) for goods in itertools.islice(batches, num_batches))
    seconds = time.perf_counter() - begun
    batches.close()
    return num_rows / seconds


if __name__ == "__main__":
    main()
