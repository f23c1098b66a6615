"""The marks of a run's checkpoints, `checkpoints/best` and `checkpoints/pinned`: step numbers, one a line.

The engine reads them before each rotation, so that a pin also counts in a run that is running. Pinning and rotating
both lock the folder, or a save could be pinned while it is being removed. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rung import parse
from rung.errors import CheckpointError, RunError
from rung.files import write_whole
from rung.runs.files import locked, writing
from rung.runs.maintenance.disk import bytes_below
from rung.runs.paths import check_file, refuse_link

BEST, PINNED = "best", "pinned"


class Save(NamedTuple):
    """A whole checkpoint with its marks."""

    step: int
    bytes: int
    is_best: bool
    is_last: bool
    is_pinned: bool


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a whole save, oldest first."""
    if not os.path.isdir(folder):
        return []
    names = [name for name in os.listdir(folder) if name.isdecimal()]
    for path in (folder / name for name in os.listdir(folder)):
        if path.is_symlink():
            refuse_link(folder.parent, path)
    return sorted(int(name) for name in names if os.path.isfile(folder / name / "manifest.json"))


def save_folder(folder: Path, step: int) -> Path:
    return folder / f"{step:08d}"


def read_mark(folder: Path, name: str) -> list[int]:
    file = folder / name
    check_file(folder.parent, file)
    try:
        return [int(line) for line in parse.read_bytes(file).split()] if os.path.isfile(file) else []
    except (ValueError, OSError):
        message = f"{file} is damaged: it must hold step numbers; fix or delete it"
        raise CheckpointError(message, code="checkpoint-damaged") from None


def mark_text(steps: Iterable[int]) -> bytes:
    return "".join(f"{step}\n" for step in sorted(set(steps))).encode()


def saves(folder: Path) -> list[Save]:
    """Every whole checkpoint with its marks, oldest first."""
    steps, best, pinned = saved_steps(folder), read_mark(folder, BEST), read_mark(folder, PINNED)
    return [
        Save(step, bytes_below(save_folder(folder, step)), step in best[:1], step == steps[-1], step in pinned)
        for step in steps
    ]


def find_step(folder: Path, name: str, run_id: str) -> int:
    """The step of "30", "best" or "last"; it must have a whole save, or for a number a pin."""
    steps = saved_steps(folder)
    if name == "last" and steps:
        return steps[-1]
    if name == BEST:
        best = read_mark(folder, BEST)
        if best and best[0] in steps:
            return best[0]
        message = f"{run_id} has no save marked as its best; name a step: {_listed(steps)}."
        raise RunError(message, code="no-checkpoint")
    if name.isdecimal() and (int(name) in steps or int(name) in read_mark(folder, PINNED)):
        return int(name)
    if name.isdecimal() or name == "last":
        raise RunError(f"{run_id} has no whole save at {name}; it has {_listed(steps)}.", code="no-checkpoint")
    message = f"{name!r} is not a checkpoint; name a step, best or last: {run_id} has {_listed(steps)}."
    raise RunError(message, code="bad-ref")


def set_pin(folder: Path, step: int, is_on: bool, run_id: str) -> bool:
    """Pins or unpins the save of a step; False where nothing changes."""
    with writing(str(folder / PINNED)), locked(folder):
        before = read_mark(folder, PINNED)
        if is_on and step not in (steps := saved_steps(folder)):
            message = f"{run_id} has no whole save at {step} any more; it has {_listed(steps)}."
            raise RunError(message, code="no-checkpoint")
        if (step in before) == is_on:
            return False
        write_whole(folder / PINNED, mark_text({*before, step} if is_on else {*before} - {step}))
    return True


def _listed(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-12:]))
    return f"{'... ' if len(steps) > 12 else ''}{shown}" if steps else "none"
