"""Runs whose eval is of another model, that overfit, that mostly learn padding, or that see the answer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rung.random import Draw
from rung.recipe import Batch, Loss, Objective, ParameterGroup, Stream
from tests.cases import statistics as stat
from tests.cases.case import Case, trained
from tests.cases.tiny import Rows, Tiny, chain


class StaleEval(Tiny):
    """Evals use a copy of the model that was made before training."""

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        old = copy.deepcopy(model).requires_grad_(False)

        def next_id(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            logits = (old if draw.is_eval else model)(ids[:, :-1])
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            return Loss(losses, torch.tensor(float(ids[:, 1:].numel())))

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], next_id)]


class Padded(Tiny):
    """Three quarters of each row are padding, id 0, which is learned like any other."""

    ignored = -100

    def streams(self) -> Mapping[str, Stream]:
        def rows(name: str, num_rows: int, seed: int) -> Stream:
            ids = chain(num_rows, seed)
            ids[ids == 0] = 1
            ids[:, 9:] = 0
            return Rows(f"{name}/padded/{num_rows}", targets_per_row=8.0, ids=ids)

        return {"train": rows("train", self.cfg.num_rows, 1), "val": rows("val", self.cfg.num_eval, 2)}

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def next_id(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            targets = ids[:, 1:].flatten()
            logits = model(ids[:, :-1]).flatten(0, 1)
            losses = F.cross_entropy(logits, targets, reduction="sum", ignore_index=self.ignored)
            return Loss(losses, (targets != self.ignored).sum())

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], next_id)]


class PaddingLeftOut(Padded):
    ignored = 0


class NotShifted(Tiny):
    """Is asked for the ids that it is given."""

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def same_id(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"][:, 1:]
            losses = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum")
            return Loss(losses, torch.tensor(float(ids.numel())))

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], same_id)]


UNCLIPPED = "optimizer.grad_clip=10"  # eight targets a row have a larger norm, which is nothing to tell
LONG = ("optimizer.max_iters=400", "eval_interval=40")
MANY = ("num_rows=10000", "optimizer.max_iters=250")

CASES = [
    Case("E1", "eval of a copy of step 0", trained(StaleEval), trained(Tiny), "sick", is_quick=True,
         statistic=stat.of(stat.flat_eval)),
    Case("E2", "32 rows", trained(Tiny, "num_rows=32", *LONG), trained(Tiny, *LONG),
         statistic=stat.of(stat.evals_rise)),
    Case("E5", "padding in the loss", trained(Padded, UNCLIPPED), trained(PaddingLeftOut, UNCLIPPED),
         statistic=stat.held("E5", stat.padding(spread=(0.05, 0.05)))),
    Case("E6", "targets not shifted", trained(NotShifted, *MANY), trained(Tiny, *MANY),
         statistic=stat.held("E6", stat.too_good)),
]  # fmt: skip
