"""A plain PyTorch loop with rung's guard and a fault at step 40: python examples/guarded_loop.py

The target of each row is a count, and the loss takes its logarithm. One row of step 40 has the count 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import rung


def batches(num_steps: int) -> Iterator[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)  # so that only the model draws from torch's global generator
    for step in range(num_steps):
        x = torch.randn(16, 8, generator=numbers)
        count = torch.exp(x[:, 0]).ceil()
        if step == 40:
            count[3] = 0  # the fault
        yield {"x": x, "count": count}


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def loss(batch: dict[str, Tensor]) -> Tensor:
    wanted = batch["count"] * torch.log(batch["count"])
    return (model(batch["x"])[:, 0] - wanted).abs().mean()


guard = rung.guard(model, optimizer, loss=loss, out="captures", clip=1.0)
try:
    for batch in batches(100):
        value = loss(batch)
        value.backward()
        guard.step(value, batch)  # in place of clip_grad_norm_ and optimizer.step()
        optimizer.zero_grad()
    guard.wait()
except rung.Diverged as error:
    print(error)  # noqa: T201
    print(*guard.replay().lines(), sep="\n")  # noqa: T201
