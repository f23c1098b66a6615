"""Keeps a step that failed, so that it can be run again: the state before it, and what it was given.

    captures/<step>/                    a checkpoint of the state before the step, in the usual format
    captures/<step>/batch.<rank>.safetensors   its micros, "<micro>/<name>"
    captures/<step>/capture.<rank>.json        what else the step depended on

A capture is whole or absent, as a checkpoint is; the batches of other ranks arrive after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rung.data.prefetch import Micro
from rung.engine.build import Setup
from rung.engine.checkpoint import Checkpoints
from rung.errors import CheckpointError
from rung.files import write_whole
from rung.recipe import Draw
from rung.runs.files import read_json, to_json


@dataclass(frozen=True)
class Captured:
    """`facts` and `micros` by rank."""

    path: Path
    facts: list[dict[str, Any]]
    micros: list[list[Micro]]


def write(
    folder: Path, setup: Setup, step: int, micros: Sequence[Micro], facts: Mapping[str, Any], is_alone: bool = False
) -> Path:
    """`setup.state` must be the state before the step. The first rank writes the state, each rank its own batch.

    `is_alone`: only this rank failed, and nobody waits for it; it writes the state too, which is the same on all ranks.
    """
    captures = Checkpoints(folder)
    path = captures.at(step)
    try:
        if setup.world.is_first or is_alone:
            captures.save(setup.state, setup.save_extra())
    finally:  # also when the disk is full, or the others would wait for good
        if not is_alone:
            setup.world.wait()
    rank = setup.world.rank
    # (cloned: the file format refuses two names for one memory)
    named = {f"{n}/{name}": t.detach().cpu() for n, micro in enumerate(micros) for name, t in micro.batch.items()}
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}
    save_file(tensors, path / f"batch.{rank}.safetensors")
    document = {**machine(setup), **facts, "step": step, "micros": [_described(micro) for micro in micros]}
    write_whole(path / f"capture.{rank}.json", to_json(document) + b"\n")
    return path


def machine(setup: Setup) -> dict[str, Any]:
    """What a step depends on besides its state and its batch."""
    scale, world = setup.precision.loss_scale, setup.world
    return {
        "rank": world.rank,
        "num_ranks": world.size,
        "seed": setup.cfg.seed,
        "position": setup.state.progress.position,
        "dtype": setup.precision.name,
        "device": str(world.device),
        "loss_scale": float(scale.scale) if scale is not None else None,
        "compile": setup.cfg.system.compile,
        "flags": {
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "torch": str(torch.__version__),
    }


def read(path: Path, device: torch.device | str = "cpu") -> Captured:
    facts, micros = [], []
    for file in sorted(path.glob("capture.*.json"), key=lambda f: int(f.name.split(".")[1])):
        try:
            fact = read_json(file)
            tensors = load_file(path / f"batch.{fact['rank']}.safetensors", device=str(device))
            facts.append(fact)
            micros.append([_micro(fact, n, tensors) for n in range(len(fact["micros"]))])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"the capture {path} is damaged: {file.name}: {error}") from error
    if not facts:
        raise CheckpointError(f"{path} is not a capture: it has no capture.<rank>.json")
    return Captured(path, facts, micros)


def steps(folder: Path) -> list[int]:
    """The steps that were captured, oldest first."""
    return [step for step in Checkpoints(folder).steps() if any(Checkpoints(folder).at(step).glob("capture.*.json"))]


def _described(micro: Micro) -> dict[str, Any]:
    return {"ids": micro.ids.tolist(), "rows": micro.draw.rows.tolist()}


def _micro(fact: Mapping[str, Any], number: int, tensors: Mapping[str, torch.Tensor]) -> Micro:
    described, prefix = fact["micros"][number], f"{number}/"
    batch = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    draw = Draw(fact["seed"], fact["step"], np.asarray(described["rows"], np.int64))
    return Micro(np.asarray(described["ids"], np.int64), draw, batch)
