"""Which frames are trained on and which are held out.

Never single frames, whose neighbours would give them away: whole episodes, or blocks of time with a gap around them.
Blocks are spread over the recording, so that what is held out is not only its end. Choices depend on the seed alone.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rung.errors import DataError
from rung.random import key_of
from rung.recipes.world.config import Dataset
from rung.recipes.world.sources.episode import onward

CHOSEN = ("train", "validation", "test")  # here; the last split is the source's to say: a place nobody learns from
SPLITS = (*CHOSEN, "unseen")
NOWHERE = -1  # the gap around a block
ENOUGH_EPISODES = 4
BLOCK_S, BLOCK_FRAMES = 4.0, 96  # a block is no shorter than either, as far as the share allows: a memory and a
# rollout must fit, of 32 frames each in our presets


def assign(
    times: list[np.ndarray], labels: list[str], cfg: Dataset, seed: int, sources: list[int] | None = None
) -> tuple[list[np.ndarray], str]:
    """For each episode's frames the number of their split in SPLITS, or NOWHERE; and the way that was taken.

    Episodes of one label are of one place or one drive, and stay together. Those of one source follow each other in one
    recording, and the gap is kept across them too; None: each is a recording of its own.
    """
    places = list(dict.fromkeys(labels))
    way = cfg.split
    if way == "auto":
        way = "episode" if len(places) >= ENOUGH_EPISODES else "time"
    if way == "time":
        return by_time(times, cfg, seed, sources or list(range(len(times)))), way
    lengths = [sum(len(t) for t, label in zip(times, labels) if label == place) for place in places]
    chosen = dict(zip(places, by_episode(lengths, cfg, seed)))
    return [np.full(len(t), chosen[label]) for t, label in zip(times, labels)], way


def by_episode(lengths: list[int], cfg: Dataset, seed: int) -> list[int]:
    """The split of each group of episodes, given how many frames it has."""
    shares = [share for share in (cfg.validation, cfg.test) if share > 0]
    if len(lengths) <= len(shares):
        raise DataError(
            f"{len(lengths)} episodes cannot be shared by {len(shares) + 1} splits; set dataset.split=time to hold out "
            "blocks of time",
            code="too-few",
        )
    order = sorted(range(len(lengths)), key=lambda number: (key_of(seed, "split", number), number))
    chosen = np.zeros(len(lengths), np.int64)
    for split, share in ((1, cfg.validation), (2, cfg.test)):
        left = [number for number in order if chosen[number] == 0]
        room = len(left) - 1 - int(split == 1 and cfg.test > 0)  # the splits after this one take one each
        wanted, have = share * sum(lengths), 0
        for number in left:
            if room and abs(have + lengths[number] - wanted) < abs(have - wanted):
                chosen[number], have, room = split, have + lengths[number], room - 1
        if share > 0 and not have:  # all are much longer than the share: one that is not longer than most
            usual = np.median([lengths[number] for number in left])
            chosen[next(number for number in left if lengths[number] <= usual)] = split
    return [int(split) for split in chosen]


def by_time(times: list[np.ndarray], cfg: Dataset, seed: int, sources: list[int]) -> list[np.ndarray]:
    """The recordings laid end to end are cut into cells; each has a block of each split, somewhere in its part."""
    ends = np.cumsum([len(t) for t in times])
    total, held = int(ends[-1]), cfg.validation + cfg.test
    splits = np.zeros(total, np.int64)
    if held:
        smallest = min(share for share in (cfg.validation, cfg.test) if share > 0)
        step_s = float(np.median(np.concatenate([np.diff(t) for t in times if len(t) > 1] or [np.ones(1)])))
        block_frames = max(BLOCK_FRAMES, max(BLOCK_S, 2 * cfg.split_gap) / max(step_s, 1e-6))
        num_cells = max(1, int(smallest * total / block_frames))
        for cell in range(num_cells):
            first, last = total * cell // num_cells, total * (cell + 1) // num_cells
            middle = first + round((last - first) * cfg.validation / held)
            _paint(splits, 1, first, middle, round(cfg.validation * (last - first)), ends, seed)
            _paint(splits, 2, middle, last, round(cfg.test * (last - first)), ends, seed)
    clock, owners = np.concatenate(times), np.repeat(sources, [len(t) for t in times])
    for first, last in pairwise([0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), total]):
        splits[first:last] = _with_gaps(splits[first:last], onward(clock[first:last]), cfg.split_gap)
    return np.split(splits, ends[:-1])


def _paint(splits: np.ndarray, split: int, first: int, last: int, length: int, ends: np.ndarray, seed: int) -> None:
    """A block somewhere in [first, last), moved into the episode that its middle lies in."""
    if length < 1:
        return
    start = first + key_of(seed, "block", split, first) % (last - first - length + 1)
    episode = int(np.searchsorted(ends, start + length // 2, side="right"))
    begin, end = (int(ends[episode - 1]) if episode else 0), int(ends[episode])
    start = max(begin, min(start, end - length))
    splits[start : min(start + length, end)] = split


def _with_gaps(splits: np.ndarray, times: np.ndarray, gap_s: float) -> np.ndarray:
    """Drops what is too near in time to a frame of a split that matters more: test, then validation, then train."""
    out = splits.copy()
    for split in (1, 2):
        held = times[splits == split]  # in order, since this clock does not run backwards
        if len(held):
            after = np.searchsorted(held, times).clip(0, len(held) - 1)
            before = np.maximum(after - 1, 0)
            distance = np.minimum(np.abs(held[after] - times), np.abs(times - held[before]))
            out[(splits < split) & (distance < gap_s)] = NOWHERE
    return out
