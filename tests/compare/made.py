"""Runs and repositories for tests of what compares them: made in milliseconds, of the form that `rung train` leaves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.runs.files import write_json
from rung.runs.query import Run, open_run
from rung.runs.record import Record

CONFIG: dict[str, Any] = {
    "seed": 7,
    "init_from": "scratch",
    "system": {"dtype": "auto", "threads": 0},
    "data": {"batch_size": 16, "context_size": 256},
    "optimizer": {"max_iters": "40", "grad_clip": 1.0},
    "lr": {"learning_rate": 0.002, "lr_decay_iters": "40", "schedule": "cosine"},
    "eval_interval": "10",
    "eval_iters": 0,
    "logging": {"log_interval": 10},
}
SOURCES = {"lr.lr_decay_iters": "derived: from optimizer.max_iters", "optimizer.max_iters": "command line"}
DERIVED = {"num_steps": 40, "decay_steps": 40, "rows_per_step": 16, "targets_per_row": 100.0, "device": "cpu"}
DATA = {
    "train": {"fingerprint": "7c1e/train/windows-256", "rows": 100, "about": {"source": "bach", "tokenizer": "t1"}},
    "val": {"fingerprint": "7c1e/val/windows-256", "rows": 10},
}
DEFINITIONS = {"eval/val": {"eval set": "7c1e/val/windows-256", "mask": "none", "ignored_ids": [0], "rows": 10}}
WEIGHTS = {"wte.weight": [[8, 4], "aa"], "head.weight": [[4, 8], "bb"]}
IDENTITY = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]


def git(folder: Path, *args: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "-C", str(folder), *IDENTITY, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def make_repo(folder: Path, files: Mapping[str, str] = {}) -> Path:
    """A repository with one commit of these files; its runs folder is ignored."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    for name, text in {".gitignore": "*.bin\n", "model.py": "WIDTH = 32\nDEPTH = 2\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def changed(tree: Mapping[str, Any], **dotted: Any) -> dict[str, Any]:
    """A copy of a tree with some values changed; a__b names a.b, and ... takes the key out."""
    out = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    for name, value in dotted.items():
        *sections, last = name.split("__")
        place = out
        for part in sections:
            place = place.setdefault(part, {})
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = value
    return out


def start_run(root: Path, experiment: str = "piano", **fields: Any) -> Record:
    """An open run; `fields` are those of Record.create."""
    given: dict[str, Any] = {
        "recipe": "piano", "preset": "tiny", "command": ["rung", "train", "piano"], "seed": 7, "config": CONFIG,
        "sources": SOURCES, "derived": DERIVED, "data": DATA, "definitions": DEFINITIONS,
    }  # fmt: skip
    weights = fields.pop("weights", WEIGHTS)
    record = Record.create(root, experiment, **{**given, **fields})
    if weights:
        write_json(record.path / "init.json", weights)
    return record


def make_run(
    root: Path,
    experiment: str = "piano",
    *,
    losses: Sequence[float] = (4.0, 3.0, 2.5, 2.4),
    every: int = 10,
    targets: float = 1600.0,
    salt: float = 0.0,
    status: str | None = "finished",
    evals_of: str = "val",
    **fields: Any,
) -> Run:
    """A run of `every` * len(losses) steps that evaluated every `every` of them."""
    record = start_run(root, experiment, **fields)
    for step in range(every * len(losses)):
        record.log(step, {"loss": 5.0 - 0.01 * step, "targets": targets, "step_s": 0.5, "batch_hash": step + salt})
    for number, loss in enumerate(losses, 1):
        results = {evals_of: {"loss": loss, "loss_se": 0.05, "targets": 1000.0}}
        record.event("eval", step=every * number, results=results)
    record.update(best={"step": every * len(losses), "set": evals_of, "loss": losses[-1] if losses else None})
    if status is None:
        record.close()
    else:
        record.finish(status, last_step=every * len(losses))
    return open_run(record.path, root)
