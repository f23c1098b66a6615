"""If this fails, numbers that a script logs from a GPU are lost, out of order or not those it computed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import rung
from rung.runs.metrics import read_tables
from rung.runs.query import open_run

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def train(runs: Path, num_steps: int = 60) -> tuple[list[float], list[float]]:
    """A loop that hands over tensors and never waits; returns what it had computed, read at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = rung.init("gpu", runs=runs, code=False)
    run.watch(model, optimizer)
    losses, norms = [], []
    for _ in range(num_steps):
        x = torch.randn(32, 64, device="cuda")
        loss = (model(x)[:, 0] - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
        optimizer.step()
        run.log({"loss": loss, "half": loss.half(), "targets": 32})
        losses.append(loss.detach())
    run.log({"val/loss": losses[-1] * math.nan})
    run.finish(quiet=True)
    return torch.stack(losses).double().tolist(), torch.stack(norms).double().tolist()


def test_rows_of_a_gpu_arrive_in_order_and_to_the_digit(tmp_path: Path) -> None:
    losses, norms = train(tmp_path)
    run = open_run("gpu", tmp_path)
    rows = run.metrics(["loss", "norm", "half", "targets"])
    assert rows["step"][:60] == list(range(60))
    assert rows["loss"][:60] == losses
    assert rows["norm"][:60] == pytest.approx(norms, rel=1e-5)
    assert rows["half"][:60] == pytest.approx(losses, rel=1e-2)
    assert math.isnan(run.evals()[0]["loss"])
    assert len(read_tables(run.path / "tables")["tensors"][0]["names"]) == 4


def test_logging_from_a_gpu_does_not_wait_for_it(tmp_path: Path) -> None:
    run = rung.init("gpu", runs=tmp_path, code=False)
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):
        busy = busy @ busy / 4096
    after = torch.cuda.Event()
    after.record()
    run.log({"loss": busy.mean()})
    assert not after.query(), "the device was done when log returned: it has waited, or the work was too small"
    run.finish(quiet=True)
    assert len(open_run("gpu", tmp_path).metrics(["loss"])["loss"]) == 1
