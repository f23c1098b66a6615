"""Forecasts noisy sines with a GRU: two micro-batches an update, a linear warm-up and decay."""

import torch
from torch import nn

import rung

cfg = dict(seed=1337, lr=5e-3, warmup=30, steps=300, batch=16, micros=2, width=24, length=24, dropout=0.0)
torch.manual_seed(cfg["seed"])


def waves(count):
    phase, speed = 6.28 * torch.rand(count, 1), 0.2 + 0.4 * torch.rand(count, 1)
    series = torch.sin(phase + speed * torch.arange(cfg["length"] + 1))
    return (series + 0.05 * torch.randn_like(series))[..., None]


train, val = waves(2000), waves(200)


class Forecaster(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter = nn.Linear(1, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(cfg["dropout"])
        self.leave = nn.Linear(width, 1)

    def forward(self, x):
        hidden, _ = self.rnn(torch.tanh(self.enter(x)))
        return self.leave(self.drop(hidden))


model = Forecaster(cfg["width"])
optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])


def scale(step):
    rise = (step + 1) / cfg["warmup"]
    return min(1.0, rise, max(0.05, 1 - step / cfg["steps"]))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
mse = nn.MSELoss()
run = rung.init("waves", config=cfg, tags=["forecast"])
run.watch(model, optimizer, every=20)
for step in range(cfg["steps"]):
    total = 0.0
    for _ in range(cfg["micros"]):
        series = train[torch.randint(len(train), (cfg["batch"],))]
        x, y = series[:, :-1], series[:, 1:]
        loss = mse(model(x), y) / cfg["micros"]
        loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    run.log({"loss": total, "grad_norm": norm, "targets": cfg["batch"] * cfg["micros"] * cfg["length"]}, step=step)
    scheduler.step()
    if (step + 1) % 50 == 0:
        model.eval()
        with torch.no_grad():
            run.log({"val/loss": mse(model(val[:, :-1]), val[:, 1:])}, step=step + 1)
        model.train()
run.finish()
