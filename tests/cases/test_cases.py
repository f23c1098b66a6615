"""If this fails, the doctor misses a disease of its catalogue, or sees one where there is none.

All of it: `make test-doctor`. The everyday tests take the quick cases with one seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rung.doctor.finding import SEVERITIES
from tests.cases.case import Case, Found
from tests.cases.catalog import cases

CASES = cases()
SEEDS = range(1, 6)


def at_least(found: Found, severity: str) -> dict[str, str]:
    return {rule: s for rule, s in found.items() if SEVERITIES.index(s) >= SEVERITIES.index(severity)}


def names(some: list[Case]) -> list[str]:
    return [f"{case.rule}-{case.name}" for case in some]


def assert_sick(case: Case, found: Found) -> None:
    assert case.rule in at_least(found, case.severity), f"missed; found {dict(found)}"
    others = {rule: s for rule, s in at_least(found, "sick").items() if rule != case.rule}
    assert not others, f"another root cause: {others}"


QUICK = [case for case in CASES if case.is_quick]


@pytest.mark.parametrize("case", QUICK, ids=names(QUICK))
def test_a_quick_case_is_caught_and_its_twin_left_alone(case: Case, tmp_path: Path) -> None:
    assert_sick(case, case.sick(tmp_path / "sick", 1))
    assert at_least(case.healthy(tmp_path / "healthy", 1), "warn") == {}


@pytest.mark.doctor
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_the_sick_one_has_this_disease_and_no_other(case: Case, tmp_path: Path) -> None:
    assert_sick(case, case.sick(tmp_path, 1))


@pytest.mark.doctor
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_the_healthy_twin_has_none(case: Case, seed: int, tmp_path: Path) -> None:
    assert at_least(case.healthy(tmp_path, seed), "warn") == {}
