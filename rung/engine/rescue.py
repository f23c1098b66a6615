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
from typing import Any

import torch

from rung.data.prefetch import Micro
from rung.engine import capture
from rung.engine.build import Setup, restore
from rung.engine.checkpoint import Checkpoints
from rung.engine.signals import LAG
from rung.runs.record import Record


class Diverged(Exception):
    """A step was not finite and was not applied, or would have broken the weights and was undone.

    Unless `is_broken`: then weights were found broken long after, and there is no state before it to go on from.
    """

    def __init__(self, step: int, why: str, is_broken: bool = False, **facts: Any) -> None:
        super().__init__(why)
        self.step, self.is_broken, self.facts = step, is_broken, facts


class Rescue:
    def __init__(self, setup: Setup, record: Record | None) -> None:
        self._setup, self._record = setup, record
        self._recent: deque[tuple[int, Sequence[Micro], float]] = deque(maxlen=LAG + 2)
        self._policy, self._most, self._num_recoveries = setup.cfg.guard.policy, setup.cfg.guard.most, 0

    def remember(self, step: int, micros: Sequence[Micro], lr: float) -> None:
        self._recent.append((step, micros, lr))

    def after(self, error: Diverged) -> str:
        """Goes back to the state before the step, keeps the step, and says what became of the run.

        Empty: it stops. Otherwise it goes on from `progress`, and this is what to tell.
        """
        guard, state = self._setup.stepper.guard, self._setup.state
        state.progress.position -= (state.progress.step - error.step) * self._setup.cut.rows_per_step
        state.progress.step = error.step
        self.keep(error.step, str(error), **error.facts)
        is_hopeless = error.is_broken and self._policy == "skip"
        if self._policy == "stop" or self._num_recoveries >= self._most or is_hopeless:
            return ""
        self._num_recoveries += 1
        told = self._skip(error) if self._policy == "skip" else self._roll_back(error)
        if told:
            guard.open()
            guard.arm(state.progress.step)
        return told

    def keep(self, step: int, reason: str, error: str | None = None, **facts: Any) -> str:
        """Writes the capture; returns its place in the run. A capture that cannot be written does not hide why."""
        micros, lr = next(((micros, lr) for at, micros, lr in self._recent if at == step), ((), None))
        folder = _shared_folder(self._setup, self._record)
        if (not micros and "tensors" not in facts) or folder is None:
            return ""
        guard = self._setup.stepper.guard
        guard.restore_buffers()
        facts |= {"reason": reason, "error": error, "lr": lr, "armed": guard.is_armed(step)}
        try:
            capture.write(folder, self._setup, step, micros, facts)
        except Exception as failure:  # a full disk, a device that is gone
            if self._record is not None:
                self._record.event("warning", step=step, text=f"the step could not be captured: {failure}")
            return ""
        place = f"captures/{step:08d}"
        if self._record is not None:
            told: dict[str, Any] = {name: facts[name] for name in ("micro", "values", "tensors") if name in facts}
            told["diagnosis"] = first_diagnosis(micros, facts)
            rank = self._setup.world.rank
            self._record.event("diverged", step=step, capture=place, rank=rank, why=reason, error=error, **told)
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
        record.rewind()
        record.event("rollback", step=error.step, to=earlier[-1], why=str(error))
        return f"{error}; back to the save of step {earlier[-1]}, with the data after it (guard.policy=rollback)"


def first_diagnosis(micros: Sequence[Micro], facts: Mapping[str, Any]) -> str:
    """What can be said at once, from what the step was given and what it left; `rung replay` finds the rest."""
    for number, micro in enumerate(micros):
        for name, tensor in micro.batch.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                where = f"{name!r}, in micro {number}"
                if tensor.dim() and len(tensor) == len(micro.ids):
                    bad = (~torch.isfinite(tensor.reshape(len(tensor), -1))).any(dim=1)
                    where = f"{name!r} of row {int(micro.ids[int(bad.int().argmax())])}, in micro {number}"
                return f"the data is not finite: {where}"
    if facts.get("error"):
        return f"the step raised: {facts['error']}"
    if "tensors" in facts:
        return "the gradients were finite and the weights are not: the optimizer made it"
    values = facts.get("values", {})
    if "loss" in values or not values:
        return f"the loss itself, in the forward of micro {max(0, facts.get('micro', 0))}; the data is finite"
    return "the loss is finite and its gradient is not: the backward, or a norm that overflows; the data is finite"


def _shared_folder(setup: Setup, record: Record | None) -> Path | None:
    """Where all ranks put a capture: the first rank knows the run's folder."""
    if setup.world.size == 1:
        return record.path / "captures" if record is not None else None
    said: list[Any] = [str(record.path / "captures") if record is not None else None]
    with contextlib.suppress(RuntimeError):
        torch.distributed.broadcast_object_list(said)
    return Path(said[0]) if said[0] else None
