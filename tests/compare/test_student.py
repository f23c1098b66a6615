"""If this fails, an interval is too narrow or too wide: Student's t has other tails than the tables say."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.compare.student import limit, two_sided, upper_tail

# Tails as scipy 1.17 has them (scipy.stats.t.sf); most are so small that 1 minus the rest would have lost them.
FAR = [
    (3.9, 200, 6.565087349682057e-05),
    (4.0, 4, 0.008065044950046273),
    (7.25, 2.5, 0.004857787165714968),
    (8.092992616757432, 791.8384081789187, 1.0934569114073024e-15),
    (9.5, 60, 7.182396868914729e-14),
    (30.0, 11, 3.3334656106825253e-12),
]


def cdf(t: float, df: float) -> float:
    return upper_tail(-t, df)


# Two-sided 5 %, 1 % and 0.1 % limits as printed in statistical tables.
TABLE = {
    1: (12.706, 63.657, 636.619),
    2: (4.303, 9.925, 31.599),
    3: (3.182, 5.841, 12.924),
    4: (2.776, 4.604, 8.610),
    5: (2.571, 4.032, 6.869),
    7: (2.365, 3.499, 5.408),
    10: (2.228, 3.169, 4.587),
    11: (2.201, 3.106, 4.437),
    20: (2.086, 2.845, 3.850),
    30: (2.042, 2.750, 3.646),
    60: (2.000, 2.660, 3.460),
    120: (1.980, 2.617, 3.373),
}


@pytest.mark.parametrize("df", TABLE)
def test_limits_are_those_of_the_tables(df: int) -> None:
    for level, printed in zip((0.05, 0.01, 0.001), TABLE[df]):
        assert limit(level, df) == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize("t", [-50.0, -3.0, -1e-8, 0.0, 0.3, 1.0, 7.5, 1e4, 1e8])
def test_one_two_and_four_degrees_have_closed_forms(t: float) -> None:
    cauchy = math.atan2(1, t) / math.pi
    two = (1 - t / math.sqrt(2 + t * t)) / 2 if t < 1 else 1 / (math.sqrt(2 + t * t) * (math.sqrt(2 + t * t) + t))
    assert upper_tail(t, 1) == pytest.approx(cauchy, rel=1e-9)
    assert upper_tail(t, 2) == pytest.approx(two, rel=1e-9)
    if abs(t) < 10:
        u = t / math.sqrt(4 + t * t)
        assert cdf(t, 4) == pytest.approx(0.5 + 0.75 * (u - u**3 / 3), rel=1e-9)


def test_many_degrees_are_a_normal_distribution() -> None:
    normal = NormalDist()
    for level in (0.002, 0.05, 0.4, 0.999):
        assert limit(level, 1e5) == pytest.approx(normal.inv_cdf(1 - level / 2), abs=1e-4)
    assert cdf(1.0, 1e5) == pytest.approx(normal.cdf(1.0), abs=1e-5)


@pytest.mark.parametrize(("t", "df", "tail"), FAR)
def test_small_tails_keep_their_digits(t: float, df: float, tail: float) -> None:
    assert upper_tail(t, df) == pytest.approx(tail, rel=1e-9)


@pytest.mark.parametrize("df", [1, 2, 3.7, 8, 33.3, 400])
def test_the_cdf_is_the_integral_of_the_density(df: float) -> None:
    """Against Simpson's rule on the density itself: another way to the same number."""
    const = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    for t in (0.5, 2.0, 6.0):
        n = 4000
        at = [const * (1 + (t * i / n) ** 2 / df) ** (-(df + 1) / 2) for i in range(n + 1)]
        area = t / n / 3 * (at[0] + at[-1] + 4 * sum(at[1:-1:2]) + 2 * sum(at[2:-1:2]))
        assert cdf(t, df) == pytest.approx(0.5 + area, abs=1e-11)


@given(st.floats(1e-9, 1 - 1e-9), st.floats(0.5, 5000))
def test_a_limit_is_passed_as_often_as_it_says(level: float, df: float) -> None:
    assert two_sided(limit(level, df), df) == pytest.approx(level, rel=1e-7)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0.5, 1e5))
def test_a_cdf_rises_and_is_symmetric(s: float, t: float, df: float) -> None:
    low, high = sorted((s, t))
    assert 0 <= cdf(low, df) <= cdf(high, df) + 1e-12 <= 1 + 1e-11
    assert cdf(s, df) == pytest.approx(upper_tail(-s, df), abs=1e-14)
    assert two_sided(s, df) == two_sided(-s, df)


def test_the_ends() -> None:
    assert (upper_tail(math.inf, 3), cdf(math.inf, 3), upper_tail(1e-200, 3), upper_tail(0.0, 3)) == (0, 1, 0.5, 0.5)
    assert math.isnan(cdf(math.nan, 3))
    with pytest.raises(ValueError, match="degrees of freedom"):
        cdf(1.0, 0)
