"""What `rung gc` may delete, found first and deleted after somebody has agreed.

    trash        runs that were removed, with the git refs that only they name
    starts       numbered folders of starts that were killed before there was a run: nothing but what a start writes
    parts        files that a killed process was still writing, a day old
    aside        checkpoints that a resume set aside; only when asked for
    copies       metrics by column and other copies, which are made again when needed; only when asked for

Nothing of a run that is running, or that may be, is touched. A ref is deleted when a run in the trash names it, by name
and commit, and no other run of this runs folder does: all other refs under refs/rung may be another runs folder's.

The surprising thing: an entry of the trash is renamed before it is deleted, and its refs go before its files, so a kill
leaves either a run that can be brought back, or something that the next `rung gc` knows to be rubbish.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rung.runs.files import locked, refused
from rung.runs.house.disk import freed_bytes, newest
from rung.runs.house.journal import refuse_unfinished
from rung.runs.house.needs import Beginning, beginning, is_inside, manifests_below
from rung.runs.house.places import Place, Standing, everyone, readable
from rung.runs.house.refs import Ref, Repositories, refs_of
from rung.runs.house.trash import GONE, RUN, TRASH, entries, removed
from rung.runs.query import experiments, numbers_in

KINDS = ("trash", "starts", "parts", "aside", "copies")
DAY_S = 86_400.0
_COPIES = ("metrics/columns", ".config.json")
_PART = re.compile(r"\..+\.[0-9]+\.(part|tmp)")
_OF_A_START = re.compile(r"(config\.yaml|[a-z.]+\.json|code\.tar\.gz|\..+\.part)")


class Item(NamedTuple):
    """A file or folder that may go."""

    kind: str
    path: Path
    name: str
    bytes: int


@dataclass
class Plan:
    root: Path
    items: list[Item] = field(default_factory=list)
    refs: list[Ref] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # what was left alone, and why

    def bytes_by_kind(self) -> dict[str, int]:
        return {kind: sum(item.bytes for item in self.items if item.kind == kind) for kind in KINDS}


def clear(root: Path, days: float = 0.0, *, aside: bool = False, copies: bool = False, is_real: bool = False) -> Plan:
    """Finds what may go; with `is_real` also deletes it, and returns what went. `days` is for the trash and `aside`."""
    if not root.is_dir():
        return Plan(root)
    try:
        with locked(root):
            refuse_unfinished(root)
            plan = _find(root, time.time() - days * DAY_S, aside, copies)
            return _delete(plan) if is_real else plan
    except OSError as error:
        raise refused(f"under {root}", error) from error


def _find(root: Path, before: float, aside: bool, copies: bool) -> Plan:
    plan = Plan(root)
    every, there = everyone(root), removed(root)
    old = [one for one in there if one.unix_s <= before]
    half = [folder for folder in entries(root) if folder.name.startswith(GONE) or not (folder / RUN).exists()]
    plan.items = [_item("trash", one.folder, one.id) for one in old]
    plan.items += [_item("trash", folder, folder.name) for folder in half]
    stay = [(found.place.path, found.document) for found in every]
    stay += [(one.run, readable(one.run)) for one in there if one not in old]
    plan.refs = _own_refs([item.path / RUN for item in plan.items], [document for _, document in stay])
    began = [beginning(path, document) for path, document in stay] if aside else []
    for found in every:
        if found.liveness.word in ("running", "silent"):
            plan.kept.append(f"{found.place.id} was not looked at: {found.liveness.word}, {found.liveness.text}")
            continue
        plan.items += _parts(found.place.path, found.place.id)
        if aside:
            plan.items += _aside(found, before, began)
        if copies:
            made = [found.place.path / name for name in _COPIES]
            plan.items += [_item("copies", path, f"{found.place.id} {path.name}") for path in made if path.exists()]
    for folder in (root, *(root / name for name in experiments(root))):
        plan.items += _parts(folder, folder.name, is_deep=False)
    _starts(plan)
    return plan


def _item(kind: str, path: Path, name: str) -> Item:
    return Item(kind, path, name, freed_bytes(path))


def _own_refs(going: Iterable[Path], stay: Iterable[Mapping[str, Any]]) -> list[Ref]:
    """Refs that go with these runs: named by them, by nobody who stays, and still what they were."""
    kept = {ref.ref for document in stay for ref in refs_of(document)}
    named = {ref for path in going for ref in refs_of(readable(path))}
    repositories = Repositories()
    return sorted(r for r in named if r.ref not in kept and (repositories.refs(r.root) or {}).get(r.ref) == r.commit)


def _parts(folder: Path, name: str, is_deep: bool = True) -> Iterator[Item]:
    """Named by the process that wrote them; a day is longer than any write takes."""
    for place, folders, files in os.walk(folder):
        for found in [n for n in (*folders, *files) if _PART.fullmatch(n)]:
            path = Path(place, found)
            with contextlib.suppress(FileNotFoundError):
                if newest(path) < time.time() - DAY_S:
                    yield _item("parts", path, f"{name} {found}")
        folders[:] = [n for n in folders if is_deep and not _PART.fullmatch(n)]


def _aside(found: Standing, before: float, began: Iterable[Beginning]) -> Iterator[Item]:
    for path in sorted((found.place.path / "checkpoints").glob("aside-*")):
        if path.is_dir() and newest(path) <= before and not _is_used(path, found, began):
            yield _item("aside", path, f"{found.place.id} {path.name}")


def _is_used(aside: Path, target: Standing, began: Iterable[Beginning]) -> bool:
    """Whether a run began with one of the checkpoints that were set aside, by what it loaded or by its name for it."""
    manifests = manifests_below(aside)
    return any(
        start.manifest in manifests or (aside.name in start.name and is_inside(start.name, target)) for start in began
    )


def _starts(plan: Plan) -> None:
    """A start that was killed has written what is known before step 0; where there is more, it was a run."""
    for experiment in experiments(plan.root):
        for number in numbers_in(plan.root / experiment):
            place = Place(plan.root, experiment, number)
            if (place.path / "run.json").exists():
                continue
            if not all(_OF_A_START.fullmatch(path.name) for path in place.path.iterdir()):
                plan.kept.append(f"{place.path} has no run.json but holds more than a start writes; look into it")
            elif newest(place.path) < time.time() - DAY_S:
                plan.items.append(_item("starts", place.path, place.id))


def _delete(plan: Plan) -> Plan:
    done = Plan(plan.root, kept=list(plan.kept))
    going = [item._replace(path=_set_apart(item)) for item in plan.items]
    done.refs = Repositories().delete(plan.refs)
    for item in going:
        try:
            if item.path.is_dir() and not item.path.is_symlink():
                shutil.rmtree(item.path)
            else:
                item.path.unlink()
        except OSError as error:
            done.kept.append(f"{item.path} could not be deleted: {(error.strerror or str(error)).lower()}")
        else:
            done.items.append(item)
    with contextlib.suppress(OSError):  # only where nothing is left in it
        (plan.root / TRASH).rmdir()
    return done


def _set_apart(item: Item) -> Path:
    """From now on an entry of the trash cannot be brought back."""
    if item.kind != "trash" or item.path.name.startswith(GONE):
        return item.path
    apart = item.path.with_name(f"{GONE}{item.path.name}.{time.time_ns()}")
    os.rename(item.path, apart)
    return apart
