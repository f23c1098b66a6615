"""A step of somebody's own loop that failed: what it was given, and the folder it is kept in.

<out>/<step>/model.safetensors, optimizer.pt, state.json, manifest.json     the state before it, as a save of a run
<out>/<step>/step.pt          batches of the step and of some before it, random states; loads with weights_only=True
<out>/<step>/capture.json     everything else it depended on
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rung.data.prefetch import Micro
from rung.engine.checkpoint import Checkpoints, load, load_weights
from rung.engine.state import Progress, State
from rung.engine.step import Trained
from rung.errors import CheckpointError
from rung.files import write_whole
from rung.own_loop import chance, nest
from rung.own_loop.chance import Chance
from rung.recipe import Draw
from rung.runs.files import floats_again, read_json, to_json

MOST_OTHERS = 64 << 20  # bytes of other batches that go into a capture
LOSSES = "loop"  # the name of the one objective


@dataclass
class Taken:
    """One backward: its batch, and the random states before the forward and after the backward."""

    batch: Any
    before: Chance
    after: Chance


@dataclass
class Kept:
    """`lrs` are of all groups of all optimizers. `others` are batches of steps nearby, for comparison."""

    step: int
    taken: list[Taken]
    lrs: list[Any]
    others: list[list[Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


def write(out: Path, kept: Kept, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Path:
    """The model and the optimizers must be as they were before the step."""
    captures = Checkpoints(out)
    lost: list[str] = []
    with rates(optimizers, kept.lrs):
        path = captures.save(_state(model, optimizers, kept.step), {})
    micros = [(nest.to_disk(t.batch, lost), t.before.to_disk(), t.after.to_disk()) for t in kept.taken]
    others, size = [], 0
    for batches in kept.others:
        size += sum(map(nest.bytes_of, batches))
        others += [[nest.to_disk(batch, []) for batch in batches]] if size <= MOST_OTHERS else []
    torch.save({"micros": micros, "others": others}, path / "step.pt")
    write_whole(path / "capture.json", to_json({**kept.facts, "step": kept.step, "lost": lost}) + b"\n")
    return path


def read(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Kept:
    """Brings the model and the optimizers to the state before the step."""
    if not (path / "capture.json").is_file():
        raise CheckpointError(f"{path} is not a capture of a guarded loop: it has no capture.json")
    saved = load(path)
    try:
        facts = floats_again(read_json(path / "capture.json"))
        stored = torch.load(path / "step.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"the capture {path} is damaged: {' '.join(str(error).split())[:200]}") from error
    load_weights(model, saved.weights, path)
    try:
        _state(model, optimizers, saved.step).load_tensors(saved.tensors())
    except ValueError as error:
        raise CheckpointError(f"{path} was captured with other optimizers: {error}; pass the same ones") from error
    taken = [
        Taken(nest.from_disk(batch), chance.from_disk(before), chance.from_disk(after))
        for batch, before, after in stored["micros"]
    ]
    others = [[nest.from_disk(batch) for batch in batches] for batches in stored["others"]]
    return Kept(saved.step, taken, [g["lr"] for o in optimizers for g in o.param_groups], others, facts, path)


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
    tensors = nest.tensors_of(batch)
    num_rows = nest.num_rows_of(tensors)
    return Micro(first_id + np.arange(num_rows), Draw(number, step, np.arange(num_rows)), tensors)


def by_row(batch: Any, number: int, step: int) -> Micro:
    """The same with its ids on the first axis of every tensor: what has no rows is one."""
    micro = micro_of(batch, number, step)
    num_rows = len(micro.ids)
    tensors = {name: t if t.shape[:1] == (num_rows,) else t.reshape(1, -1) for name, t in micro.batch.items()}
    return micro._replace(batch=tensors)


def trained_of(optimizers: Sequence[torch.optim.Optimizer], loss: Any = None) -> Trained:
    """Also what stands still now: it may be trained later."""
    parameters = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    return Trained(LOSSES, loss, list(parameters.values()), list(optimizers))


def _state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int) -> State:
    return State(model, [trained_of(optimizers)], None, Progress(step=step))
