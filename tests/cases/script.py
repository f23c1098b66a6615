"""Runs a case as somebody's own training script would: torch's optimizer, one loop, `rung.init` and `run.guard`.

The model, the loss and the batches are the recipe's, so that a fault is the same in both. The script says in one line
each what the doctor names as the way to look: how many rows its data has (run.data), which of them a step has
(run.rows), how many targets a micro has (run.targets), what an input is worth (run.without), the measures of its evals
and the parts of its losses (run.log), and that it reads its config from run.config alone. Of several objectives each
takes its own step, and the optimizers are watched. What an update of another size would have done is not known here.

    python -m tests.cases.script         which of the faults are named in a recipe, and which in a plain loop
    python -m tests.cases.script --scripts O8 G1        only these, only in a plain loop
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from rung.engine.config import Engine
from rung.engine.evaluate import EVAL_STEP
from rung.engine.guarded import Diverged
from rung.engine.probes import row_losses, take_away
from rung.engine.step import seed_torch
from rung.random import Draw
from rung.recipe import Recipe
from rung.runs.query import open_run
from tests.cases.case import Seen, Trained, diagnosed
from tests.cases.catalog import cases
from tests.cases.running import setup_of

EVALS = 8  # of a whole run
ENGINE = {field.name for field in dataclasses.fields(Engine)}


def script_case(recipe: type[Recipe], root: Path, *overrides: str, seed: int = 1) -> Seen:
    """What the doctor finds in a run of a script that trains this recipe's model with these keys."""
    setup = setup_of(recipe, f"seed={seed}", *overrides, root=root)
    objectives, model, cfg = setup.state.objectives, setup.state.model, setup.cfg
    first, is_half = objectives[0], cfg.system.dtype == "float16"
    num_micros = cfg.optimizer.gradient_accumulation_steps
    train, held_out = setup.streams["train"], next((s for n, s in setup.streams.items() if n != "train"), None)
    own = {key.rpartition(".")[2]: key for key in setup.config.values if "." not in key and key not in ENGINE}
    config = {"lr": cfg.lr.learning_rate, "batch_size": cfg.data.batch_size, "grad_clip": cfg.optimizer.grad_clip}
    config |= {name: setup.config.values[key] for name, key in own.items()}
    run = rung.init("script", config=config, seed=seed, runs=root, code=False)
    run.config.check_read()
    for name in ("lr", "batch_size", "grad_clip"):
        _ = run.config[name]

    def computed(objective: Any, batch: Mapping[str, Any]) -> Any:
        seed_torch(objective.name, batch["draw"])
        return objective.plain_loss({name: t for name, t in batch.items() if name != "draw"}, batch["draw"])

    def loss(batch: Mapping[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=is_half):
            computed_last[:] = [computed(first, batch)]
        [found] = computed_last
        return found.sum / found.count.clamp(min=1) / num_micros

    def gathered(stream: Any, ids: np.ndarray, rows: np.ndarray, step: int) -> dict[str, Any]:
        draw = Draw(cfg.seed, step, rows)
        return {**{n: torch.as_tensor(a) for n, a in stream.gather(ids, draw).items()}, "draw": draw}

    def evaluated(row: dict[str, float]) -> None:
        assert held_out is not None
        rows = np.arange(min(held_out.num_rows, 64))
        batch = gathered(held_out, rows, rows, EVAL_STEP)
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=is_half):
            found = computed(first, batch)
            arrays = {name: value for name, value in batch.items() if name != "draw"}
            row["val/loss"] = float(found.sum / found.count)
            for name, (total, count) in setup.recipe.measure(model, arrays, batch["draw"]).items():
                row[f"val/{name}"] = float(total / count)
            for given in setup.recipe.inputs():
                without = take_away(arrays, given, batch["draw"])
                pairs = [row_losses(first.plain_loss, some, batch["draw"]) for some in (arrays, without)]
                run.without(given.name, *(pair[:, 0] / pair[:, 1] for pair in pairs))
        model.train()

    losses: list[Any] = []  # of the micros of a step
    computed_last: list[Any] = []  # the guard asks for losses too, to measure activations
    guard = None
    scaler = torch.amp.GradScaler("cpu") if is_half else None
    if len(objectives) == 1:
        guard = run.guard(
            model, first.optimizers, loss, clip=cfg.optimizer.grad_clip, layers_every=cfg.signals.layers_every,
            activation_stats_every=cfg.signals.activation_stats_every, scaler=scaler,
        )  # fmt: skip
    else:
        run.watch(model, [x for o in objectives for x in o.optimizers], every=cfg.signals.layers_every, share=1)
    run.data("train", np.arange(train.num_rows))
    a_step = setup.layout.rows_per_step
    with contextlib.suppress(Diverged):
        for step in range(setup.num_steps or 0):
            for optimizer in (x for o in objectives for x in o.optimizers):
                for group in optimizer.param_groups:
                    group["lr"] = setup.schedule.lr(step, []) * group.get("lr_scale", 1.0)
                optimizer.zero_grad()
            ids = train.ids(step * a_step, a_step, cfg.seed)
            run.rows(ids)
            row: dict[str, float] = {}
            losses.clear()
            if guard is not None:
                for some in np.split(np.arange(a_step), num_micros):
                    batch = gathered(train, ids[some], some, step)
                    value = loss(batch)
                    losses += computed_last
                    run.targets(int(losses[-1].count))
                    (value if scaler is None else scaler.scale(value)).backward()
                    guard.micro(value, batch)
                guard.step()
                row["loss"] = sum(float(x.sum.detach() / x.count.clamp(min=1)) for x in losses) / num_micros
            else:
                batch = gathered(train, ids, np.arange(a_step), step)
                for objective in objectives:
                    found = computed(objective, batch)
                    gradients = torch.autograd.grad(found.sum / found.count, objective.parameters, allow_unused=True)
                    for parameter, gradient in zip(objective.parameters, gradients, strict=True):
                        parameter.grad = gradient
                    torch.nn.utils.clip_grad_norm_(objective.parameters, cfg.optimizer.grad_clip or 1e9)
                    for optimizer in objective.optimizers:
                        optimizer.step()
                    prefix = "" if objective is first else f"{objective.name}/"
                    row[f"{prefix}loss"] = float(found.sum.detach() / found.count)
                    row |= {f"{prefix}{name}": float(total / count) for name, (total, count) in found.parts.items()}
                    run.targets(int(found.count))
            if held_out is not None and (step + 1) % max(1, (setup.num_steps or 0) // EVALS) == 0:
                evaluated(row)
            run.log(row, step=step)
        if guard is not None:
            guard.wait()
    unread = set(setup.config.unread())
    for name in (name for name, key in own.items() if key not in unread):
        _ = run.config[name]
    run.finish("diverged" if guard is not None and guard.has_ended else "finished", quiet=True)
    return diagnosed(read(open_run(run.id, root)))


def main() -> None:
    is_quick = "--scripts" in sys.argv
    only, named = [word for word in sys.argv[1:] if word[0] != "-"], {"a recipe": 0, "a plain loop": 0}
    known = [case for case in cases() if isinstance(case.sick, Trained) and (not only or case.rule in only)]
    for case in known:
        assert isinstance(case.sick, Trained)
        with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
            in_recipe = {} if is_quick else case.sick(Path(folder) / "recipe", 1).found
            in_script = script_case(case.sick.recipe, Path(folder), *case.sick.overrides).found
        named["a recipe"] += case.rule in in_recipe
        named["a plain loop"] += case.rule in in_script
        print(f"{case.rule:3} {case.name:40.40} {in_recipe.get(case.rule, '-'):6} {dict(in_script) or '-'}", flush=True)  # noqa: T201
    print(f"of {len(known)} faults, named in " + ", in ".join(f"{place}: {count}" for place, count in named.items()))  # noqa: T201


if __name__ == "__main__":
    main()
