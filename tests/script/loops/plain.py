"""A regression in the plainest of loops, at the level of the module: python plain.py FAULT ..  (healthy: no fault)

Each fault is a run of its own, named after it. rung is told nothing but the losses.
"""

# ruff: noqa: B023  (functions of a loop are called in it)
import copy
import math
import sys

import torch
from torch import nn

import rung

STEPS = 300

for fault in sys.argv[1:]:
    torch.manual_seed(1)
    run = rung.init(fault, config={"lr": 1e-2, "weight_decay": 0.1 if fault == "key_not_passed" else 0.01}, code=False)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    extra = nn.Linear(8, 1)
    start = copy.deepcopy(model)
    trained = list(start.parameters()) if fault == "other_model" else list(model.parameters())
    if fault == "frozen":
        for parameter in trained:
            parameter.requires_grad_(False)
    if fault not in ("left_out", "frozen"):
        trained += extra.parameters()
    if fault == "some_still":
        groups = [{"params": trained[:1], "lr": 0.0}, {"params": trained[1:]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(trained, lr=0.0 if fault == "rate_zero" else 1e-2)
    weights = torch.randn(8, generator=torch.Generator().manual_seed(3))
    fixed = torch.randn(128, 8, generator=torch.Generator().manual_seed(2))

    def loss_of(x: torch.Tensor, network: nn.Module, noise: float = 0.1) -> torch.Tensor:
        y = torch.tanh(x @ weights) + noise * torch.randn(len(x))
        return (network(x)[:, 0] + extra(x)[:, 0] - y).pow(2).mean()

    def rate(step: int) -> float:
        if fault == "joint":
            return 1e-2 * (step + 1) / 30 if step < 30 else 2e-3 * (1 - step / STEPS)
        if fault == "restarts":
            return 1e-2 * (1 + math.cos(math.pi * (step % 60) / 60)) / 2 + 1e-4
        if fault == "ends_early":
            return 1e-2 * max(0.0, 1 - step / 150)
        if fault == "never_warm":
            return 1e-2 * (step + 1) / 1000
        if fault == "cosine":
            return 1e-2 * min((step + 1) / 20, 0.1 + 0.9 * (1 + math.cos(math.pi * step / STEPS)) / 2)
        if fault == "milestones":
            return 1e-2 * 0.1 ** (step // 120)
        return float(optimizer.param_groups[-1]["lr"])

    for step in range(STEPS):
        if fault in ("joint", "restarts", "ends_early", "never_warm", "cosine", "milestones"):
            optimizer.param_groups[0]["lr"] = rate(step)
        x = torch.randn(32, 8)
        if fault == "no_relation":
            x = x[torch.randperm(32)]
            loss = (model(torch.randn(32, 8))[:, 0] - 3 * torch.randn(32)).pow(2).mean()
        else:
            loss = loss_of(x, model)
        if fault == "wrong_sign":
            loss = -loss
        if fault not in ("no_zero_grad", "by_hand"):
            optimizer.zero_grad()
        if fault != "no_backward":
            if not loss.requires_grad:
                loss = loss + 0 * extra.weight.sum()
            loss.backward()
        if fault == "by_hand":
            with torch.no_grad():
                for parameter in (*model.parameters(), *extra.parameters()):
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
        elif fault != "no_step":
            optimizer.step()
        row = {"loss": abs(loss.item()) if fault == "wrong_sign" else loss.item()}
        if fault == "nan_metric":
            row["ratio"] = float("nan") if step > 200 else 1.0
        if fault == "placeholder":
            row["epoch_loss_ratio"] = 1.0 if step % 100 == 99 else float("nan")
        run.log(row)
        if step % 30 == 29:
            with torch.no_grad():
                torch.manual_seed(step if fault != "quiet_eval" else 0)
                network = start if fault == "stale_eval" else model
                value = loss_of(fixed, network, 0.0 if fault == "stale_eval" else 0.1).item()
                if fault == "stale_eval":
                    value = (start(fixed)[:, 0] - torch.tanh(fixed @ weights)).pow(2).mean().item()
                run.log({"val/loss": float("nan") if fault == "nan_eval" and step > 200 else value})
                if fault == "two_evals":
                    run.log({"val/loss": loss_of(fixed, nn.Sequential(nn.Dropout(0.3), model)).item()})
    run.finish()
