"""If this fails, a page claims a slope, an exponent or an interval that the figures do not hold."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.compare.scaling.fit import LEAST_DISTINCT, Interval, line, mean_interval, power, unpaired
from rung.compare.student import limit

XS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def test_a_mean_has_students_interval() -> None:
    found = mean_interval([-0.169, -0.332, -0.273, -0.584])  # t of 3 degrees of freedom is 3.182446
    sd = math.sqrt(sum((x + 0.3395) ** 2 for x in (-0.169, -0.332, -0.273, -0.584)) / 3)
    assert found.value == pytest.approx(-0.3395)
    assert found.high - found.value == pytest.approx(3.182446305 * sd / 2, rel=1e-8)
    assert not mean_interval([1.0]).is_known
    assert mean_interval([1.0]).covers_zero  # nothing is excluded by one value
    assert math.isnan(mean_interval([]).value)


def test_the_unpaired_interval_is_welchs() -> None:
    a, b = [2.713, 3.520, 3.366, 4.412], [2.544, 3.188, 3.093, 3.828]
    found = unpaired(a, b)
    parts = [np.var(one, ddof=1) / 4 for one in (a, b)]
    df = sum(parts) ** 2 / sum(part**2 / 3 for part in parts)
    assert found.value == pytest.approx(-0.3395)
    assert found.high - found.value == pytest.approx(limit(0.05, df) * math.sqrt(sum(parts)))
    assert not unpaired([1.0], [2.0, 3.0]).is_known


@given(st.floats(-10, 10), st.floats(-10, 10), st.lists(st.floats(-5, 5), min_size=1, max_size=4))
def test_a_line_is_recovered(intercept: float, slope: float, levels: list[float]) -> None:
    found = line([[(x, intercept + level + slope * x) for x in XS] for level in levels])
    assert found is not None
    assert found.slope.value == pytest.approx(slope, abs=1e-9)
    assert found.intercept.value == pytest.approx(intercept + sum(levels) / len(levels), abs=1e-9)
    assert max(abs(r) for one in found.residuals for r in one) < 1e-9
    assert found.slope.low - 1e-9 <= slope <= found.slope.high + 1e-9


@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=3, max_size=20))
def test_one_seed_agrees_with_numpy(points: list[tuple[float, float]]) -> None:
    xs, ys = np.array(points).T
    found = line([points])
    if np.ptp(xs) < 1e-2:
        return
    assert found is not None
    columns = np.stack([np.ones_like(xs), xs], axis=1)
    (intercept, slope), *_ = np.linalg.lstsq(columns, ys, rcond=None)
    scale = 1 + abs(intercept) + abs(slope)
    assert found.slope.value == pytest.approx(slope, abs=1e-6 * scale)
    assert found.intercept.value == pytest.approx(intercept, abs=1e-6 * scale)
    residuals = ys - columns @ [intercept, slope]
    covariance = residuals @ residuals / max(1, len(xs) - 2) * np.linalg.inv(columns.T @ columns)
    half = limit(0.05, len(xs) - 2) * math.sqrt(max(0.0, covariance[1, 1]))
    assert found.slope.high - found.slope.value == pytest.approx(half, abs=1e-5 * scale)


def test_what_cannot_be_fitted_is_not() -> None:
    assert line([]) is None
    assert line([[(1.0, 2.0)]]) is None
    assert line([[(1.0, 2.0), (1.0, 3.0)]]) is None
    two = line([[(0.0, 2.0), (1.0, 3.0)]])
    assert two is not None
    assert two.slope.value == 1.0
    assert not two.slope.is_known  # two points lie on a line whatever they are
    few = [(x, 1 / x) for x in XS[: LEAST_DISTINCT - 1]]
    assert power([few, few, few]) is None
    assert power([[(0.0, 1.0), *((x, 1 / x) for x in XS)]]) is None


@given(
    st.floats(0, 5),
    st.floats(0.1, 5),
    st.floats(0.1, 2),
    st.floats(1, 1e6),
    st.lists(st.floats(-1, 1), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=40)
def test_a_power_law_is_recovered(
    floor: float, gain: float, exponent: float, first: float, levels: list[float]
) -> None:
    seeds = [[(first * x, floor + level + gain * x**-exponent) for x in XS] for level in levels]
    found = power(seeds)
    assert found is not None
    assert found.exponent.value == pytest.approx(exponent, rel=1e-3)
    assert found.gain.value == pytest.approx(gain, rel=2e-3)
    assert found.floor.value == pytest.approx(floor + sum(levels) / len(levels), abs=2e-3 * gain)
    assert found.first == first


def test_a_power_law_is_the_least_squares_one() -> None:
    """No choice of the three parameters near the found ones, or on a wide grid, follows the points better."""
    draw = random.Random(3)
    points = [(x, 2 + 1.5 * x**-0.5 + draw.gauss(0, 0.05)) for x in XS]
    found = power([points])
    assert found is not None
    xs, ys = np.array(points).T
    best = min(
        float(np.linalg.lstsq(np.stack([np.ones_like(xs), xs**-e], axis=1), ys, rcond=None)[1][0])
        for e in np.geomspace(0.01, 8, 4000)
    )
    assert sum(r * r for r in found.residuals[0]) == pytest.approx(best, rel=1e-5)


def test_a_straight_fall_has_no_floor() -> None:
    """Points on a line in log(x) cannot say where they level off: the intervals are open, and not merely wide."""
    draw = random.Random(0)
    found = power([[(x, 3 - 0.3 * math.log2(x) + draw.gauss(0, 0.05)) for x in XS]])
    assert found is not None
    assert found.exponent.low == 0
    assert found.floor.low == -math.inf


def test_an_interval_that_covers_zero_says_so() -> None:
    assert Interval(0.1, -0.1, 0.3).covers_zero
    assert not Interval(0.2, 0.1, 0.3).covers_zero


def test_intervals_hold_what_they_promise() -> None:
    """Of simulated studies about 95 % of the intervals hold the truth, whatever the levels of the seeds."""
    draw = random.Random(7)
    num, hits = 1000, {"slope": 0, "one seed": 0, "mean": 0}
    for _ in range(num):
        # Each seed has its own level, far apart, and its own slope, a little apart.
        seeds = []
        for _ in range(4):
            level, slope = draw.gauss(3, 1), draw.gauss(-0.1, 0.02)
            seeds.append([(x, level + slope * x + draw.gauss(0, 0.03)) for x in range(5)])
        found, alone = line(seeds), line([[(x, 1 - 0.1 * x + draw.gauss(0, 0.03)) for x in range(5)]])
        assert found is not None
        assert alone is not None
        hits["slope"] += found.slope.low <= -0.1 <= found.slope.high
        hits["one seed"] += alone.slope.low <= -0.1 <= alone.slope.high
        mean = mean_interval([draw.gauss(1, 2) for _ in range(3)])
        hits["mean"] += mean.low <= 1 <= mean.high
    print({name: f"{100 * hit / num:.1f} %" for name, hit in hits.items()})  # noqa: T201
    assert all(0.93 <= hit / num <= 0.97 for hit in hits.values()), hits


def test_profiles_hold_what_they_promise() -> None:
    draw = random.Random(11)
    num, hits = 200, {"exponent": 0, "gain": 0, "floor": 0}
    for _ in range(num):
        levels = [draw.gauss(2, 1) for _ in range(3)]
        seeds = [[(x, level + 1.5 * x**-0.5 + draw.gauss(0, 0.03)) for x in XS] for level in levels]
        found = power(seeds)
        assert found is not None
        hits["exponent"] += found.exponent.low <= 0.5 <= found.exponent.high
        hits["gain"] += found.gain.low <= 1.5 <= found.gain.high
        hits["floor"] += found.floor.low <= sum(levels) / 3 <= found.floor.high
    print({name: f"{100 * hit / num:.1f} %" for name, hit in hits.items()})  # noqa: T201
    assert all(0.90 <= hit / num <= 0.99 for hit in hits.values()), hits
