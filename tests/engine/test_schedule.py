"""If this fails, a learning rate moves when a run is resumed, cut differently or stopped early."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.engine.schedule import Schedule

DIARY = Schedule("cosine", peak=8e-5, floor=8e-6, start=0.0, warmup_steps=1000, decay_steps=300_000)
SPEECH = {"shape": "cosine", "peak": 6e-5, "floor": 1e-5, "start": 6e-5, "warmup_steps": 0}


@pytest.mark.parametrize(
    ("step", "lr"), [(0, 0.0), (1, 8e-8), (1000, 8e-5), (150_500, 4.4e-5), (300_000, 8e-6), (999_999, 8e-6)]
)
def test_cosine_of_the_piano_diary(step: int, lr: float) -> None:
    assert DIARY.lr(step) == pytest.approx(lr, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("horizon", "lr"), [(900_000, 5.991e-5), (90_000, 5.17e-5)])
def test_cosine_of_the_speech_diary(horizon: int, lr: float) -> None:
    assert Schedule(**SPEECH, decay_steps=horizon).lr(24_000) == pytest.approx(lr, rel=1e-3)


@given(
    shape=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    peak=st.floats(1e-6, 1.0),
    floor_share=st.floats(0, 1),
    start_share=st.floats(0, 1),
    warmup=st.integers(0, 50),
    decay=st.integers(51, 500),
    fraction=st.floats(0.01, 1.0),
)
def test_no_jumps_and_the_right_ends(
    shape: str, peak: float, floor_share: float, start_share: float, warmup: int, decay: int, fraction: float
) -> None:
    """The warm-up rises to the peak, the fall never rises again, the end is the floor, and no step is a jump."""
    schedule = Schedule(shape, peak, peak * floor_share, peak * start_share, warmup, decay, fraction)
    rates = [schedule.lr(step) for step in range(decay + 20)]
    rise, fall = rates[: warmup + 1], rates[warmup:]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(rise))
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(fall))
    assert rates[warmup] == pytest.approx(peak)
    if shape != "constant":
        assert rates[-1] == pytest.approx(peak * floor_share, abs=1e-12)
    steepest = peak * max(1 / min(max(decay * fraction, 1), decay - warmup), 2 / (decay - warmup))
    assert all(abs(a - b) <= steepest * 1.01 + 1e-12 for a, b in itertools.pairwise(fall))


@given(scale=st.floats(0.1, 10.0), step=st.integers(0, 400))
def test_the_family_scales_as_one(scale: float, step: int) -> None:
    one = Schedule("cosine", 1e-3, 1e-4, 1e-6, 40, 300)
    many = Schedule("cosine", 1e-3 * scale, 1e-4 * scale, 1e-6 * scale, 40, 300)
    assert many.lr(step) == pytest.approx(one.lr(step) * scale)


def test_plateau_falls_only_after_patience() -> None:
    schedule = Schedule("plateau", 1.0, 0.1, 0.0, 0, 0, plateau_factor=0.5, plateau_patience=2)
    assert schedule.lr(9, [3.0, 2.0, 2.5]) == 1.0
    assert schedule.lr(9, [3.0, 2.0, 2.5, 2.1]) == 0.5
    assert schedule.lr(9, [3.0, 2.0, 2.5, 2.1, 1.9, 1.95]) == 0.5
    assert schedule.lr(9, [3.0] * 40) == 0.1
    assert schedule.lr(9, [math.nan, math.nan, 1.0]) == 0.5  # what is not a number is not a new best
