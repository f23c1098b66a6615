"""If this fails, a case that only just crosses its limit passes for a clear one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rung.doctor.history import History
from tests.cases.case import Case, Seen
from tests.cases.made import history
from tests.cases.statistics import FACT, Reading, above, all_of, any_of, below, held
from tests.cases.test_cases import assert_margin


@pytest.mark.parametrize(
    ("reading", "margin"),
    [
        (above("norm", 4.0, 1.0), 2.0),
        (above("norm", 0.5, 1.0), -1.0),
        (above("norm", 0.0, 1.0), -math.inf),
        (below("slope", 0.01, 0.04), 2.0),
        (below("slope", 0.0, 0.04), math.inf),
        (above("share", 0.95, 0.9, spread=(0.025, 0.5)), 2.0),  # of sick runs, which vary by .025
        (above("share", 0.4, 0.9, spread=(0.025, 0.5)), -1.0),  # of healthy ones, which vary by .5
        (above("never measured", math.nan, 1.0), -math.inf),
    ],
)
def test_a_margin_is_in_doublings_or_in_spreads(reading: Reading, margin: float) -> None:
    assert reading.margin == pytest.approx(margin)


def test_of_signs_that_are_wanted_together_the_weakest_decides() -> None:
    weak, strong = above("weak", 1.5, 1.0), below("strong", 0.1, 1.0)
    assert all_of(strong, weak) is weak
    assert any_of(strong, weak) is strong


def test_of_a_state_what_held_three_times_in_a_row_counts() -> None:
    """One wild look is none: the doctor would not speak of it either."""
    losses = np.where((np.arange(200) >= 139) & (np.arange(200) < 140), 64.0, 4.0)  # seen at one look, after 140 steps
    statistic = held("O1", lambda until: above("loss", float(until["loss"].values[-1]), 1.0))
    assert statistic(history({"loss": losses.tolist()}), "warn").value == 4.0


@pytest.mark.parametrize(("value", "is_sick", "is_clear"), [(2.1, True, True), (1.9, True, False), (0.4, False, True),
                                                            (0.6, False, False)])  # fmt: skip
def test_a_case_near_its_limit_is_refused(value: float, is_sick: bool, is_clear: bool) -> None:
    def ask(root: Path, seed: int) -> Seen:
        return Seen({}, History())

    case = Case("O1", "made up", ask, ask, statistic=lambda evidence, severity: above("value", value, 1.0))
    if is_clear:
        assert_margin(case, ask(Path(), 1), is_sick)
    else:
        with pytest.raises(AssertionError):
            assert_margin(case, ask(Path(), 1), is_sick)


def test_a_fact_has_no_margin() -> None:
    case = Case("R1", "made up", lambda root, seed: Seen({}), lambda root, seed: Seen({}), statistic=FACT)
    assert case.reading(Seen({}), is_sick=True) is None
