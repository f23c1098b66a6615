"""The guarded step in a loop that is not rung's.

`ScriptGuard.step` stands where `optimizer.step()` stood. Everything between the backward and the next forward is the
engine's guarded step (engine/guarded.py): norms, clipping, the verdict on the device, the update or none, signals,
spikes. What is added here is what somebody else's loop needs: any nesting of batches, random states read around each
forward, a GradScaler, parameters that appear later. Where an optimizer does not know the flag of fused optimizers, a
GradScaler is in use or bad steps are to be skipped, the host looks once a step.

On a GPU a bad step is told some steps late. Nothing has been applied since, so the state is still the one before it;
`wait` makes sure that nothing is on its way before weights are saved.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rung.engine.activations import ActivationStats
from rung.engine.capture import conditions
from rung.engine.divergence import first_diagnosis
from rung.engine.guarded import Diverged, Gradients, GuardedStep, ObjectiveState, Row
from rung.engine.loop import BUFFER_STEPS
from rung.engine.parallel import World
from rung.engine.precision import Precision
from rung.engine.recorder import memory
from rung.engine.signals import LAG, Layered
from rung.errors import UserError
from rung.forensics.examine import Report
from rung.forensics.first import is_finite
from rung.random import Draw
from rung.recipe import Batch, Loss
from rung.script import capture, pytree, replay
from rung.script.capture import Generators, MicroInputs, StepInputs, objective_of
from rung.script.log import Log
from rung.script.replay import NAMES, Value, is_compiled, unwrapped
from rung.script.step_axis import Update

if TYPE_CHECKING:
    from rung.doctor.finding import Finding
    from rung.doctor.history import History
    from rung.forensics.verdict import Verdict
    from rung.script.run import OwnRun

POLICIES = ("stop", "skip")
MOST_OVERFLOWS = 8  # in a row, once steps have been applied: a scale that was right is too high by a factor or two


class ScriptGuard:
    """Guards a loop; make it when the weights are loaded, and call its `step` in place of `optimizer.step()`.

    loss: the value of a batch, as it is differentiated; needed to replay. out: a folder for captures and signals.
    clip: the largest norm of the gradients, 0 for none. scaler: its `step` and `update` are called here.
    autocast: the type of an autocast that the loop enters around the loss; one inside of `loss` is found by itself.
    policy: stop raises Diverged, skip leaves the batch out and continues, at most `most` times.
    armed_steps: after a start and after spikes, how long updates are also checked for what they make of the weights.
    layers_every: steps between norms per tensor, 0 for none. activation_stats_every: steps between forwards of a few
    rows in which activations, attention and predictions are measured, 0 for none; `loss` is called for them.
    build: a function of a module that can be imported, which returns (model, optimizer, loss), so that `rung replay`
    can take a failed step again in another process.
    clips_itself: the loop clips the gradients before the guard sees them, so that their norm is norm_clipped.
    run: the run of `rung.init` whose folder holds captures, rows and events; `run.guard` passes it.

    `signals` are the newest rows, oldest first; `tables` norms per tensor; `failure` the last step that failed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Value | None = None,
        out: str | Path | None = None,
        *,
        clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        policy: str = "stop",
        most: int = 10,
        armed_steps: int = 20,
        layers_every: int = 20,
        activation_stats_every: int = 100,
        build: Callable[[], Any] | str | None = None,
        clips_itself: bool = False,
        run: OwnRun | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"guard() takes a module of torch, not {type(model).__name__}", code="bad-model")
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
            kinds = ", ".join(type(each).__name__ for each in optimizers) or "none"
            raise UserError(
                f"guard() takes one optimizer of torch or a list of them, not {kinds}", code="bad-optimizer"
            )
        if policy not in POLICIES:
            raise UserError(f"policy={policy!r} is not one of {', '.join(POLICIES)}", code="bad-value")
        if autocast is not None and autocast not in NAMES:
            raise UserError(f"autocast={autocast} is not one of {', '.join(map(str, NAMES))}", code="bad-value")
        if build is not None and not isinstance(build, str):  # FILE:FUNCTION, for `rung replay`
            name, file = getattr(build, "__qualname__", ""), inspect.getsourcefile(build)
            if not name.isidentifier() or file is None:
                raise UserError(
                    f"build={build!r} cannot be imported by another process; pass a function of a module",
                    code="bad-build",
                )
            build = f"{Path(file).resolve()}:{name}"
        self._model, self._loss = unwrapped(model), loss
        self._optimizers: list[torch.optim.Optimizer] = optimizers
        self._clip, self._clips_itself, self._policy, self._most, self._build = clip, clips_itself, policy, most, build
        self._dtype = NAMES[autocast] if autocast is not None else None
        self._is_compiled = is_compiled(model, loss)
        self._objective, self._num_params = self._trained_now(), self._count_params()
        device = self._device = self._objective.parameters[0].device
        group = torch.distributed
        is_shared = group.is_available() and group.is_initialized()
        self._world = World(group.get_rank(), group.get_world_size(), device) if is_shared else World(0, 1, device)
        self._scaling = GradScaling(scaler, device) if scaler is not None and scaler.is_enabled() else None
        self._core = GuardedStep(
            self._model, [self._objective], device, num_ranks=self._world.size, armed_steps=armed_steps,
            layers_every=layers_every, scaling=self._scaling, apply=self._scaling.apply if self._scaling else None,
        )  # fmt: skip
        self._core.start(0)

        # Where captures, rows and events go.
        self._run = run if run is not None and run.path is not None else None
        if out is None and run is not None and run.path is not None:
            out = run.path / "captures"
        self._out = Path(out) if out else None
        self._frozen = capture.frozen_of(self._model) if self._out is not None else {}
        if self._out is not None and self._world.size > 1:
            self._out /= f"rank{self._world.rank}"
        if self._run is not None:
            self._run.take_over(self._model, optimizers, clip)
        self._log = Log(self._out, self._run)
        self.signals, self.tables, self.events = self._log.rows, self._log.tables, self._log.events

        # Activations are measured where there is a loss to call, and it runs as it was written, in one process.
        self._stats: ActivationStats | None = None
        self._stats_every = activation_stats_every
        if loss is not None and activation_stats_every and not self._is_compiled and self._world.size == 1:

            def of_few_rows(tensors: Batch, draw: Draw) -> Loss:
                batch = pytree.with_tensors(self._micros[0].batch, lambda name, tensor: tensors[name])
                return Loss(loss(batch), torch.ones(()))

            precision = Precision(self._dtype or "float32", device)
            self._stats = ActivationStats(self._model, objective_of(optimizers, of_few_rows), precision)

        self.number = 0  # of the step that comes next
        self.failure: StepInputs | None = None
        self._ended: Diverged | None = None  # what was raised
        self._num_skips = 0
        self._recent: deque[StepInputs] = deque(maxlen=LAG + 4)
        self._generators = Generators(device)
        self._detach: Callable[[], object] = lambda: None
        self._begin_step()

    def _begin_step(self) -> None:
        self._micros: list[MicroInputs] = []
        self._values: list[Tensor] = []  # (2,) loss and 1, of each backward
        self.begin()

    def begin(self) -> None:
        """Optional, right before a forward: where it begins, for loops whose data draws random numbers too."""
        self._core.guard.keep_buffers()
        self._rng = self._generators.read()

    def micro(self, value: Tensor, batch: Any = None) -> None:
        """After each backward of a step that has several; then `step()` without arguments."""
        if self._ended is not None:
            raise self._ended
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError(
                "the value of a step is the loss that was differentiated: one number, in a tensor", code="bad-loss"
            )
        dtype = torch.float32 if self._device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        number = value.detach().to(self._device, dtype).reshape(())
        self._values.append(torch.stack([number, torch.ones_like(number)]))
        after = self._generators.read()
        self._micros.append(MicroInputs(batch, self._rng, after))
        self._rng = after

    def step(self, value: Tensor | None = None, batch: Any = None, *, clip: float | None = None) -> bool:
        """Applies the gradients, unless loss or gradients are not finite; False where it is known that it did not.

        Raises Diverged when a step was bad: this one, or on a GPU one of the last few.
        """
        if value is not None:
            self.micro(value, batch)
        if self._ended is not None:
            raise self._ended
        if not self._micros:
            raise UserError(
                "guard.step() has nothing to judge; pass the loss: guard.step(value, batch)", code="no-loss"
            )
        step, clip = self.number, self._clip if clip is None else clip
        # Of all groups; tensors are copied, since somebody's schedule writes into them.
        lrs = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]
        lrs = [lr.clone() if isinstance(lr, Tensor) else lr for lr in lrs]
        facts = {"clip": clip, "armed": self._core.guard.is_armed(step)}
        self._recent.append(StepInputs(step, self._micros, lrs, facts=facts))
        if self._count_params() != self._num_params:  # a group was added: its new moments are worth a check
            self._num_params, self._objective = self._count_params(), self._trained_now()
            self._core.replace_objectives([self._objective])
            self._core.guard.arm(step)
        if step == 0 and self._run is not None:
            num_rows = [pytree.num_rows_of(pytree.tensors_of(micro.batch)) for micro in self._micros]
            if min(num_rows) > 1:  # one row: nobody knows
                self._run.derive(rows_per_step=sum(num_rows))

        # Activations, where they are due, of the weights that this step was computed with.
        scalars: dict[str, Tensor] = {}
        tables: dict[str, Layered] = {}
        first = self._micros[0].batch
        if self._stats is not None and step % self._stats_every == 0 and pytree.tensors_of(first):
            with self._generators.left_alone():
                found = self._stats.take(capture.micro_of(first, 0, step), step)
            scalars, tables = found.scalars, {kind: Layered(*table) for kind, table in found.tables.items()}
            if self._stats.reason:
                self._log.event("no_activation_stats", step, why=self._stats.reason)
                self._stats = None

        if self._scaling is not None:
            self._scaling.unscale(self._objective)
        # Values of micros add up, as their gradients do: the count of a step is 1.
        total = torch.stack(self._values)[:, 0].sum()
        packed = torch.stack([total, torch.ones_like(total)])[None]
        is_sparse = any(p.grad is not None and p.grad.is_sparse for p in self._objective.parameters)
        measures = self._core.measures(step) and not is_sparse
        signals = self._core.update(
            step, [Gradients(self._objective, ["loss"], packed, self._values, None, clip)], measures=measures
        )
        signals |= scalars
        tables |= self._core.tables()[1] if measures else {}
        host = memory(self._device) if tables else {}
        if isinstance(lrs[0], Tensor):
            signals["lr"] = lrs[0].to(self._device)
        else:
            host["lr"] = float(lrs[0])
        self._core.push(step, host, signals, tables)
        if self._run is not None:
            # The run learns of the step at once, so that what the script logs next goes into the same row.
            wanted = ("norm_clipped", "skipped", "scale", "lr") + (() if self._clips_itself else ("norm",))
            named = {name: number for name, number in signals.items() if name in wanted or name.startswith("logits/")}
            values: dict[str, Any] = {"loss": signals["loss/sum"], **named, **host}
            # (no gradients, no losses: a tensor on the host is a number at once)
            values = {name: v.item() if getattr(v, "is_cpu", False) else v for name, v in values.items()}
            self._run.axis.guarded_step(step, Update(values, dict(tables)))
        self.number += 1
        was_applied = self._read()
        self._begin_step()
        if self.number == BUFFER_STEPS:
            self._core.guard.forget_still_buffers()
        return was_applied

    def attach(self) -> None:
        """For a trainer that calls `optimizer.step()` itself: that call is a step of this guard from now on.

        Somebody calls `micro` for each forward. A call without one, as when a trainer leaves a batch out, is the
        optimizer's own.
        """
        (optimizer,) = self._optimizers
        is_own, step = "step" in vars(optimizer), optimizer.step  # a schedule may have put its own there already

        def guarded(closure: Any = None) -> Any:
            value = None
            if closure is not None:  # forward and backward, as Lightning has it
                with torch.enable_grad():
                    value = closure()
            if not self._micros:
                step()
                return value
            optimizer.step = step  # type: ignore[method-assign]
            try:
                self.step()
            finally:
                optimizer.step = guarded  # type: ignore[method-assign]
            return value

        optimizer.step = guarded  # type: ignore[method-assign]
        self._detach = lambda: setattr(optimizer, "step", step) if is_own else vars(optimizer).pop("step", None)

    def detach(self) -> None:
        """The optimizer steps by itself again."""
        self._detach()

    @property
    def has_ended(self) -> bool:
        """A step failed and the guard has raised; forwards after that are those of a replay."""
        return self._ended is not None

    @property
    def num_micros(self) -> int:
        """Forwards since the last step."""
        return len(self._micros)

    def wait(self) -> None:
        """Reads what is still on its way from the device: before weights are saved, and at the end."""
        self._read(wait=True)

    def __enter__(self) -> ScriptGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._log.close()

    def findings(self) -> list[Finding]:
        """What the doctor says of the steps so far; it knows neither evals nor data here, and asks less."""
        from rung.doctor.diagnose import diagnose

        with contextlib.suppress(Diverged):
            self.wait()
        found = diagnose(self._history(), raises=False)
        # The step that failed is at hand, kept on disk or not.
        failed = self.failure.step if self.failure is not None else -1
        here = [f.probe.startswith("rung replay") or (f.since == failed and not f.probe) for f in found]
        ready = "call guard.replay(): it names what went wrong"
        return [replace(f, probe="guard.replay()", remedy=ready) if at else f for f, at in zip(found, here)]

    def _history(self) -> History:
        """What the guard has seen, as the doctor reads it."""
        from rung.doctor.history import History, series_from_rows, tables_from_rows

        # The loop in the words of a config, as far as its optimizers tell.
        group = self._optimizers[0].param_groups[0]
        config = {
            "optimizer.name": type(self._optimizers[0]).__name__.lower(),
            "optimizer.grad_clip": self._clip,
            "guard.policy": self._policy,
            **{f"optimizer.{key}": group[key] for key in ("eps", "weight_decay") if key in group},
            **({"optimizer.beta2": group["betas"][1]} if "betas" in group else {}),
        }
        return History(
            config=config,
            derived={
                "parameters": sum(p.numel() for p in self._model.parameters()),
                "device": str(self._device),
                "dtype": self._dtype or str(self._objective.parameters[0].dtype).removeprefix("torch."),
                "num_ranks": self._world.size,
            },
            rows=series_from_rows(self.signals),
            tables=tables_from_rows({kind: list(rows) for kind, rows in self.tables.items()}),
            events=list(self.events),
            is_script=True,
        )

    def replay(self, report: Report = lambda text: None) -> Verdict:
        """Why the last bad step failed; everything is left as it is."""
        failure = self.failure
        if failure is None:
            raise UserError("no step has failed; there is nothing to replay", code="no-capture")
        if self._loss is None:
            raise UserError(
                "a replay needs the loss: rung.guard(model, optimizer, loss=lambda batch: ...)", code="no-loss"
            )
        if self._world.size > 1:
            raise UserError(
                f"ranks would wait for each other; replay in one process: {_call(failure)}", code="several-ranks"
            )
        if self._ended is not None:
            return replay.verdict_of(
                failure, self._model, self._optimizers, self._loss, self._is_compiled, report, self._history
            )
        if failure.path is None:
            raise UserError(
                "the loop has gone on since the step was skipped; give the guard a folder to keep it: out=",
                code="no-capture",
            )
        tensors = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in self._optimizers]
        try:
            return replay.replay(failure.path, self._model, self._optimizers, self._loss, report, self._history)
        finally:
            self._model.load_state_dict(tensors)
            for optimizer, state in zip(self._optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    def _read(self, wait: bool = False) -> bool:
        """Rows as they arrive; whether the last one was applied, as far as is known."""
        was_applied = True
        # (nobody has counted targets)
        hidden = {"targets", "targets_min"} | ({"norm"} if self._clips_itself else set())
        for row in self._core.rows(wait=wait or self._policy == "skip"):
            self._log.row(row.step, {name: value for name, value in row.values.items() if name not in hidden})
            for kind, (names, columns) in row.tables.items():
                self._log.table(kind, row.step, names, columns)
            for spike in row.spikes:
                self._log.event("spike", row.step, **spike._asdict())
            if self._core.no_layers:
                self._log.event("no_layers", row.step, why=self._core.no_layers)
                self._core.no_layers = ""
            was_applied = row.values["skipped"] == 0
            if row.failure is not None:
                self._fail(row, row.failure)
                return False
        return was_applied

    def _fail(self, row: Row, failed: Diverged) -> None:
        """Keeps the step; then stops, or leaves it out and continues."""
        step, latch, why = row.step, self._core.guard, str(failed)
        latch.restore_buffers()
        inputs = self.failure = next(one for one in self._recent if one.step == step)
        inputs.others = [[m.batch for m in one.micros] for one in self._recent if one is not inputs]
        inputs.facts |= {
            **conditions(self._device, self._dtype, row.values.get("scale"), self._is_compiled),
            **failed.facts,
            "reason": why,
            "loop": "script",
            "build": self._build,
            "lr": [float(lr) for lr in inputs.lrs],
            "loss": row.values["loss"],
            "norm": row.values["norm"],
            "eval_modules": [name for name, module in self._model.named_modules() if not module.training],
        }
        micros = [capture.micro_of(micro.batch, n, step) for n, micro in enumerate(inputs.micros)]
        diagnosis = first_diagnosis(micros, inputs.facts)

        # A capture that cannot be written does not hide why it was to be.
        place, where = "", "It is not kept on disk (out= names a folder)."
        if self._out is not None:
            try:
                path = capture.write(self._out, inputs, self._model, self._optimizers, self._world, self._frozen)
                inputs.path, where = path, f"It is kept in {path}."
                place = str(path) if self._run is None else f"captures/{path.name}"
            except Exception as error:  # a full disk, a device that is gone, tensors of an odd kind
                said = " ".join(str(error).split())[:200]
                self._log.event("warning", step, text=f"the step could not be captured: {said}")
                where = f"It could not be captured: {said}."
        if tensors := failed.facts.get("tensors"):
            self._log.event("weights_broken", step, tensors=tensors, gradients_finite=True)
        facts = {"rank": self._world.rank, "build": bool(self._build), **failed.facts}
        self._log.event("diverged", step, capture=place, why=why, diagnosis=diagnosis, **facts)
        if self._policy == "skip" and self._num_skips < self._most:
            self._num_skips += 1
            self._log.event("skip", step, why=why)
            latch.open()
            latch.arm(self.number)
            return

        calls = [] if self._world.size > 1 else ["guard.replay()"]  # ranks would wait for each other
        calls += [f"{'' if calls else 'in one process '}{_call(inputs)}"] if inputs.path else []
        text = (
            f"{why}. First diagnosis: {diagnosis}. Weights, buffers and optimizers are as before step {step}. "
            f"{where} For the operation, the sample and the cause: "
            f"{', or in another process '.join(calls) or 'name a folder, out='}."
        )
        text += " Other ranks keep their own batches, and one of them may be to blame." if self._world.size > 1 else ""
        self._ended = Diverged(step, text, reason=why, capture=place, diagnosis=diagnosis, **failed.facts)
        raise self._ended

    def _trained_now(self) -> ObjectiveState:
        """In the order of the model, in which clip_grad_norm_ adds up too."""
        trained, own = objective_of(self._optimizers), {id(p): n for n, p in enumerate(self._model.parameters())}
        strangers = sum(id(p) not in own for p in trained.parameters)
        if strangers or not trained.parameters:
            what = f"{strangers} tensors that the model does not have" if strangers else "nothing"
            raise UserError(
                f"the optimizers train {what}; pass one module that holds all that is trained", code="bad-optimizer"
            )
        trained.parameters.sort(key=lambda p: own[id(p)])
        return trained

    def _count_params(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]


guard = ScriptGuard


class GradScaling:
    """torch's GradScaler as the guarded step asks a scaling: it decides, until it can no longer be calibration."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self._scaler, self._device = scaler, device
        self.scale = torch.ones((), device=device)
        self._objective: ObjectiveState | None = None
        self._num_overflows = self._num_applied = 0
        self._is_overflow = self._is_fatal = False

    def unscale(self, objective: ObjectiveState) -> None:
        self._objective = objective
        for optimizer in objective.optimizers:
            try:
                self._scaler.unscale_(optimizer)
            except RuntimeError as error:
                if "already been called" not in str(error):  # by the loop, which wanted to clip
                    raise
        self.scale = torch.tensor(self._scaler.get_scale(), device=self._device)

    def is_fatal(self, bad_loss: Tensor, bad_norm: Tensor) -> Tensor:
        """An overflow is calibration as long as there is room below, as before the first step that was applied."""
        assert self._objective is not None
        gradients = [p.grad for p in self._objective.parameters if p.grad is not None]
        self._is_overflow = bool(bad_norm) and not all(is_finite(g) for g in gradients)
        self._num_overflows = self._num_overflows + 1 if self._is_overflow else 0
        has_room = float(self.scale) > 1.0 and (self._num_overflows < MOST_OVERFLOWS or not self._num_applied)
        self._is_fatal = bool(bad_loss) or (bool(bad_norm) and not (self._is_overflow and has_room))
        return torch.tensor(self._is_fatal, device=self._device)

    def apply(self, optimizers: Sequence[torch.optim.Optimizer], skip: Tensor) -> None:
        if self._is_fatal:
            self._scaler.update(float(self.scale))  # leaves it where it was, and forgets the step
            return
        for optimizer in optimizers:
            self._scaler.step(optimizer)  # which leaves an overflow out by itself
        self._scaler.update()
        self._num_applied += not self._is_overflow

    def update(self, is_bad: Tensor, latch: Tensor) -> None:
        """In `apply`: the scaler is updated after its steps."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """An update that is undone leaves the scale where the scaler has put it."""


def _call(failure: StepInputs) -> str:
    return f'rung.replay("{failure.path}", model, optimizer, loss)'
