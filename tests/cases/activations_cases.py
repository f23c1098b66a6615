"""Runs with dead or saturated units, wild attention, drifting logits, collapsed answers, blocks that add too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.doctor.history import read
from rung.random import Draw
from rung.recipe import Batch, Loss, Objective, ParameterGroup, Recipe, Stream
from tests.cases import statistics as stat
from tests.cases.case import Ask, Case, Seen, diagnosed, trained
from tests.cases.running import run_case
from tests.cases.tiny import Attention, Block, Gpt, Rows, Tiny


class Dead(Tiny):
    """Of each layer, all but a few units start far below zero."""

    def model(self) -> nn.Module:
        model = super().model()
        for block in model.blocks:  # type: ignore[union-attr]
            with torch.no_grad():
                block.mlp[0].bias[4:] = -3.0
        return model


class Tanh(Tiny):
    """Rectifiers replaced, weights before them times `gain`."""

    gain = 1.0

    def model(self) -> nn.Module:
        model = super().model()
        for block in model.blocks:  # type: ignore[union-attr]
            block.mlp[1] = nn.Tanh()
            with torch.no_grad():
                block.mlp[0].weight.mul_(self.gain)
        return model


class Saturated(Tanh):
    gain = 500.0  # of weights with a standard deviation of .02: inputs of the tanh are near 57


class Reach(Tiny):
    """A regression whose output is a tanh; targets of standard deviation `scale`, clipped at three of them."""

    scale = 0.3

    def streams(self) -> Mapping[str, Stream]:
        def rows(name: str, num_rows: int, seed: int) -> Stream:
            x = np.random.default_rng(seed).standard_normal((num_rows, 8)).astype(np.float32)
            y = self.scale * (x[:, :4].sum(1, keepdims=True) / 2).clip(-3, 3)
            return Rows(f"{name}/reach/{self.scale}", targets_per_row=1.0, x=x, y=y)

        return {"train": rows("train", self.cfg.num_rows, 1), "val": rows("val", self.cfg.num_eval, 2)}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def squares(batch: Batch, draw: Draw) -> Loss:
            loss = F.mse_loss(model(batch["x"]), batch["y"], reduction="sum")
            return Loss(loss, torch.tensor(float(batch["y"].numel())))

        return [Objective("squares", [ParameterGroup("all", model.parameters())], squares)]


class OutOfReach(Reach):
    scale = 1.0


class LoudAttention(Attention):
    """Multiplies with what it should divide by, and more."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1e4)
        return self.out(y.transpose(1, 2).flatten(2))


class Loud(Tiny):
    def model(self) -> nn.Module:
        model = super().model()
        for block in model.blocks:  # type: ignore[union-attr]
            block.attention.__class__ = LoudAttention
        return model


class Drifting(Tiny):
    """The logits sink by a half at every step, which a softmax does not see."""

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def next_id(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            logits = model(ids[:, :-1]) - 0.5 * max(draw.step, 0)
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            return Loss(losses, torch.tensor(float(ids[:, 1:].numel())))

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], next_id)]


class Sure(Tiny):
    """A bonus for entropy with the wrong sign: certainty is rewarded."""

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def next_id(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            logits = model(ids[:, :-1])
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            doubt = torch.special.entr(logits.softmax(-1)).sum()
            return Loss(losses + 10.0 * doubt, torch.tensor(float(ids[:, 1:].numel())))

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], next_id)]


class Deep(Tiny):
    """Four blocks, whose output projections start times `gain`."""

    gain = 1.0

    def model(self) -> nn.Module:
        model = Gpt(self.cfg.model.width, 4, self.cfg.model.dropout)
        for block in model.blocks:
            assert isinstance(block, Block)
            with torch.no_grad():
                block.attention.out.weight.mul_(self.gain)
                block.mlp[2].weight.mul_(self.gain)
        return model


class DeepLoud(Deep):
    gain = 50.0


def beside_parent(recipe: type[Recipe], *overrides: str) -> Ask:
    """What is found in a run whose parent is a healthy one."""

    def ask(root: Path, seed: int) -> Seen:
        parent = run_case(Deep, root, *overrides, seed=seed)
        return diagnosed(read(run_case(recipe, root, *overrides, seed=seed, parent=parent.id)))

    return ask


OFTEN = "signals.activation_stats_every=2"  # 50 looks in 100 steps
SHORT, LONGER = "optimizer.max_iters=60", "optimizer.max_iters=300"
SLOW = "lr.learning_rate=2e-4"  # at ten times that such logits are a sign of too high a rate, and that is what is told

CASES = [
    Case("A1", "biases far below zero", trained(Dead, OFTEN), trained(Tiny, OFTEN), "sick",
         statistic=stat.held("A1", stat.dead_units(spread=(0.016, 0.33)))),
    Case("A2", "weights times 500 before a tanh", trained(Saturated), trained(Tanh),
         statistic=stat.held("A2", stat.saturated(spread=(0.1, 0.1)))),
    Case("A2", "targets that a tanh cannot reach", trained(OutOfReach), trained(Reach), "fatal",
         statistic=stat.held("A2", stat.targets_outside)),
    Case("A3", "attention scaled up", trained(Loud, SLOW), trained(Tiny, SLOW), "sick", is_quick=True,
         statistic=stat.attention_logit),
    Case("A4", "logits sink at every step", trained(Drifting), trained(Tiny),
         statistic=stat.held("A4", stat.logit_drift)),
    Case("A5", "certainty is rewarded", trained(Sure, LONGER), trained(Tiny, LONGER), "sick",
         statistic=stat.held("A5", stat.too_sure)),
    Case("A6", "loud blocks", beside_parent(DeepLoud, SHORT), beside_parent(Deep, SHORT),
         statistic=stat.of(stat.growth_apart)),
]  # fmt: skip
