"""If this fails, saving memory costs more than time: another gradient, or no memory saved."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rung.engine.build import Setup
from rung.engine.state import set_training
from rung.engine.step import seed_torch
from rung.recipe import Objective
from tests.contract.cases import CASES, Case
from tests.contract.test_contract import losses, one_step, train
from tests.contract.toy import Toy
from tests.errors import raises_code

ON = "system.activation_checkpointing=true"


@pytest.fixture(params=["piano", "text"])
def case(request: pytest.FixtureRequest) -> Case:
    make, data = CASES[request.param]
    return make(request.getfixturevalue(data))


def saved_bytes(setup: Setup) -> int:
    """What the forward of one micro keeps for its backward."""
    set_training(setup.state.model)
    num_bytes = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal num_bytes
        num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    micro = setup.prefetcher().take(0)[0]
    seed_torch("next_token", micro.draw)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        setup.state.objectives[0].loss(micro.batch, micro.draw)
    return num_bytes


def test_gradients_are_equal_to_the_bit_with_dropout_on(case: Case) -> None:
    (plain, gradients), (again, recomputed) = one_step(case.setup()), one_step(case.setup(ON))
    assert plain == again
    assert len(gradients) == len(recomputed) > 0
    assert all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))


def test_a_run_is_the_same_to_the_last_digit(case: Case, tmp_path: Path) -> None:
    words = ("optimizer.max_iters=6", "signals.activation_stats_every=2", "signals.layers_every=2")
    plain, again = (train(case.setup(*words, *more), tmp_path, "exp") for more in ((), (ON,)))
    assert losses(plain) == losses(again)
    norms = [run.metrics(["norm"])["norm"] for run in (plain, again)]
    assert norms[0] == norms[1]


def test_less_is_kept_for_the_backward(case: Case) -> None:
    few, many = ("model.n_layer=2",), ("model.n_layer=6",)
    plain = saved_bytes(case.setup(*many)) - saved_bytes(case.setup(*few))
    kept = saved_bytes(case.setup(*many, ON)) - saved_bytes(case.setup(*few, ON))
    assert 0 <= kept < plain / 5  # of four blocks, only what went in


def test_evals_samples_and_arithmetic_do_not_change(case: Case) -> None:
    plain, setup = case.setup(), case.setup(ON)
    assert setup.flops == plain.flops
    assert setup.evaluator.run(setup.state.model) == plain.evaluator.run(plain.state.model)
    draw = plain.prefetcher().take(0)[0].draw
    assert [s.data for s in setup.samples(draw)] == [s.data for s in plain.samples(draw)]


def test_with_a_compiled_loss(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole capture but without generating kernels."""
    plain, gradients = one_step(case.setup(*case.calm))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled, recomputed = one_step(case.setup(ON, "system.compile=true", *case.calm))
    assert compiled["norm"] == pytest.approx(plain["norm"], rel=1e-5)
    for a, b in zip(gradients, recomputed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_recipe_without_blocks_says_so() -> None:
    with raises_code("not-supported"):
        CASES["toy"][0](Path()).setup(ON)


def test_blocks_with_running_statistics_are_refused() -> None:
    class Normed(Toy):
        def model(self) -> nn.Module:
            model: Any = super().model()
            model.generator.append(nn.BatchNorm2d(1))
            return model

        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            return [o._replace(blocks=[model.generator]) for o in super().objectives(model)]  # type: ignore[list-item]

    with raises_code("bad-objective"):
        Case("toy", Normed, ()).setup(ON)
