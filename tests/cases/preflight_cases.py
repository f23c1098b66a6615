"""Mistakes that can be seen before the first step, each as a user's own recipe beside one that is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.data.order import shuffled
from rung.doctor.preflight.checks import run_checks
from rung.doctor.preflight.result import CheckContext, Result
from rung.engine.build import Setup
from rung.random import Draw
from rung.recipe import Batch, Loss, Objective, ParameterGroup, Stream
from tests.cases import statistics as stat
from tests.cases.case import Ask, Case, Found, Seen
from tests.cases.running import setup_of
from tests.cases.statistics import FACT
from tests.cases.tiny import LENGTH, VOCAB, Attention, Block, Gpt, Rows, Tiny, chain

SEVERITY = {"pass": "info", "skip": "info", "warn": "warn", "fail": "sick"}


def by_rule(results: Sequence[Result]) -> Found:
    """The worst of each rule; whether the code was committed says nothing of a recipe."""
    found: dict[str, str] = {}
    for level in ("pass", "skip", "warn", "fail"):
        found |= {r.rule or r.name: SEVERITY[level] for r in results if r.level == level and r.rule != "R2"}
    return found


def checked(
    recipe: type[Tiny], *overrides: str, is_quick: bool = True, change: Callable[[Setup], None] | None = None
) -> Ask:
    """What the checks find in this recipe; `change` is made to the run when it is put together."""

    def ask(root: Path, seed: int) -> Seen:
        setup = setup_of(recipe, f"seed={seed}", *overrides, root=root)
        if change is not None:
            change(setup)
        context = CheckContext(setup, is_quick)
        return Seen(by_rule(run_checks(context)), context)

    return ask


def objective(model: nn.Module, loss: Callable[[Batch, Draw], Loss]) -> list[Objective]:
    return [Objective("next_id", [ParameterGroup("all", model.parameters())], loss)]


def losses_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, positions) losses and their targets."""
    logits, targets = model(ids[:, :-1]), ids[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape), targets


# N5: a float16 table and an optimizer that is not fused


class HalfTable(Tiny):
    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        assert isinstance(model, Gpt)
        model.tokens.half()
        return super().objectives(model)


def plain_adamw(setup: Setup) -> None:
    trained = setup.state.objectives[0]
    trained.optimizers = [torch.optim.AdamW(trained.parameters, lr=0.0, eps=1e-8, fused=False, foreach=False)]


# N6: rows without targets, or micros with very few


class Masked(Tiny):
    """Targets count where the mask says so; the losses are summed."""

    def masks(self, num_rows: int) -> np.ndarray:
        """Between 5 and 100 % of each row, and nothing of some."""
        rng = np.random.default_rng(3)
        density = rng.uniform(0.05, 1, (num_rows, 1)) * (rng.random((num_rows, 1)) > 0.05)
        return (rng.random((num_rows, LENGTH)) < density).astype(np.float32)

    def streams(self) -> Mapping[str, Stream]:
        sizes = {"train": self.cfg.num_rows, "val": self.cfg.num_eval}
        return {
            name: Rows(f"masked/{n}/{type(self).__name__}", ids=chain(n, seed), mask=self.masks(n))
            for seed, (name, n) in enumerate(sizes.items(), start=1)
        }

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            losses, _ = losses_of(model, batch["ids"])
            return self.total(losses, batch["mask"])

        return objective(model, loss)

    def total(self, losses: Tensor, mask: Tensor) -> Loss:
        return Loss((losses * mask).sum(), mask.sum())


class MeanPerRow(Masked):
    def total(self, losses: Tensor, mask: Tensor) -> Loss:
        return Loss(((losses * mask).sum(1) / mask.sum(1)).sum(), mask.sum())


class Short(Masked):
    """One row in ten has one target."""

    def masks(self, num_rows: int) -> np.ndarray:
        lengths = np.where(np.arange(num_rows) % 10 == 0, 1, LENGTH)
        return (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)


class Long(Masked):
    def masks(self, num_rows: int) -> np.ndarray:
        lengths = LENGTH // 2 + np.arange(num_rows) % (LENGTH // 2)
        return (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)


# D3: one id without a row in the table, and labels without a class


class OneBadId(Tiny):
    def streams(self) -> Mapping[str, Stream]:
        ids = chain(self.cfg.num_rows, 1)
        ids[shuffled(9 * 16, 1, len(ids), self.seed)[0], 7] = VOCAB
        return {**super().streams(), "train": Rows("one bad id", ids=ids)}


class FewClasses(Tiny):
    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, Gpt)
        model.head = nn.Linear(self.cfg.model.width, VOCAB // 2, bias=False)
        return model


# E3: another mask, another place or another loss in training


class TrainMasks(Tiny):
    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            losses, targets = losses_of(model, batch["ids"])
            counts = self.counts(targets, draw.is_eval).float()
            return Loss((losses * counts).sum(), counts.sum())

        return objective(model, loss)

    def counts(self, targets: Tensor, is_eval: bool) -> Tensor:
        return torch.ones_like(targets, dtype=torch.bool) if is_eval else targets >= 4


class MasksAlways(TrainMasks):
    def counts(self, targets: Tensor, is_eval: bool) -> Tensor:
        return targets >= 4


class OtherPlaces(TrainMasks):
    def counts(self, targets: Tensor, is_eval: bool) -> Tensor:
        is_late = torch.arange(targets.shape[1]) >= targets.shape[1] // 2
        return (is_late if is_eval else ~is_late).expand_as(targets)


class TrainSmooths(Tiny):
    def smoothing(self, draw: Draw) -> float:
        return 0.0 if draw.is_eval else 0.3

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            logits, targets = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
            total = F.cross_entropy(logits * 5, targets, reduction="sum", label_smoothing=self.smoothing(draw))
            return Loss(total, torch.tensor(float(targets.numel())))

        return objective(model, loss)


class SmoothsAlways(TrainSmooths):
    def smoothing(self, draw: Draw) -> float:
        return 0.3


class DropsText(TrainSmooths):
    """Ids are dropped in training; what else differs must not hide behind that."""

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        inner = super().objectives(nn.Sequential(_Dropped(), model))[0]

        def loss(batch: Batch, draw: Draw) -> Loss:
            _Dropped.share = 0.0 if draw.is_eval else 0.2
            return inner.loss(batch, draw)

        return objective(model, loss)


class _Dropped(nn.Module):
    share = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        return torch.where(torch.rand(ids.shape) < self.share, 0, ids)


class DropsTextAlone(DropsText):
    def smoothing(self, draw: Draw) -> float:
        return 0.0


# E4: dropout that does not know about eval, statistics that move in it


class AlwaysDrops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


class Drops(Tiny):
    def drop(self) -> nn.Module:
        return AlwaysDrops()

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, Gpt)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.drop = self.drop()  # type: ignore[assignment]
        return model


class DropsInTraining(Drops):
    def drop(self) -> nn.Module:
        return nn.Dropout(0.5)


class Moving(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        is_training = self.training or self.always
        return F.batch_norm(x.mT, self.running_mean, self.running_var, training=is_training).mT

    always = True


class StillInEval(Moving):
    always = False


class MovesStatistics(Drops):
    def drop(self) -> nn.Module:
        return Moving(self.cfg.model.width)


class KeepsStatistics(Drops):
    def drop(self) -> nn.Module:
        return StillInEval(self.cfg.model.width)


class RoundsInSamples(Tiny):
    def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> dict[str, tuple[Tensor, Tensor]]:
        model.bfloat16().float()
        return {}


# O9: a head in no objective, a row that is used and never changes


class NoHead(Tiny):
    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        assert isinstance(model, Gpt)
        inner = super().objectives(model)[0]
        return objective(nn.ModuleList([model.tokens, model.places, model.blocks, model.norm]), inner.loss)


class PaddingIsAnId(Tiny):
    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, Gpt)
        model.tokens.padding_idx = 3
        return model


# E6: attention without its mask, and targets that were given


class Uncausal(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class SeesAll(Tiny):
    def model(self) -> nn.Module:
        model = super().model()
        for module in model.modules():
            if isinstance(module, Attention):
                module.__class__ = Uncausal
        return model


class NoShift(Tiny):
    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"][:, :-1]
            total = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum")
            return Loss(total, torch.tensor(float(ids.numel())))

        return objective(model, loss)


# O12: means where sums are wanted


class MeanOfMicro(Long):
    def total(self, losses: Tensor, mask: Tensor) -> Loss:
        return Loss((losses * mask).sum() / mask.sum(), mask.sum())


class MeanCountsOne(Long):
    def total(self, losses: Tensor, mask: Tensor) -> Loss:
        return Loss((losses * mask).sum() / mask.sum(), torch.tensor(1.0))


# A6: a head, queries and blocks that start too large


class Scaled(Tiny):
    """`factors` multiply what is found under these names."""

    factors: Mapping[str, float] = {}

    def model(self) -> nn.Module:
        model = super().model()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                for part, factor in self.factors.items():
                    if part in name:
                        parameter.mul_(factor)
        return model


class LoudHead(Scaled):
    factors = {"head": 50.0}


class LoudQueries(Scaled):
    factors = {"qkv": 50.0}


class SharpQueries(Scaled):
    factors = {"qkv": 15.0}


class LoudBlocks(Scaled):
    """Without norms each block multiplies what it got."""

    factors = {"mlp.2": 5000.0}

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, Gpt)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.norm2 = nn.Identity()  # type: ignore[assignment]
        return model


HEALTHY = checked(Tiny)
CASES = [
    Case("N5", "float16 weights", checked(HalfTable, change=plain_adamw), checked(Tiny, change=plain_adamw), "sick",
         is_quick=True, statistic=FACT),
    Case("N6", "rows without targets", checked(MeanPerRow), checked(Masked), "sick", is_quick=True, statistic=FACT),
    Case("N6", "few targets", checked(Short, "data.batch_size=1", is_quick=False),
         checked(Long, "data.batch_size=1", is_quick=False), statistic=stat.of(stat.targets_per_micro)),
    Case("D3", "one id", checked(OneBadId, is_quick=False), checked(Tiny, is_quick=False), "sick", statistic=FACT),
    Case("D3", "labels", checked(FewClasses), HEALTHY, "sick", is_quick=True, statistic=FACT),
    Case("E3", "other count", checked(TrainMasks), checked(MasksAlways), "sick", is_quick=True, statistic=FACT),
    Case("E3", "other places", checked(OtherPlaces), checked(MasksAlways), "sick", statistic=FACT),
    Case("E3", "other loss", checked(TrainSmooths), checked(SmoothsAlways), statistic=stat.of(stat.loss_apart)),
    Case("E3", "other loss behind a dropout of text", checked(DropsText), checked(DropsTextAlone), statistic=FACT),
    Case("E4", "an eval that rounds the weights", checked(RoundsInSamples), HEALTHY, statistic=FACT),
    Case("O9", "a head in no objective", checked(NoHead), HEALTHY, statistic=FACT),
    Case("O9", "padding that is an id of the data", checked(PaddingIsAnId), HEALTHY, statistic=FACT),
    Case("E4", "dropout in eval", checked(Drops), checked(DropsInTraining), "sick", is_quick=True, statistic=FACT),
    Case("E4", "statistics move", checked(MovesStatistics), checked(KeepsStatistics), "sick", statistic=FACT),
    Case("E6", "attention sees all", checked(SeesAll), HEALTHY, "sick", is_quick=True,
         statistic=stat.of(stat.look_ahead)),
    Case("E6", "no shift", checked(NoShift), HEALTHY, "sick", statistic=FACT),
    Case("O12", "mean of a micro", checked(MeanOfMicro), checked(Long), "sick", is_quick=True,
         statistic=stat.of(stat.gradients_apart)),
    Case("O12", "mean that counts as one", checked(MeanCountsOne), checked(Long), "sick",
         statistic=stat.of(stat.gradients_apart)),
    Case("A6", "loud head", checked(LoudHead), HEALTHY, is_quick=True, statistic=stat.of(stat.initial_loss)),
    Case("A6", "loud queries", checked(LoudQueries), HEALTHY, statistic=stat.of(stat.initial_logit)),
    Case("A6", "sharp queries", checked(SharpQueries), HEALTHY, statistic=stat.of(stat.initial_logit)),
    Case("A6", "loud blocks at step 0", checked(LoudBlocks), HEALTHY, statistic=stat.of(stat.block_ratio)),
]  # fmt: skip
