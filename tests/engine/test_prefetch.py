"""If this fails, a step trains on other rows than its number says: after a resume, on more ranks or workers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.engine.prefetch import BatchLayout, Micro, Origin, Prefetcher
from rung.random import Draw
from rung.recipe import Arrays, Stream
from tests.errors import raises_code

CPU = torch.device("cpu")


class Toy(Stream):
    """Rows that say which they are, and what was drawn for them."""

    fingerprint = "toy"

    def __init__(self, num_rows: int = 37, broken: int | None = None) -> None:
        self.num_rows = num_rows
        self.broken = broken
        self.gathered: set[int] = set()

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        self.gathered.add(draw.step)
        if draw.step == self.broken:
            raise RuntimeError(f"step {draw.step} cannot be read")
        return {"ids": ids.copy(), "noise": draw.uniform("noise", 2), "odd": np.stack([ids, ids], axis=1)[:, ::-1]}


@contextmanager
def feeding(
    stream: Stream, cut: BatchLayout, workers: int, seed: int = 3, origin: Origin = Origin()
) -> Iterator[Prefetcher]:
    prefetcher = Prefetcher(stream, cut, seed, CPU, workers, origin)
    try:
        yield prefetcher
    finally:
        prefetcher.close()


def whole(micros: list[Micro], name: str) -> np.ndarray:
    return np.concatenate([micro.batch[name].numpy() for micro in micros])


# The cut of a batch

cuts = st.tuples(st.integers(1, 8), st.integers(1, 12), st.integers(1, 12)).filter(lambda c: c[0] * c[1] % c[2] == 0)


@given(cuts)
def test_ranks_and_micros_are_the_global_batch_in_order(cut: tuple[int, int, int]) -> None:
    batch_size, accumulation, num_ranks = cut
    rows = batch_size * accumulation
    shares = [BatchLayout(rows, batch_size, rank, num_ranks).micros() for rank in range(num_ranks)]
    assert np.concatenate([places for share in shares for places in share]).tolist() == list(range(rows))
    assert all(0 < len(places) <= batch_size for share in shares for places in share)
    assert len({len(share) for share in shares}) == 1  # every rank takes part in every reduction


@given(cuts, st.integers(0, 20))
@settings(deadline=None)
def test_a_step_has_the_same_rows_and_draws_on_any_number_of_ranks(cut: tuple[int, int, int], step: int) -> None:
    batch_size, accumulation, num_ranks = cut
    rows = batch_size * accumulation
    with feeding(Toy(), BatchLayout(rows, rows), 0) as one:
        expected = one.take(step)
    parts = []
    for rank in range(num_ranks):
        with feeding(Toy(), BatchLayout(rows, batch_size, rank, num_ranks), 0) as prefetcher:
            parts += prefetcher.take(step)
    for name in ("ids", "noise", "odd"):
        assert np.array_equal(whole(parts, name), whole(expected, name))
    assert np.array_equal(np.concatenate([micro.ids for micro in parts]), whole(expected, "ids"))


# The prefetcher


@pytest.mark.parametrize("workers", [0, 1, 3])
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(0, 60))
@settings(max_examples=25, deadline=None)
def test_any_step_in_any_order_is_what_a_direct_gather_gives(workers: int, steps: list[int], last_step: int) -> None:
    stream, cut, origin = Toy(), BatchLayout(8, 3, rank=1, num_ranks=2), Origin(step=0, position=5)
    with feeding(stream, cut, workers, origin=origin) as prefetcher:
        for step in steps:
            micros = prefetcher.take(step, last_step)
            ids = stream.ids(5 + step * 8, 8, 3)
            assert [micro.draw.rows.tolist() for micro in micros] == [[4, 5, 6], [7]]
            for micro in micros:
                expected = stream.gather(ids[micro.draw.rows], Draw(3, step, micro.draw.rows))
                assert micro.draw.step == step
                assert np.array_equal(micro.ids, ids[micro.draw.rows])
                assert set(micro.batch) == set(expected)
                assert all(np.array_equal(micro.batch[name].numpy(), expected[name]) for name in expected)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_all_steps_one_after_the_other_are_the_epoch(workers: int) -> None:
    with feeding(Toy(24), BatchLayout(8, 4), workers) as prefetcher:
        seen = np.concatenate([whole(prefetcher.take(step, last_step=9), "ids") for step in range(9)])
    assert all(sorted(epoch.tolist()) == list(range(24)) for epoch in seen.reshape(3, 24))


@given(st.integers(0, 30), st.integers(0, 500), st.integers(1, 16), st.integers(0, 20))
@settings(deadline=None)
def test_a_run_resumed_with_another_batch_size_goes_on_with_the_next_row(
    step: int, position: int, rows: int, more: int
) -> None:
    with feeding(Toy(), BatchLayout(rows, rows), 0, origin=Origin(step, position)) as prefetcher:
        assert prefetcher.position(step) == position
        assert prefetcher.position(step + more) == position + more * rows
        assert (
            whole(prefetcher.take(step + more), "ids").tolist() == Toy().ids(position + more * rows, rows, 3).tolist()
        )


def test_a_resumed_feed_goes_on_as_the_one_that_was_never_stopped() -> None:
    with feeding(Toy(), BatchLayout(8, 4), 1) as straight:
        expected = [whole(straight.take(step), "noise") for step in range(6)]
        position = straight.position(4)
    with feeding(Toy(), BatchLayout(8, 4), 1, origin=Origin(4, position)) as resumed:
        for step in (4, 5):
            assert np.array_equal(whole(resumed.take(step), "noise"), expected[step])


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_while_gathering_reaches_the_caller(workers: int) -> None:
    with (
        feeding(Toy(broken=2), BatchLayout(4, 2), workers) as prefetcher,
        raises_code("gather-failed"),
    ):
        _ = [prefetcher.take(step, last_step=3) for step in range(3)]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_step_beyond_the_end_of_the_run_is_not_gathered(workers: int) -> None:
    toy = Toy()
    with feeding(toy, BatchLayout(4, 2), workers) as prefetcher:
        for step in range(5):
            prefetcher.take(step, last_step=5)
        while prefetcher._ahead:  # what a mistake would have left to do is done, so that it shows
            prefetcher._ahead.popleft().micros.result()
    assert toy.gathered == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("workers", [1, 3])
def test_close_leaves_no_thread(workers: int) -> None:
    before = set(threading.enumerate())
    with feeding(Toy(), BatchLayout(4, 2), workers) as prefetcher:
        prefetcher.take(0)
        assert set(threading.enumerate()) - before
    assert set(threading.enumerate()) - before == set()
    prefetcher.close()  # twice does no harm


class Event:
    """Stands for the end of a copy to a GPU."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


def test_what_is_being_copied_is_held_until_it_is_done() -> None:
    """Only the time a copy takes is made up here; tests/gpu sends real batches."""
    with feeding(Toy(), BatchLayout(2, 2), workers=0) as prefetcher:
        first, second = Event(), Event()
        alive = []
        for event in (first, second):
            rows = np.zeros(3)
            alive.append(weakref.ref(rows))
            prefetcher._hold({"rows": rows}, event)  # type: ignore[arg-type]
            del rows
        assert all(ref() is not None for ref in alive)
        first.is_done = True
        prefetcher._hold({}, Event())  # type: ignore[arg-type]  # the next batch is sent
        assert [ref() is not None for ref in alive] == [False, True]
