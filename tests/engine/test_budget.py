"""If this fails, a run ends, evaluates or saves at another step than its config says, or otherwise after a resume."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.engine.budget import Cadence, Rate
from rung.units import Budget

RATE = Rate(rows_per_step=8, epoch_rows=100, targets_per_row=256.0)
rates = st.builds(Rate, st.integers(1, 4096), st.integers(1, 10**7), st.integers(1, 4096).map(float))


@given(rates, st.integers(0, 10**9))
def test_tokens_are_never_exceeded_by_a_step(rate: Rate, targets: int) -> None:
    steps = rate.steps(Budget(targets=targets))
    assert steps is not None
    per_step = rate.rows_per_step * Fraction(rate.targets_per_row)
    assert steps * per_step <= targets < (steps + 1) * per_step


@given(rates, st.integers(0, 50))
def test_whole_epochs_show_every_row_and_stop(rate: Rate, epochs: int) -> None:
    steps = rate.steps(Budget(epochs=float(epochs)))
    assert steps is not None
    assert steps * rate.rows_per_step >= epochs * rate.epoch_rows
    assert (steps - 1) * rate.rows_per_step < epochs * rate.epoch_rows or steps == 0


@given(rates, st.integers(1, 10**6), st.integers(1, 10**9), st.floats(0.1, 20))
def test_the_first_that_is_due_counts(rate: Rate, steps: int, targets: int, epochs: float) -> None:
    alone = [rate.steps(b) for b in (Budget(steps=steps), Budget(targets=targets), Budget(epochs=epochs))]
    joined = rate.steps(Budget(steps=steps, targets=targets, epochs=epochs, seconds=5.0))
    assert joined == min(n for n in alone if n is not None)


def test_time_alone_is_no_number_of_steps() -> None:
    assert RATE.steps(Budget.parse("10 min")) is None
    assert RATE.steps(Budget.parse("10 min, 50 steps")) == 50


@pytest.mark.parametrize(
    ("text", "steps"),
    [("7", 7), ("2048 tokens", 1), ("2047 tokens", 0), ("4.1k tokens", 2), ("1 epoch", 13), ("0.5 epochs", 7)],
)
def test_by_hand(text: str, steps: int) -> None:
    assert RATE.steps(Budget.parse(text)) == steps


@given(st.integers(1, 50), st.integers(0, 200))
def test_what_is_due_does_not_depend_on_where_counting_began(every: int, resumed_at: int) -> None:
    """A cadence made at a resume agrees with the one of the run that was never stopped."""
    whole, resumed = (Cadence(Budget(steps=every), RATE, elapsed_s=e) for e in (0.0, 17.0))
    straight = [step for step in range(300) if whole.due(step, float(step))]
    assert straight == [step for step in range(1, 300) if step % every == 0]
    assert [s for s in range(resumed_at, 300) if resumed.due(s, 17.0)] == [s for s in straight if s >= resumed_at]


def test_never_is_never_due() -> None:
    for text in ("0", "0 tokens", "0, 1 s"):
        cadence = Cadence(Budget.parse(text), RATE, 0.0)
        assert not any(cadence.due(step, step * 1e6) for step in range(100))


def test_a_distance_below_one_step_is_every_step() -> None:
    cadence = Cadence(Budget.parse("1 token"), RATE, 0.0)
    assert [step for step in range(5) if cadence.due(step, 0.0)] == [1, 2, 3, 4]


def test_the_clock_counts_from_the_start_of_training() -> None:
    cadence = Cadence(Budget.parse("10 s"), RATE, elapsed_s=100.0)
    asked = [100.0, 109.9, 110.5, 112.0, 120.4, 120.6]
    assert [t for t in asked if cadence.due(3, t)] == [110.5, 120.4]


def test_a_run_that_is_stopped_before_each_time_is_up_still_gets_its_turn() -> None:
    resumed = Cadence(Budget.parse("30 min"), RATE, elapsed_s=1750.0)
    assert [t for t in (1760.0, 1801.0, 1900.0) if resumed.due(3, t)] == [1801.0]


def test_count_and_clock_together() -> None:
    cadence = Cadence(Budget.parse("10 steps, 60 s"), RATE, elapsed_s=0.0)
    due = [step for step in range(25) if cadence.due(step, elapsed_s=step * 8.0)]
    assert due == [8, 10, 15, 20, 23]  # by clock after 60, 120 and 180 s, by count at 10 and 20


@given(rates, st.integers(1, 3))
def test_epochs_are_due_where_they_end_and_do_not_drift(rate: Rate, epochs: int) -> None:
    """A row more than a step each epoch would be a whole epoch off after some hundred."""
    if epochs * rate.epoch_rows < rate.rows_per_step or rate.epoch_rows > 400 * rate.rows_per_step:
        return
    cadence = Cadence(Budget(epochs=float(epochs)), rate, 0.0)
    last = rate.steps(Budget(epochs=4.0 * epochs)) or 0
    ends = [rate.steps(Budget(epochs=float(k * epochs))) for k in range(1, 5)]
    assert [step for step in range(last + 1) if cadence.due(step, 0.0)] == ends
