"""If this fails, a row comes twice or never in an epoch, or the order depends on how it was asked for."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.data.order import permute, shuffled
from rung.random import key_of

sizes = st.one_of(st.integers(1, 20), st.integers(1, 3000))
seeds = st.integers(0, 2**31)


@given(sizes, st.integers(0, 1000), seeds)
def test_each_row_comes_once_per_epoch(size: int, epoch: int, seed: int) -> None:
    rows = shuffled(epoch * size, size, size, seed)
    assert rows.dtype == np.int64
    assert sorted(rows.tolist()) == list(range(size))


@given(st.integers(1, 60), st.integers(0, 200), st.integers(0, 200), seeds, st.data())
def test_any_slicing_gives_the_same_sequence(
    size: int, start: int, length: int, seed: int, data: st.DataObject
) -> None:
    whole = shuffled(start, length, size, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=6)))
    edges = [0, *cuts, length]
    parts = [shuffled(start + a, b - a, size, seed) for a, b in itertools.pairwise(edges)]
    assert np.array_equal(np.concatenate(parts), whole)


@given(st.integers(4000, 20_000), st.integers(0, 60_000), st.integers(1, 9000))
def test_a_stretch_of_a_long_epoch_is_the_permutation_at_its_places(size: int, start: int, length: int) -> None:
    rows = shuffled(start, length, size, seed=9)
    for place in (start, start + length // 2, start + length - 1):
        epoch, offset = divmod(place, size)
        expected = permute(np.array([offset]), size, key_of(9, "order", epoch))
        assert rows[place - start] == expected[0]


@given(st.integers(20, 3000), seeds)
def test_epochs_and_seeds_differ(size: int, seed: int) -> None:
    first = shuffled(0, size, size, seed)
    assert not np.array_equal(first, shuffled(size, size, size, seed))
    assert not np.array_equal(first, shuffled(0, size, size, seed + 1))
    assert not np.array_equal(first, np.arange(size))


def test_a_batch_may_be_larger_than_the_epoch() -> None:
    rows = shuffled(2, 11, 3, seed=5)
    assert sorted(rows[1:4].tolist()) == sorted(rows[4:7].tolist()) == [0, 1, 2]


def test_nothing_asked_nothing_given() -> None:
    assert shuffled(7, 0, 3, seed=5).shape == (0,)


def test_far_positions_of_large_data_need_no_array_of_all_rows() -> None:
    size = 10**12
    rows = shuffled(size * 3 + 12345, 1000, size, seed=1)
    assert len(np.unique(rows)) == 1000
    assert rows.min() >= 0
    assert rows.max() < size
    assert rows.max() > size // 2


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("size", [2, 3, 4, 16, 17, 60])
def test_every_place_gets_every_row_equally_often(size: int) -> None:
    """Over many seeds; four standard deviations of chi-square with (size - 1)^2 degrees of freedom, plus a little."""
    counts = places_by_rows(size, num_seeds=1500)
    freedom = (size - 1) ** 2
    assert chi_square(counts) < freedom + 4 * (2 * freedom) ** 0.5 + 4


@pytest.mark.parametrize("size", [5, 10])
def test_a_handful_of_rows_is_nearly_even(size: int) -> None:
    """Four rounds over four bits leave a row where it was up to 1.27 times as often as chance would (6000 seeds)."""
    counts = places_by_rows(size, num_seeds=3000)
    assert counts.max() / counts.mean() < 1.4
    assert counts.min() / counts.mean() > 0.75


def places_by_rows(size: int, num_seeds: int) -> np.ndarray:
    counts = np.zeros((size, size))
    for seed in range(num_seeds):
        counts[np.arange(size), permute(np.arange(size), size, seed * 7919 + 1)] += 1
    return counts


def test_neighbours_of_an_epoch_are_not_neighbours_of_the_data() -> None:
    size = 10_000
    rows = shuffled(0, size, size, seed=3)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(rows, np.arange(size))[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(rows)) == 1) < 0.002  # 0.0002 expected of a random order


def test_a_short_run_sees_rows_from_everywhere() -> None:
    size, seen = 1_000_000, 8000
    rows = shuffled(0, seen, size, seed=11)
    counts = np.bincount(rows * 16 // size, minlength=16)
    assert chi_square(counts) < 45  # 15 degrees of freedom


def test_all_orders_of_three_rows_occur() -> None:
    orders = Counter(tuple(permute(np.arange(3), 3, seed * 104729 + 5).tolist()) for seed in range(1200))
    assert len(orders) == 6
    assert min(orders.values()) > 100


def in_plain_numbers(place: int, size: int, key: int) -> int:
    """The permutation written out with Python's own integers: what order.py promises, whatever numpy does."""
    bits = max(2, (size - 1).bit_length())
    keys = [key_of(key, number) for number in range(8)]
    value = place
    while True:
        left_bits, right_bits = bits // 2, bits - bits // 2
        left, right = value >> right_bits, value % 2**right_bits
        for round_key in keys:
            mixed = (right ^ round_key) * 0x9E3779B97F4A7C15 % 2**64
            mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 % 2**64
            left, right = right, left ^ mixed >> (64 - left_bits)
            left_bits, right_bits = right_bits, left_bits
        value = (left << right_bits) | right
        if value < size:
            return value


@given(size=st.integers(1, 5000), key=st.integers(0, 2**62), data=st.data())
def test_the_order_is_the_same_on_every_machine(size: int, key: int, data: st.DataObject) -> None:
    """Another order is other data for every run that is to be resumed."""
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    assert permute(np.array(places), size, key).tolist() == [in_plain_numbers(place, size, key) for place in places]
