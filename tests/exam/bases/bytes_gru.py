"""Learns to write text, byte by byte, with a GRU."""

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from rung.config import key
from rung.recipe import Identity, Loss, Objective, ParameterGroup, Recipe, Sample, Stream


@dataclass
class Config:
    width: int = key(48, "Channels of the GRU.", low=1)
    context_size: int = key(64, "Bytes in a row that are predicted.", low=1)


class Rows(Stream):
    def __init__(self, data, context):
        self.data, self.context = data, context
        self.num_rows = (len(data) - 1) // context
        self.targets_per_row = float(context)
        self.fingerprint = f"{hashlib.sha256(data.tobytes()).hexdigest()[:16]}/rows-{context}"
        shares = np.bincount(data)[np.unique(data)] / len(data)
        self.baselines = {"unigram": float(-(shares * np.log(shares)).sum())}

    def gather(self, ids, draw):
        return {"bytes": self.data[ids[:, None] * self.context + np.arange(self.context + 1)]}


class Gru(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, ids, state=None):
        out, state = self.gru(self.embed(ids), state)
        return self.head(out), state


class Bytes(Recipe):
    Config = Config

    def streams(self):
        data = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
        cut = len(data) * 9 // 10
        parts = {"train": data[:cut], "held_out": data[cut:]}
        return {name: Rows(part, self.cfg.context_size) for name, part in parts.items()}

    def model(self):
        return Gru(self.cfg.width)

    def objectives(self, model):
        def loss(batch, draw):
            ids = batch["bytes"].long()
            logits, _ = model(ids[:, :-1])
            targets = ids[:, 1:].flatten()
            each = cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
            return Loss(each.sum(), torch.tensor(float(len(each)), device=each.device))

        return [Objective("next_byte", [ParameterGroup("all", model.parameters())], loss)]

    def sample(self, model, draw):
        device = model.head.weight.device
        generator, state, written = draw.generator("sample", device), None, [10]
        for _ in range(60):
            logits, state = model(torch.tensor([written[-1:]], device=device), state)
            written.append(int(torch.multinomial(logits[0, -1].float().softmax(-1), 1, generator=generator)))
        return [Sample("text.txt", bytes(written), "60 bytes after a line break")]

    def identity(self):
        return Identity(weights={"vocabulary": "bytes"}, metrics={"loss": "cross entropy in nats"})
