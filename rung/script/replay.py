"""Takes a captured step of a script again and says why it failed: `rung replay`, with a loss as a callable.

Compiled code, precisions, devices, samples and other batches are tried as for a run of rung; older weights are not at
hand. The loss must be the one that was differentiated, for one batch, as it is passed to the guard.

While a try is on, an autocast that the loss enters itself takes the precision of the try, or no other one could be
tried. One that switches autocast off stays off.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rung.engine import capture as files
from rung.engine.guarded import ObjectiveState
from rung.engine.precision import DTYPES, LossScale, Precision
from rung.engine.prefetch import Micro
from rung.errors import RunError, UserError
from rung.forensics.examine import Report, examine
from rung.forensics.rerun import Rerun, rows_of
from rung.forensics.verdict import Verdict
from rung.random import Draw
from rung.recipe import Batch, Loss
from rung.runs.files import read_json
from rung.runs.paths import inside
from rung.runs.query import ref, root_of
from rung.runs.trust import check_file
from rung.script import pytree
from rung.script.capture import Generators, StepInputs, micro_of, objective_of, rates, read

if TYPE_CHECKING:
    from rung.doctor.history import History
    from rung.runs.query import Run

Value = Callable[[Any], Tensor]
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def replay(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Value,
    report: Report = lambda text: None,
    history: Callable[[], History] | None = None,
) -> Verdict:
    """Why a captured step failed. The model and the optimizer are left in the state before that step.

    `history` is what was recorded before it; by default that of the run whose folder the capture lies in.
    """
    compiled, model, optimizers = is_compiled(model, loss), unwrapped(model), listed(optimizer)
    inputs, folder = read(Path(path), model, optimizers), Path(path).resolve().parents[1]
    if history is None and (folder / "run.json").is_file():
        from rung.doctor.history import read as read_history
        from rung.runs.query import Run
        from rung.runs.record import read_document

        history = lambda: read_history(Run(folder, read_document(folder)), with_parent=False)  # noqa: E731
    return verdict_of(inputs, model, optimizers, loss, compiled, report, history)


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
    old = inside(path, "capture.json")
    facts = read_json(old) if old.is_file() else files.read(path).facts[0]
    if build is None and isinstance(recorded := facts.get("build"), str):
        check_file(Path(recorded.rpartition(":")[0]), run, root_of())
        build = recorded
    if not build:
        raise RunError(
            f"{run.id} was trained by a script, and rung cannot build its model by itself. Write a function that "
            f"returns (model, optimizer, loss) as the script makes them, and pass it: "
            f"`rung replay {ref(run.path, run.id)}@{int(path.name)} --build FILE:FUNCTION`; or in Python: "
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
    sys.path.insert(0, str(Path(file).resolve().parent))
    arguments, sys.argv = sys.argv, [file, *command[1:]]
    try:
        found = runpy.run_path(file, run_name=Path(file).stem).get(name)
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
    history: Callable[[], History] | None = None,
) -> Verdict:
    """The model and the optimizers must be in the state before the step, and are left in it."""
    if not inputs.micros or any(taken.batch is None for taken in inputs.micros):
        raise UserError(
            "a step cannot be taken again without its batch; pass it: guard.step(value, batch)", code="no-batch"
        )
    facts, device = inputs.facts, next(model.parameters()).device
    generators = Generators(device)
    micros = [micro_of(taken.batch, number, inputs.step) for number, taken in enumerate(inputs.micros)]
    batches = [taken.batch for taken in inputs.micros] + [b for batches in inputs.others for b in batches]

    # What of the recorded step is not here.
    not_tested = []
    if str(facts["device"]).partition(":")[0] != device.type:
        not_tested.append(f"the device of the step ({facts['device']}): this model is on {device.type}")
    if facts["torch"] != str(torch.__version__):
        not_tested.append(f"torch {facts['torch']}, with which it was recorded: here is {torch.__version__}")
    if facts["compile"] and not is_compiled:
        not_tested.append("compiled: it was so when it was recorded, and is not here")
    not_tested += [f"{name} of the batch: it could not be kept" for name in facts.get("lost", [])]

    def value(number: int, tensors: Batch) -> Loss:
        batch = pytree.with_tensors(batches[number], lambda name, tensor: tensors[name])
        with _before_autocast(_obey):
            found = loss(batch)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise UserError(f"loss(batch) must be one number in a tensor, not {type(found).__name__}", code="bad-loss")
        # Values of micros add up, as their gradients do: the counts of a step make 1.
        return Loss(found.reshape(()), torch.tensor(1.0 / len(inputs.micros)))

    def value_of_rows(tensors: Batch, draw: Draw) -> Loss:
        try:
            return value(draw.seed, tensors)
        except Exception:
            if len(draw.rows) > 1:
                raise
        # A row that cannot be alone, such as with batch statistics, is taken twice.
        return value(draw.seed, {n: torch.cat([t, t]) if t.shape[:1] == (1,) else t for n, t in tensors.items()})

    def seed(objective: ObjectiveState, micro: Micro) -> None:
        """Other batches draw what the first micro of the step drew."""
        number = micro.draw.seed
        generators.set(inputs.micros[number if number < len(inputs.micros) else 0].before)

    def other_batches() -> Iterator[list[Micro]]:
        number = len(inputs.micros)
        for others in inputs.others:
            # Ids below 0, so that none is taken for a sample of the failed step.
            yield [micro_of(batch, number + n, inputs.step, -(1 << 40)) for n, batch in enumerate(others)]
            number += len(others)

    with contextlib.ExitStack() as stack:
        # Each module trains or evaluates as it did in the step; rates and generators are those of the step.
        for name, module in model.named_modules():
            stack.callback(setattr, module, "training", module.training)
            module.training = name not in facts["eval_modules"]
        stack.enter_context(rates(optimizers, inputs.lrs))
        stack.enter_context(generators.left_alone())
        precision = Precision(facts["dtype"] or _autocast_dtype(inputs, model, loss, generators), device)
        precision.loss_scale = None
        if facts["loss_scale"] is not None:
            precision.loss_scale = LossScale(device)
            precision.loss_scale.scale.fill_(facts["loss_scale"])
        trained = objective_of(optimizers, value_of_rows)
        trained.parameters = [parameter for parameter in trained.parameters if parameter.requires_grad]
        rerun = Rerun(
            model=model,
            objectives=[trained],
            micros=micros,
            precision=precision,
            grad_clip=facts["clip"],
            step=inputs.step,
            is_compiled=is_compiled,
            other_batches=other_batches if inputs.others else None,
            seed=seed,
            history=history,
        )

        # Taken again, a step must leave torch's generators as it had left them.
        for number, (taken, micro) in enumerate(zip(inputs.micros, micros)):
            rerun.take(micros=[micro])
            if not generators.read().is_same_for_torch(taken.after):
                not_tested.append(
                    f"the random numbers of micro {number}: something besides the loss drew too, or its draws depend "
                    "on the device; guard.begin() right before the forward tells where it begins"
                )
                break

        # A loss that raises when it is given fewer rows must not be taken for one that fails: its micro stays whole.
        for number, micro in enumerate(micros):
            rows = np.arange(len(micro.ids))
            if len(rows) < 2 or rerun.take(micros=[micro]).place == "error":
                continue
            halves = (rows[: len(rows) // 2], rows[len(rows) // 2 :])
            if any(rerun.take(micros=[rows_of(micro, half)]).place == "error" for half in halves):
                rerun.micros[number] = micro._replace(ids=micro.ids[:1])
                not_tested.append("the sample: the loss does not take fewer rows")
        verdict = examine(rerun, not_tested=not_tested, report=report)
        verdict.changes = {}  # keys of a recipe
        return verdict


def _autocast_dtype(inputs: StepInputs, model: nn.Module, loss: Value, generators: Generators) -> str:
    """The precision of the autocast that the loss enters, if it does."""
    entered: list[torch.dtype] = []
    taken, device = inputs.micros[0], next(model.parameters()).device
    generators.set(taken.before)
    note = _before_autocast(lambda autocast: entered.append(autocast.fast_dtype) if autocast._enabled else None)
    with torch.no_grad(), note, contextlib.suppress(Exception):
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            loss(pytree.with_tensors(taken.batch, lambda name, tensor: tensor.to(device)))
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
    return next((NAMES[dtype] for dtype in entered if dtype in NAMES), "float32")


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


def _obey(autocast: Any) -> None:
    """An autocast inside of the loss takes the type of the one around it, and is off where there is none."""
    autocast._enabled = autocast._enabled and torch.is_autocast_enabled(autocast.device)
    autocast.fast_dtype = torch.get_autocast_dtype(autocast.device)


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
