"""Histories made by hand, from lists, and from small loops of other people's making that rung's own would not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rung.doctor.diagnose import diagnose
from rung.doctor.finding import Finding
from rung.doctor.history import History, Series, Table
from rung.doctor.rules import catalogue


def series(values: Sequence[float], steps: Sequence[int] | None = None) -> Series:
    return Series(np.arange(len(values)) if steps is None else np.asarray(steps), np.asarray(values, np.float64))


def table(names: Sequence[str], steps: Sequence[int], **columns: Any) -> Table:
    """Each column is a number, one number per name, or one per step and name."""
    shape = (len(steps), len(names))
    filled = {c: np.broadcast_to(np.asarray(v, np.float64), shape).copy() for c, v in columns.items()}
    return Table(np.asarray(steps), list(names), filled)


def tensors(names: Sequence[str], steps: Sequence[int], **columns: Any) -> Table:
    """A table of tensors that are healthy but for the arguments: updates of 3e-3, matrices of 1000 numbers."""
    usual: dict[str, Any] = {"grad": 0.1, "weight": 1.0, "update": 3e-3, "rms": 1.0, "eps_share": 0.0}
    return table(names, steps, **(usual | {"numel": 1000.0, "decayed": 1.0} | columns))


def history(rows: Mapping[str, Sequence[float]], config: Mapping[str, Any] | None = None, **fields: Any) -> History:
    """Columns from step 0 on. lr and skipped are there unless given; a warm-up is not."""
    num_steps = max((len(values) for values in rows.values()), default=0)
    usual = {"loss": [2.0] * num_steps, "lr": [1e-3] * num_steps, "skipped": [0.0] * num_steps}
    usual |= {"norm": [1.0] * num_steps, "targets": [512.0] * num_steps}
    known = {"lr.learning_rate": 1e-3, "optimizer.name": "adamw", "optimizer.grad_clip": 1.0, "optimizer.eps": 1e-8}
    derived = {"num_steps": num_steps, "warmup_steps": 0} | dict(fields.pop("derived", {}))
    return History(
        run_id="made/1",
        config=known | dict(config or {}),
        derived=derived,
        rows={name: series(values) for name, values in (usual | dict(rows)).items()},
        **fields,
    )


def found(made: History, rule: str) -> Finding | None:
    """What this rule alone finds, held as long as it must be."""
    return next(iter(diagnose(made, [r for r in catalogue() if r.id == rule])), None)


def severity(made: History, rule: str) -> str | None:
    """How bad this rule says it is; whatever it says must come with all that a reader needs."""
    finding = found(made, rule)
    if finding is not None:
        assert finding.evidence
        assert finding.ruled_out
        assert finding.probe
        assert finding.remedy
    return finding.severity if finding else None


def own_loop(
    update: Callable[[nn.Module, Tensor, dict[str, float]], None],
    config: Mapping[str, Any],
    seed: int,
    num_steps: int = 150,
) -> History:
    """A loop over a small regression; `update` does backward and step, and notes what a row should have."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(2048, 16)
    y = (x[:, :4].sum(1, keepdim=True)).tanh() + 0.1 * torch.randn(2048, 1)
    rows: dict[str, list[float]] = {}
    for step in range(num_steps):
        few = torch.arange(step * 32, step * 32 + 32) % len(x)
        loss = (model(x[few]) - y[few]).square().mean()
        row = {"loss": loss.item(), "lr": 1e-2, "skipped": 0.0}
        update(model, loss, row)
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
    return history(rows, config)
