"""If this fails, a resume that is another run goes unnoticed, or an honest one is blamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.doctor.diagnose import diagnose
from rung.doctor.finding import Finding
from rung.doctor.history import History, Series, read
from rung.doctor.rules.provenance import significant_bits
from rung.engine.build import Setup
from tests.cases.performance_cases import made
from tests.cases.provenance_cases import as_it_was, forget_moments, other_rate, other_rows, resumed

FIRST, END = 400, 440
NAMES = ("loss", "norm", "lr", "batch_hash")


def found(history: History) -> dict[str, Finding]:
    return {f.rule: f for f in diagnose(history)}


def taken_twice(device: str = "cpu") -> History:
    """A healthy run whose steps 400 to 439 were taken twice, with the same numbers."""
    history = made(batch_hash=np.random.default_rng(0).integers(0, 2**53, 600).astype(float))
    history.derived |= {"device": device, "dtype": "float32"}
    history.events.append({"kind": "resume", "step": FIRST, "overrides": []})
    history.superseded = {
        step: [{"step": step, **{name: float(history[name].values[step]) for name in NAMES}}]
        for step in range(FIRST, END)
    }
    return history


def change(history: History, name: str, first: int, factor: float) -> History:
    for step in range(first, END):
        history.superseded[step][0][name] *= factor
    return history


def test_the_same_numbers_are_a_continuation() -> None:
    assert "R4" not in found(taken_twice())


@pytest.mark.parametrize(
    ("name", "first", "word"),
    [
        ("batch_hash", FIRST, "rows"),
        ("batch_hash", FIRST + 7, "rows"),
        ("lr", FIRST, "rate"),
        ("loss", FIRST, "weights"),
        ("loss", FIRST + 1, "updates them differently"),
        ("norm", FIRST, "weights"),
    ],
)
def test_what_differs_first_names_the_cause(name: str, first: int, word: str) -> None:
    finding = found(change(taken_twice(), name, first, 1 + 1e-6))["R4"]
    assert finding.severity == "sick"
    assert word in finding.what
    assert finding.since == FIRST


def test_other_rows_explain_another_loss() -> None:
    history = change(change(taken_twice(), "loss", FIRST, 1.01), "batch_hash", FIRST, 1.5)
    assert "rows" in found(history)["R4"].what


def test_a_device_may_add_in_another_order() -> None:
    assert "R4" not in found(change(taken_twice("cuda"), "loss", FIRST, 1 + 1e-6))
    assert "R4" in found(change(taken_twice("cuda"), "loss", FIRST, 1.01))
    # Such differences grow from step to step; only the first few say anything.
    assert "R4" not in found(change(taken_twice("cuda"), "loss", FIRST + 10, 1.01))


def test_another_cut_may_add_in_another_order() -> None:
    history = change(taken_twice(), "loss", FIRST, 1 + 1e-6)
    assert "R4" in found(history)
    history.events[-1]["overrides"] = ["data.batch_size=8", "optimizer.gradient_accumulation_steps=2"]
    assert "R4" not in found(history)


def test_rows_of_evals_are_no_steps() -> None:
    history = taken_twice()
    history.superseded[FIRST - 1] = [{"step": FIRST - 1, "eval/val/loss": 1.0}]
    history.superseded[FIRST].insert(0, {"step": FIRST, "eval/val/loss": 1.0})
    assert "R4" not in found(history)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (as_it_was, None),
        (forget_moments, "updates them differently"),
        (other_rows, "other rows"),
        (other_rate, "learning rate"),
    ],
)
def test_real_resumes(spoil: Callable[[Setup], None], word: str | None, tmp_path: Path) -> None:
    found = [f.what for f in diagnose(read(resumed(tmp_path, 1, spoil))) if f.rule == "R4"]
    assert len(found) == (word is not None)
    assert all(word in what for what in found if word)


def test_unread_keys_and_ranks_are_told_from_events() -> None:
    history = made()
    history.config["foo"] = 1
    history.events += [
        {"kind": "unread_keys", "step": 25, "keys": ["foo"]},
        {"kind": "ranks_differ", "step": 500, "tensors": ["a.weight"]},
        {"kind": "code", "step": 0, "dirty": True, "changed": ["recipe.py"]},
    ]
    findings = found(history)
    assert {rule: f.severity for rule, f in findings.items()} == {"R1": "warn", "R2": "info", "R3": "sick"}
    assert findings["R1"].evidence == ["foo = 1"]
    assert findings["R3"].since == 500


@given(st.lists(st.floats(1.0, 1e6, width=32), min_size=1, max_size=20))
def test_bits_are_those_of_the_binary_form(values: list[float]) -> None:
    expected = [len(bin(int(v * 2**40)).lstrip("0b").rstrip("0")) for v in values]
    assert significant_bits(np.array(values)).tolist() == expected


def test_a_loss_in_bfloat16_has_lost_its_digits() -> None:
    loss = made()["loss"].values
    full = loss * 16384
    short = (full.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    finding = found(made(loss=short / 16384))["R5"]
    assert "8 significant bits" in finding.what
    assert "R5" not in found(made(loss=full.astype(np.float32) / 16384))


def test_a_loss_that_never_changes_is_not_the_loss() -> None:
    history = made()
    history.rows["loss"] = Series(np.arange(600), np.full(600, 2.5))
    assert "R5" in found(history)
