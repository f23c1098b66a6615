"""Whether a film was split frame by frame: then no eval frame is in train, but the ones before and after it are.

Frames are shrunk to 8 x 8 greys. Training rows whose numbers follow each other are neighbours in time, if they are far
nearer to each other than any two rows are; otherwise the rows are no film, and nothing can be said. An eval frame that
has a training frame as near as such neighbours are has probably been seen in training. Of a split frame by frame that
is true of about half of the frames or more, for the limit is the median.

A car that drives its laps comes by the same place again and again, and then it is true of any split (64 % of the
frames of such a film). So the same is asked of training frames and all of train but the frames around them: what is as
likely there is no fault of the split.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.evaluate import EVAL_STEP
from rung.recipe import Draw, Stream

NUM_EVAL, NUM_TRAIN, NUM_PAIRS = 64, 1500, 200
MOST_BYTES = 1_000_000_000  # to gather
SIDE = 8
FILM = 0.5  # distance of neighbours over that of any two: above it rows are no film
SHARE = 0.25  # of eval frames that have such a neighbour, beyond the share of training frames
AROUND = 50  # rows before and after a frame that show the same moment


def frames_apart(bench: Bench) -> Iterator[Result]:
    setup = bench.setup
    for name, held in setup.evaluator.streams.items():
        title = f"{name} has no neighbours in train"
        array = picture_of(setup.streams["train"], setup.cfg.seed)
        if array is None:
            continue
        if held.num_rows < NUM_EVAL // 4:
            yield Result(title, "skip", f"only {held.num_rows} rows", rule="E7")
            continue
        yield _compare(setup.streams["train"], held, array, setup.cfg.seed, title)


def picture_of(stream: Stream, seed: int) -> str | None:
    """The array of the largest pictures, the fewest of them a row; None where rows are no pictures."""
    one = stream.gather(np.zeros(1, np.int64), Draw(seed, 0, np.arange(1)))
    pictures = {name: a for name, a in one.items() if a.ndim >= 4 and (a.dtype == np.uint8 or a.dtype.kind == "f")}
    if not pictures:
        return None
    return max(pictures, key=lambda name: (frame_size(pictures[name]), -pictures[name].size))


def frame_size(array: np.ndarray) -> int:
    return int(np.prod(sorted(array.shape[-3:])[1:]))


def shrunk(stream: Stream, name: str, ids: np.ndarray, step: int, seed: int) -> np.ndarray:
    """(rows, 64) the first picture of each row, as greys."""
    parts = []
    for start in range(0, len(ids), 64):
        some = ids[start : start + 64]
        array = stream.gather(some, Draw(seed, step, np.arange(len(some))))[name]
        while array.ndim > 4:
            array = array[:, 0]
        axis = -1 if array.shape[-1] <= 4 else 1
        greys = array.astype(np.float32).mean(axis)
        cells = [np.array_split(strip, SIDE, axis=2) for strip in np.array_split(greys, SIDE, axis=1)]
        parts.append(np.stack([cell.mean((1, 2)) for strip in cells for cell in strip if cell.size], axis=1))
    return np.concatenate(parts)


def _compare(train: Stream, held: Stream, name: str, seed: int, title: str) -> Result:
    one = train.gather(np.zeros(1, np.int64), Draw(seed, 0, np.arange(1)))
    most = max(100, MOST_BYTES // max(1, sum(a.nbytes for a in one.values())) // 2)
    num_train, num_pairs = min(NUM_TRAIN, train.num_rows, most), min(NUM_PAIRS, train.num_rows - 1, most // 4)
    if num_pairs < 2:
        return Result(title, "skip", f"train has {train.num_rows} rows", rule="E7")
    pairs = np.arange(num_pairs) * (train.num_rows - 1) // num_pairs
    first, next_ = (shrunk(train, name, pairs + k, 0, seed) for k in (0, 1))
    near = np.linalg.norm(first - next_, axis=1)
    far = np.median(np.linalg.norm(first - np.roll(first, num_pairs // 2, axis=0), axis=1))
    limit = float(np.median(near))
    if not 0 < limit < FILM * far:
        seen = f"rows of {name} that follow each other are {limit:.3g} apart, any two {far:.3g}: no film"
        return Result(title, "skip", seen, rule="E7")
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
    if share - usual > SHARE:
        remedy = "split by episode, or by blocks of time with a gap between them, not by frame"
        return Result(title, "warn", seen, remedy, "E7")
    return Result(title, "pass", seen, rule="E7")


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


CHECKS: list[Check] = [Check("eval frames apart from train", frames_apart, is_quick=False)]
