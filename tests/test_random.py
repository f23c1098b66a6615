"""If this fails, a random draw depends on how a batch was cut, or two things that should differ draw the same."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.random import Draw, scramble

seeds = st.integers(0, 2**31)
steps = st.integers(0, 10**9)
names = st.text(min_size=1, max_size=20)


def draw(seed: int = 0, step: int = 0, num_rows: int = 64) -> Draw:
    return Draw(seed, step, np.arange(num_rows))


@given(seeds, steps, names, st.integers(1, 40), st.integers(1, 5), st.data())
def test_rows_draw_the_same_in_any_cut_and_order(
    seed: int, step: int, name: str, num_rows: int, num_values: int, data: st.DataObject
) -> None:
    whole = Draw(seed, step, np.arange(num_rows)).uniform(name, num_values)
    assert whole.shape == (num_rows, num_values)
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=num_rows)), dtype=np.int64)
    assert np.array_equal(Draw(seed, step, rows).uniform(name, num_values), whole[rows])
    high = np.arange(1, num_rows + 1)
    integers = Draw(seed, step, np.arange(num_rows)).integers(name, high)
    assert np.array_equal(Draw(seed, step, rows).integers(name, high[rows]), integers[rows])


@given(seeds, steps, names)
def test_drawing_twice_is_the_same_and_leaves_no_trace(seed: int, step: int, name: str) -> None:
    one = draw(seed, step)
    first = one.uniform(name, 3)
    one.uniform("another", 7)
    assert np.array_equal(one.uniform(name, 3), first)


@given(seeds, steps, st.lists(names, min_size=2, max_size=2, unique=True))
def test_seeds_steps_and_names_give_other_numbers(seed: int, step: int, both: list[str]) -> None:
    base = draw(seed, step).uniform(both[0])
    for other in (
        draw(seed + 1, step).uniform(both[0]),
        draw(seed, step + 1).uniform(both[0]),
        draw(seed, step).uniform(both[1]),
    ):
        assert not np.isin(base, other).any()


def test_seed_and_step_are_not_added_up() -> None:
    assert not np.array_equal(draw(1, 2).uniform("x"), draw(2, 1).uniform("x"))
    assert not np.array_equal(draw(1, 23).uniform("x"), draw(12, 3).uniform("x"))


@pytest.mark.parametrize("name", ["crop", "mask", "noise"])
def test_numbers_are_uniform_and_rows_unrelated(name: str) -> None:
    values = draw(3, 5, 20_000).uniform(name, 2)
    assert values.dtype == np.float64
    assert values.min() >= 0.0
    assert values.max() < 1.0
    # 40000 draws: the mean has a standard deviation of 0.0014, a bin of 16 one of 48, the correlation one of 0.007
    assert values.mean() == pytest.approx(0.5, abs=0.006)
    counts = np.bincount((values.ravel() * 16).astype(int), minlength=16)
    assert float(((counts - 2500.0) ** 2 / 2500.0).sum()) < 45  # chi-square of 15 degrees: 45 comes once in 10000
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.03
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.03


def test_steps_are_unrelated() -> None:
    values = np.array([draw(7, step, 1).uniform("x")[0, 0] for step in range(4000)])
    assert values.mean() == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.07


@given(seeds, st.integers(1, 2**52))
def test_integers_stay_below_their_limit(seed: int, high: int) -> None:
    values = draw(seed).integers("x", high)
    assert values.dtype == np.int64
    assert (values >= 0).all()
    assert (values < high).all()


def test_integers_reach_every_number() -> None:
    assert set(draw(0, 0, 500).integers("x", 7).tolist()) == set(range(7))


def test_no_rows_draw_nothing() -> None:
    assert draw(num_rows=0).uniform("x", 3).shape == (0, 3)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=50, unique=True))
def test_scramble_never_merges_two_numbers(values: list[int]) -> None:
    assert len(np.unique(scramble(np.array(values, dtype=np.uint64)))) == len(values)


def in_plain_numbers(seed: int, step: int, name: str, counter: int) -> float:
    """One draw written out with Python's own integers: what recipe.py promises, whatever numpy does."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little") >> 1

    def splitmix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    return (splitmix(splitmix((counter + key) % 2**64) ^ key) >> 11) / 2**53


@given(seeds, steps, names, st.integers(1, 4))
def test_draws_are_the_same_on_every_machine(seed: int, step: int, name: str, num_values: int) -> None:
    """Another number is another batch for every run that is to be resumed."""
    drawn = draw(seed, step, 3).uniform(name, num_values).ravel().tolist()
    assert drawn == [in_plain_numbers(seed, step, name, counter) for counter in range(3 * num_values)]


def test_generators_differ_by_name_and_repeat() -> None:
    torch = pytest.importorskip("torch")
    one, again, other = (torch.rand(4, generator=draw().generator(name)) for name in ("a", "a", "b"))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@given(seeds, steps, names, st.integers(1, 20), st.lists(st.integers(1, 4), max_size=2), st.data())
def test_noise_is_the_same_for_a_row_in_any_cut_and_is_what_uniform_draws(
    seed: int, step: int, name: str, num_rows: int, shape: list[int], data: st.DataObject
) -> None:
    whole = Draw(seed, step, np.arange(num_rows)).noise(name, tuple(shape)).numpy()
    assert whole.shape == (num_rows, *shape)
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=num_rows)), dtype=np.int64)
    assert np.array_equal(Draw(seed, step, rows).noise(name, tuple(shape)).numpy(), whole[rows])
    drawn = Draw(seed, step, np.arange(num_rows)).uniform(name, int(np.prod(shape)))
    assert np.array_equal(whole.reshape(num_rows, -1), np.floor(drawn * 2**24) / 2**24)  # its first 24 bits


def test_noise_is_even_and_differs_by_name_and_step() -> None:
    one = Draw(0, 5, np.arange(64)).noise("a", (256,))
    assert 0 <= one.min() < 0.001
    assert 0.999 < one.max() < 1
    assert abs(one.mean() - 0.5) < 0.01
    assert abs(one.var() - 1 / 12) < 0.002
    for other in (Draw(0, 5, np.arange(64)).noise("b", (256,)), Draw(0, 6, np.arange(64)).noise("a", (256,))):
        assert abs(np.corrcoef(one.flatten(), other.flatten())[0, 1]) < 0.03
