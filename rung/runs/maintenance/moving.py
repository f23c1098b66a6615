"""Renames an experiment, or moves runs to another one.

A run's id is where its folder lies, and everything that refers to it uses its uid, so a move is one rename. Before it,
run.json gets the new id and keeps the old one under `formerly`; a kill in between leaves the run under its old name,
because readers go by the folder. Runs of an experiment move one by one: after a kill, the same command moves the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.files import sync
from rung.runs.files import locked, write_json, writing
from rung.runs.maintenance.selection import RunFolder, folders_of, refuse_running, select, state_of
from rung.runs.query import numbers_in, open_run
from rung.runs.record import COUNTER, check_name, former_ids, last_number, read_leniently, reserve_number

_NUMBER = re.compile(r"0*[1-9][0-9]{0,8}")


def move(source: str, target: str, root: Path, is_forced: bool = False) -> dict[str, str]:
    """Moves the runs that `source` means; returns old id -> new id. Everything is checked before anything changes."""
    source, target = source.rstrip("/"), target.rstrip("/")
    if not root.is_dir():
        open_run(source, root)  # raises
    is_experiment = "/" not in source
    with writing(f"under {root}, `rung mv {source} {target}` again continues"), locked(root):
        folders = _experiment(source, target, root) if is_experiment else _runs(source, target, root)
        for folder in folders:
            _movable(folder, is_forced)
        old, new = folders[0].path.parent, root / target.partition("/")[0]
        is_new = not new.is_dir()
        new.mkdir(exist_ok=True)
        moved: dict[str, str] = {}
        try:
            with locked(new):  # no start takes a number here meanwhile
                numbers = _numbers(folders, target, new, is_experiment)
                with contextlib.nullcontext() if old.samefile(new) else locked(old):
                    reserve_number(old, max(folder.number for folder in folders))  # an old id is not given again
                if is_experiment:  # pages and plots, which lie beside the runs
                    for path in sorted(old.iterdir()):
                        is_page = not path.name.isdecimal() and path.name != COUNTER and path.suffix != ".part"
                        if is_page and not os.path.lexists(new / path.name):
                            os.rename(path, new / path.name)
                for folder, number in zip(folders, numbers, strict=True):
                    moved[folder.id] = _move_run(folder, RunFolder(root, new.name, number), is_forced)
                    reserve_number(new, number)
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):
                    new.rmdir()
            raise
    return moved


def _experiment(source: str, target: str, root: Path) -> list[RunFolder]:
    """All runs of an experiment, to one that has none but those that were moved there from it."""
    if "/" in target:
        message = f"{source} is an experiment, {target} is none; `rung mv {source}/1 {target}` moves a run."
        raise RunError(message, code="bad-name")
    check_name(target)
    folders = folders_of(root, source)
    if not folders:
        open_run(source, root)  # raises
    others = [
        n
        for n in numbers_in(root / target)
        if f"{source}/{n}" not in former_ids(read_leniently(root / target / str(n)))
    ]
    if source == target or others:
        message = f"experiment {target} already exists; choose another name, or move runs one by one."
        raise RunError(message, code="experiment-exists")
    return folders


def _runs(source: str, target: str, root: Path) -> list[RunFolder]:
    """Runs to the next numbers of an experiment, or one run to a number that it may have."""
    folders = select([source], root)
    experiment, _, number = target.partition("/")
    check_name(experiment)
    for folder in folders:
        if folder.root.resolve() != root.resolve():
            message = f"{folder.path} is not under {root}; name its runs folder with --runs."
            raise RunError(message, code="bad-folder")
        if not number and folder.experiment == experiment:
            message = f"{folder.id} is in {experiment} already; name another experiment, or a number."
            raise RunError(message, code="run-exists")
    if number and not _NUMBER.fullmatch(number):
        message = f"{target} is neither an experiment nor a run; write bach, or bach/3."
        raise RunError(message, code="bad-name")
    if number and len(folders) > 1:
        message = f"{len(folders)} runs cannot all become {target}; write {experiment} to give them the next numbers."
        raise RunError(message, code="too-many")
    return folders


def _numbers(folders: Sequence[RunFolder], target: str, new: Path, is_experiment: bool) -> list[int]:
    """The new numbers. A number is given once; only the run that had it may have it again."""
    last, wanted = last_number(new), target.partition("/")[2]
    if not is_experiment and not wanted:
        return [last + 1 + i for i in range(len(folders))]
    numbers = [folder.number for folder in folders] if is_experiment else [int(wanted)]
    for folder, number in zip(folders, numbers, strict=True):
        name = f"{new.name}/{number}"
        if (new / str(number)).exists():
            message = f"there is a run {name} already; name another number, or write {new.name} for the next one."
            raise RunError(message, code="run-exists")
        if number <= last and name not in former_ids(read_leniently(folder.path)):
            raise RunError(
                f"{name} was another run's number and is not given again; {new.name} has given numbers up to {last}: "
                f"write {new.name}/{last + 1}, or another name.",
                code="number-used",
            )
    return numbers


def _move_run(old: RunFolder, new: RunFolder, is_forced: bool) -> str:
    with locked(old.path):
        document = _movable(old, is_forced)  # asked again: a resume may have begun in the meantime
        formerly = [name for name in dict.fromkeys([*former_ids(document), old.id]) if name != new.id]
        names = {"id": new.id, "experiment": new.experiment, "number": new.number, "formerly": formerly}
        write_json(old.path / "run.json", {**document, **names})
        os.rename(old.path, new.path)
    sync(new.path.parent)
    sync(old.path.parent)
    return new.id


def _movable(folder: RunFolder, is_forced: bool) -> Mapping[str, Any]:
    """run.json of a run that may be moved."""
    state = state_of(folder)
    if state.problem is not None:
        message = f"{folder.id} cannot be moved, because its run.json cannot be changed: {state.problem}"
        raise RunError(message, code="run-damaged")
    refuse_running(state, "move", is_forced)
    return state.document
