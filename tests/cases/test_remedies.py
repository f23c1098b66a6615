"""If this fails, a remedy that the doctor proposes as one does not heal the sick case of its own rule.

`python -m tests.cases.remedies` prints them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.case import Case
from tests.cases.remedies import try_remedy, with_keys

QUICK = {("O1", "rate x 300"), ("O3", "no warm-up"), ("O6", "eps 0.1")}


def assert_heals(case: Case, root: Path) -> None:
    tried = try_remedy(case, root)
    if tried is not None:
        assert tried.heals or tried.finding.remedy_is_guess, tried.line()


@pytest.mark.parametrize("case", [c for c in with_keys() if (c.rule, c.name) in QUICK], ids=lambda c: c.name)
def test_a_quick_remedy_heals(case: Case, tmp_path: Path) -> None:
    tried = try_remedy(case, tmp_path)
    assert tried is not None
    assert tried.heals, tried.line()


@pytest.mark.doctor
@pytest.mark.parametrize("case", with_keys(), ids=lambda c: f"{c.rule}-{c.name}")
def test_a_remedy_heals_or_is_a_guess(case: Case, tmp_path: Path) -> None:
    assert_heals(case, tmp_path)
