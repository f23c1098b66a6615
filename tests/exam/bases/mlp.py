"""Regression with noise; every step is guarded."""

import torch
from torch import nn

import rung

SEED, LR, STEPS, BATCH, WIDTH, DEPTH = 1337, 3e-3, 400, 64, 32, 2
torch.manual_seed(SEED)
truth = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


@torch.no_grad()
def make(count):
    x = torch.randn(count, 8)
    y = 3 * truth(x)[:, 0] + 0.1 * torch.randn(count)
    return x, y


x_train, y_train = make(4096)
x_val, y_val = make(512)


def layers():
    yield nn.Linear(8, WIDTH)
    for _ in range(DEPTH - 1):
        yield nn.ReLU()
        yield nn.Linear(WIDTH, WIDTH)
    yield nn.ReLU()
    yield nn.Linear(WIDTH, 1)


model = nn.Sequential(*layers())
optimizer = torch.optim.Adam(model.parameters(), lr=LR)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def loss_fn(batch):
    x, y = batch
    return (model(x)[:, 0] - y).pow(2).mean()


run = rung.init("regression", config={"lr": LR, "steps": STEPS, "batch_size": BATCH, "width": WIDTH, "seed": SEED})
guard = run.guard(model, optimizer, loss=loss_fn, clip=5.0)
order = torch.randperm(len(x_train))
for step in range(STEPS):
    start = step * BATCH % len(x_train)
    if start == 0:
        order = torch.randperm(len(x_train))
    rows = order[start : start + BATCH]
    batch = (x_train[rows], y_train[rows])
    loss = loss_fn(batch)
    optimizer.zero_grad()
    loss.backward()
    guard.step(loss, batch)
    scheduler.step()
    run.log({"loss": loss, "targets": len(rows)})
    if step % 50 == 49:
        with torch.no_grad():
            run.log({"val/loss": loss_fn((x_val, y_val))})
guard.wait()
run.finish()
