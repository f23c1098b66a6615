"""Trains the faulty recipe until it fails, and replays the capture that the engine left."""

from __future__ import annotations

from pathlib import Path

from rung.api import rebuild
from rung.data.order import shuffled
from rung.engine.build import Setup, restore
from rung.engine.checkpoint import Checkpoints
from rung.engine.loop import fit
from rung.forensics import replay
from rung.forensics.verdict import Verdict
from rung.recipe import Recipe
from rung.runs.query import Run, open_run
from rung.runs.record import Record
from tests.cases.running import Mute, setup_of
from tests.forensics.faulty import FIRST, NUM_ROWS, Faulty

SEED = 1
WORDS = ("optimizer.max_iters=8", "lr.warmup_iters=2", "signals.doctor=false")


def train(recipe: type[Recipe], root: Path, *words: str) -> Run:
    """As `rung train` does, also when the recipe raises."""
    setup = setup_of(recipe, f"seed={SEED}", *WORDS, *words, root=root)
    record = Record.create(
        root, "case", recipe=f"{recipe.__module__}:{recipe.__qualname__}", preset=None, command=["test"],
        seed=setup.cfg.seed, config=setup.config.tree(), sources=setup.config.sources, derived=setup.derived,
        data=setup.data,
    )  # fmt: skip
    return _fitted(setup, record, root)


def go_on(run: Run, recipe: type[Recipe], root: Path, *words: str) -> Run:
    """As `rung resume` does, from the last save; `words` are all that the run had, and what is new."""
    setup = setup_of(recipe, f"seed={SEED}", *WORDS, *words, root=root)
    saves = Checkpoints(run.path / "checkpoints")
    step = saves.steps()[-1]
    restore(setup, saves.at(step), evaluated={row["step"] for row in run.evals()})
    record = Record.reopen(run.path, command=["test"])
    record.event("resume", step=step)
    return _fitted(setup, record, root)


def _fitted(setup: Setup, record: Record, root: Path) -> Run:
    status, reason = "crashed", ""
    try:
        outcome = fit(setup, record, Mute())
        status, reason = outcome.status, outcome.reason
    except KeyboardInterrupt:
        status = "stopped"
    except Exception as error:
        reason = str(error)
    record.finish(status, reason=reason)
    return open_run(record.id, root)


def fail(root: Path, fault: str, num_micros: int, dtype: str, *words: str, bad_micro: int | None = None) -> Run:
    """A run of 4 rows a micro that fails at step FIRST; with `bad_micro`, by the second row of that micro."""
    rows = 4 * num_micros
    words = (f"fault={fault}", f"system.dtype={dtype}", "data.batch_size=4",
             f"optimizer.gradient_accumulation_steps={num_micros}", *words)  # fmt: skip
    if bad_micro is not None:
        words = (*words, f"bad_position={FIRST * rows + bad_micro * 4 + 1}")
    return train(Faulty, root, *words)


def sample_of(num_micros: int, bad_micro: int) -> int:
    return int(shuffled(FIRST * 4 * num_micros + bad_micro * 4 + 1, 1, NUM_ROWS, SEED)[0])


def verdict_of(run: Run, root: Path, step: int | None = None) -> Verdict:
    captured = replay.read(run, step)
    setup = rebuild(run, captured.facts[0]["dtype"], runs=root)
    return replay.replay(setup, run, captured, lambda text: None)
