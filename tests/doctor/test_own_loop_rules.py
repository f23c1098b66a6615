"""If this fails, an eval of rows that were trained on, or of other targets than training has, is called healthy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rung.doctor.diagnose import ask
from rung.doctor.history import History
from rung.doctor.rules import catalogue
from tests.cases.made import history, series


def answer(of: History, rule: str) -> str:
    """What one rule says: a severity, healthy, or not looked at."""
    (one,) = ask(of, [known for known in catalogue() if known.id == rule], raises=True)
    return one.findings[0].severity if one.findings else "not looked at" if one.why_not else "healthy"


@pytest.mark.parametrize(
    ("share", "repeats", "said"), [(1.0, 0.0, "warn"), (0.9, 0.85, "healthy"), (0.1, 0.0, "healthy")]
)
def test_rows_that_are_shared_beyond_what_repeats_anyway(share: float, repeats: float, said: str) -> None:
    seen = {"val": {"share": share, "repeats": repeats, "rows": 400}}
    assert answer(history({}, derived={"overlap": seen}, is_script=True), "L10") == said
    assert answer(history({}, is_script=True), "L10") == "not looked at"


def evaluated(times: list[float], rows: int | None = 16, level: float = 1.0) -> History:
    """Evals at every 50 steps, at these times the training loss; an epoch is 300 steps, or unknown."""
    steps = np.arange(400)
    loss = level * (0.5 + 2 * np.exp(-steps / 80)) * (1 + 0.02 * np.random.default_rng(3).standard_normal(400))
    at = [50 * (n + 1) for n in range(len(times))]
    losses = [factor * level * (0.5 + 2 * float(np.exp(-step / 80))) for factor, step in zip(times, at, strict=True)]
    derived: dict[str, Any] = {"rows_per_step": rows, "epoch_rows": 4800}
    evals = {"val": {"loss": series(losses, at)}}
    return history({"loss": list(loss)}, derived=derived, evals=evals, is_script=True)


@pytest.mark.parametrize("level", [1.0, 1e-3])
def test_an_eval_that_is_apart_in_the_first_epoch(level: float) -> None:
    assert answer(evaluated([1.0] * 7, level=level), "L11") == "healthy"
    assert answer(evaluated([0.5] * 7, level=level), "L11") == "healthy"  # dropout in training
    assert answer(evaluated([1.7] * 7, level=level), "L11") == "warn"
    assert answer(evaluated([1.7] * 7, None, level), "L11") == "not looked at"
    assert answer(evaluated([1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5], None, level), "L11") == "healthy"  # learned by heart
    assert answer(evaluated([6.0, 4.0, 3.0, 2.4, 2.0, 1.7, 1.5], level=level), "L11") == "healthy"  # averaged weights
    assert answer(evaluated([1.0] * 5 + [1.0, 3.0], level=level), "L11") == "healthy"


def test_evals_that_come_after_the_first_epoch_tell_nothing_unless_they_are_near() -> None:
    of = evaluated([1.0] * 7)
    of.evals["val"]["loss"] = series([6.0, 6.1], [301, 390])
    assert answer(of, "L11") == "not looked at"
    of.evals["val"]["loss"] = series([0.55, 0.52], [301, 390])
    assert answer(of, "L11") == "healthy"


def test_an_eval_far_above_the_untrained_model_that_improves_a_little_is_no_use() -> None:
    of = evaluated([3.0] * 4)
    of.evals["val"]["loss"] = series([7.0, 6.5, 6.2, 6.0], [50, 100, 150, 200])
    assert answer(of, "L7") == "warn"
    of.evals["val"]["loss"] = series([70.0, 40.0, 25.0, 18.0], [50, 100, 150, 200])  # in other units, and it falls
    assert answer(of, "L7") == "healthy"
