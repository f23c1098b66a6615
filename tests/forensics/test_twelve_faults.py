"""If this fails, `rung replay` blames the wrong thing for a step that failed, or misses its sample or its line.

Each fault is made by a user's recipe outside of the package, captured by the engine, and replayed from the capture.
"""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from rung.engine.guarded import ObjectiveState
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.forensics.examine import examine
from rung.forensics.rerun import Rerun
from rung.forensics.verdict import Verdict
from rung.random import Draw
from rung.recipe import Batch, Loss
from tests.forensics.failing import fail, sample_of, verdict_of
from tests.forensics.faulty import FIRST, Faulty


class Expected(NamedTuple):
    """`row` says whether it is one row of the data that is bad; lines are named by how they end."""

    fault: str
    origin: str
    module: str
    op: str
    row: bool = False
    phase: str = "forward"
    line: str = "# here"


FAULTS = [
    Expected("nan feature", "DATA", "first", "aten.mm", row=True, line="self.tokens(token))"),
    Expected("inf feature", "DATA", "first", "aten.mm", row=True, line="self.tokens(token))"),
    Expected("id out of range", "DATA", "tokens", "aten.embedding", row=True, line="self.tokens(token))"),
    Expected("empty target", "DATA", "", "aten.nll_loss_forward", row=True),
    Expected("zero row", "DATA", "model", "aten.div", row=True),
    Expected("log 0", "MODEL MATH", "odd", "aten.log"),
    Expected("zero norm", "MODEL MATH", "odd", "aten.div"),
    Expected("root", "MODEL MATH", "odd", "aten.div", phase="backward"),
    Expected("exp", "MODEL MATH", "odd", "aten.exp"),
    Expected("inf weight", "WEIGHTS", "head", "aten.addmm", line="self.drop(h)))"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_micros", [1, 4])
@pytest.mark.parametrize("expected", FAULTS, ids=lambda e: e.fault.replace(" ", "-"))
def test_the_cause_is_named_and_no_other(expected: Expected, num_micros: int, dtype: str, tmp_path: Path) -> None:
    bad_micro = num_micros // 2 if expected.row else 0
    run = fail(tmp_path, expected.fault, num_micros, dtype, bad_micro=bad_micro if expected.row else None)
    verdict = verdict_of(run, tmp_path)
    assert (verdict.origin, verdict.confidence) == (expected.origin, "sure"), verdict.lines()
    assert (verdict.step, verdict.micro, verdict.rank) == (FIRST, bad_micro, None)
    assert (verdict.module, verdict.op, verdict.phase) == (expected.module, expected.op, expected.phase)
    file, _, line = verdict.line.rpartition(":")
    assert file.endswith("tests/forensics/faulty.py")
    assert linecache.getline(file, int(line)).strip() == verdict.text
    assert verdict.text.endswith(expected.line)
    wanted = [sample_of(num_micros, bad_micro)] if expected.row else []
    assert set(wanted) <= set(verdict.samples)
    assert len(verdict.samples) == (4 if expected.fault == "empty target" else len(wanted))
    assert verdict.inputs
    assert verdict.not_tested == []


@pytest.mark.parametrize("num_micros", [1, 4])
def test_an_overflow_of_float16_is_precision(num_micros: int, tmp_path: Path) -> None:
    verdict = verdict_of(fail(tmp_path, "float16", num_micros, "float16"), tmp_path)
    assert (verdict.origin, verdict.confidence, verdict.micro) == ("PRECISION", "sure", 0), verdict.lines()
    assert (verdict.module, verdict.op) == ("first", "aten.mm")
    assert verdict.changes == {"system.dtype": "bfloat16"}
    assert "system.dtype=bfloat16" in verdict.command("case/1")


def test_the_same_inputs_in_a_wider_type_are_no_failure(tmp_path: Path) -> None:
    assert fail(tmp_path, "float16", 1, "bfloat16").status == "finished"


@pytest.mark.parametrize("num_micros", [1, 4])
def test_finite_gradients_with_a_norm_that_does_not_fit(num_micros: int, tmp_path: Path) -> None:
    verdict = verdict_of(fail(tmp_path, "huge gradient", num_micros, "float32"), tmp_path)
    assert (verdict.origin, verdict.confidence) == ("NORM OVERFLOW", "sure"), verdict.lines()


@pytest.mark.parametrize("num_micros", [1, 4])
def test_what_does_not_happen_again_is_transient(
    num_micros: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faulty, "num_transient", 1)
    verdict = verdict_of(fail(tmp_path, "transient", num_micros, "float32"), tmp_path)
    assert (verdict.origin, verdict.samples) == ("TRANSIENT", [])
    assert "0 of 10" in " ".join(verdict.evidence)


def half(scale: float = 1.0, num_micros: int = 1, **options: float) -> Rerun:
    """A step of somebody's own loop, whose weights are float16; the engine's own are never."""
    torch.manual_seed(0)
    model = nn.Embedding(32, 8).half()

    def loss(batch: Batch, draw: Draw) -> Loss:
        return Loss((model(batch["ids"]).float() * scale).sum(), torch.tensor(1.0))

    ids = np.arange(4)
    micros = [Micro(ids, Draw(0, 5, ids), {"ids": torch.arange(4)})] * num_micros
    own = torch.optim.AdamW(model.parameters(), foreach=False, **options)  # type: ignore[arg-type]
    trained = ObjectiveState("own", loss, list(model.parameters()), [own])
    return Rerun(model, [trained], micros, Precision("float32", torch.device("cpu")), step=5)


def assert_untouched(rerun: Rerun, weights: torch.Tensor, verdict: Verdict) -> None:
    assert torch.equal(next(rerun.model.parameters()), weights)
    assert not rerun.objectives[0].optimizers[0].state, verdict.lines()


def test_an_eps_that_float16_does_not_have_is_the_optimizers() -> None:
    rerun = half(lr=1e-3, eps=1e-8)
    before = next(rerun.model.parameters()).detach().clone()
    verdict = examine(rerun)
    assert (verdict.origin, verdict.confidence) == ("OPTIMIZER", "sure"), verdict.lines()
    assert "eps=1e-08 is 0 in float16" in verdict.what
    assert "224 of them with a gradient of exactly 0" in verdict.what  # 28 rows of 8 that no id names
    assert "fused" in " ".join(verdict.evidence)
    assert_untouched(rerun, before, verdict)


def test_a_square_that_does_not_fit_is_the_optimizers() -> None:
    rerun = half(scale=1e4, lr=1e-3, eps=1e-4)  # 0.001 of its square is 1e5, and float16 ends at 65504
    before = next(rerun.model.parameters()).detach().clone()
    verdict = examine(rerun)
    assert (verdict.origin, verdict.confidence) == ("OPTIMIZER", "sure"), verdict.lines()
    assert "the square of a gradient of 1e+04 does not fit" in verdict.what
    assert_untouched(rerun, before, verdict)


def test_a_rate_that_is_not_finite_is_the_optimizers() -> None:
    rerun = half(lr=1e-3, eps=1e-4)
    rerun.lr = float("nan")
    assert "lr is nan" in examine(rerun).what


def test_gradients_that_overflow_when_they_are_added_up() -> None:
    verdict = examine(half(scale=4e4, num_micros=2, lr=1e-3, eps=1e-4))
    assert (verdict.origin, verdict.micro) == ("PRECISION", None), verdict.lines()
    assert "their sum is not" in " ".join(verdict.evidence)


def test_a_sound_step_of_float16_weights_is_nobodys() -> None:
    assert examine(half(lr=1e-3, eps=1e-4)).origin == "TRANSIENT"
