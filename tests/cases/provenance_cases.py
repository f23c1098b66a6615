"""Records that cannot be trusted: unread keys, uncommitted code, ranks apart, resumes that are other runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rung.config import key
from rung.doctor.history import History, read
from rung.engine.build import Setup, restore
from rung.engine.checkpoint import Checkpoints
from rung.engine.loop import fit
from rung.random import Draw
from rung.recipe import Batch, Loss, Objective, ParameterGroup, Recipe
from rung.runs.query import Run, open_run
from rung.runs.record import Record
from tests.cases.case import Ask, Case, Seen, diagnosed, trained
from tests.cases.performance_cases import judged, made
from tests.cases.running import Mute, run_case, setup_of
from tests.cases.statistics import FACT
from tests.cases.tiny import Config, Tiny

SHORT = ("optimizer.max_iters=60", "checkpoint.every=30", "checkpoint.keep=0")


@dataclass
class SpareConfig(Config):
    spare: float = key(1.0, "Read by nobody.")


class Spare(Tiny):
    """Somebody believes that `spare` does something."""

    Config = SpareConfig


class Rounded(Tiny):
    """A loss that is summed in bfloat16."""

    def objectives(self, model: nn.Module) -> list[Objective]:
        def next_id(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            losses = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            return Loss(losses.bfloat16().sum(), torch.tensor(float(losses.numel())))

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], next_id)]


class Forgetful(Tiny):
    """A weight that is kept in a plain list: it is trained with the others, and saved with none of them."""

    def model(self) -> nn.Module:
        model = super().model()
        model.hidden = [nn.Parameter(torch.full((32,), 0.1))]
        return model

    def objectives(self, model: nn.Module) -> list[Objective]:
        weight = model.hidden[0]

        def next_id(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            logits = model(ids[:, :-1]) + weight
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            return Loss(losses, torch.tensor(float(ids[:, 1:].numel())))

        return [Objective("next_id", [ParameterGroup("all", [*model.parameters(), weight])], next_id)]


def forget_moments(setup: Setup) -> None:
    for objective in setup.stepper.objectives:
        for optimizer in objective.optimizers:
            optimizer.state.clear()


def other_rows(setup: Setup) -> None:
    """The stream goes on somewhere else."""
    setup.state.progress.position += 160


def other_rate(setup: Setup) -> None:
    setup.schedule = replace(setup.schedule, peak=1.5 * setup.schedule.peak)


def resumed(root: Path, seed: int, spoil: Callable[[Setup], None], recipe: type[Recipe] = Tiny) -> Run:
    """Sixty steps, and the last thirty of them again from the save at 30, after `spoil`."""
    run = run_case(recipe, root, *SHORT, seed=seed)
    setup = setup_of(recipe, f"seed={seed}", *SHORT, root=root)
    restore(setup, Checkpoints(run.path / "checkpoints").at(30), evaluated={row["step"] for row in run.evals()})
    spoil(setup)
    record = Record.reopen(run.path, command=["test"])
    record.event("resume", step=30, overrides=[])
    outcome = fit(setup, record, Mute())
    record.finish(outcome.status)
    return open_run(run.id, root)


def after(spoil: Callable[[Setup], None], recipe: type[Recipe] = Tiny) -> Ask:
    return lambda root, seed: diagnosed(read(resumed(root, seed, spoil, recipe)))


def as_it_was(setup: Setup) -> None:
    pass


def in_git(is_dirty: bool) -> Ask:
    """A run that was started from a repository in which a file had, or had not, been edited."""

    def ask(root: Path, seed: int) -> Seen:
        code = root / "code"
        code.mkdir(parents=True)
        (code / "recipe.py").write_text("a = 1\n")
        for args in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
            who = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
            subprocess.run(["git", "-C", str(code), *who, *args], check=True, capture_output=True)
        if is_dirty:
            (code / "recipe.py").write_text("a = 2\n")
        record = Record.create(root / "runs", "case", recipe="case", preset=None, command=["test"], seed=seed,
                               config={}, sources={}, derived={}, data={}, code_root=code)  # fmt: skip
        for step in range(3):
            record.log(step, {"loss": 1.0 / (step + 1)})
        record.finish("finished")
        return diagnosed(read(open_run(record.id, root / "runs")))

    return ask


def ranks_apart(seed: int) -> History:
    history = made(seed=seed)
    history.events.append({"kind": "ranks_differ", "step": 500, "tensors": ["blocks.0.attention.qkv.weight"]})
    return history


def counts_mistakes(seed: int) -> History:
    """A loss that is a whole number by nature: it needs few bits, and has lost none."""
    wrong = np.random.default_rng(seed).integers(200, 400, 600)
    return made(seed=seed, loss=wrong / 512, targets=512.0, targets_min=512.0)


CASES = [
    Case("R1", "a-key-nobody-reads", trained(Spare, "spare=2"), trained(Spare), is_quick=True, statistic=FACT),
    Case("R2", "edited-file", in_git(True), in_git(False), severity="info", is_quick=True, statistic=FACT),
    Case("R3", "perturbed-rank", judged(ranks_apart), judged(lambda seed: made(seed=seed)), "sick", statistic=FACT),
    Case("R4", "no-moments", after(forget_moments), after(as_it_was), "sick", is_quick=True, statistic=FACT),
    Case("R4", "other-rows", after(other_rows), after(as_it_was), "sick", statistic=FACT),
    Case("R4", "other-rate", after(other_rate), after(as_it_was), "sick", statistic=FACT),
    Case("R4", "unsaved-weight", after(as_it_was, Forgetful), after(as_it_was), "sick", statistic=FACT),
    Case("R5", "summed-in-bfloat16", trained(Rounded), judged(counts_mistakes), statistic=FACT),
]
