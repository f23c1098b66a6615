"""What becomes of a run whose step failed: the step is kept as a capture, then the run stops, goes on, or goes back.

The state is that before the failing step, whichever way it failed: see guard.py. A batch is kept by reference for as
many steps as the host may be behind the device, so that what is captured is what was computed with, not what the data
would give a second time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rung.data.prefetch import Micro
from rung.engine import capture
from rung.engine.build import Setup, restore
from rung.engine.checkpoint import Checkpoints
from rung.engine.signals import LAG
from rung.errors import UserError
from rung.runs.record import Record


class Diverged(Exception):
    """A step was not finite and was not applied, or would have broken the weights and was undone.

    Unless `is_broken`: then weights were found broken long after, and there is no state before it to go on from.
    """

    def __init__(self, step: int, why: str, is_broken: bool = False, **facts: Any) -> None:
        super().__init__(why)
        self.step, self.is_broken, self.facts = step, is_broken, facts


class Held(NamedTuple):
    """What a step was given, for as long as the host may not know how it went."""

    step: int
    micros: Sequence[Micro]
    lr: float
    versions: list[dict[str, int]]  # of the tensors of each micro, before the step

    def written(self) -> list[str]:
        """Names of the tensors that the loss wrote into: what is kept of them is not what they were."""
        pairs = [(m.batch, versions) for m, versions in zip(self.micros, self.versions)]
        return sorted({name for batch, of in pairs for name, version in of.items() if batch[name]._version != version})


class Rescue:
    def __init__(self, setup: Setup, record: Record | None) -> None:
        self._setup, self._record = setup, record
        lag = LAG + 2 if setup.world.device.type == "cuda" or setup.world.size > 1 else 2
        self._recent: deque[Held] = deque(maxlen=lag)
        self._policy, self._most, self._num_recoveries = setup.cfg.guard.policy, setup.cfg.guard.most, 0
        self._folder = _shared_folder(setup, record)
        if record is not None:
            Checkpoints(record.path / "captures").sweep()

    def remember(self, step: int, micros: Sequence[Micro], lr: float) -> None:
        versions = [{name: tensor._version for name, tensor in micro.batch.items()} for micro in micros]
        self._recent.append(Held(step, micros, lr, versions))

    def after(self, error: Diverged) -> str:
        """Goes back to the state before the step, keeps the step, and says what became of the run.

        Empty: it stops. Otherwise it goes on from `progress`, and this is what to tell.
        """
        guard, state = self._setup.stepper.guard, self._setup.state
        state.progress.position -= (state.progress.step - error.step) * self._setup.cut.rows_per_step
        state.progress.step = error.step
        self._keep(error.step, str(error), {**error.facts, "is_broken": error.is_broken})
        is_hopeless = error.is_broken and self._policy == "skip"
        if self._policy == "stop" or self._num_recoveries >= self._most or is_hopeless:
            return ""
        self._num_recoveries += 1
        told = self._skip(error) if self._policy == "skip" else self._roll_back(error)
        if told:
            guard.open()
            guard.arm(state.progress.step)
        return told

    def after_raise(self, error: Exception) -> None:
        """Keeps a step whose forward or backward raised: it can be run again, to find the row.

        Other ranks are somewhere in the step and do not know; so this rank asks nothing of them.
        """
        stepper, step = self._setup.stepper, self._setup.state.progress.step
        is_begun = any(held.step == step for held in self._recent)
        if isinstance(error, UserError | torch.OutOfMemoryError) or not is_begun or not stepper.is_own:
            return
        with contextlib.suppress(Exception):  # whatever goes wrong here, `error` is what the user must see
            if stepper.guard.latch.item():
                return  # an earlier step was bad already, and the state is that before it
            place = self._keep(step, f"{type(error).__name__}: {error}", {"error": str(error)}, is_alone=True)
            if place:
                error.add_note(f"the step is kept in {place}; `rung replay` names the operation and the row")

    def _keep(self, step: int, reason: str, facts: dict[str, Any], is_alone: bool = False) -> str:
        """Writes the capture and tells of it; returns its place in the run, nothing where it could not be written."""
        held = next((held for held in reversed(self._recent) if held.step == step), Held(step, (), 0.0, []))
        guard = self._setup.stepper.guard
        guard.restore_buffers()
        facts |= {"reason": reason, "lr": held.lr, "armed": guard.is_armed(step), "written": held.written()}
        place, failure = "", "nothing is known of the step"
        if self._folder is not None and (held.micros or facts.get("is_broken")):
            try:
                capture.write(self._folder, self._setup, step, held.micros, facts, is_alone)
                place = f"captures/{step:08d}"
            except Exception as problem:  # a full disk, a device that is gone
                failure = str(problem)
        if self._record is not None:
            names = ("micro", "values", "tensors", "error", "is_broken", "written")
            told: dict[str, Any] = {name: facts[name] for name in names if facts.get(name)}
            told |= {"diagnosis": _diagnosis(held.micros, facts), "capture": place or None, "why": reason}
            self._record.event("diverged", step=step, rank=self._setup.world.rank, **told)
            if not place:
                self._record.event("warning", step=step, text=f"the step could not be captured: {failure}")
        return place

    def _skip(self, error: Diverged) -> str:
        """The step counts, its batch does not: what comes after is as if that batch had been empty."""
        progress = self._setup.state.progress
        progress.step += 1
        progress.position += self._setup.cut.rows_per_step
        progress.skipped += 1
        if self._record is not None:
            self._record.event("skip", step=error.step, why=str(error))
        return f"{error}; its batch is left out (guard.policy=skip, {self._num_recoveries} so far)"

    def _roll_back(self, error: Diverged) -> str:
        """To the last save, and past the data up to the bad batch: other weights meet other rows."""
        record, setup = self._record, self._setup
        assert record is not None
        saves = Checkpoints(record.path / "checkpoints")
        earlier = [step for step in saves.steps() if step <= error.step]
        if not earlier:
            return ""
        position = setup.state.progress.position + setup.cut.rows_per_step
        restore(setup, saves.at(earlier[-1]))
        setup.state.progress.position = position
        self._recent.clear()  # their steps will come again, with other rows
        record.rewind()
        record.event("rollback", step=error.step, to=earlier[-1], position=position, why=str(error))
        return f"{error}; back to the save of step {earlier[-1]}, with the data after it (guard.policy=rollback)"


def _diagnosis(micros: Sequence[Micro], facts: Mapping[str, Any]) -> str:
    try:
        return first_diagnosis(micros, facts)
    except Exception as error:  # batches come in shapes that nobody here has seen
        return f"none ({type(error).__name__}: {error})"


def first_diagnosis(micros: Sequence[Micro], facts: Mapping[str, Any]) -> str:
    """What can be said at once, from what the step was given and what it left; `rung replay` finds the rest."""
    for number, micro in enumerate(micros):
        for name, tensor in micro.batch.items():
            if not tensor.is_floating_point():
                continue
            is_bad = tensor.isnan() | tensor.isposinf()  # -inf is a mask
            if is_bad.any():
                is_by_row = tensor.dim() and len(tensor) == len(micro.ids)
                row = int(is_bad.reshape(len(tensor), -1).any(dim=1).int().argmax()) if is_by_row else -1
                of_row = f" of row {int(micro.ids[row])}" if is_by_row else ""
                return f"the data is not finite: {name!r}{of_row}, in micro {number}"
    if facts.get("error"):
        return f"the step raised: {facts['error']}"
    if facts.get("is_broken"):
        return "weights are not finite, and have not been since some earlier step; what made them so is not known yet"
    if "tensors" in facts:
        return "the gradients were finite and the weights would not be: the optimizer made it"
    bad_losses = [name for name in facts.get("values", {}) if name == "loss" or name.endswith("/loss")]
    if bad_losses:
        micro = facts.get("micro", 0)
        where = f"of micro {micro}; the data" if micro >= 0 else "of another rank; the data of this one"
        return f"the {bad_losses[0]} itself, in the forward {where} is finite"
    if not facts.get("values"):
        return "the gradient does not fit into float16 at any scale; loss and data are finite"
    return "the loss is finite and its gradient is not: the backward, or a norm that overflows; the data is finite"


def _shared_folder(setup: Setup, record: Record | None) -> Path | None:
    """Where all ranks put a capture: the first rank knows the run's folder."""
    if setup.world.size == 1:
        return record.path / "captures" if record is not None else None
    said: list[Any] = [str(record.path / "captures") if record is not None else None]
    torch.distributed.broadcast_object_list(said)
    return Path(said[0]) if said[0] else None
