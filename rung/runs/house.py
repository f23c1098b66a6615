"""Who is who when house is kept: which runs some words mean, how they stand, who needs them; and their tags.

A run is known here by its place, `<runs>/<experiment>/<number>`, because also one that cannot be read can be removed.
Removing is left to trash, moving to moving, clearing to clearing.

The surprising thing: the answer to "does it run?" is asked again under the run's own lock before it is touched, since a
`rung resume` may have begun in between.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.files import sha256, write_whole
from rung.runs.files import locked, read_json, refused, write_json
from rung.runs.marks import PINNED, read_mark
from rung.runs.process import Liveness, liveness
from rung.runs.query import Run, list_runs, open_run
from rung.runs.record import COUNTER as COUNTER
from rung.runs.record import check_name, heartbeat_of, read_document

_NUMBER = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9]+)/?")
_RANGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9]*)\.\.([0-9]*)")
_INIT_FROM = re.compile(r"^init_from:[ ]*(.+?)[ ]*$", re.MULTILINE)
_NUM_TAG = 100
_JOINER = "\u200d"  # holds some emoji together


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


def numbers_in(folder: Path) -> list[int]:
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def standing(place: Place) -> Standing:
    """Reads a run that may be damaged or of a newer rung, and says whether it may be running."""
    problem = None
    document: Any = {}
    try:
        document = read_document(place.path)
    except RunError as error:
        problem = str(error)
        with contextlib.suppress(OSError, ValueError):
            document = read_json(place.path / "run.json")
    document = document if isinstance(document, dict) else {}
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


def refuse_running(found: Standing, what: str, is_forced: bool) -> None:
    """Nobody touches a run that goes on; where that cannot be known, the user has to say so."""
    word, text = found.liveness
    if word == "running":
        raise RunError(f"{found.place.id} is running ({text}); stop it before you {what} it.")
    if word == "silent" and not is_forced:
        raise RunError(f"{found.place.id} may be running {text}; if you know that it is not, add --force.")


def needed_by(targets: Sequence[Standing]) -> Iterator[str]:
    """Why runs should stay, one sentence each: others come from them, or one of their checkpoints is pinned."""
    going = {target.place.path.resolve() for target in targets}
    for root in dict.fromkeys(target.place.root for target in targets):
        here = [target for target in targets if target.place.root == root]
        for run in list_runs(root, problems=[]):
            if run.path.resolve() in going:
                continue
            for target in here:
                reason = _relation(run, target)
                if reason:
                    yield f"{run.id} {reason} {target.place.id}"
    for target in targets:
        with contextlib.suppress(Exception):  # a mark that cannot be read protects nothing
            pinned = read_mark(target.place.path / "checkpoints", PINNED)
            if pinned:
                yield f"{target.place.id} has pinned checkpoints ({', '.join(map(str, pinned))})"


def _relation(run: Run, target: Standing) -> str | None:
    ab = run.document.get("ab")
    if run.document.get("parent") in target.names:
        return "comes from"
    if isinstance(ab, dict) and ab.get("base") in target.names:
        return "is compared with"
    return "started with the weights of" if _starts_from(run, target) else None


def _starts_from(run: Run, target: Standing) -> bool:
    """By the name or path that init_from gives, or by the checkpoint that was loaded, told by its manifest."""
    derived = run.document.get("derived")
    loaded = derived.get("weights_from") if isinstance(derived, dict) else None
    manifest = loaded.get("manifest") if isinstance(loaded, dict) else None
    if manifest:
        saves = (target.place.path / "checkpoints").glob("**/manifest.json")
        return any(sha256(file) == manifest for file in saves)
    try:
        match = _INIT_FROM.search((run.path / "config.yaml").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    name = match[1].strip("'\"") if match else ""
    return is_inside(name, target)


def is_inside(name: str, target: Standing) -> bool:
    """Whether a name, as init_from has it, means the run or something in it."""
    path = target.place.path
    return name in target.names or (
        "/" in name
        and (
            Path(name).resolve().is_relative_to(path.resolve())
            or f"/{path.parent.parent.name}/{target.place.id}/" in f"/{name}/"
        )
    )


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


def tags_of(document: Mapping[str, Any]) -> list[str]:
    tags = document.get("tags")
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def check_tag(tag: str) -> str:
    """The tag as it is kept; it is a single word, so that lists of tags can be read and typed."""
    tag = unicodedata.normalize("NFC", tag)
    odd = [char for char in tag if unicodedata.category(char)[0] in "CZ" and char != _JOINER]
    if not tag or odd or len(tag) > _NUM_TAG or tag[0] in "+-":
        why = f"holds {odd[0]!r}" if odd else f"is longer than {_NUM_TAG} characters" if len(tag) > _NUM_TAG else None
        why = why or ("is empty" if not tag else "begins with + or -")
        raise RunError(
            f"{tag[:_NUM_TAG]!r} cannot be a tag: it {why}; use one word, without spaces or control characters."
        )
    return tag


def retag(place: Place, on: Iterable[str], off: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tags before and after."""
    before: list[str] = []

    def change(document: dict[str, Any]) -> dict[str, Any]:
        before[:] = tags_of(document)
        left = [tag for tag in before if tag not in set(off)]
        return {**document, "tags": list(dict.fromkeys([*left, *on]))}

    return before, tags_of(edit(place.path, change))


def tag_counts(runs: Iterable[Run]) -> dict[str, int]:
    """How many runs have each tag, the most frequent first."""
    counts: dict[str, int] = {}
    for run in runs:
        for tag in dict.fromkeys(tags_of(run.document)):
            counts[tag] = counts.get(tag, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
