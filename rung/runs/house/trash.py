"""The trash of a runs folder: runs that were removed, each as it was, until `rung gc` empties it.

    <runs>/.trash/<experiment>.<number>/note.json   when it was removed, from where, and together with which others
                                        run/        the run's folder

A run is in its place or in the trash, whole, at every moment: it goes there and back by one rename. Its number is never
given again. Whether it may go is decided by whoever calls; see places and needs.

The surprising thing: the note is written first, so an entry without a `run` is a removal that was killed before it did
anything. Nobody shows it, and `rung gc` clears it.
"""

from __future__ import annotations

import contextlib
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
from rung.runs.files import locked, read_json, refused, write_json
from rung.runs.house.journal import refuse_unfinished
from rung.runs.house.places import ID, Place, raise_counter, refuse_running, standing

TRASH = ".trash"
GONE = ".gone-"  # an entry that gc has begun to delete
NOTE, RUN = "note.json", "run"


@dataclass(frozen=True)
class Removed:
    """A run in the trash."""

    folder: Path
    id: str
    unix_s: float
    removal: str  # the same for all runs that were removed together

    @property
    def run(self) -> Path:
        return self.folder / RUN

    @property
    def root(self) -> Path:
        return self.folder.parent.parent


def remove(places: Sequence[Place], is_forced: bool = False) -> list[Removed]:
    """Moves runs to the trash of their runs folder, one rename each; refuses one that has begun to run."""
    removal, now = uuid.uuid4().hex, time.time()
    gone: list[Removed] = []
    for place in places:
        try:
            with locked(place.root):
                refuse_unfinished(place.root)
                gone.append(_remove(place, removal, now, is_forced))
        except OSError as error:
            done = f"; {', '.join(one.id for one in gone)} went before it" if gone else ""
            raise refused(f"{place.root / TRASH} (for {place.id}{done})", error) from error
    return gone


def _remove(place: Place, removal: str, now: float, is_forced: bool) -> Removed:
    entry = _new_entry(place)
    write_json(entry / NOTE, {"id": place.id, "unix_s": now, "removal": removal})
    try:
        with locked(place.path.parent):
            raise_counter(place.path.parent, place.number)
        with locked(place.path):
            refuse_running(standing(place), "remove", is_forced)
            os.rename(place.path, entry / RUN)
    except BaseException:
        if not (entry / RUN).exists():
            shutil.rmtree(entry, ignore_errors=True)
        raise
    sync(entry)
    sync(place.path.parent)
    return Removed(entry, place.id, now, removal)


def _new_entry(place: Place) -> Path:
    """Numbers are not given twice, but a run can come back under its old name and be removed again."""
    trash = place.root / TRASH
    trash.mkdir(exist_ok=True)
    name, number = f"{place.experiment}.{place.number}", 1
    while True:
        entry = trash / (name if number == 1 else f"{name}~{number}")
        try:
            entry.mkdir()
        except FileExistsError:
            number += 1
        else:
            return entry


def removed(root: Path) -> list[Removed]:
    """What is in the trash, the oldest removal first."""
    found = [_read(folder) for folder in entries(root) if not folder.name.startswith(GONE) and (folder / RUN).exists()]
    return sorted(found, key=lambda one: (one.unix_s, one.removal, _by_number(one.id)))


def entries(root: Path) -> list[Path]:
    """Every folder of the trash, also what a kill left half-way."""
    try:
        return sorted(path for path in (root / TRASH).iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(folder: Path) -> Removed:
    """The note, or where it is damaged what the folder itself can tell."""
    note: Any = None
    with contextlib.suppress(OSError, ValueError):
        note = read_json(folder / NOTE)
    note = note if isinstance(note, dict) else {}
    by_folder = "/".join(folder.name.partition("~")[0].rsplit(".", 1))
    name, unix_s = note.get("id"), note.get("unix_s")
    return Removed(
        folder,
        name if isinstance(name, str) and ID.fullmatch(name) else by_folder,
        float(unix_s) if isinstance(unix_s, int | float) else folder.stat().st_mtime,
        str(note.get("removal") or folder.name),
    )


def bring_back(root: Path, ids: Sequence[str], is_real: bool = True) -> list[Removed]:
    """Moves runs back to where they were; without ids those of the last removal. All of them, or none."""
    if not root.is_dir():
        raise RunError(f"there is no folder {root}; name another one with --runs or RUNG_RUNS.")
    try:
        with locked(root):
            refuse_unfinished(root)
            chosen = _chosen(root, ids)
            for one in chosen:
                if not ID.fullmatch(one.id):
                    raise RunError(f"where {one.run} was is not known; move it back by hand.")
                if (root / one.id).exists():
                    raise RunError(f"{one.id} cannot come back: there is another {one.id}; `rung mv` that one first.")
            for one in chosen if is_real else ():
                folder = (root / one.id).parent
                folder.mkdir(exist_ok=True)
                os.rename(one.run, root / one.id)
                sync(folder)
                with locked(folder):
                    raise_counter(folder, int(one.id.rpartition("/")[2]))
                shutil.rmtree(one.folder, ignore_errors=True)
    except OSError as error:
        raise refused(f"a run under {root}", error) from error
    return chosen


def _chosen(root: Path, ids: Sequence[str]) -> list[Removed]:
    there = removed(root)
    if not there:
        raise RunError(f"the trash of {root} is empty; there is nothing to bring back.")
    if not ids:
        return [one for one in there if one.removal == there[-1].removal]
    latest = {one.id: one for one in there}  # of two that had one name the one removed last
    for name in ids:
        if name not in latest:
            raise RunError(f"{name} is not in the trash of {root}; `rung rm --list` shows what is.")
    return [latest[name] for name in dict.fromkeys(ids)]


def _by_number(name: str) -> tuple[str, int]:
    experiment, _, number = name.rpartition("/")
    return experiment, int(number) if number.isdecimal() else 0
