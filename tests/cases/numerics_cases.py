"""Numbers that are not finite, and float16: each made in the way it happens to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rung.random import Draw
from rung.recipe import Arrays, Batch, Loss, Objective, ParameterGroup, Stream
from tests.cases import statistics as stat
from tests.cases.case import Ask, Case, Seen, diagnosed, trained
from tests.cases.made import own_loop
from tests.cases.statistics import FACT
from tests.cases.tiny import Rows, Tiny


def summed(logits: Tensor, ids: Tensor) -> Loss:
    losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
    return Loss(losses, torch.tensor(float(ids.numel())))


# N1: one sample with a NaN in it, at step 17


class Features(Rows):
    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {name: array[ids].copy() for name, array in self.arrays.items()}


class OneNan(Features):
    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        arrays = super().gather(ids, draw)
        if draw.step == 17:
            arrays["x"][3, 2] = np.nan
        return arrays


class Regression(Tiny):
    Train: type[Rows] = Features

    def streams(self) -> Mapping[str, Stream]:
        rng = np.random.default_rng(1)
        x = rng.standard_normal((2064, 8)).astype(np.float32)
        y = np.tanh(x[:, :1] + x[:, 1:2]) + 0.1 * rng.standard_normal((2064, 1)).astype(np.float32)
        train = self.Train("features", 1, x=x[:2000], y=y[:2000])
        return {"train": train, "val": Features("features/val", 1, x=x[2000:], y=y[2000:])}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def squares(batch: Batch, draw: Draw) -> Loss:
            return Loss(
                F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), torch.tensor(float(len(batch["x"])))
            )

        return [Objective("squares", [ParameterGroup("all", model.parameters())], squares)]


class NanFeature(Regression):
    Train = OneNan


# N2: a root of zero behind a where; a sum of squares that overflows; a scaled norm; calibration


class Root(nn.Module):
    """The forward is right in both; only the backward of the root at 0 is not."""

    def __init__(self, is_safe: bool) -> None:
        super().__init__()
        self.is_safe = is_safe

    def forward(self, x: Tensor) -> Tensor:
        r = x.square()
        safe = torch.where(r > 0, r, 1.0) if self.is_safe else r
        return torch.where(r > 0, safe.sqrt(), 0.0)


class SafeRoot(Regression):
    """Some rows are all zeros."""

    is_safe = True

    def streams(self) -> Mapping[str, Stream]:
        streams = super().streams()
        streams["train"].arrays["x"][:40] = 0.0  # type: ignore[attr-defined]
        return streams

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32, bias=False), Root(self.is_safe), nn.Linear(32, 1))


class UnsafeRoot(SafeRoot):
    is_safe = False


class Scaled(Tiny):
    """The loss in other units: sound, and far too large for the type."""

    units = 1.0
    growth = 1.0

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        [plain] = super().objectives(model)

        def larger(batch: Batch, draw: Draw) -> Loss:
            loss = plain.loss(batch, draw)
            units = self.units * (self.growth ** max(0, draw.step))
            return Loss(loss.sum * units, loss.count)

        return [plain._replace(loss=larger)]


class Overflowing(Scaled):
    growth = 10.0


class Calibrating(Scaled):
    units = 1e4


class TooLargeForHalf(Scaled):
    units = 1e12


def half(is_unscaled_first: bool) -> Ask:
    """Somebody's loop with a loss scale, which clips before or after the scale is divided out."""

    def ask(root: Path, seed: int) -> Seen:
        scale, made = 2.0**16, {}

        def update(model: nn.Module, loss: Tensor, row: dict[str, float]) -> None:
            nonlocal scale
            optimizer = made.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-2))
            optimizer.zero_grad()
            (loss * scale).backward()
            if is_unscaled_first:
                for p in model.parameters():
                    p.grad /= scale
            row["norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9 if not is_unscaled_first else 1.0))
            row["scale"], row["norm_clipped"] = scale, min(row["norm"], 1.0)
            if not is_unscaled_first:
                for p in model.parameters():
                    p.grad /= scale
            optimizer.step()
            made["steps"] = made.get("steps", 0) + 1
            scale *= 16 if made["steps"] % 50 == 0 else 1  # twice is lost in the noise of ten norms

        return diagnosed(own_loop(update, {"optimizer.name": "adamw"}, seed))

    return ask


# N3: a weight that the update of step 13 makes infinite, without any gradient being so


class BrokenWeight(Tiny):
    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        [plain] = super().objectives(model)

        def breaks(batch: Batch, draw: Draw) -> Loss:
            if model.training and draw.step == 13:

                def once(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                    handle.remove()
                    model.tokens.weight.data[0, 0] = float("inf")

                handle = register_optimizer_step_post_hook(once)
            return plain.loss(batch, draw)

        return [plain._replace(loss=breaks)]


# N6: no label at step 5, or hardly any in some micros, and a mean in place of a sum


class Masked(Tiny):
    """Targets are labels; what is -100 does not count."""

    def num_labels(self, draw: Draw) -> int:
        return 32

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def mean(batch: Batch, draw: Draw) -> Loss:
            ids, labels = batch["ids"], batch["ids"][:, 1:].clone()
            labels[:, self.num_labels(draw) :] = -100
            count = (labels != -100).sum().float()
            return Loss(F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels.flatten()) * count, count)

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], mean)]


class NoLabels(Masked):
    def num_labels(self, draw: Draw) -> int:
        return 0 if draw.step == 5 else 32


class FewLabels(Masked):
    def num_labels(self, draw: Draw) -> int:
        return 1 if draw.step % 8 == 0 and draw.rows[0] == 0 else 32


HALF = ("system.dtype=float16",)
MICROS = ("data.batch_size=4", "optimizer.gradient_accumulation_steps=4")
CASES = [
    Case("N1", "nan feature", trained(NanFeature), trained(Regression), "fatal", is_quick=True, statistic=FACT),
    Case("N2", "root of zero", trained(UnsafeRoot), trained(SafeRoot), "fatal", statistic=FACT),
    Case("N2", "sum of squares", trained(Overflowing), trained(Tiny), "sick",
         statistic=stat.of(stat.norm_before_overflow)),
    Case("N2", "norm before unscale", half(False), half(True), "warn", statistic=stat.of(stat.norm_follows_scale)),
    Case("N2", "calibration", trained(Calibrating, *HALF), trained(Tiny, *HALF), "info", statistic=FACT),
    Case("N3", "broken weight", trained(BrokenWeight), trained(Tiny), "fatal", statistic=FACT),
    Case("N4", "no scale fits", trained(TooLargeForHalf, *HALF), trained(Tiny, *HALF),
         statistic=stat.of(stat.least_scale)),
    Case("N6", "no labels", trained(NoLabels), trained(Masked), "fatal", is_quick=True, statistic=FACT),
    Case("N6", "few labels", trained(FewLabels, *MICROS), trained(Masked, *MICROS),
         statistic=stat.of(stat.few_targets)),
]  # fmt: skip
