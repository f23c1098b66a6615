"""A user's own recipe that takes any small model, and one row of data that is not like the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rung.config import key
from rung.data.order import shuffled
from rung.random import Draw
from rung.recipe import Arrays, Batch, Loss, Objective, ParameterGroup, Recipe, Stream

NUM_ROWS, BATCH = 512, 8
BAD_STEP, BAD_PLACE = 3, 5  # where the bad row comes


@dataclass
class Config:
    bad: str = key("none", "What the second number of the bad row is, nan included; none: there is no such row.")


class Rows(Stream):
    num_rows, targets_per_row = NUM_ROWS, 1.0

    def __init__(self, bad: str, seed: int) -> None:
        self.fingerprint = f"vectors/{bad}"
        self.x = np.random.default_rng(0).normal(size=(NUM_ROWS, 4)).astype(np.float32)
        if bad != "none":
            self.x[bad_id(seed), 1] = float(bad)

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {"x": self.x[ids]}


def bad_id(seed: int = 1) -> int:
    return int(shuffled(BAD_STEP * BATCH + BAD_PLACE, 1, NUM_ROWS, seed)[0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.middle(self.a(x))))
        return out

    def middle(self, x: Tensor) -> Tensor:
        return x


class Vectors(Recipe):
    Config = Config
    cfg: Config

    def streams(self) -> Mapping[str, Stream]:
        return {"train": Rows(self.cfg.bad, self.seed), "val": Rows("none", self.seed)}

    def model(self) -> nn.Module:
        return Net()

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            return Loss((model(batch["x"])[:, 0] - 1.0).square().sum(), torch.tensor(float(len(batch["x"]))))

        return [Objective("fit", [ParameterGroup("all", model.parameters())], loss)]
