"""A step of a script that failed: what it was given, and how it is kept.

The folder has the format of engine/capture.py. Of each backward it holds the tensors of the batch, its nesting as JSON,
and the random states before the forward and after the backward; batches of some steps nearby are kept for comparison.

In a loop that is not ours nobody says when a forward begins. So random states are read at the end of each step, which
is the state before the next forward unless the data loader draws from the same generators; `guard.begin` says it
exactly. A replay that drew the same numbers leaves the generators as the step had left them.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
from rung.errors import CheckpointError
from rung.random import Draw
from rung.runs.files import floats_again, read_json
from rung.runs.paths import inside
from rung.script import pytree

MOST_OTHERS = 64 << 20  # bytes of other batches that go into a capture
MOST_FROZEN = 64 << 20  # bytes of weights that nobody trains and that a capture holds all the same
OBJECTIVE = "loop"  # the name of the one objective
LEARNING = 4  # reads after which it is known whether anything draws from Python or numpy


class RngState(NamedTuple):
    """Of torch on the host and on the GPU, of Python and of numpy."""

    host: Tensor
    device: Tensor | None
    python: Any
    numpy: Any

    def is_same_for_torch(self, other: RngState) -> bool:
        if (self.device is None) != (other.device is None) or not torch.equal(self.host, other.host):
            return False
        return self.device is None or other.device is None or torch.equal(self.device, other.device)

    def to_json(self, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        kind, keys, *rest = self.numpy
        tensors[f"{name}.host"] = self.host
        if self.device is not None:
            tensors[f"{name}.device"] = self.device
        return {"name": name, "python": self.python, "numpy": [kind, keys.tolist(), *rest]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RngState:
        name, (version, keys, gauss) = stored["name"], stored["python"]
        kind, numbers, *rest = stored["numpy"]
        python, numpy = (version, tuple(keys), gauss), (kind, np.asarray(numbers, np.uint32), *rest)
        return cls(tensors[f"{name}.host"].cpu(), tensors.get(f"{name}.device"), python, numpy)


class Generators:
    """Reading the states of Python and numpy takes 0.1 ms, of torch a few us. If the first steps leave the former where
    they were, they are not read again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_reads, self._moved = 0, False
        self._python: Any = random.getstate()
        self._numpy: Any = np.random.get_state()

    def read(self) -> RngState:
        if self._num_reads < LEARNING or self._moved:
            python: Any = random.getstate()
            numpy: Any = np.random.get_state()
            known = self._numpy
            self._moved |= python != self._python or numpy[2:] != known[2:] or not np.array_equal(numpy[1], known[1])
            self._python, self._numpy = python, numpy
            self._num_reads += 1
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return RngState(torch.get_rng_state(), on_device, self._python, self._numpy)

    def set(self, state: RngState) -> None:
        torch.set_rng_state(state.host)
        if state.device is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(state.device, self._device)
        random.setstate(state.python)
        np.random.set_state(state.numpy)

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Afterwards they are as they were."""
        before = Generators(self._device).read()
        try:
            yield
        finally:
            self.set(before)


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
        size += sum(t.numel() * t.element_size() for b in batches for t in pytree.tensors_of(b).values())
        if size <= MOST_OTHERS:
            others.append([pytree.to_json(b, f"other{k}.{n}", tensors, []) for n, b in enumerate(batches)])
    facts = {**inputs.facts, "micros": micros, "others": others, "lost": lost}
    with rates(optimizers, inputs.lrs):
        state = State(model, [objective_of(optimizers)], None, Progress(step=inputs.step), frozen=frozen)
        return files.write(out, state, {}, world, tensors, facts, is_alone=True)


def read(path: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> StepInputs:
    """Brings the model and the optimizers to the state before the step."""
    if (path / "capture.json").is_file():
        micros, others, facts = _read_first_format(path)
    else:
        captured = files.read(path)
        facts, tensors = captured.facts[0], captured.tensors[0]
        if any("batch" not in micro for micro in facts["micros"]):
            raise CheckpointError(
                f"{path} was captured by `rung train`, not by a script: use `rung replay`", code="capture-mismatch"
            )
        micros = [
            MicroInputs(
                pytree.from_json(micro["batch"], tensors),
                RngState.from_json(micro["before"], tensors),
                RngState.from_json(micro["after"], tensors),
            )
            for micro in facts["micros"]
        ]
        others = [[pytree.from_json(batch, tensors) for batch in batches] for batches in facts["others"]]
    saved = load(path)
    saved.load_into(model)
    try:
        State(model, [objective_of(optimizers)], None).load_tensors(saved.tensors())
    except ValueError as error:
        raise CheckpointError(
            f"{path} was captured with other optimizers: {error}; pass the same ones", code="capture-mismatch"
        ) from error
    lrs = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    return StepInputs(saved.step, micros, lrs, others, facts, path)


def _read_first_format(path: Path) -> tuple[list[MicroInputs], list[list[Any]], dict[str, Any]]:
    """Captures of scripts used to have capture.json, and step.pt with plain containers of tensors."""
    try:
        facts = floats_again(read_json(inside(path, "capture.json")))
        stored = torch.load(inside(path, "step.pt"), map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"the capture {path} is damaged: {' '.join(str(error).split())[:200]}", code="capture-damaged"
        ) from error

    def rng_state(stored: tuple[Any, ...]) -> RngState:
        host, device, python, (kind, keys, *rest) = stored
        return RngState(host, device, python, (kind, np.asarray(keys, np.uint32), *rest))

    batches = [[pytree.from_containers(batch) for batch in batches] for batches in stored["others"]]
    micros = [MicroInputs(pytree.from_containers(b), rng_state(a), rng_state(z)) for b, a, z in stored["micros"]]
    return micros, batches, facts


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


def objective_of(optimizers: Sequence[torch.optim.Optimizer], loss: Any = None) -> ObjectiveState:
    """Also what stands still now: it may be trained later."""
    parameters = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    return ObjectiveState(OBJECTIVE, loss, list(parameters.values()), list(optimizers))
