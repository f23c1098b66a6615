"""If this fails, the doctor cannot tell a shuffled epoch from rows in order, drawn twice, or out of range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.data.order import shuffled
from rung.doctor.history import History
from rung.engine.recorder import Coverage
from tests.cases.made import found, history, severity


def fed(ids: np.ndarray, epoch_rows: int, rows_per_step: int) -> History:
    """A run that saw these rows, as the engine would note them."""
    coverage = Coverage(epoch_rows)
    rows: dict[str, list[float]] = {"follows": [], "fresh": [], "batch_hash": []}
    for start in range(0, len(ids) - rows_per_step + 1, rows_per_step):
        for name, value in coverage.note(ids[start : start + rows_per_step], start).items():
            rows[name].append(value)
    derived = {"epoch_rows": epoch_rows, "rows_per_step": rows_per_step}
    return history({name: values for name, values in rows.items() if values}, derived=derived)


@settings(max_examples=30, deadline=None)
@given(epoch_rows=st.integers(16, 700), rows_per_step=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_seeded_permutation_is_left_alone(epoch_rows: int, rows_per_step: int, seed: int) -> None:
    made = fed(shuffled(0, 120 * rows_per_step, epoch_rows, seed), epoch_rows, rows_per_step)
    assert severity(made, "D1") is None
    assert severity(made, "D2") is None


def test_rows_in_order() -> None:
    made = fed(np.arange(2400) % 2000, 2000, 16)
    assert severity(made, "D1") == "warn"
    assert severity(made, "D2") is None


def test_the_same_order_in_every_epoch() -> None:
    made = fed(np.tile(shuffled(0, 640, 640, 1), 4), 640, 16)
    assert severity(made, "D1") == "warn"
    assert "epoch earlier" in found(made, "D1").what  # type: ignore[union-attr]


def test_a_fifth_of_the_data_again_and_again() -> None:
    made = fed(np.tile(shuffled(0, 400, 2000, 1), 6), 2000, 16)
    finding = found(made, "D2")
    assert finding is not None
    assert (finding.severity, finding.since) == ("sick", 25)


def test_one_batch_over_and_over_is_seen_before_the_epoch_is_over() -> None:
    assert severity(fed(np.tile(np.arange(0, 160, 10), 60), 20000, 16), "D2") == "sick"


def test_drawing_with_replacement_is_told_and_no_more() -> None:
    ids = np.random.default_rng(0).integers(0, 2000, 4000)
    assert severity(fed(ids, 2000, 16), "D2") == "info"


def test_a_step_that_holds_all_the_data_repeats_it_by_design() -> None:
    assert severity(fed(np.tile(np.arange(16), 60), 16, 16), "D2") is None


@pytest.mark.parametrize(
    "error",
    [
        "index out of range in self",
        "Target 40 is out of bounds.",
        "index 3 is out of bounds for dimension 0 with size 3",
        "CUDA error: device-side assert triggered",
    ],
)
def test_an_id_without_a_row(error: str) -> None:
    made = history({"loss": [3.4] * 9}, events=[{"kind": "diverged", "step": 9, "why": f"IndexError: {error}"}])
    finding = found(made, "D3")
    assert finding is not None
    assert (finding.severity, finding.since) == ("fatal", 9)


@pytest.mark.parametrize("why", ["loss is NaN", "the data is not finite: 'x' of row 3", "out of memory"])
def test_other_failures_are_not_about_ids(why: str) -> None:
    event = {"kind": "diverged", "step": 9, "why": why, "origin": "DATA" if "data" in why else "FORWARD"}
    assert severity(history({"loss": [3.4] * 9}, events=[event]), "D3") is None


def test_a_batch_that_was_judged_to_be_at_fault() -> None:
    event = {"kind": "diverged", "step": 9, "origin": "DATA", "micro": 2}
    assert severity(history({"loss": [3.4] * 9}, events=[event]), "D3") == "fatal"
