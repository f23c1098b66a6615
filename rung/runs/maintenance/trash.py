"""The trash of a runs folder: runs that were removed, each as it was, until `rung gc` empties it.

    <runs>/.trash/<experiment>.<number>/note.json   when it was removed, from where, and together with which others
                                        run/        the run's folder

A run is in its place or in the trash, whole, at every moment: it goes there and back by one rename. Its number is never
given again. The note is written first, so an entry without a `run` is a removal that was killed before it did anything;
nobody shows it, and `rung gc` deletes it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.files import sync
from rung.runs.files import locked, read_json, write_json, writing
from rung.runs.maintenance.selection import ID, RunFolder, refuse_running, state_of
from rung.runs.record import reserve_number

TRASH = ".trash"
GONE = ".gone-"  # an entry that gc has begun to delete
NOTE, RUN = "note.json", "run"


@dataclass(frozen=True)
class TrashedRun:
    """A run in the trash."""

    folder: Path
    id: str
    unix_s: float
    removal: str  # the same for all runs that were removed together

    @property
    def run(self) -> Path:
        return self.folder / RUN


def remove(folders: Sequence[RunFolder], is_forced: bool = False) -> list[TrashedRun]:
    """Moves runs to the trash of their runs folder, one rename each; refuses one that has begun to run."""
    removal, now = uuid.uuid4().hex, time.time()
    gone: list[TrashedRun] = []
    for folder in folders:
        done = f"; {', '.join(one.id for one in gone)} went before it" if gone else ""
        with writing(f"{folder.root / TRASH} (for {folder.id}{done})"), locked(folder.root):
            entry = _new_entry(folder)
            write_json(entry / NOTE, {"id": folder.id, "unix_s": now, "removal": removal})
            try:
                with locked(folder.path.parent):
                    reserve_number(folder.path.parent, folder.number)
                with locked(folder.path):
                    refuse_running(state_of(folder), "remove", is_forced)
                    os.rename(folder.path, entry / RUN)
            except BaseException:
                if not (entry / RUN).exists():
                    shutil.rmtree(entry, ignore_errors=True)
                raise
            sync(entry)
            sync(folder.path.parent)
        gone.append(TrashedRun(entry, folder.id, now, removal))
    return gone


def _new_entry(folder: RunFolder) -> Path:
    """Numbers are not given twice, but a run can come back under its old name and be removed again."""
    trash = folder.root / TRASH
    trash.mkdir(exist_ok=True)
    for number in itertools.count(1):
        entry = trash / f"{folder.experiment}.{folder.number}{f'~{number}' if number > 1 else ''}"
        with contextlib.suppress(FileExistsError):
            entry.mkdir()
            return entry
    raise AssertionError("numbers do not end")


def trashed(root: Path) -> list[TrashedRun]:
    """What is in the trash, the oldest removal first."""
    found = [_read(folder) for folder in entries(root) if not folder.name.startswith(GONE) and (folder / RUN).exists()]

    def order(one: TrashedRun) -> tuple[float, str, str, int]:
        experiment, _, number = one.id.rpartition("/")
        return one.unix_s, one.removal, experiment, int(number) if number.isdecimal() else 0

    return sorted(found, key=order)


def entries(root: Path) -> list[Path]:
    """Every folder of the trash, also what a kill left half-way."""
    try:
        return sorted(path for path in (root / TRASH).iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(folder: Path) -> TrashedRun:
    """The note, or where it is damaged what can be read from the folder itself."""
    note: Any = None
    with contextlib.suppress(OSError, ValueError):
        note = read_json(folder / NOTE)
    note = note if isinstance(note, dict) else {}
    by_folder = "/".join(folder.name.partition("~")[0].rsplit(".", 1))
    name, unix_s = note.get("id"), note.get("unix_s")
    return TrashedRun(
        folder,
        name if isinstance(name, str) and ID.fullmatch(name) else by_folder,
        float(unix_s) if isinstance(unix_s, int | float) else folder.stat().st_mtime,
        str(note.get("removal") or folder.name),
    )


def restore(root: Path, ids: Sequence[str], is_real: bool = True) -> list[TrashedRun]:
    """Moves runs back to where they were; without ids those of the last removal. All of them, or none."""
    if not root.is_dir():
        message = f"there is no folder {root}; name another one with --runs or RUNG_RUNS."
        raise RunError(message, code="no-folder")
    with writing(f"a run under {root}"), locked(root):
        there = trashed(root)
        if not there:
            raise RunError(f"the trash of {root} is empty; there is nothing to restore.", code="trash-empty")
        latest = {one.id: one for one in there}  # of two that had one name the one removed last
        for name in ids:
            if name not in latest:
                message = f"{name} is not in the trash of {root}; `rung rm --list` shows what is."
                raise RunError(message, code="no-run")
        chosen = [latest[name] for name in dict.fromkeys(ids)]
        chosen = chosen or [one for one in there if one.removal == there[-1].removal]
        for one in chosen:
            if not ID.fullmatch(one.id):
                raise RunError(f"it is not known where {one.run} was; move it back by hand.", code="run-damaged")
            if (root / one.id).exists():
                message = f"{one.id} cannot come back: there is another {one.id}; `rung mv` that one first."
                raise RunError(message, code="run-exists")
        for one in chosen if is_real else ():
            folder = (root / one.id).parent
            folder.mkdir(exist_ok=True)
            os.rename(one.run, root / one.id)
            sync(folder)
            with locked(folder):
                reserve_number(folder, int(one.id.rpartition("/")[2]))
            shutil.rmtree(one.folder, ignore_errors=True)
    return chosen
