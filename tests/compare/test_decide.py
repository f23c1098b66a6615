"""If this fails, an interval is not what it says it is, and noise is called a result."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.compare.decide import (
    ALPHA,
    LOOKS,
    AlphaSpending,
    bca_interval,
    correlation,
    decide,
    decide_by_floor,
    decide_unpaired,
    more_pairs,
)
from rung.compare.judge import judge
from tests.compare.arms import arms

CLOSE = [(1.0, 0.95), (1.01, 0.957), (0.99, 0.941)]  # about 0.05 better, and steadily


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_a_paired_interval_is_that_of_the_textbook() -> None:
    """Differences 1, 2, 3, 4, 5 with one planned look: mean 3, sd sqrt(2.5), t of 4 degrees at 3 % 3.2976."""
    found = decide([1.0, 2.0, 3.0, 4.0, 5.0], delta=0.0, spending=AlphaSpending(5))
    half = 3.2976 * math.sqrt(2.5) / math.sqrt(5)
    assert found.level == pytest.approx(0.03)
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half), abs=1e-3)
    assert found.p == pytest.approx(0.0132, abs=1e-4)  # t = 4.243
    assert found.word == "WORSE"


def test_welch_is_that_of_the_textbook() -> None:
    """Equal sizes and spreads: 2n - 2 degrees of freedom, and t as in the pooled test."""
    a, b = [1.0, 2.0, 3.0], [5.0, 6.0, 7.0]
    found = decide_unpaired(a, b, 0.0, AlphaSpending(3))
    assert found.effect == 4
    assert found.p == pytest.approx(0.00805, abs=1e-4)  # t = 4.899, 4 degrees
    assert (found.method, found.word) == ("Welch", "WORSE")
    assert decide_unpaired(b, a, 0.0, AlphaSpending(3)).word == "BETTER"


def test_all_looks_together_may_err_no_more_than_alpha() -> None:
    assert sum(AlphaSpending().level(n) for n in LOOKS) == pytest.approx(ALPHA)
    for planned in (3, 4, 6, 20):
        spent = AlphaSpending(planned).level(planned) + sum(
            AlphaSpending(planned).level(n) for n in LOOKS if n != planned
        )
        assert spent <= ALPHA + 1e-12
    levels = [AlphaSpending().level(n) for n in LOOKS]
    assert levels == sorted(levels)  # little is spent early
    assert AlphaSpending().level(4) == AlphaSpending().level(3)  # between two looks, that of the smaller one
    assert AlphaSpending().level(30) == AlphaSpending().level(12)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=12), st.floats(0, 0.5), st.booleans())
def test_a_word_follows_from_its_interval(differences: list[float], delta: float, lower: bool) -> None:
    found = decide(differences, delta, is_lower_better=lower)
    if found.sd == 0:
        return
    assert found.low <= found.effect <= found.high
    if found.word == "EQUIVALENT":
        assert -delta < found.low
        assert found.high < delta
    elif found.word in ("BETTER", "WORSE"):
        assert found.low > 0 or found.high < 0
        assert (found.word == "BETTER") == ((found.effect < 0) == lower)
    else:
        assert found.low <= 0 <= found.high


@given(st.lists(st.floats(-1, 1).map(lambda x: round(x, 6)), min_size=3, max_size=12), st.floats(0.001, 1))
def test_turning_the_arms_round_turns_the_verdict_round(differences: list[float], delta: float) -> None:
    one, two = decide(differences, delta), decide([-x for x in differences], delta)
    other = {"BETTER": "WORSE", "WORSE": "BETTER"}
    assert two.word == other.get(one.word, one.word)


def test_equal_differences_are_no_replicates() -> None:
    assert decide([0.0, 0.0, 0.0], 0.01).word == "EQUIVALENT"
    found = decide([0.2, 0.2, 0.2], 0.01)
    assert found.word == "UNDECIDED"
    assert "the seed decides nothing" in found.reasons[0]


def test_more_pairs_would_really_do() -> None:
    """With the number of pairs it asks for, about four of five repetitions are decided (a fixed seed; sd of the share
    0.013 over 1000)."""
    rng = random.Random(1)
    need = more_pairs(0.8, 1.0, 3, 0.0, AlphaSpending().level)
    assert need is not None
    hits = sum(decide([rng.gauss(0.8, 1.0) for _ in range(3 + need)], 0.0).word == "WORSE" for _ in range(1000))
    assert 740 <= hits <= 880
    assert more_pairs(0.0, 1.0, 3, 0.0, AlphaSpending().level) is None  # nothing to find, and nothing is small enough


def test_a_noise_floor_known_from_three_runs_asks_for_more() -> None:
    assert decide_by_floor([-0.1], 0.01, df=200, delta=0.0).word == "BETTER"  # z = 7
    few = decide_by_floor([-0.1], 0.01, df=2, delta=0.0)
    assert few.word == "UNDECIDED"
    assert "9.9 are needed" in few.reasons[0]
    assert decide_by_floor([-0.04], 0.01, df=1000, delta=0.0).word == "UNDECIDED"  # z = 2.8


def test_the_bootstrap_is_repeatable_and_near_the_t_interval() -> None:
    rng = random.Random(3)
    values = [rng.gauss(0.5, 1) for _ in range(30)]
    found = decide(values, 0.0)
    interval = bca_interval(values, found.level)
    assert interval == bca_interval(values, found.level)
    assert interval == pytest.approx((found.low, found.high), abs=0.12)


def test_the_bootstrap_stands_beside_the_interval_from_eight_pairs_on(root: Path) -> None:
    a, b = arms(root, [(1 + x / 100, 0.9 + x * x / 1000) for x in range(8)])
    found = judge(a, b)
    assert found.bca is not None
    assert found.bca[0] < found.effect < found.bca[1]
    assert judge(a[:7], b[:7]).bca is None


def test_a_skewed_spread_bends_the_bootstrap() -> None:
    values = [0.0] * 8 + [1.0, 4.0]
    low, high = bca_interval(values, 0.05)
    mean = statistics.fmean(values)
    assert high - mean > 1.5 * (mean - low)


def test_several_variants_share_the_level() -> None:
    for n in (3, 4, 5, 12):
        assert AlphaSpending(3, num_variants=4).level(n) == pytest.approx(AlphaSpending(3).level(n) / 4)
    alone, among = decide([1.0, 2.0, 3.0], 0.0), decide([1.0, 2.0, 3.0], 0.0, AlphaSpending(num_variants=2))
    assert among.low < alone.low < alone.high < among.high
    assert (
        decide_by_floor([-0.1], 0.01, 5, 0.0, AlphaSpending(num_variants=9)).low
        < decide_by_floor([-0.1], 0.01, 5, 0.0).low
    )


def test_correlation() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(correlation([1, 1, 1], [1, 2, 3]))
