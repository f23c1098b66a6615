"""Runs a case as somebody's own training script would: torch's optimizer, one loop, `rung.init` and `run.guard`.

The model, the loss and the batches are the recipe's, so that a fault is the same in both. The script says how many rows
its data has (run.data) and counts targets (run.targets); what inputs are worth, which rows a step had and how long it
waited for them is not known here. One objective is trained, in float32, as such scripts do.

    python -m tests.cases.script         which of the faults are named in a recipe, and which in a plain loop
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rung
from rung.doctor.history import read
from rung.engine.guarded import Diverged
from rung.engine.step import seed_torch
from rung.random import Draw
from rung.recipe import Recipe
from rung.runs.query import open_run
from tests.cases.case import Seen, Trained, diagnosed
from tests.cases.catalog import cases
from tests.cases.running import setup_of

EVALS = 8  # of a whole run


def script_case(recipe: type[Recipe], root: Path, *overrides: str, seed: int = 1) -> Seen:
    """What the doctor finds in a run of a script that trains this recipe's model with these keys."""
    setup = setup_of(recipe, f"seed={seed}", *overrides, root=root)
    objective, model, cfg = setup.state.objectives[0], setup.state.model, setup.cfg
    train, held_out = setup.streams["train"], next((s for n, s in setup.streams.items() if n != "train"), None)
    config = {"lr": cfg.lr.learning_rate, "batch_size": cfg.data.batch_size, "grad_clip": cfg.optimizer.grad_clip}
    run = rung.init("script", config=config, seed=seed, runs=root, code=False)

    counts: list[float] = []

    def loss(batch: Mapping[str, Any]) -> Tensor:
        seed_torch(objective.name, batch["draw"])
        value = objective.plain_loss({name: t for name, t in batch.items() if name != "draw"}, batch["draw"])
        counts.append(float(value.count))
        return value.sum / value.count.clamp(min=1)

    def gathered(stream: Any, position: int, count: int, step: int) -> dict[str, Any]:
        ids = stream.ids(position, count, cfg.seed)
        draw = Draw(cfg.seed, step, position + np.arange(len(ids)))
        return {**{n: torch.as_tensor(a) for n, a in stream.gather(ids, draw).items()}, "draw": draw}

    guard = run.guard(
        model, objective.optimizers, loss, clip=cfg.optimizer.grad_clip, layers_every=cfg.signals.layers_every,
        activation_stats_every=cfg.signals.activation_stats_every,
    )  # fmt: skip
    run.data("train", np.arange(train.num_rows))
    rows = setup.layout.rows_per_step
    with contextlib.suppress(Diverged):
        for step in range(setup.num_steps):
            for optimizer in objective.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = setup.schedule.lr(step, []) * group.get("lr_scale", 1.0)
                optimizer.zero_grad()
            batch = gathered(train, step * rows, rows, step)
            value = loss(batch)
            run.targets(int(counts[-1]))
            value.backward()
            guard.step(value, batch)
            row = {"loss": value.item()}
            if held_out is not None and (step + 1) % max(1, setup.num_steps // EVALS) == 0:
                with torch.no_grad():
                    count = min(held_out.num_rows, 64)
                    row["val/loss"] = loss(gathered(held_out, 0, count, 0)).item()
            run.log(row, step=step)
        guard.wait()
    run.finish("diverged" if guard.has_ended else "finished", quiet=True)
    return diagnosed(read(open_run(run.id, root)))


def main() -> None:
    only, named = sys.argv[1:], {"a recipe": 0, "a plain loop": 0}
    known = [case for case in cases() if isinstance(case.sick, Trained) and (not only or case.rule in only)]
    for case in known:
        assert isinstance(case.sick, Trained)
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
            in_recipe = case.sick(Path(folder) / "recipe", 1).found
            in_script = script_case(case.sick.recipe, Path(folder), *case.sick.overrides).found
        named["a recipe"] += case.rule in in_recipe
        named["a plain loop"] += case.rule in in_script
        print(f"{case.rule:3} {case.name:40.40} {in_recipe.get(case.rule, '-'):6} {dict(in_script) or '-'}", flush=True)  # noqa: T201
    print(f"of {len(known)} faults, named in " + ", in ".join(f"{place}: {count}" for place, count in named.items()))  # noqa: T201


if __name__ == "__main__":
    main()
