"""Who is who when house is kept: which runs some words mean, and how they stand.

A run is known here by its place, `<runs>/<experiment>/<number>`, because also one that cannot be read can be removed.

The surprising thing: the answer to "does it run?" is asked again under the run's own lock before it is touched, since a
`rung resume` may have begun in between.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.files import write_whole
from rung.runs.files import locked, read_json, refused, write_json
from rung.runs.process import Liveness, liveness
from rung.runs.query import experiments, numbers_in, open_run
from rung.runs.record import COUNTER, check_name, heartbeat_of, read_document

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[0-9]+")  # what a file says must not lead out of the runs folder
_NUMBER = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9]+)/?")
_RANGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9]*)\.\.([0-9]*)")


@dataclass(frozen=True)
class Place:
    """Where a run lies."""

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
class Standing:
    """What can be known of the run at a place; `problem` says why its run.json cannot be used."""

    place: Place
    document: Mapping[str, Any]
    problem: str | None
    liveness: Liveness

    @property
    def names(self) -> set[str]:
        """Every id that others may know it by."""
        return {self.place.id, *former_ids(self.document)}


def choose(words: Sequence[str], root: Path) -> list[Place]:
    """The runs of "piano/7", "piano/3..7", "piano/3..", "piano/last", "piano/best" or a path, each once."""
    found: dict[Path, Place] = {}
    for word in words:
        for place in _choose(word, root):
            found.setdefault(place.path.resolve(), place)
    return list(found.values())


def _choose(word: str, root: Path) -> list[Place]:
    if match := _RANGE.fullmatch(word):
        experiment, low, high = match[1], int(match[2] or 0), int(match[3]) if match[3] else None
        places = [p for p in places_of(root, experiment) if low <= p.number and (high is None or p.number <= high)]
        if not places:
            open_run(experiment, root)  # says so where there is no such experiment
            raise RunError(f"there is no run in {word}; `rung ls {experiment}` lists those that are there.")
        return places
    if match := _NUMBER.fullmatch(word):
        place = Place(root, match[1], int(match[2]))
        if (place.path / "run.json").exists():
            return [place]
    return [place_of(open_run(word, root).path)]


def place_of(path: Path) -> Place:
    """The place of a folder that was named by its path."""
    root = path.parent.parent
    with contextlib.suppress(RunError):
        check_name(path.parent.name)
        if path.name.isdecimal() and str(int(path.name)) == path.name:
            return Place(root, path.parent.name, int(path.name))
    raise RunError(f"{path} does not lie in a runs folder, as <runs>/<experiment>/<number>; move or delete it by hand.")


def places_of(root: Path, experiment: str) -> list[Place]:
    """The runs of an experiment by number, readable or not; a folder without run.json is none."""
    numbers = [n for n in numbers_in(root / experiment) if (root / experiment / str(n) / "run.json").exists()]
    return [Place(root, experiment, number) for number in numbers]


def standing(place: Place) -> Standing:
    """Reads a run that may be damaged or of a newer rung, and says whether it may be running."""
    problem = None
    document: dict[str, Any] = {}
    try:
        document = read_document(place.path)
    except RunError as error:
        problem = str(error)
        document = readable(place.path)
    if problem is None:
        recorded = str(document.get("status"))
        is_over = recorded != "running"
    else:  # of a run that cannot be read only the signs of life can be asked
        recorded, is_over = "unreadable", document.get("status", "running") != "running"
    if is_over:
        return Standing(place, document, problem, Liveness(recorded, recorded))
    process = document.get("process")
    found = liveness(process if isinstance(process, dict) else None, heartbeat_of(place.path))
    return Standing(place, document, problem, found)


def everyone(root: Path) -> list[Standing]:
    """Every run of a runs folder, readable or not."""
    return [standing(place) for name in experiments(root) for place in places_of(root, name)]


def readable(path: Path) -> dict[str, Any]:
    """What a run.json says, also one of a newer rung; empty where it is damaged or not there."""
    with contextlib.suppress(OSError, ValueError):
        document = read_json(path / "run.json")
        return document if isinstance(document, dict) else {}
    return {}


def refuse_running(found: Standing, what: str, is_forced: bool) -> None:
    """Nobody touches a run that goes on; where that cannot be known, the user has to say so."""
    word, text = found.liveness
    if word == "running":
        raise RunError(f"{found.place.id} is running ({text}); stop it before you {what} it.")
    if word == "silent" and not is_forced:
        raise RunError(f"{found.place.id} may be running {text}; if you know that it is not, add --force.")


def former_ids(document: Mapping[str, Any]) -> list[str]:
    """Ids that a run had before it was moved, oldest first."""
    formerly = document.get("formerly")
    return [str(name) for name in formerly] if isinstance(formerly, list) else []


def counter_of(folder: Path) -> int:
    """The highest number that an experiment ever gave."""
    given = numbers_in(folder)
    with contextlib.suppress(OSError, ValueError):
        given.append(int((folder / COUNTER).read_text()))
    return max(given, default=0)


def raise_counter(folder: Path, number: int) -> None:
    """From now on the experiment gives higher numbers only. The caller holds the lock of the folder."""
    write_whole(folder / COUNTER, f"{max(counter_of(folder), number)}\n".encode())


def edit(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Replaces run.json by what `change` makes of it, under its lock; nothing is written where nothing changes."""
    try:
        with locked(path):
            before = read_document(path)
            after = change(dict(before))
            if after != before:
                write_json(path / "run.json", after)
    except OSError as error:
        raise refused(str(path / "run.json"), error) from error
    return after
