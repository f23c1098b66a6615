"""If this fails, a budget that a user wrote means another number of steps or seconds, or a figure is misprinted."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.units import Budget, count, duration, size

SPELLINGS = {
    "steps": ("", "step", "steps", "iter", "iters"),
    "targets": ("token", "tokens", "target", "targets"),
    "epochs": ("epoch", "epochs"),
    "seconds": ("s", "sec", "seconds"),
}
SCALES = {"": 1, "k": 1000, "M": 10**6, "B": 10**9}


@given(st.integers(0, 10**12), st.sampled_from(["steps", "targets"]), st.data())
def test_whole_numbers_come_back_exactly(number: int, unit: str, data: st.DataObject) -> None:
    word = data.draw(st.sampled_from(SPELLINGS[unit]))
    gap = data.draw(st.sampled_from(["", " "]))
    budget = Budget.parse(f"{number}{gap}{word}")
    assert getattr(budget, unit) == number
    assert budget == Budget.parse(str(budget))
    assert [getattr(budget, other) for other in SPELLINGS if other != unit] == [None] * 3


@given(st.integers(1, 10**6), st.integers(0, 3), st.sampled_from(list(SCALES)))
def test_a_scaled_decimal_is_exact_or_refused(digits: int, places: int, scale: str) -> None:
    number = Decimal(digits).scaleb(-places)
    exact = number * SCALES[scale]
    if exact == exact.to_integral_value():
        assert Budget.parse(f"{number:f}{scale} tokens").targets == int(exact)
    else:
        with pytest.raises(ValueError, match="not a whole number of targets"):
            Budget.parse(f"{number:f}{scale} tokens")


@given(st.floats(0.001, 1e6), st.sampled_from([("s", 1), ("min", 60), ("h", 3600)]))
def test_times_are_seconds(number: float, unit: tuple[str, int]) -> None:
    assert Budget.parse(f"{number!r} {unit[0]}").seconds == pytest.approx(number * unit[1])
    assert Budget.parse(f"{number!r} epochs").epochs == number


@given(st.permutations(["30 steps", "2k tokens", "1.5 epochs", "2 min"]), st.integers(1, 4))
def test_limits_join_in_any_order(parts: list[str], number: int) -> None:
    expected = {
        "30 steps": ("steps", 30),
        "2k tokens": ("targets", 2000),
        "1.5 epochs": ("epochs", 1.5),
        "2 min": ("seconds", 120),
    }
    budget = Budget.parse(", ".join(parts[:number]))
    given_limits = {unit: getattr(budget, unit) for unit in SPELLINGS if getattr(budget, unit) is not None}
    assert given_limits == dict(expected[part] for part in parts[:number])


@pytest.mark.parametrize(
    ("value", "steps"), [(3e5, 300_000), (2000, 2000), ("1_000", 1000), ("3e5", 300_000), (1e16, 10**16)]
)
def test_numbers_of_yaml_mean_steps(value: float | str, steps: int) -> None:
    assert Budget.parse(value).steps == steps


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("2.5", "not a whole number of steps"),
        ("-3", "not a quantity"),
        ("", "not a quantity"),
        ("ten steps", "not a quantity"),
        ("3 fortnights", "not a unit"),
        ("5 m", "not a unit"),  # minutes or millions? ask
        ("10 steps, 20 steps", "two limits in steps"),
        ("1 min, 30 s", "two limits in seconds"),
        ("1e400", "too large"),
        ("1e999999999999 epochs", "too large"),
        (math.inf, "not a quantity"),
        (math.nan, "not a quantity"),
        (True, "not a quantity"),
        (None, "not a quantity"),
    ],
)
def test_what_is_refused(value: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Budget.parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "is_never"), [("0", True), ("0 tokens", True), ("0, 10 min", True), ("1", False), ("1 s", False)]
)
def test_zero_means_never(text: str, is_never: bool) -> None:
    assert Budget.parse(text).is_never is is_never
    assert Budget().is_never


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (9999, "9999"), (1234.5, "1234"), (12.345, "12.3"), (12_345, "12.3k"), (1_234_567, "1.23M"),
     (124e6, "124M"), (9.04e9, "9.04B"), (2e12, "2T"), (math.nan, "nan"), (math.inf, "inf")],
)  # fmt: skip
def test_count(value: float, text: str) -> None:
    assert count(value) == text


@given(st.floats(0, 1e15))
def test_a_count_is_short_and_close(value: float) -> None:
    text = count(value)
    assert "e" not in text or value < 1e-3
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBT")) * scale == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (12.3, "12 s"), (59.7, "1 m 00 s"), (75, "1 m 15 s"), (3599.6, "1 h 00 m"),
     (4325, "1 h 12 m"), (47.99 * 3600, "47 h 59 m"), (50 * 3600, "2 d 2 h"), (math.nan, "?"), (math.inf, "?")],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.5 kB"), (1_536_000, "1.5 MB"), (2e9, "2.0 GB"), (3e12, "3.0 TB")],
)
def test_size(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text
