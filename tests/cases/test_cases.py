"""If this fails, the doctor misses a disease of its catalogue, or sees one where there is none, or only just.

All of it: `make test-doctor`. The everyday tests take the quick cases with one seed. `python -m tests.cases.margins`
prints what the margins are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rung.doctor.finding import SEVERITIES
from tests.cases.case import Case, Found, Seen
from tests.cases.catalog import cases
from tests.cases.statistics import ENOUGH

CASES = cases()
SEEDS = range(1, 6)


def at_least(found: Found, severity: str) -> dict[str, str]:
    return {rule: s for rule, s in found.items() if SEVERITIES.index(s) >= SEVERITIES.index(severity)}


def names(some: list[Case]) -> list[str]:
    return [f"{case.rule}-{case.name}" for case in some]


def assert_sick(case: Case, seen: Seen) -> None:
    assert case.rule in at_least(seen.found, case.severity), f"missed; found {dict(seen.found)}"
    others = {rule: s for rule, s in at_least(seen.found, "sick").items() if rule != case.rule}
    assert not others, f"another root cause: {others}"


def assert_healthy(seen: Seen) -> None:
    assert at_least(seen.found, "warn") == {}


def assert_margin(case: Case, seen: Seen, is_sick: bool) -> None:
    """Too near to the limit, it is the processor that decides; make the fault stronger, or its twin calmer."""
    reading = case.reading(seen, is_sick)
    if reading is not None:
        assert (reading.margin if is_sick else -reading.margin) >= ENOUGH, reading


QUICK = [case for case in CASES if case.is_quick]


@pytest.mark.parametrize("case", QUICK, ids=names(QUICK))
def test_a_quick_case_is_caught_and_its_twin_left_alone(case: Case, tmp_path: Path) -> None:
    assert_sick(case, case.sick(tmp_path / "sick", 1))
    assert_healthy(case.healthy(tmp_path / "healthy", 1))


@pytest.mark.doctor
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_the_sick_one_has_clearly_this_disease_and_no_other(case: Case, tmp_path: Path) -> None:
    seen = case.sick(tmp_path, 1)
    assert_sick(case, seen)
    assert_margin(case, seen, is_sick=True)


@pytest.mark.doctor
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_the_healthy_twin_clearly_has_none(case: Case, seed: int, tmp_path: Path) -> None:
    seen = case.healthy(tmp_path, seed)
    assert_healthy(seen)
    assert_margin(case, seen, is_sick=False)
