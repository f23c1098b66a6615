"""A recipe that was written from docs/recipe.md and nothing else: a frozen part, two groups, two codebooks.

If it needs more than the page says, the page is wrong.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from rung.config import key
from rung.recipe import Identity, Input, Loss, Notes, Objective, ParameterGroup, Recipe, Sample, Stream, TargetLosses

CLASSES, NAMES = 16, ("coarse", "fine")


@dataclass
class Config:
    width: int = key(24, "Channels of the GRU.", low=1)
    num_rows: int = key(64, "Melodies to learn from.", low=8)


class Melodies(Stream):
    """Rows of 6 to 10 steps on a scale, each a coarse and a fine code, and a tempo that says how far a step goes."""

    groups = ("slow", "fast")
    targets_per_row = 14.0

    def __init__(self, first, num_rows):
        self.first, self.num_rows = first, num_rows
        self.fingerprint = f"melodies/{first}+{num_rows}"
        self.baselines = {"uniform": float(np.log(CLASSES))}

    def gather(self, ids, draw):
        steps, tempo = np.arange(10), 1 + self.group_of(ids)
        coarse = (self.first + 5 * ids[:, None] + steps * tempo[:, None]) % CLASSES
        codes = np.stack([coarse, (3 * coarse + ids[:, None]) % CLASSES], -1).astype(np.uint8)
        weights = np.repeat(steps < 6 + (ids % 5)[:, None], 2).reshape(codes.shape)
        return {"codes": codes, "weights": weights, "tempo": tempo.astype(np.float32)}

    def group_of(self, ids):
        return ids % 2


class Singer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Embedding(CLASSES, width).requires_grad_(False)  # a constant, as if somebody had trained it
        self.embed = nn.ModuleList(nn.Embedding(CLASSES, width) for _ in NAMES)
        self.body = nn.ModuleDict(
            {"gru": nn.GRU(width + 1, width, batch_first=True), "head": nn.Linear(width, 2 * CLASSES)}
        )
        nn.init.normal_(self.body["head"].weight, std=0.02)
        nn.init.zeros_(self.body["head"].bias)

    def forward(self, codes, tempo):
        summed = sum((embed(codes[..., n]) for n, embed in enumerate(self.embed)), self.scale(codes[..., 0]))
        x = torch.cat([summed, tempo[:, None, None].expand(-1, codes.shape[1], 1)], -1)
        return self.body["head"](self.body["gru"](x)[0]).unflatten(-1, (len(NAMES), CLASSES))


class Newcomer(Recipe):
    Config = Config

    def streams(self, split=None):
        if split is not None:
            return {split: Melodies(2000, 12)}
        return {"train": Melodies(0, self.cfg.num_rows), "held_out": Melodies(1000, 12)}

    def model(self):
        return Singer(self.cfg.width)

    def objectives(self, model):
        def loss(batch, draw):
            codes = batch["codes"].long()
            targets, weights = codes[:, 1:], batch["weights"][:, 1:].float()
            logits = model(codes[:, :-1], batch["tempo"]).float()
            each = cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view_as(weights) * weights
            parts = {name: (each[..., n].sum(), weights[..., n].sum()) for n, name in enumerate(NAMES)}
            return Loss(each.sum(), weights.sum(), parts, TargetLosses(each.detach(), weights, NAMES))

        embed = ParameterGroup("embed", model.embed.parameters(), lr_scale=0.5, weight_decay=0.0)
        body = ParameterGroup("body", model.body.parameters(), betas=(0.9, 0.99), muon=True)
        return [Objective("codes", [embed, body], loss, blocks=[model.body["gru"]])]

    def measure(self, model, batch, draw):
        codes, weights = batch["codes"].long(), batch["weights"][:, 1:]
        is_right = model(codes[:, :-1], batch["tempo"]).argmax(-1) == codes[:, 1:]
        return {"accuracy": ((is_right & weights).sum(), weights.sum())}

    def sample(self, model, draw):
        device = model.scale.weight.device
        codes, generator = torch.zeros(1, 1, 2, dtype=torch.long, device=device), draw.generator("sample", device)
        for _ in range(9):
            shares = model(codes, torch.ones(1, device=device))[0, -1].float().softmax(-1)
            codes = torch.cat([codes, torch.multinomial(shares, 1, generator=generator).view(1, 1, 2)], 1)
        return [Sample("melody.txt", str(codes[0].tolist()).encode(), "ten steps, slow")]

    def inputs(self):
        return [Input("tempo", ["tempo"])]

    def identity(self):
        return Identity({"vocab_size": CLASSES, "codebooks": list(NAMES)}, {"loss": "cross entropy in nats"})

    def describe(self, init_from):
        return Notes(lines=[f"{len(NAMES)} codebooks of {CLASSES} classes"])
