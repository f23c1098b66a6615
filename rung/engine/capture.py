"""Keeps a step that failed, so that it can be run again: the state before it, and what it was given.

    captures/<step>/                           a checkpoint of the state before the step, in the usual format
    captures/<step>/batch.<rank>.safetensors   the tensors of its micros, "<micro>/<name>"
    captures/<step>/capture.<rank>.json        what else the step depended on

The same for a run of the engine and for a script under rung.guard; they differ in what `micros` in the JSON says: rows
of a stream there, the nesting of a batch and the random states here. A capture is whole or absent, as a checkpoint is;
the batches of other ranks arrive after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rung.engine.checkpoint import Checkpoints
from rung.engine.parallel import World
from rung.engine.prefetch import Micro
from rung.engine.state import State
from rung.errors import CheckpointError
from rung.files import write_whole
from rung.random import Draw
from rung.runs.files import floats_again, newer, read_json, to_json
from rung.runs.maintenance.disk import bytes_below
from rung.runs.paths import inside
from rung.units import size

SCHEMA = 1  # of capture.<rank>.json
MOST_BYTES = 32 << 30  # that a run's captures take together before no other one is written


@dataclass(frozen=True)
class Captured:
    """`facts` and `tensors` by rank."""

    path: Path
    facts: list[dict[str, Any]]
    tensors: list[dict[str, Tensor]]

    @property
    def micros(self) -> list[list[Micro]]:
        """Of a run of the engine, by rank."""
        ranks = []
        for fact, tensors in zip(self.facts, self.tensors, strict=True):
            micros: list[Micro] = []
            for number, about in enumerate(fact["micros"]):
                try:
                    draw = Draw(fact["seed"], fact["step"], np.asarray(about["rows"], np.int64))
                    ids = np.asarray(about["ids"], np.int64)
                except (KeyError, TypeError, ValueError) as error:
                    raise CheckpointError(
                        f"the capture of step {fact.get('step')} is damaged: {error!r}", code="capture-damaged"
                    ) from error
                prefix = f"{number}/"
                batch = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                micros.append(Micro(ids, draw, batch))
            ranks.append(micros)
        return ranks


def write(
    folder: Path,
    state: State,
    extra: Mapping[str, Any],
    world: World,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    is_alone: bool = False,
) -> Path:
    """`state` must be that before the step. The first rank writes it, each rank its own batch.

    `is_alone`: only this rank failed, and nobody waits for it; it writes the state too, which is the same on all ranks.
    """
    captures = Checkpoints(folder)
    path = captures.at(state.progress.step)
    try:
        if world.is_first or is_alone:
            check_room(folder)
            captures.save(state, extra)
    finally:  # also when the disk is full, or the others would wait for good
        if not is_alone:
            world.wait()
    # (cloned: the file format refuses two names for one memory)
    kept = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    save_file(kept, path / f"batch.{world.rank}.safetensors")
    document = {"schema": SCHEMA, **facts, "step": state.progress.step, "rank": world.rank, "num_ranks": world.size}
    write_whole(path / f"capture.{world.rank}.json", to_json(document) + b"\n")
    return path


def check_room(folder: Path) -> None:
    """CheckpointError where the captures of a run take as much as they may; the first is always written."""
    taken = bytes_below(folder)
    if taken >= MOST_BYTES:
        raise CheckpointError(
            f"{folder} holds {size(taken)}, and captures may take {size(MOST_BYTES)}: move or delete some",
            code="captures-full",
        )


def conditions(device: torch.device, dtype: str | None, loss_scale: float | None, is_compiled: bool) -> dict[str, Any]:
    """What a step depends on besides its state and its batch."""
    return {
        "dtype": dtype,
        "device": str(device),
        "loss_scale": loss_scale,
        "compile": is_compiled,
        "flags": {
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "torch": str(torch.__version__),
    }


def read(path: Path, device: torch.device | str = "cpu") -> Captured:
    facts, tensors = [], []
    for file in sorted(path.glob("capture.*.json"), key=lambda f: int(f.name.split(".")[1])):
        try:
            fact = floats_again(read_json(inside(path, file.name)))
            if problem := newer(path, fact, SCHEMA):
                raise CheckpointError(problem, code="version-mismatch")
            tensors.append(load_file(inside(path, f"batch.{int(fact['rank'])}.safetensors"), device=str(device)))
            facts.append(fact)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(
                f"the capture {path} is damaged: {file.name}: {error}", code="capture-damaged"
            ) from error
    if not facts:
        raise CheckpointError(f"{path} is not a capture: it has no capture.<rank>.json", code="no-capture")
    return Captured(path, facts, tensors)


def steps(folder: Path) -> list[int]:
    """The steps that were captured, oldest first."""
    return [step for step in Checkpoints(folder).steps() if any(Checkpoints(folder).at(step).glob("capture*.json"))]
