"""The next note of short tunes with a small transformer; tunes differ in length, so rows are padded."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from rung.config import key
from rung.recipe import Loss, Objective, ParameterGroup, Recipe, Sample, Stream

PAD, START, END, NOTES = 0, 1, 2, 24


@dataclass
class Config:
    width: int = key(32, "Channels.", low=1)
    longest: int = key(24, "Notes of the longest tune.", low=2)


def tunes(count, longest, seed):
    """Random walks on a scale that prefer to go on as they went."""
    rng = np.random.default_rng(seed)
    rows = np.full((count, longest + 2), PAD, np.uint8)
    for row in rows:
        n, note, step = int(rng.integers(longest // 2, longest + 1)), int(rng.integers(NOTES)), 1
        row[0] = START
        for t in range(n):
            step = step if rng.random() < 0.6 else int(rng.integers(-3, 4))
            note = (note + step) % NOTES
            row[1 + t] = 3 + note
        row[1 + n] = END
    return rows


class Tunes(Stream):
    def __init__(self, rows):
        self.rows, self.num_rows = rows, len(rows)
        self.targets_per_row = float((rows[:, 1:] != PAD).sum(1).mean())
        self.fingerprint = hashlib.sha256(rows.tobytes()).hexdigest()[:16]
        counts = np.bincount(rows[:, 1:][rows[:, 1:] != PAD])
        shares = counts[counts > 0] / counts.sum()
        self.baselines = {"unigram": float(-(shares * np.log(shares)).sum())}

    def gather(self, ids, draw):
        return {"notes": self.rows[ids]}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Composer(nn.Module):
    def __init__(self, width, longest):
        super().__init__()
        self.notes, self.places = nn.Embedding(3 + NOTES, width), nn.Embedding(longest + 1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3 + NOTES, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.05)

    def forward(self, ids):
        x = self.notes(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Melody(Recipe):
    Config = Config

    def streams(self):
        return {
            "train": Tunes(tunes(2500, self.cfg.longest, self.seed)),
            "val": Tunes(tunes(250, self.cfg.longest, self.seed + 1)),
        }

    def model(self):
        return Composer(self.cfg.width, self.cfg.longest)

    def objectives(self, model):
        def loss(batch, draw):
            ids = batch["notes"].long()
            targets = ids[:, 1:]
            counts = (targets != PAD).float()
            each = cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), targets.flatten(), reduction="none")
            return Loss((each.view_as(counts) * counts).sum(), counts.sum())

        return [Objective("next_note", [ParameterGroup("all", model.parameters())], loss)]

    def sample(self, model, draw):
        written = [START]
        generator = draw.generator("tune", "cpu")
        for _ in range(self.cfg.longest):
            logits = model(torch.tensor([written]))[0, -1].float()
            written.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        return [Sample("tune.txt", " ".join(map(str, written)).encode(), "a tune")]
