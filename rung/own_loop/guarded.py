"""Keeps a loop that is not rung's from applying a bad step, records what it does, and keeps what failed.

`Guarded.step` stands where `optimizer.step()` stood. It judges loss and gradients on the device, before any clipping
that it does can spread a NaN, and leaves an update out by the flag that fused optimizers know: no copy is made and
nothing waits. Where an optimizer does not know the flag, a GradScaler is in use or bad steps are to be skipped, the
host looks once a step. How a step is judged, kept and measured is the engine's code, called in the order in which
somebody else's loop allows it.

The surprising thing: on a GPU a bad step is told of some steps late. Nothing has been applied since, so the state is
still the one before it; `wait` makes sure that nothing is on its way before weights are saved.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rung.engine.keeper import SPIKE, memory
from rung.engine.loop import BUFFER_STEPS
from rung.engine.rescue import Diverged, first_diagnosis
from rung.engine.signals import LAG, Signals
from rung.engine.sums import Sums
from rung.errors import UserError
from rung.forensics.examine import Report
from rung.own_loop import again, kept
from rung.own_loop.again import NAMES, Value, is_compiled, listed, unwrapped
from rung.own_loop.chance import Generators
from rung.own_loop.kept import Kept, Taken
from rung.own_loop.log import Log
from rung.own_loop.update import Update
from rung.recipe import Loss
from rung.robust import Spikes

if TYPE_CHECKING:
    from rung.doctor.finding import Finding
    from rung.forensics.verdict import Verdict

POLICIES = ("stop", "skip")


@dataclass(frozen=True)
class Options:
    clip: float = 0.0
    scaler: torch.amp.GradScaler | None = None
    dtype: str | None = None  # of an autocast around the loss; None: whatever the loss does itself
    policy: str = "stop"
    most: int = 10
    armed_steps: int = 20
    layers_every: int = 20


def guard(
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
) -> Guarded:
    """Guards a loop; make it when the weights are loaded, and call its `step` in place of `optimizer.step()`.

    loss: the value of a batch, as it is differentiated; needed to replay. out: a folder for captures and signals.
    clip: the largest norm of the gradients, 0 for none. scaler: its `step` and `update` are called here.
    autocast: the type of an autocast that the loop enters around the loss; one inside of `loss` is found by itself.
    policy: stop raises Diverged, skip leaves the batch out and goes on, at most `most` times.
    armed_steps: after a start and after spikes, how long updates are also checked for what they make of the weights.
    layers_every: steps between norms per tensor, 0 for none.
    """
    if policy not in POLICIES:
        raise UserError(f"policy={policy!r} is not one of {', '.join(POLICIES)}")
    if autocast is not None and autocast not in NAMES:
        raise UserError(f"autocast={autocast} is not one of {', '.join(map(str, NAMES))}")
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    dtype = NAMES[autocast] if autocast is not None else None
    options = Options(clip, scaler, dtype, policy, most, armed_steps, layers_every)
    return Guarded(model, listed(optimizer), loss, Path(out) if out else None, options)


class Guarded:
    """`signals` are the newest rows, oldest first; `tables` norms per tensor; `failure` the last step that failed."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        loss: Value | None,
        out: Path | None,
        options: Options,
    ) -> None:
        self._model, self._optimizers, self._loss, self._options = unwrapped(model), optimizers, loss, options
        self._update = Update(self._model, optimizers, options.scaler, options.armed_steps, options.layers_every)
        self._is_compiled = is_compiled(model, loss)
        self._rank, self._num_ranks = _rank()
        self._out = out / f"rank{self._rank}" if out is not None and self._num_ranks > 1 else out
        self._log = Log(self._out)
        self.signals, self.tables, self.events = self._log.rows, self._log.tables, self._log.events
        self.failure: Kept | None = None
        self.number = 0  # of the step that comes next
        self._rows = Signals(fixed_lag=self._num_ranks > 1)
        self._recent: deque[Kept] = deque(maxlen=LAG + 4)
        self._spikes = {"loss": Spikes(), "norm": Spikes()}
        self._generators = Generators(self._update.device)
        self._num_skips = 0
        self._ended: Diverged | None = None
        self._begin_step()

    def begin(self) -> None:
        """Optional, right before a forward: where it begins, for loops whose data draws random numbers too."""
        self._update.guard.keep_buffers()
        self._chance = self._generators.read()

    def micro(self, value: Tensor, batch: Any = None) -> None:
        """After each backward of a step that has several; then `step()` without arguments."""
        if self._ended is not None:
            raise self._ended
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError("the value of a step is the loss that was differentiated: one number, in a tensor")
        self._sums.add(Loss(value, torch.ones((), device=value.device)))
        after = self._generators.read()
        self._taken.append(Taken(batch, self._chance, after))
        self._chance = after

    def step(self, value: Tensor | None = None, batch: Any = None, *, clip: float | None = None) -> bool:
        """Applies the gradients, unless loss or gradients are not finite; False where it is known that it did not.

        Raises Diverged when a step was bad: this one, or on a GPU one of the last few.
        """
        if value is not None:
            self.micro(value, batch)
        if self._ended is not None:
            raise self._ended
        if not self._taken:
            raise UserError("guard.step() has nothing to judge; pass the loss: guard.step(value, batch)")
        step, clip, lrs = self.number, self._options.clip if clip is None else clip, self._update.lrs()
        facts = {"clip": clip, "armed": self._update.guard.is_armed(step)}
        self._recent.append(Kept(step, self._taken, lrs, facts=facts))
        values = torch.stack(self._sums.micros)[:, 0]
        signals, tables = self._update.take(step, values, clip, lambda why: self._log.event("no_layers", step, why=why))
        host = memory(self._update.device) if tables else {}
        if isinstance(lrs[0], Tensor):
            signals["lr"] = lrs[0].to(self._update.device)
        else:
            host["lr"] = float(lrs[0])
        self._rows.push(step, host, signals, tables)
        self.number += 1
        was_applied = self._read()
        self._begin_step()
        if self.number == BUFFER_STEPS:
            self._update.guard.forget_still_buffers()
        return was_applied

    def _begin_step(self) -> None:
        self._sums = Sums(self._update.device)
        self._taken: list[Taken] = []
        self.begin()

    def wait(self) -> None:
        """Reads what is still on its way from the device: before weights are saved, and at the end."""
        self._read(wait=True)

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._log.close()

    def findings(self) -> list[Finding]:
        """What the doctor says of the steps so far; he knows neither evals nor data here, and asks less."""
        from rung.doctor.diagnose import diagnose

        with contextlib.suppress(Diverged):
            self.wait()
        found = diagnose(self._log.history(*self._described()), failed={})
        return [replace(f, probe="guard.replay()") if f.probe.startswith("rung ") else f for f in found]

    def replay(self, report: Report = lambda text: None) -> Verdict:
        """Why the last bad step failed; everything is left as it is."""
        failure = self.failure
        if failure is None:
            raise UserError("no step has failed; there is nothing to replay")
        if self._loss is None:
            raise UserError("a replay needs the loss: rung.guard(model, optimizer, loss=lambda batch: ...)")
        if self._num_ranks > 1:
            raise UserError(f"ranks would wait for each other; replay in one process: {_call(failure)}")
        if self._ended is not None:
            return again.verdict_of(failure, self._model, self._optimizers, self._loss, self._is_compiled, report)
        if failure.path is None:
            raise UserError("the loop has gone on since the step was skipped; give the guard a folder to keep it: out=")
        with _put_back(self._model, self._optimizers):
            return again.replay(failure.path, self._model, self._optimizers, self._loss, report)

    def _read(self, wait: bool = False) -> bool:
        """Rows as they arrive; whether the last one was applied, as far as is known."""
        was_applied = True
        for step, row, tables in self._rows.ready(wait=wait or self._options.policy == "skip"):
            has_diverged, bad_micro = row.pop("diverged") > 0, int(row.pop("bad_micro"))
            for name in ("targets", "targets_min"):  # nobody has counted any
                del row[name]
            self._log.row(step, row)
            for kind, (names, columns) in tables.items():
                self._log.table(kind, step, names, columns)
            was_applied = row["skipped"] == 0
            if has_diverged:
                self._rows.drop()
                self._fail(step, row, bad_micro)
                return False
            self._notice_spikes(step, row)
        return was_applied

    def _notice_spikes(self, step: int, row: Mapping[str, float]) -> None:
        for name, spikes in self._spikes.items():
            score = spikes.score(row[name])
            if score > SPIKE and math.isfinite(score):
                self._update.guard.arm(self.number)
                self._log.event("spike", step, signal=name, score=score, value=row[name])

    def _fail(self, step: int, row: Mapping[str, float], bad_micro: int) -> None:
        """Keeps the step; then stops, or leaves it out and goes on."""
        latch = self._update.guard
        latch.restore_buffers()
        failure = self.failure = next(one for one in self._recent if one.step == step)
        failure.others = [[t.batch for t in one.taken] for one in self._recent if one is not failure]
        why, told = self._why(row, bad_micro)
        failure.facts |= {**self._facts(failure, row), **told, "reason": why}
        diagnosis = first_diagnosis([kept.by_row(t.batch, n, step) for n, t in enumerate(failure.taken)], failure.facts)
        where = self._keep(failure)
        if "tensors" in told:
            self._log.event("weights_broken", step, tensors=told["tensors"], gradients_finite=True)
        place = str(failure.path or "")
        self._log.event("diverged", step, capture=place, why=why, diagnosis=diagnosis, rank=self._rank, **told)
        if self._options.policy == "skip" and self._num_skips < self._options.most:
            self._num_skips += 1
            self._log.event("skip", step, why=why)
            latch.open()
            latch.arm(self.number)
            return
        calls = [] if self._num_ranks > 1 else ["guard.replay()"]  # ranks would wait for each other
        calls += [f"{'' if calls else 'in one process '}{_call(failure)}"] if place else []
        text = (
            f"step {step} was not applied: {why}. First diagnosis: {diagnosis}. Weights, buffers and optimizers are as "
            f"they were before it. {where} For the operation, the sample and the cause: "
            f"{', or in another process '.join(calls) or 'name a folder, out='}."
        )
        text += " Other ranks keep their own batches, and one of them may be to blame." if self._num_ranks > 1 else ""
        self._ended = Diverged(step, text, capture=place, diagnosis=diagnosis, **told)
        raise self._ended

    def _why(self, row: Mapping[str, float], bad_micro: int) -> tuple[str, dict[str, Any]]:
        """In words and in facts."""
        broken, self._update.broken = self._update.broken, []
        values = {name: row[name] for name in ("loss", "norm") if not math.isfinite(row[name])}
        if values:
            said = ", ".join(f"{name} is {value:g}" for name, value in values.items())
            return said, {"values": values, "micro": max(0, bad_micro)}
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        return f"its gradients were finite, and the update broke {', '.join(broken[:3])}{more}", {"tensors": broken}

    def _keep(self, failure: Kept) -> str:
        """Writes the capture, and says where. One that cannot be written does not hide why it was to be."""
        if self._out is None:
            return "It is not kept on disk (out= names a folder)."
        try:
            failure.path = kept.write(self._out, failure, self._model, self._optimizers)
            return f"It is kept in {failure.path}."
        except Exception as error:  # a full disk, a device that is gone, tensors of an odd kind
            said = " ".join(str(error).split())[:200]
            self._log.event("warning", failure.step, text=f"the step could not be captured: {said}")
            return f"It could not be captured: {said}."

    def _facts(self, failure: Kept, row: Mapping[str, float]) -> dict[str, Any]:
        """What a step depends on besides its state and its batch."""
        return {
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "lr": [float(lr) for lr in failure.lrs],
            "dtype": self._options.dtype,
            "device": str(self._update.device),
            "loss_scale": row.get("scale"),
            "compile": self._is_compiled,
            "eval_modules": [name for name, module in self._model.named_modules() if not module.training],
            "flags": {
                "tf32": torch.backends.cuda.matmul.allow_tf32,
                "cudnn_benchmark": torch.backends.cudnn.benchmark,
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            },
            "loss": row["loss"],
            "norm": row["norm"],
            "torch": str(torch.__version__),
        }

    def _described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The loop in the words of a config, as far as its optimizers tell."""
        group = self._optimizers[0].param_groups[0]
        config = {
            "optimizer.name": type(self._optimizers[0]).__name__.lower(),
            "optimizer.grad_clip": self._options.clip,
            "guard.policy": self._options.policy,
            **{f"optimizer.{key}": group[key] for key in ("eps", "weight_decay") if key in group},
            **({"optimizer.beta2": group["betas"][1]} if "betas" in group else {}),
        }
        lrs = [row["lr"] for row in self.signals]
        rising = next((n for n, (a, b) in enumerate(itertools.pairwise(lrs)) if b <= a), len(lrs))
        derived = {
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "device": str(self._update.device),
            "dtype": self._options.dtype or self._update.dtype(),
            "num_ranks": self._num_ranks,
            "warmup_steps": rising if self.signals and self.signals[0]["step"] == 0 else 0,
        }
        return config, derived


def _call(failure: Kept) -> str:
    return f'rung.replay("{failure.path}", model, optimizer, loss)'


def _rank() -> tuple[int, int]:
    group = torch.distributed
    return (group.get_rank(), group.get_world_size()) if group.is_available() and group.is_initialized() else (0, 1)


@contextlib.contextmanager
def _put_back(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """What is loaded inside is gone afterwards."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    try:
        yield
    finally:
        model.load_state_dict(tensors)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
