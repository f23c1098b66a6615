"""What becomes of a run whose step failed: the step is captured, then the run stops, skips the batch, or rolls back.

The state is that before the failing step, whichever way it failed: see guarded.py. A batch is kept by reference for as
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

from rung.engine import capture
from rung.engine.build import Setup, restore
from rung.engine.checkpoint import Checkpoints
from rung.engine.guarded import Diverged, not_finite
from rung.engine.prefetch import Micro
from rung.engine.signals import LAG
from rung.errors import UserError
from rung.runs.record import Record
from rung.text import error_text


class StepInputs(NamedTuple):
    """What a step was given, for as long as the host may not know how it went."""

    step: int
    micros: Sequence[Micro]
    lr: float
    versions: list[dict[str, int]]  # of the tensors of each micro, before the step


class DivergenceHandler:
    def __init__(self, setup: Setup, record: Record | None) -> None:
        self._setup, self._record, self._num_recoveries = setup, record, 0
        self._policy, self._most = setup.cfg.guard.policy, setup.cfg.guard.most
        lag = LAG + 2 if setup.world.device.type == "cuda" or setup.world.size > 1 else 2
        self._recent: deque[StepInputs] = deque(maxlen=lag)
        # All ranks put a capture into the folder of the run, which only the first rank knows, and go back to its saves.
        run = setup.world.from_first(None if record is None else str(record.path))
        self._folder = Path(run) / "captures" if run else None
        self._saves = Checkpoints(Path(run) / "checkpoints") if run else None
        self._odd: set[str] = set()
        self._odd = set(self.broken_weights())  # not finite from the start, as a mask that is kept as a parameter
        if record is not None:
            Checkpoints(record.path / "captures").sweep()

    def broken_weights(self) -> list[str]:
        """Names of trained tensors that have become non-finite. The host waits for it."""
        stepper = self._setup.stepper
        parameters = [p for o in stepper.objectives for p in o.parameters]
        names = stepper.layers.names_of([parameters[n] for n in not_finite([p.detach() for p in parameters])])
        return [name for name in names if name not in self._odd]

    def remember(self, step: int, micros: Sequence[Micro], lr: float) -> None:
        versions = [{name: tensor._version for name, tensor in micro.batch.items()} for micro in micros]
        self._recent.append(StepInputs(step, micros, lr, versions))

    def after(self, error: Diverged) -> str:
        """Goes back to the state before the step, captures it, and recovers as guard.policy says.

        Returns what to tell the user of a run that continues from `progress`; empty: the run ends.
        """
        setup, record = self._setup, self._record
        progress, guard, num_rows = setup.state.progress, setup.stepper.guard, setup.layout.rows_per_step
        progress.position -= (progress.step - error.step) * num_rows
        progress.step = error.step
        self._capture(error.step, str(error), {**error.facts, "is_broken": error.is_broken})
        is_hopeless = error.is_broken and self._policy == "skip"
        if self._policy == "stop" or self._num_recoveries >= self._most or is_hopeless:
            return ""
        self._num_recoveries += 1
        if self._policy == "skip":  # the step counts, its batch does not: as if that batch had been empty
            progress.step += 1
            progress.position += num_rows
            progress.skipped += 1
            if record is not None:
                record.event("skip", step=error.step, why=str(error))
            message = f"{error}; its batch is left out (guard.policy=skip, {self._num_recoveries} so far)"
        else:  # to the last save, and past the data up to the bad batch: other weights meet other rows
            assert self._saves is not None
            steps = self._saves.steps()
            earlier = setup.world.from_first([step for step in steps if step <= error.step])  # (disks may lag behind)
            if not earlier:
                return ""
            position = progress.position + num_rows
            restore(setup, self._saves.at(earlier[-1]))
            setup.state.progress.position = position
            self._recent.clear()  # their steps will come again, with other rows
            if record is not None:
                record.rewind()
                record.event("rollback", step=error.step, to=earlier[-1], position=position, why=str(error))
            message = f"{error}; back to the save of step {earlier[-1]}, with the data after it (guard.policy=rollback)"
        guard.open()
        guard.arm(setup.state.progress.step)
        return message

    def after_raise(self, error: Exception) -> None:
        """Captures a step whose forward or backward raised: it can be run again, to find the row.

        Other ranks are somewhere in the step and do not know; so this rank asks nothing of them.
        """
        stepper, step = self._setup.stepper, self._setup.state.progress.step
        is_begun = any(held.step == step for held in self._recent)
        if isinstance(error, UserError | torch.OutOfMemoryError) or not is_begun or not stepper.is_own:
            return
        if self._setup.world.watchdog is not None and self._setup.world.watchdog.is_broken:
            return  # another rank failed, not this step
        with contextlib.suppress(Exception):  # whatever goes wrong here, `error` is what the user must see
            if stepper.guard.latch.item():
                return  # an earlier step was bad already, and the state is that before it
            place = self._capture(step, error_text(error), {"error": str(error)}, is_alone=True)
            if place:
                error.add_note(f"the step is kept in {place}; `rung replay` names the operation and the row")

    def _capture(self, step: int, reason: str, facts: dict[str, Any], is_alone: bool = False) -> str:
        """Writes the capture and an event; returns its place in the run, nothing where it could not be written."""
        setup, guard = self._setup, self._setup.stepper.guard
        held = next((held for held in reversed(self._recent) if held.step == step), StepInputs(step, (), 0.0, []))
        guard.restore_buffers()
        # Tensors that the loss wrote into: what is kept of them is not what they were.
        pairs = [(micro.batch, versions) for micro, versions in zip(held.micros, held.versions)]
        written = {name for batch, of in pairs for name, version in of.items() if batch[name]._version != version}
        facts |= {"reason": reason, "lr": held.lr, "armed": guard.is_armed(step), "written": sorted(written)}
        place, failure = "", "nothing is known of the step"
        if self._folder is not None and (held.micros or facts.get("is_broken")):
            try:
                scale = setup.precision.loss_scale
                loss_scale = None if scale is None else float(scale.scale)
                document = {
                    **capture.conditions(
                        setup.world.device, setup.precision.name, loss_scale, setup.cfg.system.compile
                    ),
                    "seed": setup.cfg.seed,
                    "position": setup.state.progress.position,
                    **facts,
                    "micros": [{"ids": m.ids.tolist(), "rows": m.draw.rows.tolist()} for m in held.micros],
                }
                tensors = {f"{n}/{name}": t for n, m in enumerate(held.micros) for name, t in m.batch.items()}
                capture.write(self._folder, setup.state, setup.save_extra(), setup.world, tensors, document, is_alone)
                place = f"captures/{step:08d}"
            except Exception as problem:  # a full disk, a device that is gone
                failure = str(problem)
        if self._record is not None:
            try:
                diagnosis = first_diagnosis(held.micros, facts)
            except Exception as error:  # batches come in shapes that nobody here has seen
                diagnosis = f"none ({error_text(error)})"
            names = ("micro", "values", "tensors", "error", "is_broken", "written")
            event: dict[str, Any] = {name: facts[name] for name in names if facts.get(name)}
            event |= {"diagnosis": diagnosis, "capture": place or None, "why": reason}
            self._record.event("diverged", step=step, rank=setup.world.rank, **event)
            if not place:
                self._record.event("warning", step=step, text=f"the step could not be captured: {failure}")
        return place


def first_diagnosis(micros: Sequence[Micro], facts: Mapping[str, Any]) -> str:
    """What is clear at once from the inputs and results of the step; `rung replay` finds the rest."""
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
        return "weights are not finite, and became so at an earlier step; the cause is not known yet"
    if "tensors" in facts:
        return "the gradients were finite and the weights would not be: the optimizer caused it"
    bad_losses = [name for name in facts.get("values", {}) if name == "loss" or name.endswith("/loss")]
    if bad_losses:
        micro = facts.get("micro", 0)
        where = f"of micro {micro}; the data" if micro >= 0 else "of another rank; the data of this one"
        return f"the {bad_losses[0]} itself, in the forward {where} is finite"
    if not facts.get("values"):
        return "the gradient does not fit into float16 at any scale; loss and data are finite"
    return "the loss is finite and its gradient is not: the backward, or a norm that overflows; the data is finite"
