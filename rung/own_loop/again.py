"""Takes a kept step of somebody's own loop again and says why it failed: `rung replay`, with a loss as a callable.

Compiled code, precisions, devices, samples and other batches are tried as for a run of rung; older weights are not at
hand. The loss must be the one that was differentiated, for one batch, as it is passed to the guard.

The surprising thing: an autocast that the loss enters itself does what the try says while a try is on, or no other
precision could be tried. One that switches autocast off stays off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rung.data.prefetch import Micro
from rung.engine.precision import DTYPES, LossScale, Precision
from rung.errors import UserError
from rung.forensics.examine import Report, examine
from rung.forensics.rerun import Rerun, rows_of
from rung.forensics.verdict import Verdict
from rung.own_loop import nest
from rung.own_loop.chance import Generators
from rung.own_loop.kept import Kept, micro_of, rates, read, trained_of
from rung.recipe import Batch, Draw, Loss

Value = Callable[[Any], Tensor]
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def replay(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Value,
    report: Report = lambda text: None,
) -> Verdict:
    """Why a captured step failed. The model and the optimizer are left in the state before that step."""
    compiled, model, optimizers = is_compiled(model, loss), unwrapped(model), listed(optimizer)
    kept = read(Path(path), model, optimizers)
    return verdict_of(kept, model, optimizers, loss, compiled, report)


def verdict_of(
    kept: Kept,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss: Value,
    is_compiled: bool,
    report: Report,
) -> Verdict:
    """The model and the optimizers must be in the state before the step, and are left in it."""
    if not kept.taken or any(taken.batch is None for taken in kept.taken):
        raise UserError("a step cannot be taken again without its batch; pass it: guard.step(value, batch)")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_modes(model, kept.facts["eval_modules"]))
        stack.enter_context(rates(optimizers, kept.lrs))
        stack.enter_context(Generators(next(model.parameters()).device).left_alone())
        return _Replay(kept, model, optimizers, loss, is_compiled).verdict(report)


class _Replay:
    def __init__(
        self,
        kept: Kept,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        loss: Value,
        is_compiled: bool,
    ) -> None:
        device = next(model.parameters()).device
        self._kept, self._model, self._loss, self._device = kept, model, loss, device
        self._generators = Generators(device)
        self._batches = [taken.batch for taken in kept.taken] + [b for batches in kept.others for b in batches]
        num_micros = len(kept.taken)
        self._micros = [micro_of(taken.batch, number, kept.step) for number, taken in enumerate(kept.taken)]
        precision = Precision(kept.facts["dtype"] or self._dtype(), device)
        precision.loss_scale = None
        if kept.facts["loss_scale"] is not None:
            precision.loss_scale = LossScale(device)
            precision.loss_scale.scale.fill_(kept.facts["loss_scale"])
        trained = trained_of(optimizers, lambda batch, draw: self._value(batch, draw, 1.0 / num_micros))
        trained.parameters = [parameter for parameter in trained.parameters if parameter.requires_grad]
        self._is_compiled = is_compiled
        self._not_tested = self._missing()
        self._rerun = Rerun(
            model=model,
            objectives=[trained],
            micros=self._micros,
            precision=precision,
            grad_clip=kept.facts["clip"],
            step=kept.step,
            is_compiled=is_compiled,
            other_batches=self._others if kept.others else None,
            seed=lambda objective, micro: self._seed(micro),
        )

    def verdict(self, report: Report) -> Verdict:
        self._note_random_numbers()
        self._keep_whole_what_cannot_be_cut()
        return examine(self._rerun, not_tested=self._not_tested, report=report)

    def _value(self, tensors: Batch, draw: Draw, count: float) -> Loss:
        """Values of micros add up, as their gradients do: the counts of a step make 1."""
        try:
            return Loss(self._called(draw.seed, tensors), torch.tensor(count))
        except Exception:
            if len(draw.rows) > 1:
                raise
        # A row that cannot be alone, such as with batch statistics, is taken twice.
        twice = {name: torch.cat([t, t]) if t.shape[:1] == (1,) else t for name, t in tensors.items()}
        return Loss(self._called(draw.seed, twice), torch.tensor(count))

    def _called(self, number: int, tensors: Batch) -> Tensor:
        batch = nest.with_tensors(self._batches[number], lambda name, tensor: tensors[name])
        with obedient_autocast():
            value = self._loss(batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError(f"loss(batch) must be one number in a tensor, not {type(value).__name__}")
        return value.reshape(())

    def _seed(self, micro: Micro) -> None:
        """Other batches draw what the first micro of the step drew."""
        taken = self._kept.taken
        self._generators.set(taken[micro.draw.seed if micro.draw.seed < len(taken) else 0].before)

    def _others(self) -> Iterator[list[Micro]]:
        number = len(self._kept.taken)
        for batches in self._kept.others:
            # Ids below 0, so that none is taken for a sample of the failed step.
            yield [micro_of(b, number + n, self._kept.step, -(1 << 40)) for n, b in enumerate(batches)]
            number += len(batches)

    def _dtype(self) -> str:
        """The precision of the autocast that the loss enters, if it does."""
        entered: list[torch.dtype] = []
        taken = self._kept.taken[0]
        self._generators.set(taken.before)
        with torch.no_grad(), _noted_autocast(entered), contextlib.suppress(Exception):
            buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
            try:
                self._loss(nest.with_tensors(taken.batch, lambda name, tensor: tensor.to(self._device)))
            finally:
                for buffer, before in buffers:
                    buffer.copy_(before)
        return next((NAMES[dtype] for dtype in entered if dtype in NAMES), "float32")

    def _missing(self) -> list[str]:
        """What of the recorded step is not here."""
        facts, said = self._kept.facts, []
        if str(facts["device"]).partition(":")[0] != self._device.type:
            said.append(f"the device of the step ({facts['device']}): this model is on {self._device.type}")
        if facts["torch"] != str(torch.__version__):
            said.append(f"torch {facts['torch']}, with which it was recorded: here is {torch.__version__}")
        if facts["compile"] and not self._is_compiled:
            said.append("compiled: it was so when it was recorded, and is not here")
        return said + [f"{name} of the batch: it could not be kept" for name in facts.get("lost", [])]

    def _note_random_numbers(self) -> None:
        """Taken again, a step must leave torch's generators as it had left them."""
        for number, (taken, micro) in enumerate(zip(self._kept.taken, self._micros)):
            self._rerun.take(micros=[micro])
            if not self._generators.read().is_same_for_torch(taken.after):
                self._not_tested.append(
                    f"the random numbers of micro {number}: something besides the loss drew too, or its draws depend "
                    "on the device; guard.begin() right before the forward tells where it begins"
                )
                return

    def _keep_whole_what_cannot_be_cut(self) -> None:
        """A loss that raises when it is given fewer rows must not be taken for one that fails."""
        for number, micro in enumerate(self._micros):
            num_rows = len(micro.ids)
            if num_rows < 2:
                continue
            whole = self._rerun.take(micros=[micro])
            halves = [micro.ids[: num_rows // 2] - micro.ids[0], micro.ids[num_rows // 2 :] - micro.ids[0]]
            if whole.place != "error" and any(
                self._rerun.take(micros=[rows_of(micro, half)]).place == "error" for half in halves
            ):
                self._micros[number] = micro._replace(ids=micro.ids[:1])
                self._not_tested.append("the sample: the loss does not take fewer rows")
        self._rerun.micros = self._micros


def listed(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, whose tensors have the names that its author gave them."""
    return list(_layers_of(model))[-1]


def _layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """What wraps a model, from outside, and the model."""
    inner: Any = model
    while isinstance(inner, nn.Module):
        yield inner
        is_shared = isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner = inner.module if is_shared else getattr(inner, "_orig_mod", None)


def is_compiled(model: nn.Module, loss: Value | None) -> bool:
    return (
        hasattr(loss, "_torchdynamo_orig_callable")
        or any(hasattr(layer, "_orig_mod") for layer in _layers_of(model))
        or any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
    )


@contextlib.contextmanager
def _modes(model: nn.Module, eval_modules: Sequence[str]) -> Iterator[None]:
    """Each module trains or evaluates as it did in the step."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for name, module in model.named_modules():
            module.training = name not in eval_modules
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def obedient_autocast() -> Iterator[None]:
    """An autocast inside of the loss takes the type of the one around it, and is off where there is none."""

    def obey(autocast: Any) -> None:
        autocast._enabled = autocast._enabled and torch.is_autocast_enabled(autocast.device)
        autocast.fast_dtype = torch.get_autocast_dtype(autocast.device)

    with _before_autocast(obey):
        yield


@contextlib.contextmanager
def _noted_autocast(entered: list[torch.dtype]) -> Iterator[None]:
    with _before_autocast(lambda autocast: entered.append(autocast.fast_dtype) if autocast._enabled else None):
        yield


@contextlib.contextmanager
def _before_autocast(act: Callable[[Any], None]) -> Iterator[None]:
    enter = torch.autocast.__enter__

    def entering(autocast: Any) -> Any:
        written = autocast._enabled, autocast.fast_dtype
        try:
            act(autocast)
            return enter(autocast)
        finally:  # one object may serve a whole loop
            autocast._enabled, autocast.fast_dtype = written

    torch.autocast.__enter__ = entering  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
