"""If this fails, a fault that is named in a recipe is called healthy in somebody's own loop.

`python -m tests.cases.script` counts them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.case import Trained
from tests.cases.catalog import cases
from tests.cases.script import script_case

FAULTS = {
    ("N1", "nan feature"): "fatal",
    ("N3", "broken weight"): "fatal",
    ("N6", "no labels"): "fatal",
    ("O2", "rate / 100"): "warn",
    ("O3", "from zero"): "warn",
    ("O5", "thrown off"): "warn",
    ("O9", "detached"): "sick",
    ("A2", "targets that a tanh cannot reach"): "fatal",
    ("A3", "attention scaled up"): "sick",
    ("E6", "targets not shifted"): "warn",
}
ORDER = ("info", "warn", "sick", "fatal")


@pytest.mark.parametrize("fault", FAULTS, ids=" ".join)
def test_a_fault_is_named_in_a_plain_loop_and_its_healthy_twin_is_left_alone(
    fault: tuple[str, str], tmp_path: Path
) -> None:
    case = next(case for case in cases() if (case.rule, case.name) == fault)
    assert isinstance(case.sick, Trained)
    found = script_case(case.sick.recipe, tmp_path, *case.sick.overrides).found
    assert ORDER.index(found.get(case.rule, "info")) >= ORDER.index(FAULTS[fault]), found
    assert isinstance(case.healthy, Trained)
    healthy = script_case(case.healthy.recipe, tmp_path, *case.healthy.overrides).found
    assert not [rule for rule, severity in healthy.items() if severity != "info"], healthy


def test_ten_times_a_rate_that_is_too_low_heals(tmp_path: Path) -> None:
    """As its remedy says; the case has a hundredth of a good one."""
    case = next(case for case in cases() if (case.rule, case.name) == ("O2", "rate / 100"))
    assert isinstance(case.sick, Trained)
    assert case.sick.overrides == ("lr.learning_rate=3e-5",)
    healed = script_case(case.sick.recipe, tmp_path, "lr.learning_rate=3e-4")
    assert (dict(healed.found), healed.verdict) == ({}, "healthy")
