"""A recipe whose training can be held in the middle, and a sweep of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from rung.random import Draw
from rung.recipe import Batch, Loss, Objective
from rung.sweep.plan import keep, read_plan
from rung.sweep.space import Sweep
from tests.cases.tiny import Tiny

ROOT = Path(__file__).resolve().parents[2]
GO = "RUNG_TEST_GO"  # the file without which a training does not go on beyond HELD_AT
HELD_AT = 8
STEPS = 20
WORDS = {
    "system.device": "cpu", "system.threads": 1, "system.data_workers": 0, "data.batch_size": 4,
    "optimizer.max_iters": STEPS, "lr.learning_rate": 0.01, "lr.warmup_iters": 2, "eval_interval": 100,
    "checkpoint.every": 5, "checkpoint.best": False, "model.width": 8, "model.layers": 1, "num_rows": 64,
    "num_eval": 16, "signals.layers_every": 0, "signals.activation_stats_every": 0,
}  # fmt: skip


class Held(Tiny):
    """Tiny, which waits in its ninth step until the file exists that RUNG_TEST_GO names, or until it is to stop."""

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        (inner,) = super().objectives(model)

        def held(batch: Batch, draw: Draw) -> Loss:
            while draw.step >= HELD_AT and not Path(os.environ.get(GO, "/")).exists() and not _is_to_stop():
                time.sleep(0.05)
            return inner.loss(batch, draw)

        return [Objective(inner.name, inner.groups, held)]


def _is_to_stop() -> bool:
    """Whether the engine has heard of a signal; it looks for itself only between steps."""
    request = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(request, "number", 0))


def planned(folder: Path, num_points: int, **more: Any) -> Sweep:
    """A kept sweep of Held over seeds; `more` are further words of the sweep file."""
    file = folder / "held.yaml"
    told = {"recipe": "tests.sweep.held:Held", "set": WORDS, "grid": {"seed": list(range(num_points))}, **more}
    file.write_text(yaml.safe_dump(told))
    return keep(read_plan(file, folder / "runs"))
