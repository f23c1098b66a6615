"""Renames an experiment, or moves runs to another: folder, run.json, snapshots, and whoever names them as parent.

A kill at any moment leaves every run readable, and the next `rung mv` goes on where it ended: what is to be done is
written to `<runs>/.moving.json` first, each step can be done twice, and that file goes last. New refs are made before
run.json names them, and old ones go after nobody does.

What a run recorded of its past (command, config, sources) stays as it was written. `formerly` in run.json keeps the old
ids, and an old id is never given to another run: the experiment keeps its counter, also when no run is left in it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.files import sync
from rung.runs.files import locked, refused
from rung.runs.house.journal import JOURNAL, Move, Moving, unfinished, write_journal
from rung.runs.house.places import (
    Place,
    choose,
    counter_of,
    edit,
    everyone,
    former_ids,
    places_of,
    raise_counter,
    readable,
    refuse_running,
    standing,
)
from rung.runs.house.refs import Ref, Repositories, refs_of, with_new_names
from rung.runs.house.trash import removed
from rung.runs.query import numbers_in, open_run
from rung.runs.record import COUNTER, check_name

_NUMBER = re.compile(r"0*[1-9][0-9]{0,8}")


def move(source: str, target: str, root: Path, is_forced: bool = False) -> tuple[Moving | None, Moving | None]:
    """Moves; returns what an earlier, killed `rung mv` had left to do, and what this one did.

    Said again in the same words after a kill, it only finishes.
    """
    if not root.is_dir():
        open_run(source, root)  # says so
    try:
        with locked(root):
            left = unfinished(root)
            if left is not None:
                _carry_out(left, root)
                if left.words == (source, target):
                    return left, None
            moving = _begin(source, target, root, is_forced)
            _carry_out(moving, root)
    except OSError as error:
        raise refused(f"under {root}, saying `rung mv {source} {target}` again goes on", error) from error
    return left, moving


def _begin(source: str, target: str, root: Path, is_forced: bool) -> Moving:
    """Everything is checked before anything is written; the first thing written says what will be done."""
    is_experiment = "/" not in source.rstrip("/")
    places = _experiment(source.rstrip("/"), target, root) if is_experiment else _runs(source, target, root)
    documents = []
    for place in places:
        found = standing(place)
        if found.problem is not None:
            raise RunError(f"{place.id} cannot be moved, because its run.json cannot be changed: {found.problem}")
        refuse_running(found, "move", is_forced)
        documents.append(found.document)
    others = _others(root / source) if is_experiment else []
    repositories, promised = Repositories(), set[str]()
    moves = []
    with _claimed(places, target.rstrip("/"), root, keeps_numbers=is_experiment) as news:
        for place, document, new in zip(places, documents, news, strict=True):
            renamed = repositories.plan(document, new, promised)
            stay = {ref.ref for ref in refs_of(document)} - {ref.old for ref in renamed}
            moves.append(Move(place.id, new, renamed, sorted(stay)))
        moving = Moving((source, target), moves, others)
        write_journal(root, moving)
    return moving


def _runs(source: str, target: str, root: Path) -> list[Place]:
    """Runs to the next numbers of an experiment, or one run to a number that it may have."""
    places = choose([source], root)
    experiment, _, number = target.rstrip("/").partition("/")
    check_name(experiment)
    for place in places:
        if place.root.resolve() != root.resolve():
            raise RunError(f"{place.path} is not under {root}; name its runs folder with --runs.")
        if not number and place.experiment == experiment:
            raise RunError(f"{place.id} is in {experiment} already; name another experiment, or a number.")
    if number and not _NUMBER.fullmatch(number):
        raise RunError(f"{target} is neither an experiment nor a run; say bach, or bach/3.")
    if number and len(places) > 1:
        raise RunError(
            f"{len(places)} runs cannot all become {target}; say {experiment} to give them the next numbers."
        )
    return places


def _experiment(source: str, target: str, root: Path) -> list[Place]:
    """All runs of an experiment, to one that has none."""
    if "/" in target.rstrip("/"):
        raise RunError(f"{source} is an experiment, {target} is none; `rung mv {source}/1 {target}` moves a run.")
    check_name(target.rstrip("/"))
    places = places_of(root, source)
    if not places:
        open_run(source, root)  # says so
    if source == target.rstrip("/") or numbers_in(root / target):
        raise RunError(f"there is an experiment {target} already; choose another name, or move runs one by one.")
    return places


def _others(folder: Path) -> list[str]:
    """What lies beside the runs of an experiment: pages, plots."""
    names = (path.name for path in folder.iterdir() if not path.name.isdecimal() and path.name != COUNTER)
    return sorted(name for name in names if not name.endswith(".part"))


@contextlib.contextmanager
def _claimed(places: Sequence[Place], target: str, root: Path, keeps_numbers: bool) -> Iterator[list[str]]:
    """The new ids, which no start can take while the body writes them down, nor later."""
    experiment, _, number = target.partition("/")
    folder = root / experiment
    is_new = not folder.is_dir()
    folder.mkdir(exist_ok=True)
    try:
        with locked(folder):
            last = counter_of(folder)
            numbers = [place.number for place in places] if keeps_numbers else [int(number)] if number else []
            for place, wanted in zip(places, numbers):
                _refuse_taken(place, wanted, folder, last)
            numbers = numbers or [last + 1 + i for i in range(len(places))]
            yield [f"{experiment}/{wanted}" for wanted in numbers]
            raise_counter(folder, max(numbers))
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _refuse_taken(place: Place, number: int, folder: Path, last: int) -> None:
    """A number is given once; only the run that had it may have it again."""
    new = f"{folder.name}/{number}"
    if (folder / str(number)).exists():
        raise RunError(f"there is a run {new} already; name another number, or say {folder.name} for the next one.")
    if number <= last and new not in former_ids(standing(place).document):
        raise RunError(
            f"{new} was another run's number and is not given again; {folder.name} has given numbers up to {last}: "
            f"say {folder.name}/{last + 1}, or another name."
        )


def _carry_out(moving: Moving, root: Path) -> None:
    """Every step looks first whether it was done already."""
    repositories = Repositories()
    repositories.create(ref for move in moving.moves for ref in move.refs)
    _raise_counters(moving, root)
    for move in moving.moves:
        _move_one(move, root)
    for name in moving.others:
        old, new = (root / word.rstrip("/") / name for word in moving.words)
        if os.path.lexists(old) and not os.path.lexists(new):
            os.rename(old, new)
    there = [(found.place.path, found.document, found.problem) for found in everyone(root)]
    there += [(one.run, readable(one.run), None) for one in removed(root)]
    followers = [(path, document) for path, document, problem in there if problem is None]
    moving.followed.extend(_follow(moving.ids, followers))
    named = {ref for _, document, _ in there for ref in refs_of(document)}
    before = [Ref(ref.root, ref.old, ref.commit) for move in moving.moves for ref in move.refs]
    repositories.delete(ref for ref in before if ref not in named)
    (root / JOURNAL).unlink()
    sync(root)


def _raise_counters(moving: Moving, root: Path) -> None:
    """Neither the old numbers nor the new ones are given again."""
    for ids in (list(moving.ids), list(moving.ids.values())):
        folder = (root / ids[0]).parent
        folder.mkdir(exist_ok=True)
        with locked(folder):
            raise_counter(folder, max(int(name.rpartition("/")[2]) for name in ids))


def _move_one(move: Move, root: Path) -> None:
    old, new = root / move.old, root / move.new
    if old.exists():
        if new.exists():
            raise RunError(f"{move.old} cannot become {move.new}: there is one by now; move it away, then go on.")
        with locked(old):
            refuse_running(standing(Place(root, old.parent.name, int(old.name))), "move", is_forced=True)
            os.rename(old, new)
        sync(new.parent)
        sync(old.parent)
    elif not new.exists():
        return  # somebody deleted it by hand since it was written down
    experiment, _, number = move.new.partition("/")

    def change(document: dict[str, Any]) -> dict[str, Any]:
        formerly = [name for name in dict.fromkeys([*former_ids(document), move.old]) if name != move.new]
        names = {"id": move.new, "experiment": experiment, "number": int(number), "formerly": formerly}
        return with_new_names({**document, **names}, move.refs)

    edit(new, change)


def _follow(ids: Mapping[str, str], runs: Sequence[tuple[Path, Mapping[str, Any]]]) -> Iterator[str]:
    """Whoever names a moved run as parent, or as the base of an A/B, names it by its new id; also in the trash."""

    def change(document: dict[str, Any]) -> dict[str, Any]:
        parent, ab = document.get("parent"), document.get("ab")
        if parent is not None and parent in ids:
            document["parent"] = ids[parent]
        if isinstance(ab, dict) and ab.get("base") in ids:
            document["ab"] = {**ab, "base": ids[ab["base"]]}
        return document

    for path, document in runs:
        if change(dict(document)) != document:
            yield str(edit(path, change)["id"])
