"""Whether eval rows are in the training set: whole, in part, or as neighbours in time.

Rows are compared by hashes of their content, and so are their parts: windows of 50 ids, codes or samples, steps of
features, frames. How often parts of train are found elsewhere in train is no leak: chorales share phrases (1.7 % of
windows, in any split), and what is in train many times over is silence, a licence, a black frame. The work is bounded
by the clock: where train was sampled, shares are divided by the share of it that was seen.

Augmentation must not hide a leak. So rows are not gathered as in training: every row of both sets has one and the same
draw, that of an eval, and what is the same recording becomes the same array. Where a stream augments in evals too, or
only that of train does, the draw is also tried with all its numbers in the middle, where noise is nought, nothing is
dropped and nothing turned, and at either end. Rows are gathered one by one, from seeded generators, where a batch of
them comes out otherwise. What differs even so cannot be compared, and the check says so.

Of a film that was split frame by frame no eval frame is in train, but the ones before and after it are. Frames are
shrunk to 8 x 8 greys. An eval frame that has a training frame as near as neighbours in time are has probably been seen
in training; of a split frame by frame that is true of half of the frames or more. A car that drives laps comes by the
same place again in any split (64 % of the frames of such a film), so the same is asked of training frames and all of
train but the frames around them.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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
ASIDE = 0.1  # ids of fewer bytes, beside the largest array of a row, describe it: captions of unlike pieces are alike
FREQUENT, FREQUENT_SHARE = 10, 0.2  # training rows with one part: so many, or of rows that overlap such a share
FEW_CODES = 16  # books; a wider last axis of bytes is one of pictures
WIDE = 8  # numbers of a step that make it content of its own
LOOKED = 512  # numbers of a frame from which it is known whether it has content
# Shares that are worth a warning. Never more than that, however much it is: such a run can be trained, its evals just
# say less than they seem to, and whoever overfits a few rows on purpose evaluates on them.
DUPLICATES, OVERLAP, MUCH = 0.001, 0.01, 0.1
CUT = 0.25  # of the parts of a row that another one shares: phrases are shorter
LEAST_ROWS = 2  # one row alone may be chance
AROUND = 50  # rows before and after one that may be of the same piece, which may repeat itself, or show the same moment
EVAL_FRAMES, TRAIN_FRAMES, FRAME_PAIRS = 64, 1500, 200
MOST_BYTES = 1_000_000_000  # of frames to gather
SIDE = 8
FILM = 0.5  # distance of neighbours over that of any two: above it rows are no film
SHARE = 0.25  # of eval frames that have such a neighbour, beyond the share of training frames
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it can be divided by


class Parts(NamedTuple):
    """Hashes of parts of rows, such as windows of ids, and for each the id of its row."""

    hashes: np.ndarray
    owners: np.ndarray


class RowHashes(NamedTuple):
    """What is kept of some rows: a hash of each, and those of their parts by what they are parts of."""

    num_rows: int
    hashes: np.ndarray
    parts: dict[str, Parts]


@dataclass(frozen=True, slots=True)
class OneDraw(Draw):
    """One draw for all rows: what is cut, turned or made noisy is so alike in all. With a `value`, without chance."""

    value: float | None = None

    def uniform(self, name: str, num_values: int = 1) -> np.ndarray:
        if self.value is None:
            return Draw.uniform(self, name, num_values)
        return np.full((len(self.rows), num_values), self.value)

    def noise(self, name: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        found = Draw.noise(self, name, shape, device)
        return found if self.value is None else found.fill_(self.value)


class Pairing(NamedTuple):
    """How rows are gathered so that one recording gives one array, whichever set and row it is in."""

    step: int = EVAL_STEP
    value: float | None = None
    is_alone: bool = False  # row by row, each time from freshly seeded generators
    names: tuple[str, ...] = ()  # the arrays that are compared
    width: int = WINDOW  # of the windows of ids, the same in both sets

    def gather(self, stream: Stream, ids: np.ndarray, seed: int) -> Arrays:
        def some(part: np.ndarray) -> Arrays:
            return gather(stream, part, OneDraw(seed, self.step, np.zeros(len(part), np.int64), self.value))

        if not self.is_alone:
            return some(ids)
        rows = []
        for number in range(len(ids)):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.random.default_generator.manual_seed(seed)
            rows.append(some(ids[number : number + 1]))
        longest = {n: max(np.shape(row[n])[1:] for row in rows) for n in rows[0]}
        return {  # rows of a batch have one length, filled up with zeros
            name: np.concatenate([_filled(np.asarray(row[name]), shape) for row in rows])
            for name, shape in longest.items()
        }


PAIRINGS = (Pairing(), Pairing(0), *(Pairing(0, value) for value in (0.5, 0.0, 1 - 2**-24)))


def _filled(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(array, [(0, 0), *((0, max(0, to - has)) for has, to in zip(array.shape[1:], shape))])


@check("eval rows are not in train", "E7")
def leakage(context: CheckContext) -> Iterator[Result]:
    setup, seed, train = context.setup, context.setup.cfg.seed, context.setup.streams["train"]
    seconds = QUICK_SECONDS if context.is_quick else SECONDS
    of_train: dict[Pairing, RowHashes] = {}
    for name, held in setup.evaluator.streams.items():
        title = f"{name} is not in train"
        with seeded():
            ways, reason = pairings(train, held, seed)
            worst: tuple[bool, float, str] = (False, -1.0, "")
            for way in ways:
                if way not in of_train:
                    number = min(NUM_TRAIN, train.num_rows)
                    of_train[way] = read(train, way, number, seed, seconds / len(ways))
                ours = read(held, way, min(NUM_EVAL, held.num_rows), seed, seconds / 4 / len(ways))
                found = compare(ours, of_train[way], held.num_rows, train.num_rows)
                worst = max(worst, found, key=lambda one: one[:2])
        leaks, _, seen = worst
        if reason and not leaks:
            yield Result("skip", reason, name=title)
            continue
        remedy = "split by document, episode or recording before it is cut into rows; remove duplicates before"
        yield Result("warn" if leaks else "pass", seen, remedy, name=title)


def compare(ours: RowHashes, theirs: RowHashes, num_held: int, num_train: int) -> tuple[bool, float, str]:
    """Whether it is a leak, the largest share, and what was seen."""
    seen_share = theirs.num_rows / num_train
    same = np.isin(ours.hashes[ours.hashes != 0], theirs.hashes)
    worst = min(1.0, same.mean() / seen_share if same.sum() >= LEAST_ROWS else 0.0)
    leaks, seen = worst > DUPLICATES, f"{worst:.2%} of rows are in train"
    for kind, parts in ours.parts.items():
        if not len(parts.hashes) or kind not in theirs.parts:
            continue
        found = overlap_of(parts, theirs.parts[kind])
        overlap = (found.ours - found.usual) / seen_share
        seen += f", {found.ours:.2%} of their {kind} ({found.usual:.2%} of train's own are elsewhere in train)"
        # Rows cut at random out of recordings repeat each other, which explains nothing. Nearly the same piece under
        # two names looks like them, so of such a set more is asked.
        limits = (found.usual, OVERLAP), (found.phrases, MUCH)
        leaks |= found.num_rows >= LEAST_ROWS and any(
            (found.ours - usual) / seen_share > limit and found.ours - usual > 3 * found.error
            for usual, limit in limits
        )
        worst = max(worst, overlap)
    return leaks, worst, f"{seen}; {ours.num_rows} of {num_held} rows against {theirs.num_rows} of {num_train} of train"


def pairings(train: Stream, held: Stream, seed: int) -> tuple[list[Pairing], str]:
    """The ways to gather rows that are worth a comparison; and why it says nothing where no leak is found.

    Several only where the draw makes a difference to these rows.
    """
    some = {s: evenly(s.num_rows, min(4, s.num_rows)) for s in (train, held)}
    seen, found, reasons, is_fixed = set[int](), list[Pairing](), list[str](), fixed(train, some[train], seed)
    for way in PAIRINGS:
        once = {s: way.gather(s, ids, seed) for s, ids in some.items()}
        names = list(once[train])
        compared = content(once[train], once[held], names, is_fixed)
        digest = hash(tuple(a[n].tobytes() for a in once.values() for n in compared))
        if digest in seen:
            continue
        seen.add(digest)
        wild: list[str] = []
        alone = {s: way._replace(is_alone=True).gather(s, ids, seed) for s, ids in some.items()}
        if unlike := [n for n in names if any(not _same(once[s].get(n), alone[s].get(n)) for s in once)]:
            way, once = way._replace(is_alone=True), alone
            again = {s: way.gather(s, ids, seed) for s, ids in some.items()}
            wild = [n for n in unlike if any(not _same(once[s].get(n), again[s].get(n)) for s in once)]
        chosen = content(once[train], once[held], [n for n in names if n not in wild], is_fixed)
        if largest := [n for n in wild if all(once[train][n].nbytes > once[train][c].nbytes for c in chosen)]:
            reasons.append(f"{largest[0]} is drawn anew at each gather, and not through `draw`")
        if not chosen:
            continue
        ids_of = [a[n] for a in once.values() for n in chosen if a[n].ndim == 2 and a[n].shape[1] >= SHORT_WINDOW]
        width = WINDOW if all(array.shape[1] > WINDOW for array in ids_of) else SHORT_WINDOW
        found.append(way._replace(names=tuple(chosen), width=width))
        # Whether other noise would make other arrays of train, and not of the eval set.
        other = {s: found[-1].gather(s, ids, seed + 1) for s, ids in some.items()}
        noisy, still = ([n for n in chosen if not _same(once[s][n], other[s][n])] for s in (train, held))
        if noisy and not set(noisy) & set(still):
            reasons.append(
                f"{noisy[0]} of train is augmented in a way that cannot be stilled, and that of evals is not"
            )
        elif not largest:
            reasons.append("")
    if not found and not reasons:
        reasons = ["no array of a row has one kind and shape in both, or holds more than lengths and labels"]
    return found, reasons[0] if all(reasons) else ""


def fixed(stream: Stream, ids: np.ndarray, seed: int) -> list[str]:
    """The arrays of these rows that are the same under every draw."""
    once, again = (gather(stream, ids, Draw(seed, step, np.arange(len(ids)))) for step in (0, 1))
    return [name for name in once if _same(np.asarray(once[name]), np.asarray(again[name]))]


def _same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is not None and b is not None and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def content(train: Arrays, held: Arrays, names: Sequence[str], is_fixed: Sequence[str]) -> list[str]:
    """Arrays that both sets have in one kind of number and, but for the length of a row, in one shape.

    What is drawn and small beside the rest (the control of another row, say) would make equal rows differ. Lengths
    and labels alone, one number a row, are no content: two rows may well have the same.
    """
    names = [
        name
        for name in names
        if name in held
        and (train[name].ndim, train[name].shape[2:]) == (held[name].ndim, held[name].shape[2:])
        and (train[name].dtype == held[name].dtype or {train[name].dtype.kind, held[name].dtype.kind} <= set("iu"))
    ]
    largest = max((train[name].nbytes for name in names if name in is_fixed), default=0)
    names = [name for name in names if name in is_fixed or train[name].nbytes >= largest]
    return names if any(train[name].ndim > 1 for name in names) else []


@contextmanager
def seeded() -> Iterator[None]:
    """Gives back the states of the global generators."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])


def evenly(num_rows: int, wanted: int) -> np.ndarray:
    """So many ids, spread over all rows."""
    return np.arange(wanted) * num_rows // wanted


class Overlap(NamedTuple):
    """Shares of parts that are in train: of ours, and of train's own in rows far away, with what that may vary by."""

    ours: float
    usual: float
    phrases: float  # of `usual`, without rows that have so much in common that they are cuts of one recording
    error: float
    num_rows: int  # of ours that share any


def overlap_of(ours: Parts, theirs: Parts) -> Overlap:
    """Parts that are frequent in train do not count, neither here nor there."""
    order = np.argsort(theirs.owners, kind="stable")
    order = order[np.argsort(theirs.hashes[order], kind="stable")]
    parts, owners = theirs.hashes[order], theirs.owners[order]
    starts = np.flatnonzero(np.diff(parts, prepend=~parts[:1]))
    if not len(starts) or not len(ours.hashes):
        return Overlap(0.0, 0.0, 0.0, 0.0, 0)
    known, counts = parts[starts], np.diff(np.append(starts, len(parts)))
    is_row = np.diff(owners, prepend=owners[0]) != 0
    is_row[starts] = True
    num_rows = np.add.reduceat(is_row.astype(np.int64), starts)
    first, last = np.minimum.reduceat(owners, starts), np.maximum.reduceat(owners, starts)
    # Many cuts of one recording hold one part many times over, which does not make it common.
    are_cuts = np.zeros(len(starts), bool)
    is_asked = (last - first > AROUND) | (num_rows >= FREQUENT)
    are_cuts[is_asked] = _are_cuts(first[is_asked], last[is_asked], owners)
    most = max(FREQUENT, FREQUENT_SHARE * len(np.unique(owners)))
    is_rare = (num_rows < FREQUENT) | (are_cuts & (num_rows < most))
    is_far = last - first > AROUND
    usual, spread, _ = _by_row(owners, np.repeat(is_far & is_rare, counts), np.repeat(is_rare, counts))
    is_phrase = is_far & is_rare & ~are_cuts
    phrases, _, _ = _by_row(owners, np.repeat(is_phrase, counts), np.repeat(is_rare, counts))
    place = np.minimum(known.searchsorted(ours.hashes), len(known) - 1)
    is_known = known[place] == ours.hashes
    share, _, num_ours = _by_row(ours.owners, is_known & is_rare[place], ~is_known | is_rare[place])
    return Overlap(share, usual, phrases, float(spread / np.sqrt(len(np.unique(ours.owners)))), num_ours)


def _are_cuts(first: np.ndarray, last: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Whether the two rows of a part have so much in common that they were cut from one recording, in any order: then
    train does not repeat itself there, and what an eval row shares with them it shares with its own recording."""
    if not len(first):
        return np.zeros(0, bool)
    rows, sizes = np.unique(owners, return_counts=True)
    first, last = rows.searchsorted(first), rows.searchsorted(last)
    _, one, of_pair, num_shared = np.unique(
        first * len(rows) + last, return_index=True, return_inverse=True, return_counts=True
    )
    smaller = np.minimum(sizes[first[one]], sizes[last[one]])
    return np.asarray((num_shared >= CUT * smaller)[of_pair])


def _by_row(owners: np.ndarray, is_shared: np.ndarray, is_counted: np.ndarray) -> tuple[float, float, int]:
    """The share of parts that are shared, the deviation of that over rows (one shares many or none), such rows."""
    rows = np.unique(owners, return_inverse=True)[1]
    shared, counted = (np.bincount(rows, flags.astype(float)) for flags in (is_shared, is_counted))
    share = shared.sum() / max(1.0, counted.sum())
    deviation = float(np.std((shared - share * counted) / max(1.0, counted.mean())))
    return float(share), deviation, int((shared > 0).sum())


def read(stream: Stream, way: Pairing, num_rows: int, seed: int, seconds: float) -> RowHashes:
    """Hashes of rows spread over a set; in an order that leaves the same picture whenever the time is up."""
    begun, done, size = time.monotonic(), 0, FIRST_CHUNK
    ids = evenly(stream.num_rows, num_rows)
    ids = ids[np.random.default_rng(seed).permutation(num_rows)]
    hashes, parts = [], defaultdict[str, list[Parts]](list)
    while done < num_rows:
        some = ids[done : done + size]
        gathered = way.gather(stream, some, seed)
        arrays = {name: np.ascontiguousarray(gathered[name]) for name in way.names}
        hashes.append(row_hashes(arrays))
        for kind, (found, owner) in parts_of(arrays, way.width).items():
            parts[kind].append(Parts(found, some[owner]))
        done += len(some)
        took = max(time.monotonic() - begun, 1e-9)
        if took > seconds:
            break
        size = min(CHUNK, 2 * size, 1 + int(done * (seconds - took) / took))  # as many as there is time for
    joined = {kind: Parts(*map(np.concatenate, zip(*of_kind, strict=True))) for kind, of_kind in parts.items()}
    return RowHashes(done, np.concatenate(hashes), joined)


def row_hashes(arrays: Arrays) -> np.ndarray:
    """(rows,) uint64, however far a row is filled up with zeros; 0 for rows with less than a short window of ids."""
    num_rows = len(next(iter(arrays.values())))
    hashes = np.zeros(num_rows, np.uint64)
    for row in range(num_rows):
        digest = hashlib.blake2b(digest_size=8)
        for array in arrays.values():
            whole = array[row].astype(np.int64) if array.dtype.kind in "iu" and array.ndim == 2 else array[row]
            digest.update(whole.tobytes().rstrip(b"\0") + b"\0")
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


def parts_of(arrays: Arrays, width: int) -> dict[str, Parts]:
    """What rows are made of, by kind; the owners are places in these arrays. Parts without content are left out."""
    found: dict[str, list[Parts]] = defaultdict(list)
    largest = max(array.nbytes for array in arrays.values())
    for array in arrays.values():
        is_whole, is_float = array.dtype.kind in "iu", array.dtype.kind == "f"
        if len(array) > 1 and (array == array[:1]).all():
            continue  # places, or a mask: the same in every row, and rightly so
        if is_ids(array):
            if array.nbytes >= ASIDE * largest:
                found["windows of ids"].append(windows(array, width))
        elif array.ndim == 2 and is_float and array.shape[1] > 2 * SHORT_WINDOW:
            found["windows of numbers"].append(windows(_bits(array), width))
        elif array.ndim == 2 and is_float and array.shape[1] > FEW_IDS:
            found[f"rows of {array.shape[1]} numbers"].append(_pieces(array[:, None]))
        elif array.ndim == 3 and is_whole and (array.dtype != np.uint8 or array.shape[2] <= FEW_CODES):
            found["windows of codes"].append(windows(_digests(array), SHORT_WINDOW))
        elif array.ndim == 3 and is_float and array.shape[2] < WIDE:
            found["windows of steps"].append(windows(_digests(array), SHORT_WINDOW))
            # A split step by step, or windows of another offset, share no whole window. Beside frames it says nothing
            # of its own: a car that stands has the same few numbers in any drive.
            if array.shape[2] > FEW_IDS and max(one.ndim for one in arrays.values()) == 3:
                found[f"steps of {array.shape[2]} numbers"].append(_pieces(array))
        elif array.ndim == 3 and is_float:
            found[f"steps of {array.shape[2]} numbers"].append(_pieces(array))
        elif array.ndim >= 3 and (is_float or array.dtype == np.uint8):
            is_film = array.ndim == 5 or (array.ndim == 4 and min(array.shape[1], array.shape[3]) > 4)
            frames = array if is_film else array[:, None]
            found[f"frames of {'x'.join(map(str, frames.shape[2:]))}"].append(_pieces(frames))
    return {kind: Parts(*map(np.concatenate, zip(*parts, strict=True))) for kind, parts in found.items()}


def windows(ids: np.ndarray, width: int) -> Parts:
    """All windows of the ids in these rows that are worth comparing."""
    has_few = len(np.unique(ids[:8])) <= FEW_IDS and len(np.unique(ids)) <= FEW_IDS  # a mask, or flags
    if ids.shape[1] < width or has_few:
        return Parts(np.zeros(0, np.uint64), np.zeros(0, np.int64))
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
    return Parts(hashes[rows, columns], rows)


def _bits(array: np.ndarray) -> np.ndarray:
    """Numbers as whole ones that are equal where they are; 0 and -0 are."""
    return (array + 0.0).view(f"u{array.dtype.itemsize}").astype(np.uint64)


def _digests(array: np.ndarray) -> np.ndarray:
    """(rows, steps, numbers) -> (rows, steps) uint64: a hash of each step."""
    bits = _bits(array) if array.dtype.kind == "f" else array.astype(np.uint64)
    with np.errstate(over="ignore"):
        salts = scramble(np.arange(1, bits.shape[2] + 1, dtype=np.uint64))
        return np.asarray(scramble(bits ^ salts).sum(2, dtype=np.uint64))


def _pieces(array: np.ndarray) -> Parts:
    """One part per row and step, of all that lies behind; those of a few values, such as black frames, left out."""
    flat = np.ascontiguousarray(array).reshape(array.shape[0] * array.shape[1], -1)
    some = np.sort(flat[:, :: max(1, flat.shape[1] // LOOKED)], axis=1)
    is_varied = (np.diff(some, axis=1) != 0).sum(1) >= FEW_IDS
    digests = [int.from_bytes(hashlib.blake2b(piece.tobytes(), digest_size=8).digest(), "little")
               for piece in flat[is_varied]]  # fmt: skip
    owners = np.repeat(np.arange(array.shape[0]), array.shape[1])
    return Parts(np.array(digests, np.uint64), owners[is_varied])


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
        array = Pairing(step).gather(stream, some, seed)[name]
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
    first, next_ = (shrunk(train, name, pairs + k, EVAL_STEP, seed) for k in (0, 1))
    near = np.linalg.norm(first - next_, axis=1)
    far = np.median(np.linalg.norm(first - np.roll(first, num_pairs // 2, axis=0), axis=1))
    limit = float(np.median(near))
    if not 0 < limit < FILM * far:
        seen = f"rows of {name} that follow each other are {limit:.3g} apart, any two {far:.3g}: no film"
        return Result("skip", seen)
    spread = evenly(train.num_rows, num_train)
    coarse = shrunk(train, name, spread, EVAL_STEP, seed)
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
        near = np.linalg.norm(shrunk(train, name, around, EVAL_STEP, seed) - frame, axis=1)
        return float(min(distances.min(), near.min()))

    ids = evenly(held.num_rows, min(EVAL_FRAMES, held.num_rows))
    own = evenly(train.num_rows, len(ids))
    of_eval = np.array([nearest(frame) for frame in shrunk(held, name, ids, EVAL_STEP, seed)])
    of_train = np.array([nearest(f, i) for f, i in zip(shrunk(train, name, own, EVAL_STEP, seed), own.tolist())])
    share, usual = float((of_eval <= limit).mean()), float((of_train <= limit).mean())
    seen = (
        f"{share:.0%} of {len(ids)} frames have a frame of train as near ({limit:.3g}) as neighbours in time are, "
        f"{usual:.0%} of frames of train have one elsewhere in train; any two are {far:.3g} apart"
    )
    remedy = "split by episode, or by blocks of time with a gap between them, not by frame"
    return Result("warn" if share - usual > SHARE else "pass", seen, remedy)
