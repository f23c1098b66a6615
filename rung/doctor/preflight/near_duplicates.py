"""Whether a film was split frame by frame: then no eval frame is in train, but the ones before and after it are.

Frames are shrunk to 8 x 8 greys. An eval frame that has a training frame as near as neighbours in time are has probably
been seen in training; of a split frame by frame that is true of half of the frames or more. A car that drives laps
comes by the same place again in any split (64 % of the frames of such a film), so the same is asked of training frames
and all of train but the frames around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rung.doctor.preflight.result import CheckContext, Result, check
from rung.engine.contract import gather
from rung.engine.evaluate import EVAL_STEP
from rung.random import Draw
from rung.recipe import Stream

NUM_EVAL, NUM_TRAIN, NUM_PAIRS = 64, 1500, 200
MOST_BYTES = 1_000_000_000  # to gather
SIDE = 8
FILM = 0.5  # distance of neighbours over that of any two: above it rows are no film
SHARE = 0.25  # of eval frames that have such a neighbour, beyond the share of training frames
AROUND = 50  # rows before and after a frame that show the same moment


@check("eval frames apart from train", "E7", is_quick=False)
def frames_apart(context: CheckContext) -> Iterator[Result]:
    train, seed = context.setup.streams["train"], context.setup.cfg.seed
    one = gather(train, np.zeros(1, np.int64), Draw(seed, 0, np.arange(1)))
    frame_sizes = {
        name: (int(np.prod(sorted(a.shape[-3:])[1:])), -a.size)
        for name, a in one.items() if a.ndim >= 4 and (a.dtype == np.uint8 or a.dtype.kind == "f")
    }  # fmt: skip
    if not frame_sizes:
        return
    array = max(frame_sizes, key=lambda name: frame_sizes[name])  # the largest pictures, the fewest of them a row
    for name, held in context.setup.evaluator.streams.items():
        result = Result("skip", f"only {held.num_rows} rows")
        if held.num_rows >= NUM_EVAL // 4:
            most = max(100, MOST_BYTES // max(1, sum(a.nbytes for a in one.values())) // 2)
            result = _compare(train, held, array, seed, most)
        yield replace(result, name=f"{name} has no neighbours in train")


def shrunk(stream: Stream, name: str, ids: np.ndarray, step: int, seed: int) -> np.ndarray:
    """(rows, 64) the first picture of each row, as greys."""
    parts = []
    for start in range(0, len(ids), 64):
        some = ids[start : start + 64]
        array = gather(stream, some, Draw(seed, step, np.arange(len(some))))[name]
        while array.ndim > 4:
            array = array[:, 0]
        axis = -1 if array.shape[-1] <= 4 else 1
        greys = array.astype(np.float32).mean(axis)
        cells = [np.array_split(strip, SIDE, axis=2) for strip in np.array_split(greys, SIDE, axis=1)]
        parts.append(np.stack([cell.mean((1, 2)) for strip in cells for cell in strip if cell.size], axis=1))
    return np.concatenate(parts)


def _compare(train: Stream, held: Stream, name: str, seed: int, most: int) -> Result:
    """With at most so many rows of train."""
    num_train, num_pairs = min(NUM_TRAIN, train.num_rows, most), min(NUM_PAIRS, train.num_rows - 1, most // 4)
    if num_pairs < 2:
        return Result("skip", f"train has {train.num_rows} rows")
    pairs = np.arange(num_pairs) * (train.num_rows - 1) // num_pairs
    first, next_ = (shrunk(train, name, pairs + k, 0, seed) for k in (0, 1))
    near = np.linalg.norm(first - next_, axis=1)
    far = np.median(np.linalg.norm(first - np.roll(first, num_pairs // 2, axis=0), axis=1))
    limit = float(np.median(near))
    if not 0 < limit < FILM * far:
        seen = f"rows of {name} that follow each other are {limit:.3g} apart, any two {far:.3g}: no film"
        return Result("skip", seen)
    spread = np.arange(num_train) * train.num_rows // num_train
    coarse = shrunk(train, name, spread, 0, seed)
    ids = np.arange(min(NUM_EVAL, held.num_rows)) * held.num_rows // min(NUM_EVAL, held.num_rows)
    frames = shrunk(held, name, ids, EVAL_STEP, seed)
    nearest = np.array([_nearest(train, name, frame, coarse, spread, seed) for frame in frames])
    own = np.arange(len(ids)) * train.num_rows // len(ids)
    own_frames = shrunk(train, name, own, 0, seed)
    again = np.array([_nearest(train, name, f, coarse, spread, seed, i) for f, i in zip(own_frames, own.tolist())])
    share, usual = float((nearest <= limit).mean()), float((again <= limit).mean())
    seen = (
        f"{share:.0%} of {len(ids)} frames have a frame of train as near ({limit:.3g}) as neighbours in time are, "
        f"{usual:.0%} of frames of train have one elsewhere in train; any two are {far:.3g} apart"
    )
    remedy = "split by episode, or by blocks of time with a gap between them, not by frame"
    return Result("warn" if share - usual > SHARE else "pass", seen, remedy)


def _nearest(
    train: Stream, name: str, frame: np.ndarray, coarse: np.ndarray, spread: np.ndarray, seed: int, own: int = -1
) -> float:
    """The distance to the nearest training frame: the best of some, then of all around that one; not near `own`."""
    allowed = np.ones(len(spread), bool) if own < 0 else np.abs(spread - own) > AROUND
    if not allowed.any():
        return float("inf")
    distances = np.where(allowed, np.linalg.norm(coarse - frame, axis=1), np.inf)
    gap = -(-train.num_rows // len(spread))
    if gap == 1:
        return float(distances.min())
    best = int(spread[distances.argmin()])
    around = np.unique(np.clip(np.arange(best - gap, best + gap + 1), 0, train.num_rows - 1))[:64]
    near = np.linalg.norm(shrunk(train, name, around, 0, seed) - frame, axis=1)
    return float(min(distances.min(), near.min()))
