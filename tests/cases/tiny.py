"""A user's own recipe, small enough to be made sick in seconds: a GPT of two layers on a Markov chain.

It lies outside of the package and knows nothing of the doctor. Entropy rate of the chain about 1.06 nats, ln V = 3.47.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.config import key, section
from rung.random import Draw
from rung.recipe import Arrays, Batch, Loss, Objective, ParameterGroup, Recipe, Stream

VOCAB, LENGTH = 32, 32


@dataclass
class Model:
    width: int = key(32, "Channels.", low=1)
    layers: int = key(2, "Blocks.", low=1)
    dropout: float = key(0.0, "After attention and MLP.", low=0)


@dataclass
class Config:
    model: Model = section(Model, "The network.")
    num_rows: int = key(2000, "Sequences to train on.", low=1)
    num_eval: int = key(64, "Sequences to evaluate on.", low=1)


def chain(num_rows: int, seed: int, length: int = LENGTH + 1) -> np.ndarray:
    """(rows, length) ids of a fixed Markov chain in which each id has three successors."""
    rng = np.random.default_rng(7)
    successors = rng.integers(0, VOCAB, (VOCAB, 3))
    rng = np.random.default_rng(seed)
    out = np.empty((num_rows, length), np.int64)
    out[:, 0] = rng.integers(0, VOCAB, num_rows)
    for t in range(1, length):
        choice = rng.choice(3, num_rows, p=[0.5, 0.3, 0.2])
        out[:, t] = successors[out[:, t - 1], choice]
    return out


class Rows(Stream):
    """Arrays by name, one row each."""

    def __init__(self, fingerprint: str, targets_per_row: float = LENGTH, **arrays: np.ndarray) -> None:
        self.arrays, self.fingerprint, self.targets_per_row = arrays, fingerprint, targets_per_row
        self.num_rows = len(next(iter(arrays.values())))

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {name: array[ids] for name, array in self.arrays.items()}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.drop = Attention(width), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Tiny(Recipe):
    """Each case overrides what is to be sick."""

    Config = Config
    cfg: Config

    def streams(self) -> Mapping[str, Stream]:
        return {
            "train": Rows(f"chain/{self.cfg.num_rows}", ids=chain(self.cfg.num_rows, 1)),
            "val": Rows("chain/val", ids=chain(self.cfg.num_eval, 2)),
        }

    def model(self) -> nn.Module:
        return Gpt(self.cfg.model.width, self.cfg.model.layers, self.cfg.model.dropout)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def next_id(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            logits = model(ids[:, :-1])
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            return Loss(losses, torch.tensor(float(ids[:, 1:].numel())))

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], next_id)]
