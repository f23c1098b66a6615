"""A small character model in a plain loop; five numbered lines add the lab book: python examples/plain_loop.py"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import rung

TEXT = " ".join(str(part.__doc__) for part in (str, dict, list, int, float, complex, bytes, set, math, nn.Linear))

run = rung.init("plain", config={"lr": 3e-3, "width": 64, "steps": 200, "seed": 1}, why="does width pay?")  # 1
torch.manual_seed(run.config.seed)
known = sorted(set(TEXT))
ids = torch.tensor([known.index(letter) for letter in TEXT])
train, val = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
model = nn.Sequential(
    nn.Embedding(len(known), 16), nn.Flatten(), nn.Linear(8 * 16, run.config.width), nn.ReLU(),
    nn.Linear(run.config.width, len(known)),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=run.config.lr)
run.watch(model, optimizer)  # 2


def loss_of(part: Tensor, starts: Tensor) -> Tensor:
    """The loss of the next character, given the eight before it."""
    windows = torch.stack([part[start : start + 9] for start in starts.tolist()])
    return nn.functional.cross_entropy(model(windows[:, :8]), windows[:, 8])


for step in range(run.config.steps):
    loss = loss_of(train, torch.randint(len(train) - 9, (32,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log({"loss": loss, "targets": 32})  # 3
    if step % 50 == 49:
        with torch.no_grad():
            run.log({"val/loss": loss_of(val, torch.arange(0, len(val) - 9, 5))})  # 4
run.finish()  # 5
