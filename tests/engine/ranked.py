"""A small recipe with what makes gradients hard to share: tied weights, a frozen part, a part that few rows use, a
second objective that is trained at every other step. And with faults of single ranks, to choose."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.config import key
from rung.errors import DataError
from rung.random import Draw
from rung.recipe import Arrays, Batch, Input, Loss, Objective, ParameterGroup, Recipe, Stream

NUM_ROWS, VOCAB, WIDTH, LENGTH = 120, 16, 8, 6
FAULT_STEP = 4


@dataclass
class Config:
    fault: str = key("none", "What goes wrong at one step.")
    fault_rank: int = key(1, "On which rank.")
    bad_row: int = key(-1, "A row of the data whose loss is not finite.")


class Rows(Stream):
    num_rows, targets_per_row = NUM_ROWS, float(LENGTH)

    def __init__(self, cfg: Config) -> None:
        self.fingerprint = f"ranked/{cfg.bad_row}"
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(1, VOCAB, (NUM_ROWS, LENGTH + 1))
        self.lengths = rng.integers(1, LENGTH + 1, NUM_ROWS)  # so that rows differ in their number of targets
        self.is_bad = np.arange(NUM_ROWS) == cfg.bad_row

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {"tokens": self.tokens[ids], "lengths": self.lengths[ids], "is_bad": self.is_bad[ids]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.seldom, self.body = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.critic = nn.Linear(WIDTH, 1)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        is_odd = tokens[:, 0] == 3  # about one row in fifteen
        if is_odd.any():
            x = x + self.seldom(x) * is_odd[:, None, None]
        x = x + torch.tanh(self.body(self.frozen(x)))
        return x


class Ranked(Recipe):
    Config = Config
    cfg: Config

    def streams(self) -> Mapping[str, Stream]:
        return {"train": Rows(self.cfg), "val": Rows(Config())}

    def model(self) -> nn.Module:
        return Model()

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        assert isinstance(model, Model)
        critic = list(model.critic.parameters())
        rest = [p for n, p in model.named_parameters() if not n.startswith("critic")]

        def mask(batch: Batch) -> Tensor:
            return torch.arange(LENGTH) < batch["lengths"][:, None]

        def main(batch: Batch, draw: Draw) -> Loss:
            if model.training:
                self.strike(model, draw.step)
            logits = model.head(model.hidden(batch["tokens"][:, :-1]))
            losses = F.cross_entropy(logits.transpose(1, 2), batch["tokens"][:, 1:], reduction="none")
            losses = torch.where(batch["is_bad"][:, None], torch.inf, losses * mask(batch))
            return Loss(losses.sum(), mask(batch).sum())

        def criticise(batch: Batch, draw: Draw) -> Loss:
            guess = model.critic(model.hidden(batch["tokens"][:, :-1]).detach())[..., 0]
            wanted = (batch["tokens"][:, 1:] % 2).float()
            return Loss(((guess - wanted) ** 2 * mask(batch)).sum(), mask(batch).sum())

        return [
            Objective("main", [ParameterGroup("all", rest)], main),
            Objective("critic", [ParameterGroup("all", critic, lr_scale=2.0)], criticise, every=2),
        ]

    def inputs(self) -> Sequence[Input]:
        return [Input("tokens", ("tokens",), "permute")]

    def strike(self, model: Model, step: int) -> None:
        if step != FAULT_STEP or int(os.environ.get("RANK", "0")) != self.cfg.fault_rank:
            return
        if self.cfg.fault == "raise":
            raise ZeroDivisionError("this rank cannot")
        if self.cfg.fault == "data":
            raise DataError("a row is damaged; prepare the data again", code="data-damaged")
        if self.cfg.fault == "hang":
            threading.Event().wait()
        if self.cfg.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.cfg.fault == "drift":
            with torch.no_grad():
                model.body.weight[0, 0] += 1e-3
        if self.cfg.fault == "stop":
            os.kill(int(os.environ["RUNG_LAUNCHER"]), signal.SIGTERM)
