"""Takes the steps of a run again, from a save or from the beginning, as they were taken.

A step is a function of the state, the data and the step number, so on a CPU each comes out the same to the bit. What a
run did besides (batches left out, a way back to an earlier save) is in its events and is done again: the events decide,
and not the policy of the config, which a resume may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rung.engine import checkpoint
from rung.engine.build import Setup, restore
from rung.engine.clock import Clock
from rung.engine.config import SCRATCH
from rung.engine.init_from import external_source, find_checkpoint, fingerprint
from rung.engine.prefetch import Micro, Origin, Prefetcher
from rung.engine.signals import Signals
from rung.engine.state import Progress, set_training
from rung.errors import UserError
from rung.forensics.first import is_mask
from rung.recipe import Pretrained
from rung.runs.marks import save_folder
from rung.runs.query import Run


@dataclass
class Detours:
    """Where a run did not just take the next step with the next rows."""

    positions: dict[int, int] = field(default_factory=dict)  # step -> where in the data it went on after a way back
    left_out: set[int] = field(default_factory=set)  # steps whose update was not applied

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]], capture: int | None = None) -> Detours:
        """As the record has them; with `capture`, as they were when that step was captured.

        A resume and a way back begin again at a save, so what came at or after it no longer counts: the state of a save
        is that before a way back to it.
        """
        events = list(events)
        if capture is not None:
            ends = [n for n, e in enumerate(events) if e["kind"] == "diverged" and e["step"] == capture]
            events = events[: ends[-1]] if ends else events
        found = cls()
        for event in events:
            if event["kind"] == "skip":
                found.left_out.add(event["step"])
            elif event["kind"] in ("resume", "rollback"):
                begins = event["step"] if event["kind"] == "resume" else event["to"]
                found.positions = {at: position for at, position in found.positions.items() if at < begins}
                found.left_out = {at for at in found.left_out if at < begins}
                if event["kind"] == "rollback":
                    found.positions[begins] = event["position"]
        return found


class Walk:
    """`setup` must be as `build` left it: its weights are those the run began with, unless init_from names others.

    With `capture` it goes the way that led to that step, which the run may have left since.
    """

    def __init__(self, setup: Setup, run: Run, capture: int | None = None) -> None:
        self.setup, self._run = setup, run
        self.saves = checkpoint.Checkpoints(run.path / "checkpoints")
        self._initial = copy_of(setup.state.model)
        self._fresh = setup.state.tensors()
        self._clock = Clock()
        evals = run.evals()
        self._evals = [(e["step"], e["loss"]) for e in evals if e["set"] == evals[0]["set"]]
        self._detours = Detours.of(run.events(), capture)
        self.rate = 1.0  # times the learning rate, to see what another one does
        self.edit: Callable[[Micro], Micro] = lambda micro: micro  # of what each micro is given

    @property
    def step(self) -> int:
        return self.setup.state.progress.step

    def initial(self) -> dict[str, Tensor] | None:
        """The weights the run began with; None where they were those of others and are gone, or are other ones now."""
        origin, model = self.setup.cfg.init_from, self.setup.state.model
        if origin in SCRATCH:
            return self._initial
        try:
            # Where init_from led when the run began: a run that was named may have a better save since.
            source = external_source(origin) or find_checkpoint(origin, self._run.path.parent.parent)
            began_with = (self._run.document.get("derived") or {}).get("weights_from")
            if began_with is not None and fingerprint(source) != began_with:
                source = save_folder(source.parent, began_with.get("step", -1))
                if fingerprint(source) != began_with:
                    return None
            if external_source(str(source)) is None:
                return self._initial | checkpoint.load(source).weights
            # The first weights once more with those of others in them, as the build did it.
            now = copy_of(model)
            try:
                load(model, self._initial)
                assert isinstance(self.setup.recipe, Pretrained)  # or the run could not have begun
                self.setup.recipe.load_pretrained(model, source)
                return copy_of(model)
            finally:
                load(model, now)
        except (UserError, OSError):
            return None

    @cached_property
    def masks(self) -> frozenset[str]:
        """Parameters that held -inf when the run began: on purpose, then."""
        return frozenset(name for name, tensor in (self.initial() or {}).items() if is_mask(tensor))

    def go_to(self, step: int) -> str:
        """The last whole save at or before a step, or else the beginning; says which."""
        setup, begun = self.setup, "the beginning"
        setup.stepper.guard.open()
        save = self.last_whole_save(step)
        if save is not None:
            restore(setup, self.saves.at(save))
            begun = f"the save of step {save}"
        else:
            weights = self.initial()
            if weights is None:
                raise UserError(
                    f"{self._run.id} has no whole save at or before step {step}, and the weights it began with "
                    f"(init_from={setup.cfg.init_from}) are gone or are other ones now; name a step after its first "
                    "save",
                    code="no-checkpoint",
                )
            load(setup.state.model, weights)
            setup.state.load_tensors(self._fresh)
            setup.state.progress = Progress()
        set_training(setup.state.model)
        self._arrive()
        return begun

    def last_whole_save(self, step: int) -> int | None:
        """At or before a step."""
        before = [save for save in self.saves.steps() if save <= step]
        return next((save for save in reversed(before) if checkpoint.problem_of(self.saves.at(save)) is None), None)

    def _arrive(self) -> None:
        """At the state before a step, with the rows that the run took from there."""
        progress = self.setup.state.progress
        progress.position = self._detours.positions.get(progress.step, progress.position)

    def micros(self) -> list[Micro]:
        """Of the step that comes next."""
        setup, progress = self.setup, self.setup.state.progress
        origin = Origin(progress.step, progress.position)
        train, device = setup.streams["train"], setup.world.device
        taken = Prefetcher(train, setup.layout, setup.cfg.seed, device, 0, origin).take(progress.step)
        return [self.edit(micro) for micro in taken]

    def lr(self) -> float:
        return self.rate * self.setup.schedule.lr(self.step, [loss for step, loss in self._evals if step <= self.step])

    def take(self) -> dict[str, float]:
        """One step; the row that it leaves, without times."""
        setup, progress, guard = self.setup, self.setup.state.progress, self.setup.stepper.guard
        signals = Signals()
        if progress.step in self._detours.left_out:
            guard.keep_buffers()
            guard.latch.fill_(1.0)  # whatever was wrong with it: nothing of it is applied
        signals.push(progress.step, {}, setup.stepper.step(progress.step, self.micros(), self.lr(), self._clock))
        if bool(guard.latch):  # the run has gone on, and so do we
            guard.restore_buffers()
            guard.open()
        progress.step += 1
        progress.position += setup.layout.rows_per_step
        self._arrive()
        return next(iter(signals.ready(wait=True))).values


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """As a save has them: a tied weight once, or its second name would undo what is loaded under the first."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in checkpoint.canonical(model).items()}


@torch.no_grad()
def load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in checkpoint.canonical(model).items():
        if name in weights:
            tensor.copy_(weights[name])
