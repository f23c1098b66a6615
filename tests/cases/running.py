"""Runs a case as `rung train` would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rung.config import Layer, parse_overrides
from rung.engine.build import Setup, build
from rung.engine.loop import fit
from rung.recipe import Recipe
from rung.resolve import schema_of
from rung.runs.query import Run, open_run
from rung.runs.record import Record

QUICK = (
    "system.device=cpu", "system.threads=1", "system.data_workers=0", "data.batch_size=16", "optimizer.max_iters=150",
    "lr.learning_rate=3e-3", "lr.warmup_iters=10", "eval_interval=25", "checkpoint.every=0", "checkpoint.best=false",
    "signals.layers_every=5", "signals.activation_stats_every=10",
)  # fmt: skip


class Mute:
    def step(self, step: int, row: Any) -> None: ...
    def eval(self, step: int, results: Any, is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...


def setup_of(recipe: type[Recipe], *overrides: str, root: Path = Path("runs")) -> Setup:
    merged = {override.partition("=")[0]: override for override in (*QUICK, *overrides)}
    layer = Layer("command line", parse_overrides(merged.values()))
    return build(schema_of("case", recipe).resolve([layer]), recipe, root)


def run_case(recipe: type[Recipe], root: Path, *overrides: str, seed: int = 1, parent: str | None = None) -> Run:
    """Trains the recipe with QUICK keys and these; returns the run that it left."""
    setup = setup_of(recipe, f"seed={seed}", *overrides, root=root)
    record = Record.create(
        root, "case", recipe=f"{recipe.__module__}:{recipe.__qualname__}", preset=None, command=["test"],
        seed=setup.cfg.seed, config=setup.config.tree(), sources=setup.config.sources, derived=setup.derived,
        data=setup.data, parent=parent,
    )  # fmt: skip
    outcome = fit(setup, record, Mute())
    record.finish(outcome.status, reason=outcome.reason)
    return open_run(record.id, root)
