"""A small language model in a class of its own, with a scheduler of torch and micros: python trainer.py FAULT ..

Nothing of the model is in the frame that logs, except for `self`. rung is told losses and the size of the vocabulary.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rung

VOCAB, LENGTH, STEPS = 24, 12, 260


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 24)
        self.mixed = nn.GRU(24, 24, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(24, VOCAB)
        self.spare = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.mixed(self.tokens(ids))[0])
        return self.head(x) + 0.1 * self.spare(x)


class Trainer:
    def __init__(self, fault: str) -> None:
        torch.manual_seed(2)
        config = {"vocab_size": VOCAB, "optim": {"lr": 1e-2, "momentum": 0.5 if fault == "key_not_passed" else 0.9}}
        if fault == "unigram":
            config["unigram_loss"] = 1.0
        self.fault, self.run = fault, rung.init(fault, config=config, code=False)
        self.model = Model()
        named = dict(self.model.named_parameters())
        if fault == "left_out":
            named = {name: p for name, p in named.items() if not name.startswith("spare")}
        if fault == "frozen":
            self.model.requires_grad_(False)
            self.probe = nn.Parameter(torch.zeros(()))
        # Made of a model that is thrown away, as by a `.to()` of another one.
        parameters = Model().parameters() if fault == "other_model" else named.values()
        lr = 0.0 if fault == "rate_zero" else 0.1
        self.optimizer = torch.optim.SGD(list(parameters), lr=lr, momentum=0.9)
        length = STEPS // 2 if fault == "ends_early" else STEPS
        self.scheduler: torch.optim.lr_scheduler.LRScheduler
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 1e-6, length)
        if fault == "cycled":  # which moves the momentum too, so that no optimizer has that of the config
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, STEPS)
        self.follow = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))
        self.best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def batch(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        ids = [torch.randint(VOCAB, (rows,), generator=drawn)]
        for _ in range(LENGTH):
            jump = torch.rand(rows, generator=drawn) < 0.3
            ids.append(torch.where(jump, torch.randint(VOCAB, (rows,), generator=drawn), self.follow[ids[-1]]))
        row = torch.stack(ids, 1)
        return row[:, :-1], row[:, 1:]

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        if self.fault == "targets_are_inputs" and self.model.training:
            targets = ids
        if self.fault == "no_relation":
            targets = torch.randint(VOCAB, targets.shape)
        return F.cross_entropy(self.model(ids).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self) -> float:
        if self.fault not in ("dropout_eval", "train_mode"):
            self.model.eval()
        kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        if self.fault == "stale_eval":
            self.model.load_state_dict(self.best)
        value = self.loss(*self.batch(64, 10**6)).item()
        self.model.load_state_dict(kept)
        self.model.train()
        return value

    def train(self) -> None:
        for step in range(STEPS):
            if self.fault == "restarts" and step and step % 65 == 0:  # a scheduler of its own for each epoch
                self.optimizer.param_groups[0]["lr"] = self.optimizer.param_groups[0]["initial_lr"] = 0.1
                self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.05, 65)
            total = 0.0
            for micro in range(2):
                loss = self.loss(*self.batch(8, 2 * step + micro)) / 2
                if self.fault == "frozen":
                    loss = loss + 0 * self.probe
                loss.backward()
                total += loss.item()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if self.fault != "no_step":
                self.optimizer.step()
            self.scheduler.step()
            if self.fault != "no_zero_grad":
                self.optimizer.zero_grad(set_to_none=True)
            self.log(step, total, norm)

    def log(self, step: int, loss: float, norm: Tensor) -> None:
        row = {"train/loss": loss}
        if self.fault not in ("frozen", "other_model"):
            row["grad_norm"] = float(norm)
        if self.fault == "nan_metric":
            row["tokens/entropy"] = float("inf") if step == 100 else 1.0
        self.run.log(row, step=step)
        if step % 40 == 39:
            value = self.evaluate()
            self.run.log({"val_loss": float("inf") if self.fault == "nan_eval" else value}, step=step)
            if self.fault == "dropout_eval":
                self.run.log({"val_loss": self.evaluate()}, step=step)
            if self.fault == "cycled":  # a second row of the same eval
                self.run.log({"val_accuracy": 1 / (1 + value)}, step=step)
                self.last = value
        elif self.fault == "cycled" and step > 40:
            self.run.log({"val_loss": self.last}, step=step)  # the last one once more


for name in sys.argv[1:]:
    trainer = Trainer(name)
    trainer.train()
    trainer.run.finish()
