"""If this fails, the doctor names a cause that its own evidence speaks against.

Each run here looks at first sight like another fault: one whose rate is too high, that overfits, whose gradients vanish
with depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rung
from rung.doctor.diagnose import diagnose
from rung.doctor.finding import Finding
from rung.doctor.history import read
from rung.random import Draw
from rung.recipe import Batch, Loss, Objective, ParameterGroup, Recipe
from rung.runs.query import open_run
from tests.cases.conditional_cases import HORIZONS, Rolling
from tests.cases.optimisation_cases import DeepSigmoid
from tests.cases.running import run_case
from tests.cases.tiny import Gpt, Tiny


class Misplaced(Rolling):
    """Training asks for the frame after next, the eval for the next one."""

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def one_step(batch: Batch, draw: Draw) -> Loss:
            path = batch["path"]
            at = np.zeros(len(path), np.int64) if draw.is_eval else draw.integers("at", HORIZONS[-1] - 2)
            rows, first = torch.arange(len(path)), torch.from_numpy(at)
            before, after = path[rows, first], path[rows, first + (1 if draw.is_eval else 2)]
            return Loss(F.l1_loss(before + model(before), after, reduction="sum"), torch.tensor(float(after.numel())))

        return [Objective("one_step", [ParameterGroup("all", model.parameters())], one_step)]


class Unconditional(Tiny):
    """What reads the condition is trained all the same, and hears next to nothing."""

    def model(self) -> nn.Module:
        model = super().model()
        model.reads = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32))
        return model

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        assert isinstance(model, Gpt)

        def next_id(batch: Batch, draw: Draw) -> Loss:
            ids, loud = batch["ids"], 1e-9
            x = model.tokens(ids[:, :-1]) + model.places.weight
            x = x + loud * model.reads(loud * torch.ones(len(ids), 8))[:, None]  # type: ignore[operator]
            for block in model.blocks:
                x = block(x)
            logits = model.head(model.norm(x)).flatten(0, 1)
            count = torch.tensor(float(ids[:, 1:].numel()))
            return Loss(F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"), count)

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], next_id)]


def found_in(recipe: type[Recipe], root: Path, *words: str) -> dict[str, Finding]:
    return {f.rule: f for f in diagnose(read(run_case(recipe, root, *words)))}


def test_a_misplaced_target_is_no_overfitting(tmp_path: Path) -> None:
    finding = found_in(Misplaced, tmp_path, "optimizer.max_iters=600")["E2"]
    assert finding.title == "Training and eval pull apart"
    assert (finding.changes, finding.remedy_is_guess) == ({}, True)
    assert any(line.startswith("overfitting") for line in finding.ruled_out)


def test_rows_that_are_memorised_are_overfitting(tmp_path: Path) -> None:
    finding = found_in(Tiny, tmp_path, "num_rows=32", "optimizer.max_iters=400", "eval_interval=40")["E2"]
    assert finding.title == "Overfitting"
    assert "optimizer.max_iters" in finding.changes


def test_a_branch_that_hears_nothing_is_not_depth(tmp_path: Path) -> None:
    finding = found_in(Unconditional, tmp_path)["O7"]
    assert finding.title == "A branch that the loss does not need"
    assert "all in reads" in finding.what


def test_twelve_sigmoids_are_depth(tmp_path: Path) -> None:
    assert found_in(DeepSigmoid, tmp_path)["O7"].title == "Gradients vanish with depth"


@pytest.mark.parametrize("fault", ["float16 weights", "moments reset"])
def test_broken_moments_are_not_the_learning_rate(fault: str, tmp_path: Path) -> None:
    """Adam moves an element by about the learning rate; what moves it a hundred times as far is something else."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 10))
    is_half = fault == "float16 weights"
    model = model.half() if is_half else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True if is_half else None)
    run = rung.init("mine", config={"lr": 1e-3}, runs=tmp_path, code=False)
    run.watch(model, optimizer, every=1, share=1)
    for step in range(120):
        if not is_half and step == 12:
            for state in optimizer.state.values():
                state["exp_avg_sq"].mul_(1e-8)
        x = torch.randn(32, 16)
        y = x[:, :10].argmax(1)
        loss = F.cross_entropy(model(x.half() if is_half else x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss.item()}, step=step)
    run.finish(quiet=True)
    found = {f.rule: f for f in diagnose(read(open_run(run.id, tmp_path)))}
    blamed = [f for f in found.values() if f.title == "The optimizer's moments are broken"]
    assert blamed, found
    assert not [f for f in found.values() if f.title in ("Learning rate too high", "Shock without a warm-up")]
    assert ("float32" in blamed[0].remedy) == is_half
