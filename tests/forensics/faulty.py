"""A user's own recipe with a fault to choose: a small MLP that fails at step 3 in one of the ways that training fails.

It lies outside of the package and knows nothing of forensics. The line that a test expects to be named ends with
`# here`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.config import key
from rung.data.order import shuffled
from rung.random import Draw
from rung.recipe import Arrays, Batch, Loss, Objective, ParameterGroup, Recipe, Stream

NUM_ROWS, NUM_CLASSES, WIDTH, VOCAB = 200, 5, 16, 12
FIRST = 3  # the step from which faults of the code show


@dataclass
class Config:
    fault: str = key("none", "What is wrong.")
    bad_position: int = key(-1, "Where in the order of training the bad row comes; -1: nowhere.")
    dropout: float = key(0.0, "After the first layer.")


class Rows(Stream):
    num_rows, targets_per_row = NUM_ROWS, 1.0

    def __init__(self, cfg: Config, seed: int) -> None:
        self.fingerprint = f"faulty/{cfg.fault}/{cfg.bad_position}"
        rng = np.random.default_rng(0)
        self.x = rng.uniform(0.5, 1.0, (NUM_ROWS, 256)).astype(np.float32)
        self.token = rng.integers(0, VOCAB, NUM_ROWS)
        self.y = rng.integers(0, NUM_CLASSES, NUM_ROWS)
        if cfg.bad_position >= 0:
            is_whole = cfg.fault == "empty target"  # of a micro: a mean over the other rows would be fine
            first, num_rows = (cfg.bad_position // 4 * 4, 4) if is_whole else (cfg.bad_position, 1)
            self.spoil(cfg.fault, shuffled(first, num_rows, NUM_ROWS, seed))

    def spoil(self, fault: str, row: np.ndarray) -> None:
        if fault in ("nan feature", "inf feature"):
            self.x[row, 2] = np.nan if fault == "nan feature" else np.inf
        elif fault == "zero row":
            self.x[row] = 0.0
        elif fault == "id out of range":
            self.token[row] = VOCAB + 3
        elif fault == "empty target":
            self.y[row] = -100

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {"x": self.x[ids], "token": self.token[ids], "y": self.y[ids]}


class Odd(nn.Module):
    """Does nothing, or something that one does not do to numbers."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.is_on = fault, False

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "grown":
            return torch.exp(x)  # here
        if not self.is_on:
            return x
        if self.fault == "log 0":
            x = torch.log(torch.relu(x - 1e4))  # here
        elif self.fault == "zero norm":
            zero = x - x
            x = zero / zero.norm(dim=-1, keepdim=True)  # here
        elif self.fault == "root":
            square = (x * 0).pow(2).sum(-1, keepdim=True)
            x = x + torch.where(square > 0, torch.sqrt(square), 0.0)  # here
        elif self.fault == "exp":
            x = torch.exp(x * 0 + 221.0)  # here
        return x


class Mlp(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.fault = cfg.fault
        self.tokens, self.first = nn.Embedding(VOCAB, WIDTH), nn.Linear(256, WIDTH, bias=False)
        self.drop, self.odd, self.head = nn.Dropout(cfg.dropout), Odd(cfg.fault), nn.Linear(WIDTH, NUM_CLASSES)
        self.squash: nn.Module = nn.Tanh()
        if cfg.fault == "grown":
            self.squash = nn.Identity()
        if cfg.fault == "float16":  # 256 inputs of 3e4 on average make 1.5e5, and float16 ends at 65504
            nn.init.constant_(self.first.weight, 0.02)
            self.squash = nn.Identity()

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        if self.fault == "zero row":
            x = x / x.norm(dim=-1, keepdim=True)  # here
        h = self.squash(self.first(x) + self.tokens(token))
        logits: Tensor = self.head(self.odd(self.drop(h)))
        return logits


class Faulty(Recipe):
    Config = Config
    cfg: Config
    num_transient: ClassVar[int] = 0  # how often the transient fault will still strike

    def streams(self) -> Mapping[str, Stream]:
        return {"train": Rows(self.cfg, self.seed), "val": Rows(Config(), self.seed)}

    def model(self) -> nn.Module:
        return Mlp(self.cfg)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        assert isinstance(model, Mlp)

        def loss(batch: Batch, draw: Draw) -> Loss:
            x, y, count = batch["x"], batch["y"], torch.tensor(float(len(batch["y"])))
            model.odd.is_on = draw.step >= FIRST
            if self.cfg.fault == "float16" and draw.step >= FIRST:
                x = x * 4e4
            if self.cfg.fault == "inf weight" and draw.step == FIRST:
                with torch.no_grad():
                    model.head.weight[1, 2] = torch.inf
            logits = model(x, batch["token"])
            if self.cfg.fault == "empty target":
                return Loss(F.cross_entropy(logits, y) * count, count)  # here
            total = F.cross_entropy(logits, y, reduction="sum")
            if self.cfg.fault == "huge gradient" and draw.step >= FIRST:
                total = total * 1e25
            if self.cfg.fault == "transient" and draw.step == FIRST and Faulty.num_transient > 0:
                Faulty.num_transient -= 1
                total = total * torch.nan
            return Loss(total, count)

        return [Objective("classes", [ParameterGroup("all", model.parameters())], loss)]
