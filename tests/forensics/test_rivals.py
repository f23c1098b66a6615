"""If this fails, replay names the operation in which a number overflowed, and not what made it so large.

Each fault is planted in a recipe and in a loop of somebody's own: a learning rate that is too high, inputs of another
scale, weights that were too large from the start, moments that were written to, and half-precision weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rung
from rung.forensics.rivals import moments_fault
from rung.forensics.verdict import Verdict
from rung.recipe import Stream
from rung.runs.query import open_run
from tests.cases.numerics_cases import Regression
from tests.cases.running import run_case
from tests.cases.tiny import Tiny
from tests.forensics.failing import train, verdict_of


class Relu(Regression):
    """Grows without bounds where weights do."""

    scale = 1.0
    weights = 1.0

    def streams(self) -> Mapping[str, Stream]:
        streams = super().streams()
        for stream in streams.values():
            stream.arrays["x"] = stream.arrays["x"] * np.float32(self.scale)  # type: ignore[attr-defined]
        return streams

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(self.weights)
        return model


class Loud(Relu):
    scale = 1e20


class LoudInHalf(Relu):
    scale = 1e4


class Heavy(Relu):
    weights = 1e13


HALF = "system.dtype=float16"
IN_RECIPES = {
    "rate, norm overflows": (Tiny, "LEARNING RATE", ("lr.learning_rate=1e4",)),
    "rate, no clipping": (Tiny, "LEARNING RATE", ("lr.learning_rate=100", "optimizer.grad_clip=0")),
    "rate, in an update": (Regression, "LEARNING RATE", ("lr.learning_rate=1e15",)),
    "rate, loss overflows": (Relu, "LEARNING RATE", ("lr.learning_rate=1e6", "optimizer.grad_clip=0")),
    "rate, in float16": (Tiny, "LEARNING RATE", ("lr.learning_rate=10", HALF)),
    "scale of inputs": (Loud, "DATA", ()),
    "scale of inputs, in float16": (LoudInHalf, "DATA", (HALF,)),
    "initial weights": (Heavy, "WEIGHTS", ()),
}


@pytest.mark.parametrize("name", IN_RECIPES)
def test_the_cause_before_the_step_is_named_in_a_recipe(name: str, tmp_path: Path) -> None:
    recipe, origin, words = IN_RECIPES[name]
    run = train(recipe, tmp_path, "optimizer.max_iters=60", *words)
    assert run.status == "diverged"
    verdict = verdict_of(run, tmp_path)
    assert (verdict.origin, verdict.confidence) == (origin, "sure"), verdict.lines()
    assert "eps inside" not in verdict.remedy
    if origin == "LEARNING RATE":  # what it proposes is enough
        [(key, value)] = verdict.changes.items()
        healed = run_case(recipe, tmp_path, *words, "optimizer.max_iters=60", "lr.warmup_iters=2", f"{key}={value}")
        assert healed.status == "finished"


class Loop:
    """Somebody's own script, up to the step that fails."""

    def __init__(self, fault: str) -> None:
        torch.manual_seed(0)
        self.fault, self.lr, options = fault, 1e-3, dict[str, Any]()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        if fault.startswith("half"):
            self.model, options = self.model.half(), {fault.partition(" ")[2]: True}
        if fault == "heavy":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1e13)
        self.lr = {"rate": 1e3, "rate, sgd": 50.0, "inputs, sgd": 0.1}.get(fault, self.lr)
        kind: Any = torch.optim.SGD if fault.endswith("sgd") else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=self.lr, **options)
        x = torch.randn(1024, 16, generator=torch.Generator().manual_seed(1))
        self.y = x[:, :10].argmax(1)
        x = x * {"inputs, sgd": 1e4, "inputs": 1e37}.get(fault, 1.0)
        self.x = x.half() if fault.startswith("half") else x

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]).float(), batch[1])

    def verdict(self, root: Path) -> Verdict:
        run = rung.init("mine", config={"lr": self.lr}, runs=root, code=False)
        guard = run.guard(self.model, self.optimizer, self.loss)
        with pytest.raises(rung.Diverged):
            self.train(run, guard)
        run.finish("diverged", quiet=True)
        [capture] = sorted((open_run(run.id, root).path / "captures").iterdir())
        return rung.replay(capture, self.model, self.optimizer, self.loss)

    def train(self, run: Any, guard: Any) -> None:
        for step in range(120):
            if step == 60 and self.fault == "moments lost":
                for state in self.optimizer.state.values():
                    state["exp_avg_sq"].zero_()
                self.optimizer.param_groups[0]["eps"] = 1e-25
            if step == 60 and self.fault == "moments negative":
                for state in self.optimizer.state.values():
                    state["exp_avg_sq"].neg_()
            rows = torch.arange(step * 32, step * 32 + 32) % 1024
            batch = self.x[rows], self.y[rows]
            self.optimizer.zero_grad()
            value = self.loss(batch)
            value.backward()
            guard.step(value, batch)
            run.log({"loss": value.item()}, step=step)


IN_LOOPS = {
    "rate": "LEARNING RATE", "rate, sgd": "LEARNING RATE", "inputs": "DATA", "inputs, sgd": "DATA", "heavy": "WEIGHTS",
    "moments lost": "OPTIMIZER", "moments negative": "OPTIMIZER", "half fused": "OPTIMIZER",
    "half foreach": "OPTIMIZER",
}  # fmt: skip


@pytest.mark.parametrize("fault", IN_LOOPS)
def test_the_cause_before_the_step_is_named_in_a_loop_of_ones_own(fault: str, tmp_path: Path) -> None:
    verdict = Loop(fault).verdict(tmp_path)
    assert verdict.origin == IN_LOOPS[fault], verdict.lines()
    assert verdict.confidence in ("sure", "likely")
    assert verdict.changes == {}  # there is no recipe whose keys they could be
    said = " ".join([verdict.what, verdict.remedy])
    if fault.startswith("half"):
        assert "float16" in said
        assert "float32" in verdict.remedy
    if fault.startswith("moments"):
        assert "state was broken before the step" in said
    if fault == "half fused":  # neither a larger eps nor a fused optimizer is any help
        assert "eps of" not in said


def test_a_rate_that_is_not_to_blame_is_left_alone(tmp_path: Path) -> None:
    """The loss is in units that grow with every step; weights are as they should be."""
    from tests.cases.numerics_cases import Overflowing

    verdict = verdict_of(train(Overflowing, tmp_path, "optimizer.max_iters=60"), tmp_path)
    assert verdict.origin != "LEARNING RATE", verdict.lines()


def test_moments_that_gradients_made_are_no_fault() -> None:
    """For any gradients: noise, a constant, one that comes once, one that grows a thousand times a step."""
    curves = (lambda t: torch.randn(8), lambda t: torch.ones(8), lambda t: torch.full((8,), float(t == 3)),
              lambda t: torch.full((8,), 10.0 ** (3 * t - 12)))  # fmt: skip
    for betas in ((0.9, 0.999), (0.9, 0.95), (0.5, 0.9)):
        for curve in curves:
            weight = nn.Parameter(torch.zeros(8))
            optimizer = torch.optim.AdamW([weight], 1e-3, betas=betas)
            for step in range(8):
                weight.grad = curve(step)
                optimizer.step()
                assert moments_fault(weight, optimizer.state[weight], optimizer.param_groups[0]) == ""
