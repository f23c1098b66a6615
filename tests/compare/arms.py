"""Runs made up for a judgement: two configs, several seeds, and losses that the test chose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rung.runs.query import Run, open_run
from rung.runs.record import Record

STEPS, EVERY = 100, 10
DEFINITIONS = {"eval/val": {"eval set": "chain/val", "rows": 64, "reduction": "sum / targets"}}


def curve(end: float, num: int = STEPS // EVERY) -> list[float]:
    """Falls from 3 to `end`, flat over the last three evals, so that the endpoint is `end`."""
    return [end + (3 - end) * max(0.0, 1 - i / (num - 3)) ** 2 for i in range(1, num + 1)]


def make(root: Path, seed: int = 1, end: float = 1.0, key: float = 0.1, **more: Any) -> Run:
    """One run. `key` is lr.learning_rate; `losses` replace the curve; status None leaves it as if killed."""
    config = {"seed": seed, "lr": {"learning_rate": key, "decay_lr": True}, **more.pop("config", {})}
    status, losses = more.pop("status", "finished"), more.pop("losses", None)
    num_steps, rows = more.pop("num_steps", STEPS), more.pop("rows", 4)
    every, elapsed_s = more.pop("every", EVERY), more.pop("elapsed_s", 60.0)
    given: dict[str, Any] = {
        "recipe": "case:Case",
        "preset": None,
        "command": ["rung", "train", "case"],
        "seed": seed,
        "config": config,
        "sources": {"seed": "command line", "lr.learning_rate": "command line", "lr.decay_lr": "default"},
        "derived": {"num_steps": num_steps, "decay_steps": num_steps, "rows_per_step": rows, "targets_per_row": 8.0},
        "data": {"train": {"fingerprint": "chain/1", "rows": 9}, "val": {"fingerprint": "chain/val", "rows": 64}},
        "definitions": DEFINITIONS,
        "code_root": root.parent / "code",
    }
    (root.parent / "code").mkdir(parents=True, exist_ok=True)
    (root.parent / "code" / "model.py").touch()
    record = Record.create(root, more.pop("experiment", "case"), **{**given, **more})
    losses = curve(end, num_steps // every) if losses is None else losses
    noise = random.Random(seed)
    for step in range(num_steps):
        record.log(
            step, {"loss": 3 - 2 * step / num_steps + 0.01 * noise.random(), "targets": rows * 8, "step_s": 0.01}
        )
        if (step + 1) % every == 0 and (step + 1) // every <= len(losses):
            record.event("eval", step=step + 1, results={"val": {"loss": losses[(step + 1) // every - 1]}})
    if status is not None:
        record.finish(status, last_step=num_steps, totals={"elapsed_s": elapsed_s})
    else:
        record.close()
    return open_run(record.id, root)


def arms(root: Path, ends: Sequence[tuple[float, float]], first_seed: int = 1) -> tuple[list[Run], list[Run]]:
    """Pairs of endpoints, one per seed: control at learning rate 0.1, variant at 0.2."""
    a = [make(root, first_seed + i, one) for i, (one, _) in enumerate(ends)]
    b = [make(root, first_seed + i, two, key=0.2) for i, (_, two) in enumerate(ends)]
    return a, b
