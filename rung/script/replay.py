"""Takes a captured step of a script again and says why it failed: `rung replay`, with a loss as a callable.

Compiled code, precisions, devices, samples and other batches are tried as for a run of rung; older weights are not at
hand. The loss must be the one that was differentiated, for one batch, as it is passed to the guard.

While a try is on, an autocast that the loss enters itself takes the precision of the try, or no other one could be
tried. One that switches autocast off stays off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rung.engine import capture as files
from rung.engine.precision import DTYPES, LossScale, Precision
from rung.engine.prefetch import Micro
from rung.errors import RunError, UserError
from rung.forensics.examine import Report, examine
from rung.forensics.rerun import Rerun, rows_of
from rung.forensics.verdict import Verdict
from rung.random import Draw
from rung.recipe import Batch, Loss
from rung.runs.files import read_json
from rung.script import pytree
from rung.script.capture import StepInputs, micro_of, objective_of, rates, read
from rung.script.rng_state import Generators

if TYPE_CHECKING:
    from rung.runs.query import Run

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
    inputs = read(Path(path), model, optimizers)
    return verdict_of(inputs, model, optimizers, loss, compiled, report)


def replay_run(run: Run, step: int | None, build: str | None, report: Report) -> Verdict:
    """Why a step of a script's run failed. `build` is FILE:FUNCTION, which returns (model, optimizer, loss)."""
    known = files.steps(run.path / "captures")
    if not known or (step is not None and step not in known):
        has = f"it has {', '.join(map(str, known))}" if known else "none of its steps failed under a guard"
        raise RunError(
            f"{run.id} has no capture{'' if step is None else f' of step {step}'}: {has}. Only captured steps of a "
            "script can be replayed: rung does not know its data",
            code="no-capture",
        )
    path = run.path / "captures" / f"{known[-1] if step is None else step:08d}"
    old = path / "capture.json"
    facts = read_json(old) if old.is_file() else files.read(path).facts[0]
    build = build or facts.get("build")
    if not build:
        raise RunError(
            f"{run.id} was trained by a script, and rung cannot build its model by itself. Write a function that "
            f"returns (model, optimizer, loss) as the script makes them, and pass it: `rung replay {run.id}@"
            f"{int(path.name)} --build FILE:FUNCTION`; or in Python: "
            f"rung.replay({str(path)!r}, model, optimizer, loss)",
            code="missing-option",
        )
    model, optimizer, loss = _built(build, [str(word) for word in run.document.get("command") or ()])
    return replay(path, model, optimizer, loss, report)


def _built(build: str, command: list[str]) -> tuple[nn.Module, Any, Value]:
    """What FILE:FUNCTION returns, with the arguments the run was started with.

    The file is imported as a module, so what it does only as a script is not done.
    """
    file, _, name = build.rpartition(":")
    if not Path(file).is_file():
        raise UserError(
            f"{build!r} does not name a file that is here and a function in it; pass --build FILE:FUNCTION, as in "
            "--build train.py:build",
            code="bad-build",
        )
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(file).resolve().parent))
    arguments, sys.argv = sys.argv, [file, *command[1:]]
    try:
        spec.loader.exec_module(module)
        found = getattr(module, name, None)
        if not callable(found):
            raise UserError(f"{file} has no function {name!r} that returns (model, optimizer, loss)", code="bad-build")
        model, optimizer, loss = found()
    except UserError:
        raise
    except Exception as error:  # of somebody's script, which may fail in any way
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"{build} did not return (model, optimizer, loss): {type(error).__name__}: {said}", code="bad-build"
        ) from error
    finally:
        sys.path.pop(0)
        sys.argv = arguments
    return model, optimizer, loss


def verdict_of(
    inputs: StepInputs,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss: Value,
    is_compiled: bool,
    report: Report,
) -> Verdict:
    """The model and the optimizers must be in the state before the step, and are left in it."""
    if not inputs.micros or any(taken.batch is None for taken in inputs.micros):
        raise UserError(
            "a step cannot be taken again without its batch; pass it: guard.step(value, batch)", code="no-batch"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_modes(model, inputs.facts["eval_modules"]))
        stack.enter_context(rates(optimizers, inputs.lrs))
        stack.enter_context(Generators(next(model.parameters()).device).left_alone())
        return _Replay(inputs, model, optimizers, loss, is_compiled).verdict(report)


class _Replay:
    def __init__(
        self,
        inputs: StepInputs,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        loss: Value,
        is_compiled: bool,
    ) -> None:
        device = next(model.parameters()).device
        self._inputs, self._model, self._loss, self._device = inputs, model, loss, device
        self._generators = Generators(device)
        self._batches = [taken.batch for taken in inputs.micros] + [b for batches in inputs.others for b in batches]
        num_micros = len(inputs.micros)
        self._micros = [micro_of(taken.batch, number, inputs.step) for number, taken in enumerate(inputs.micros)]
        precision = Precision(inputs.facts["dtype"] or self._dtype(), device)
        precision.loss_scale = None
        if inputs.facts["loss_scale"] is not None:
            precision.loss_scale = LossScale(device)
            precision.loss_scale.scale.fill_(inputs.facts["loss_scale"])
        trained = objective_of(optimizers, lambda batch, draw: self._value(batch, draw, 1.0 / num_micros))
        trained.parameters = [parameter for parameter in trained.parameters if parameter.requires_grad]
        self._is_compiled = is_compiled
        self._not_tested = self._missing()
        self._rerun = Rerun(
            model=model,
            objectives=[trained],
            micros=self._micros,
            precision=precision,
            grad_clip=inputs.facts["clip"],
            step=inputs.step,
            is_compiled=is_compiled,
            other_batches=self._others if inputs.others else None,
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
        batch = pytree.with_tensors(self._batches[number], lambda name, tensor: tensors[name])
        with obedient_autocast():
            value = self._loss(batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError(f"loss(batch) must be one number in a tensor, not {type(value).__name__}", code="bad-loss")
        return value.reshape(())

    def _seed(self, micro: Micro) -> None:
        """Other batches draw what the first micro of the step drew."""
        taken = self._inputs.micros
        self._generators.set(taken[micro.draw.seed if micro.draw.seed < len(taken) else 0].before)

    def _others(self) -> Iterator[list[Micro]]:
        number = len(self._inputs.micros)
        for batches in self._inputs.others:
            # Ids below 0, so that none is taken for a sample of the failed step.
            yield [micro_of(b, number + n, self._inputs.step, -(1 << 40)) for n, b in enumerate(batches)]
            number += len(batches)

    def _dtype(self) -> str:
        """The precision of the autocast that the loss enters, if it does."""
        entered: list[torch.dtype] = []
        taken = self._inputs.micros[0]
        self._generators.set(taken.before)
        with torch.no_grad(), _noted_autocast(entered), contextlib.suppress(Exception):
            buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
            try:
                self._loss(pytree.with_tensors(taken.batch, lambda name, tensor: tensor.to(self._device)))
            finally:
                for buffer, before in buffers:
                    buffer.copy_(before)
        return next((NAMES[dtype] for dtype in entered if dtype in NAMES), "float32")

    def _missing(self) -> list[str]:
        """What of the recorded step is not here."""
        facts, said = self._inputs.facts, []
        if str(facts["device"]).partition(":")[0] != self._device.type:
            said.append(f"the device of the step ({facts['device']}): this model is on {self._device.type}")
        if facts["torch"] != str(torch.__version__):
            said.append(f"torch {facts['torch']}, with which it was recorded: here is {torch.__version__}")
        if facts["compile"] and not self._is_compiled:
            said.append("compiled: it was so when it was recorded, and is not here")
        return said + [f"{name} of the batch: it could not be kept" for name in facts.get("lost", [])]

    def _note_random_numbers(self) -> None:
        """Taken again, a step must leave torch's generators as it had left them."""
        for number, (taken, micro) in enumerate(zip(self._inputs.micros, self._micros)):
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
