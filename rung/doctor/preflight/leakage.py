"""Whether eval rows are in the training set: whole, in part, or as neighbours in time.

Rows are compared by hashes of their content, which is what does not change with the draw; rows of ids also by their
windows of 50. How often windows of train are found elsewhere in train is no leak: chorales share phrases (1.7 % of
windows, in any split). The work is bounded by the clock: where train was sampled, shares are divided by the share of it
that was seen.

Of a film that was split frame by frame no eval frame is in train, but the ones before and after it are. Frames are
shrunk to 8 x 8 greys. An eval frame that has a training frame as near as neighbours in time are has probably been seen
in training; of a split frame by frame that is true of half of the frames or more. A car that drives laps comes by the
same place again in any split (64 % of the frames of such a film), so the same is asked of training frames and all of
train but the frames around them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rung.doctor.preflight.result import CheckContext, Result, check
from rung.engine.contract import gather
from rung.engine.evaluate import EVAL_STEP
from rung.random import Draw, scramble
from rung.recipe import Arrays, Stream

NUM_EVAL, NUM_TRAIN = 2000, 50_000
FIRST_CHUNK, CHUNK = 8, 256  # rows gathered at once: few until it is known how long they take
SECONDS, QUICK_SECONDS = 8.0, 0.4  # for each eval set, most of it for gathering
WINDOW, SHORT_WINDOW = 50, 13  # ids
FEW_IDS = 3  # a window of no more different ids is a rest, padding, or a figure that anybody plays
FREQUENT = 10  # occurrences of a window in the training rows seen
# Shares that are worth a warning. Never more than that, however much it is: such a run can be trained, its evals just
# say less than they seem to, and whoever overfits a few rows on purpose evaluates on them.
DUPLICATES, OVERLAP = 0.001, 0.01
LEAST_ROWS = 2  # one row alone may be chance
AROUND = 50  # rows before and after one that may be of the same piece, which may repeat itself, or show the same moment
EVAL_FRAMES, TRAIN_FRAMES, FRAME_PAIRS = 64, 1500, 200
MOST_BYTES = 1_000_000_000  # of frames to gather
SIDE = 8
FILM = 0.5  # distance of neighbours over that of any two: above it rows are no film
SHARE = 0.25  # of eval frames that have such a neighbour, beyond the share of training frames
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it can be divided by


class RowHashes(NamedTuple):
    """What is kept of some rows: a hash of each, and hashes of the windows of ids in them with the id of their row."""

    num_rows: int
    hashes: np.ndarray
    windows: np.ndarray
    owners: np.ndarray


@check("eval rows are not in train", "E7")
def leakage(context: CheckContext) -> Iterator[Result]:
    setup, seed, train = context.setup, context.setup.cfg.seed, context.setup.streams["train"]
    seconds = QUICK_SECONDS if context.is_quick else SECONDS
    for name, held in setup.evaluator.streams.items():
        title = f"{name} is not in train"
        names = content(train, held, seed)
        if not names:
            yield Result("skip", "no array of a row has one shape in both", name=title)
            continue
        ours = read(held, names, min(NUM_EVAL, held.num_rows), EVAL_STEP, seed, seconds / 4)
        theirs = read(train, names, min(NUM_TRAIN, train.num_rows), 0, seed, seconds)
        seen_share = theirs.num_rows / train.num_rows
        same = np.isin(ours.hashes[ours.hashes != 0], theirs.hashes)
        duplicates = same.mean() / seen_share if same.sum() >= LEAST_ROWS else 0.0
        found = overlap_of(ours, theirs)
        overlap = (found.ours - found.usual) / seen_share
        is_sure = found.ours - found.usual > 3 * found.error
        seen = f"{min(1.0, duplicates):.2%} of rows are in train"
        if len(ours.windows):
            seen += (
                f", {found.ours:.2%} of their windows of ids ({found.usual:.2%} of train's own are elsewhere in train)"
            )
        seen += f"; {ours.num_rows} of {held.num_rows} rows against {theirs.num_rows} of {train.num_rows} of train"
        leaks = duplicates > DUPLICATES or (overlap > OVERLAP and is_sure)
        remedy = "split by document or episode, not by window; remove duplicates before"
        yield Result("warn" if leaks else "pass", seen, remedy, name=title)


def content(train: Stream, held: Stream, seed: int) -> list[str]:
    """Arrays that both sets have in one type and, but for the length of a row, in one shape, and that do not depend on
    the draw. Lengths and labels alone, one number a row, are no content: two rows may well have the same."""
    some = np.arange(min(4, train.num_rows, held.num_rows))
    once, again = (gather(train, some, Draw(seed, step, some)) for step in (0, 1))
    other = gather(held, some, Draw(seed, EVAL_STEP, some))
    names = [
        name
        for name, array in once.items()
        if name in other
        and (array.ndim, array.shape[2:], array.dtype) == (other[name].ndim, other[name].shape[2:], other[name].dtype)
        and np.array_equal(array, again[name])
    ]
    return names if any(once[name].ndim > 1 for name in names) else []


def evenly(num_rows: int, wanted: int) -> np.ndarray:
    """So many ids, spread over all rows."""
    return np.arange(wanted) * num_rows // wanted


class Overlap(NamedTuple):
    """Shares of windows that are in train: of ours, and of train's own in rows far away, with what that may vary by."""

    ours: float
    usual: float
    error: float


def overlap_of(ours: RowHashes, theirs: RowHashes) -> Overlap:
    """Windows that are frequent in train do not count, neither here nor there."""
    order = np.argsort(theirs.windows, kind="stable")
    windows, owners = theirs.windows[order], theirs.owners[order]
    starts = np.flatnonzero(np.diff(windows, prepend=~windows[:1]))
    if not len(starts) or not len(ours.windows):
        return Overlap(0.0, 0.0, 0.0)
    known, counts = windows[starts], np.diff(np.append(starts, len(windows)))
    is_rare = counts < FREQUENT
    is_far = np.maximum.reduceat(owners, starts) - np.minimum.reduceat(owners, starts) > AROUND
    usual, spread = _by_row(owners, np.repeat(is_far & is_rare, counts), np.repeat(is_rare, counts))
    place = np.minimum(known.searchsorted(ours.windows), len(known) - 1)
    is_known = known[place] == ours.windows
    share, _ = _by_row(ours.owners, is_known & is_rare[place], ~is_known | is_rare[place])
    return Overlap(share, usual, float(spread / np.sqrt(len(np.unique(ours.owners)))))


def _by_row(owners: np.ndarray, is_shared: np.ndarray, is_counted: np.ndarray) -> tuple[float, float]:
    """The share of windows that are shared, and the deviation of that share over rows: a row shares many or none."""
    rows = np.unique(owners, return_inverse=True)[1]
    shared, counted = (np.bincount(rows, flags.astype(float)) for flags in (is_shared, is_counted))
    share = shared.sum() / max(1.0, counted.sum())
    return float(share), float(np.std((shared - share * counted) / max(1.0, counted.mean())))


def read(stream: Stream, names: list[str], num_rows: int, step: int, seed: int, seconds: float) -> RowHashes:
    """Hashes of rows spread over a set; in an order that leaves the same picture whenever the time is up."""
    begun, done, size = time.monotonic(), 0, FIRST_CHUNK
    ids = evenly(stream.num_rows, num_rows)
    ids = ids[np.random.default_rng(seed).permutation(num_rows)]
    hashes, windows, owners = [], [], []
    while done < num_rows:
        some = ids[done : done + size]
        arrays = gather(stream, some, Draw(seed, step, np.arange(done, done + len(some))))
        arrays = {name: np.ascontiguousarray(arrays[name]) for name in names}
        hashes.append(row_hashes(arrays))
        found, owner = id_windows(arrays)
        windows.append(found)
        owners.append(some[owner])
        done += len(some)
        took = max(time.monotonic() - begun, 1e-9)
        if took > seconds:
            break
        size = min(CHUNK, 2 * size, 1 + int(done * (seconds - took) / took))  # as many as there is time for
    return RowHashes(done, np.concatenate(hashes), np.concatenate(windows), np.concatenate(owners))


def row_hashes(arrays: Arrays) -> np.ndarray:
    """(rows,) uint64, however far a row is filled up with zeros; 0 for rows with less than a short window of ids."""
    num_rows = len(next(iter(arrays.values())))
    hashes = np.zeros(num_rows, np.uint64)
    for row in range(num_rows):
        digest = hashlib.blake2b(digest_size=8)
        for array in arrays.values():
            digest.update(array[row].tobytes().rstrip(b"\0") + b"\0")
        hashes[row] = int.from_bytes(digest.digest(), "little") or 1
    ids = [array for array in arrays.values() if is_ids(array)]
    if ids and not any(array.ndim > 2 or (array.ndim == 2 and array.dtype.kind == "f") for array in arrays.values()):
        hashes[np.all([lengths(array) < SHORT_WINDOW for array in ids], axis=0)] = 0
    return hashes


def is_ids(array: np.ndarray) -> bool:
    return array.ndim == 2 and np.issubdtype(array.dtype, np.integer) and array.shape[1] >= SHORT_WINDOW


def lengths(ids: np.ndarray) -> np.ndarray:
    """How much of each row comes before the run of one id at its end."""
    differs = ids != ids[:, -1:]
    return np.where(differs.any(1), ids.shape[1] - differs[:, ::-1].argmax(1), 0)


def id_windows(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all windows of the ids in these rows that are worth comparing, and the row of each."""
    found = [ids_of_row for ids_of_row in arrays.values() if is_ids(ids_of_row)]
    if not found:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    ids = found[0]
    width = WINDOW if ids.shape[1] > WINDOW else SHORT_WINDOW
    hashes = rolling(ids, width)
    starts = np.arange(hashes.shape[1])
    is_whole = starts[None] + width <= lengths(ids)[:, None]
    # How many ids of each window are not one of the FEW_IDS before them.
    is_old = np.zeros(ids.shape, bool)
    for back in range(1, FEW_IDS + 1):
        is_old[:, back:] |= ids[:, back:] == ids[:, :-back]
    sums = np.concatenate([np.zeros((len(ids), 1), np.int64), np.cumsum(~is_old, axis=1)], axis=1)
    is_varied = sums[:, width:] - sums[:, :-width] > FEW_IDS
    rows, columns = np.nonzero(is_whole & is_varied)
    return hashes[rows, columns], rows


def rolling(ids: np.ndarray, width: int) -> np.ndarray:
    """(rows, length - width + 1) uint64: a hash of each window that does not depend on where it stands."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(ids.shape[1], FACTOR, np.uint64))
        inverse = np.uint64(pow(int(FACTOR), -1, 1 << 64))
        back = np.cumprod(np.full(ids.shape[1], inverse, np.uint64))
        sums = np.cumsum(scramble(ids.astype(np.uint64)) * powers, axis=1, dtype=np.uint64)
        sums = np.concatenate([np.zeros((len(ids), 1), np.uint64), sums], axis=1)
        return np.asarray((sums[:, width:] - sums[:, :-width]) * back[: ids.shape[1] - width + 1])


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
        if held.num_rows >= EVAL_FRAMES // 4:
            most = max(100, MOST_BYTES // max(1, sum(a.nbytes for a in one.values())) // 2)
            result = compare_frames(train, held, array, seed, most)
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


def compare_frames(train: Stream, held: Stream, name: str, seed: int, most: int) -> Result:
    """With at most so many rows of train."""
    num_train, num_pairs = min(TRAIN_FRAMES, train.num_rows, most), min(FRAME_PAIRS, train.num_rows - 1, most // 4)
    if num_pairs < 2:
        return Result("skip", f"train has {train.num_rows} rows")
    pairs = evenly(train.num_rows - 1, num_pairs)
    first, next_ = (shrunk(train, name, pairs + k, 0, seed) for k in (0, 1))
    near = np.linalg.norm(first - next_, axis=1)
    far = np.median(np.linalg.norm(first - np.roll(first, num_pairs // 2, axis=0), axis=1))
    limit = float(np.median(near))
    if not 0 < limit < FILM * far:
        seen = f"rows of {name} that follow each other are {limit:.3g} apart, any two {far:.3g}: no film"
        return Result("skip", seen)
    spread = evenly(train.num_rows, num_train)
    coarse = shrunk(train, name, spread, 0, seed)
    gap = -(-train.num_rows // num_train)

    def nearest(frame: np.ndarray, own: int | None = None) -> float:
        """The distance to the nearest training frame: the best of some, then of all around that one; not near `own`."""
        distances = np.linalg.norm(coarse - frame, axis=1)
        if own is not None:
            distances = np.where(np.abs(spread - own) > AROUND, distances, np.inf)
        if gap == 1 or np.isinf(distances).all():
            return float(distances.min())
        best = int(spread[distances.argmin()])
        around = np.unique(np.clip(np.arange(best - gap, best + gap + 1), 0, train.num_rows - 1))[:64]
        near = np.linalg.norm(shrunk(train, name, around, 0, seed) - frame, axis=1)
        return float(min(distances.min(), near.min()))

    ids = evenly(held.num_rows, min(EVAL_FRAMES, held.num_rows))
    own = evenly(train.num_rows, len(ids))
    of_eval = np.array([nearest(frame) for frame in shrunk(held, name, ids, EVAL_STEP, seed)])
    of_train = np.array([nearest(f, i) for f, i in zip(shrunk(train, name, own, 0, seed), own.tolist())])
    share, usual = float((of_eval <= limit).mean()), float((of_train <= limit).mean())
    seen = (
        f"{share:.0%} of {len(ids)} frames have a frame of train as near ({limit:.3g}) as neighbours in time are, "
        f"{usual:.0%} of frames of train have one elsewhere in train; any two are {far:.3g} apart"
    )
    remedy = "split by episode, or by blocks of time with a gap between them, not by frame"
    return Result("warn" if share - usual > SHARE else "pass", seen, remedy)
