"""A step of a script that failed: what it was given, and how it is kept.

The folder has the format of engine/capture.py. Of each backward it holds the tensors of the batch, its nesting as JSON,
and the random states before the forward and after the backward; batches of some steps nearby are kept for comparison.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rung.engine import capture as files
from rung.engine.checkpoint import canonical, load
from rung.engine.fingerprints import fingerprint
from rung.engine.guarded import ObjectiveState
from rung.engine.parallel import World
from rung.engine.prefetch import Micro
from rung.engine.state import Progress, State
from rung.errors import CheckpointError, UserError
from rung.random import Draw
from rung.runs.files import floats_again, read_json
from rung.script import pytree, rng_state
from rung.script.rng_state import RngState

MOST_OTHERS = 64 << 20  # bytes of other batches that go into a capture
LOSSES = "loop"  # the name of the one objective
MOST_FROZEN = 64 << 20  # bytes of weights that nobody trains and that a capture holds all the same


@dataclass
class MicroInputs:
    """One backward: its batch, and the random states before the forward and after the backward."""

    batch: Any
    before: RngState
    after: RngState


@dataclass
class StepInputs:
    """`lrs` are of all groups of all optimizers. `others` are batches of steps nearby, for comparison."""

    step: int
    micros: list[MicroInputs]
    lrs: list[Any]
    others: list[list[Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


def frozen_of(model: nn.Module) -> dict[str, str]:
    """Fingerprints of weights that nobody trains, where they are too large for a capture: whoever builds the model
    again must load them again."""
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    frozen = {name: tensor for name, tensor in canonical(model).items() if name in names}
    is_large = sum(tensor.numel() * tensor.element_size() for tensor in frozen.values()) > MOST_FROZEN
    return {name: fingerprint(tensor) for name, tensor in frozen.items()} if is_large else {}


def write(
    out: Path,
    inputs: StepInputs,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
    frozen: dict[str, str],
) -> Path:
    """The model and the optimizers must be as they were before the step. Each rank writes a folder of its own."""
    tensors: dict[str, Tensor] = {}
    lost: list[str] = []
    micros = [
        {
            "batch": pytree.to_json(micro.batch, f"{n}", tensors, lost),
            "before": micro.before.to_json(f"{n}/rng.before", tensors),
            "after": micro.after.to_json(f"{n}/rng.after", tensors),
        }
        for n, micro in enumerate(inputs.micros)
    ]
    others, size = [], 0
    for k, batches in enumerate(inputs.others):
        size += sum(map(pytree.bytes_of, batches))
        if size <= MOST_OTHERS:
            others.append([pytree.to_json(b, f"other{k}.{n}", tensors, []) for n, b in enumerate(batches)])
    facts = {**inputs.facts, "micros": micros, "others": others, "lost": lost}
    with rates(optimizers, inputs.lrs):
        state = _state(model, optimizers, inputs.step)
        state.frozen = frozen
        return files.write(out, state, {}, world, tensors, facts, is_alone=True)


def read(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> StepInputs:
    """Brings the model and the optimizers to the state before the step."""
    is_old = (path / "capture.json").is_file()
    captured = None if is_old else files.read(path)
    if captured is not None and "batch" not in (captured.facts[0]["micros"] or [{"batch": None}])[0]:
        raise CheckpointError(
            f"{path} was captured by `rung train`, not by a script: use `rung replay`", code="capture-mismatch"
        )
    saved = load(path)
    saved.load_into(model)
    try:
        _state(model, optimizers, saved.step).load_tensors(saved.tensors())
    except ValueError as error:
        raise CheckpointError(
            f"{path} was captured with other optimizers: {error}; pass the same ones", code="capture-mismatch"
        ) from error
    lrs = [g["lr"] for o in optimizers for g in o.param_groups]
    if captured is None:
        micros, others, facts = _read_old(path)
        return StepInputs(saved.step, micros, lrs, others, facts, path)
    facts, tensors = captured.facts[0], captured.tensors[0]
    micros = [
        MicroInputs(
            pytree.from_json(one["batch"], tensors),
            rng_state.from_json(one["before"], tensors),
            rng_state.from_json(one["after"], tensors),
        )
        for one in facts["micros"]
    ]
    others = [[pytree.from_json(batch, tensors) for batch in batches] for batches in facts["others"]]
    return StepInputs(saved.step, micros, lrs, others, facts, path)


def _read_old(path: Path) -> tuple[list[MicroInputs], list[list[Any]], dict[str, Any]]:
    """The first format of captures of scripts: capture.json, and step.pt with plain containers of tensors."""
    try:
        facts = floats_again(read_json(path / "capture.json"))
        stored = torch.load(path / "step.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"the capture {path} is damaged: {' '.join(str(error).split())[:200]}", code="capture-damaged"
        ) from error
    micros = [
        MicroInputs(pytree.from_containers(batch), rng_state.from_containers(a), rng_state.from_containers(b))
        for batch, a, b in stored["micros"]
    ]
    return micros, [[pytree.from_containers(b) for b in batches] for batches in stored["others"]], facts


def importable(build: Callable[[], Any] | str) -> str:
    """FILE:FUNCTION of a function at the top of a module."""
    if isinstance(build, str):
        return build
    name, file = getattr(build, "__qualname__", ""), inspect.getsourcefile(build)
    if not name.isidentifier() or file is None:
        raise UserError(
            f"build={build!r} cannot be imported by another process; pass a function of a module", code="bad-build"
        )
    return f"{Path(file).resolve()}:{name}"


@contextlib.contextmanager
def rates(optimizers: Sequence[torch.optim.Optimizer], lrs: Sequence[Any]) -> Iterator[None]:
    """The learning rates of the failed step; a schedule may have gone on before the host knew."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    before = [group["lr"] for group in groups]
    try:
        for group, lr in zip(groups, lrs):
            group["lr"] = lr
        yield
    finally:
        for group, lr in zip(groups, before):
            group["lr"] = lr


def micro_of(batch: Any, number: int, step: int, first_id: int = 0) -> Micro:
    """For the tools that take batches apart. The seed of its draw is the number under which the batch is known."""
    tensors = pytree.tensors_of(batch)
    num_rows = pytree.num_rows_of(tensors)
    return Micro(first_id + np.arange(num_rows), Draw(number, step, np.arange(num_rows)), tensors)


def by_row(batch: Any, number: int, step: int) -> Micro:
    """The same with its ids on the first axis of every tensor: what has no rows is one."""
    micro = micro_of(batch, number, step)
    num_rows = len(micro.ids)
    tensors = {name: t if t.shape[:1] == (num_rows,) else t.reshape(1, -1) for name, t in micro.batch.items()}
    return micro._replace(batch=tensors)


def objective_of(optimizers: Sequence[torch.optim.Optimizer], loss: Any = None) -> ObjectiveState:
    """Also what stands still now: it may be trained later."""
    parameters = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    return ObjectiveState(LOSSES, loss, list(parameters.values()), list(optimizers))


def _state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int) -> State:
    return State(model, [objective_of(optimizers)], None, Progress(step=step))
