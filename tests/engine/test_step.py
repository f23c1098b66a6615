"""If this fails, a step does something else than gradient descent on sum / count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from rung.engine.clock import Clock
from rung.engine.config import Optimizer as OptimizerConfig
from rung.engine.guarded import ObjectiveState
from rung.engine.optim import build_optimizers
from rung.engine.parallel import World
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.engine.step import Stepper
from rung.random import Draw
from rung.recipe import Batch, Loss, Objective, ParameterGroup
from tests.errors import raises_code

CPU = torch.device("cpu")


def config(**values: object) -> OptimizerConfig:
    cfg = OptimizerConfig()
    for name, value in values.items():
        setattr(cfg, name, value)
    return cfg


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def squares(model: nn.Module) -> object:
    def loss(batch: Batch, draw: Draw) -> Loss:
        errors = ((model(batch["x"]) - batch["y"]) ** 2).sum(1) * batch["weight"]
        return Loss(errors.sum(), batch["weight"].sum())

    return loss


def stepper(
    model: nn.Module, clip: float = 1.0, dtype: str = "float32", nominal: float = 10.0, name: str = "adamw"
) -> tuple[Stepper, ObjectiveState]:
    parameters = list(model.parameters())
    groups = [ParameterGroup("first", parameters[:2], muon=True), ParameterGroup("rest", parameters[2:])]
    objective = Objective("squares", groups, squares(model))  # type: ignore[arg-type]
    optimizers = build_optimizers(objective, parameters, config(name=name), CPU)
    trained = ObjectiveState("squares", objective.loss, parameters, optimizers)
    return Stepper(model, [trained], Precision(dtype, CPU), World(0, 1, CPU), nominal, clip), trained


def micros(cuts: Sequence[int], scale: float = 1.0) -> list[Micro]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 5, generator=generator) * scale, torch.randn(8, 3, generator=generator) * scale
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    made, start = [], 0
    for size in cuts:
        rows = np.arange(start, start + size)
        batch = {"x": x[start : start + size], "y": y[start : start + size], "weight": weight[start : start + size]}
        made.append(Micro(rows, Draw(0, 0, rows), batch))
        start += size
    return made


@pytest.mark.parametrize("nominal", [5.0, 1.0, 1000.0])
@pytest.mark.parametrize("clip", [0.0, 0.05, 1e9])
def test_ten_steps_equal_a_plain_torch_loop(clip: float, nominal: float) -> None:
    ours, theirs = net(), net()
    taker, _ = stepper(ours, clip, nominal=nominal)
    decayed = [p for p in theirs.parameters() if p.ndim >= 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in theirs.parameters() if p.ndim < 2]}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(10):
        signals = taker.step(step, micros([3, 5]), 1e-2, Clock())
        batch = micros([8])[0].batch
        reference.zero_grad()
        mean = (((theirs(batch["x"]) - batch["y"]) ** 2).sum(1) * batch["weight"]).sum() / batch["weight"].sum()
        mean.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or 1e30)
        reference.step()
        assert signals["norm"].item() == pytest.approx(norm.item(), rel=1e-5)
        assert signals["norm_clipped"].item() <= (clip * (1 + 1e-5) if clip else norm.item() * (1 + 1e-5))
        assert (signals["loss/sum"] / signals["loss/count"]).item() == pytest.approx(mean.item(), rel=1e-5)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-5)


def test_a_batch_without_targets_changes_nothing() -> None:
    model = net()
    taker, _ = stepper(model)
    before = [p.clone() for p in model.parameters()]
    empty = micros([8])[0]
    empty.batch["weight"].zero_()
    signals = taker.step(0, [empty], 1e-2, Clock())
    assert signals["norm"].item() == 0.0
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("poison", ["x", "y"])
def test_a_bad_step_is_not_applied_and_neither_is_any_after_it(name: str, poison: str) -> None:
    """However late the host looks, weights and moments are those before the first bad step."""
    model = net()
    taker, trained = stepper(model, name=name)
    taker.step(0, micros([8]), 1e-2, Clock())
    weights = [p.clone() for p in model.parameters()]
    moments = [value.clone() for o in trained.optimizers for s in o.state.values() for value in s.values()]
    bad = micros([4, 4])
    bad[1].batch[poison][0, 0] = float("nan")
    signals = taker.step(1, bad, 1e-2, Clock())
    assert not torch.isfinite(signals["norm"])
    for late in range(2, 5):
        taker.step(late, micros([8]), 1e-2, Clock())
    after = [value for o in trained.optimizers for s in o.state.values() for value in s.values()]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(after, moments, strict=True))


def test_float16_skips_are_counted_by_a_non_finite_norm_and_training_goes_on() -> None:
    model = net()
    taker, _ = stepper(model, dtype="float16")
    weights = [p.clone() for p in model.parameters()]
    scales, norms = [], []
    for step in range(30):
        signals = taker.step(step, micros([8], scale=30.0), 1e-3, Clock())
        scales.append(signals["scale"].item())
        norms.append(signals["norm"].item())
    skipped = sum(not np.isfinite(n) for n in norms)
    assert skipped > 0, "the data is scaled so that the first scales overflow"
    assert scales[-1] == 65536.0 / 2**skipped
    assert np.isfinite(norms[-5:]).all()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_float16_clips_the_unscaled_gradient() -> None:
    signals = stepper(net(), clip=0.01, dtype="float16")[0].step(0, micros([8], 0.1), 1e-3, Clock())
    reference = stepper(net(), clip=0.01)[0].step(0, micros([8], 0.1), 1e-3, Clock())
    assert signals["norm"].item() == pytest.approx(reference["norm"].item(), rel=0.02)
    assert signals["norm_clipped"].item() == pytest.approx(0.01, rel=1e-3)


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    model = net()
    _, trained = stepper(model, name="muon")
    muon, adamw = trained.optimizers
    assert [id(p) for g in muon.param_groups for p in g["params"]] == [id(model[0].weight)]  # type: ignore[index]
    assert len([p for g in adamw.param_groups for p in g["params"]]) == 3
    objective = Objective("squares", [ParameterGroup("all", model.parameters())], squares(model))  # type: ignore[arg-type]
    with raises_code("not-supported"):
        build_optimizers(objective, list(model.parameters()), config(name="muon"), CPU)


def test_decay_spares_biases_and_norms() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(3, 4))
    loss = Loss(torch.zeros(()), torch.ones(()))
    objective = Objective("x", [ParameterGroup("all", list(model.parameters()))], lambda b, d: loss)
    (optimizer,) = build_optimizers(objective, list(model.parameters()), config(weight_decay=0.3), CPU)
    for group in optimizer.param_groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] == 0.3) for p in group["params"])
