"""Which runs the user names, and the state of each.

A run is known here by its folder, `<runs>/<experiment>/<number>`, because also one that cannot be read can be removed.
Whether it runs is asked again under the run's own lock before it is touched: a `rung resume` may have begun meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.runs.process import Liveness
from rung.runs.query import experiments, numbers_in, open_run
from rung.runs.record import check_name, former_ids, liveness_of, read_document, read_leniently

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[0-9]+")  # an id read from a file must not lead out of the runs folder
_NUMBER = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9]+)/?")
RANGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9]*)\.\.([0-9]*)")


@dataclass(frozen=True)
class RunFolder:
    """Where a run lies, whether or not it can be read."""

    root: Path
    experiment: str
    number: int

    @property
    def id(self) -> str:
        return f"{self.experiment}/{self.number}"

    @property
    def path(self) -> Path:
        return self.root / self.experiment / str(self.number)


@dataclass(frozen=True)
class RunState(RunFolder):
    """A run and what is known of it; `problem` says why its run.json cannot be used."""

    document: Mapping[str, Any]
    problem: str | None
    liveness: Liveness

    @property
    def names(self) -> set[str]:
        """Every id that others may know it by."""
        return {self.id, *former_ids(self.document)}


def select(refs: Sequence[str], root: Path) -> list[RunFolder]:
    """The runs of "piano/7", "piano/3..7", "piano/3..", "piano/last", "piano/best" or a path, each once."""
    found: dict[Path, RunFolder] = {}
    for ref in refs:
        if match := RANGE.fullmatch(ref):
            experiment, low, high = match[1], int(match[2] or 0), float(match[3] or "inf")
            folders = [folder for folder in folders_of(root, experiment) if low <= folder.number <= high]
            if not folders:
                open_run(experiment, root)  # raises where there is no such experiment
                message = f"there is no run in {ref}; `rung ls {experiment}` lists those that are there."
                raise RunError(message, code="no-run")
        else:
            match = _NUMBER.fullmatch(ref)
            folders = [RunFolder(root, match[1], int(match[2]))] if match else []
            if not match or not _is_there(folders[0].path):
                folders = [folder_at(open_run(ref, root).path)]
        for folder in folders:
            found.setdefault(folder.path.resolve(), folder)
    return list(found.values())


def folder_at(path: Path) -> RunFolder:
    """A run that was named by its path."""
    with contextlib.suppress(RunError):
        check_name(path.parent.name)
        if path.name.isdecimal() and str(int(path.name)) == path.name:
            return RunFolder(path.parent.parent, path.parent.name, int(path.name))
    message = f"{path} does not lie in a runs folder, as <runs>/<experiment>/<number>; move or delete it by hand."
    raise RunError(message, code="bad-folder")


def folders_of(root: Path, experiment: str, problems: list[str] | None = None) -> list[RunFolder]:
    """The runs of an experiment by number, readable or not; a folder without run.json is none."""
    numbers = [n for n in numbers_in(root / experiment, problems) if _is_there(root / experiment / str(n))]
    return [RunFolder(root, experiment, number) for number in numbers]


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path / "run.json")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # of a folder that may not be opened; whoever reads it says so
        pass
    return True


def state_of(folder: RunFolder) -> RunState:
    """Reads a run that may be damaged or of a newer rung, and says whether it may be running."""
    problem = None
    try:
        document = read_document(folder.path)
        found = liveness_of(folder.path, document)
    except RunError as error:  # of a run that cannot be read only the signs of life can be asked
        problem, document = str(error), read_leniently(folder.path)
        found = liveness_of(folder.path, {"status": "running", **document})
        if document.get("status", "running") != "running":
            found = Liveness("unreadable", "unreadable")
    return RunState(folder.root, folder.experiment, folder.number, document, problem, found)


def all_states(root: Path, problems: list[str] | None = None) -> list[RunState]:
    """Every run of a runs folder, readable or not; folders that cannot be looked into are named in `problems`."""
    return [state_of(folder) for name in experiments(root, problems) for folder in folders_of(root, name)]


def refuse_running(state: RunState, what: str, is_forced: bool) -> None:
    """Raises RunError for a run that is running; where that cannot be known, the user has to say so."""
    word, text = state.liveness
    if word == "running":
        raise RunError(f"{state.id} is running ({text}); stop it before you {what} it.", code="wrong-state")
    if word == "silent" and not is_forced:
        message = f"{state.id} may be running {text}; if you know that it is not, add --force."
        raise RunError(message, code="wrong-state")
