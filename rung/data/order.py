"""Which row comes where: a seeded permutation per epoch, computed at any position, in constant memory.

The permutation is a four-round Feistel network over the smallest even number of bits that holds the rows, walked until
it lands inside the range. It is a bijection by construction, so that each row comes once per epoch, and needs neither
an array of all rows nor the history of an iterator. The last few stretches of it are remembered, for speed alone.
"""

from __future__ import annotations

import functools

import numpy as np

from rung.recipe import key_of, scramble

ROUNDS = 4
BLOCK = 4096  # places whose rows are computed together; no result depends on it


def shuffled(position: int, num_rows: int, epoch_rows: int, seed: int) -> np.ndarray:
    """Row numbers at [position, position + num_rows), where each run of `epoch_rows` is a permutation of all rows."""
    assert epoch_rows > 0, "a stream without rows"
    parts = [np.empty(0, dtype=np.int64)]
    while num_rows > 0:
        epoch, place = divmod(position, epoch_rows)
        number, first = divmod(place, BLOCK)
        part = _block(number, epoch, epoch_rows, seed)[first : first + num_rows]
        parts.append(part)
        position, num_rows = position + len(part), num_rows - len(part)
    return np.concatenate(parts)


@functools.lru_cache(maxsize=8)
def _block(number: int, epoch: int, epoch_rows: int, seed: int) -> np.ndarray:
    """A stretch of an epoch's order. The permutation costs numpy's overhead a hundred times over, whatever its length."""
    places = np.arange(number * BLOCK, min((number + 1) * BLOCK, epoch_rows), dtype=np.int64)
    rows = permute(places, epoch_rows, key_of(seed, "order", epoch))
    rows.flags.writeable = False
    return rows


def permute(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a permutation of range(size), chosen by `key`, sends these places."""
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():  # cycle walking: at most 4 tries are expected, as the domain is at most 4 times the size
        values[outside] = _feistel(values[outside], half_bits, key)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, key: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_number in range(ROUNDS):
        mixed = scramble(right ^ np.uint64(key_of(key, round_number))) & mask
        left, right = right, left ^ mixed
    return (left << shift) | right
