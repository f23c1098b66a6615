"""What `rung gc` may delete, found first and deleted after somebody has agreed.

    trash        runs that were removed, with the git refs of their code
    starts       numbered folders of starts that were killed before there was a run: nothing but what a start writes
    parts        files that a killed process was still writing, a day old
    aside        checkpoints that a resume set aside; only when asked for
    copies       metrics by column and other copies, which are made again when needed; only when asked for

A run that is, or may be, running is not touched. A ref is deleted when a run in the trash names it, by name and commit,
and no other run of this runs folder does. An entry of the trash is renamed before it is deleted, and its refs go before
its files, so a kill leaves either a run that can be restored, or rubbish that the next `rung gc` recognises.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rung.errors import RunError
from rung.runs.files import locked, reason, writing
from rung.runs.maintenance.disk import freed_bytes, newest
from rung.runs.maintenance.selection import all_states
from rung.runs.maintenance.trash import GONE, RUN, TRASH, entries, initial_weights, is_inside, manifests_below, trashed
from rung.runs.paths import check, remove
from rung.runs.provenance import SnapshotError, WorkingTree
from rung.runs.query import experiments, numbers_in
from rung.runs.record import read_leniently

KINDS = ("trash", "starts", "parts", "aside", "copies")
DAY_S = 86_400.0
_COPIES = ("metrics/columns", ".config.json")
_PART = re.compile(r"\..+\.[0-9]+\.(part|tmp)")
_OF_A_START = re.compile(r"(config\.yaml|[a-z.]+\.json|code\.tar\.gz|\..+\.part)")
# refs/rung/<uid>; an older rung wrote refs/rung/<experiment>/<n>. An attempt or part of a commit may follow.
_REF_NAME = re.compile(r"refs/rung/([A-Za-z0-9._-]+/)?[0-9a-f][0-9a-f.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


class Item(NamedTuple):
    """A file or folder that may go."""

    kind: str
    path: Path
    name: str
    bytes: int


class Ref(NamedTuple):
    """A code snapshot, as run.json has it under `code`: the folder it was made of, its git ref and its commit."""

    root: str
    ref: str
    commit: str


@dataclass
class Plan:
    root: Path
    items: list[Item] = field(default_factory=list)
    refs: list[Ref] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # what was left alone, and why

    def bytes_by_kind(self) -> dict[str, int]:
        return {kind: sum(item.bytes for item in self.items if item.kind == kind) for kind in KINDS}


def clean(root: Path, days: float = 0.0, *, aside: bool = False, copies: bool = False, is_real: bool = False) -> Plan:
    """Finds what may go; with `is_real` also deletes it, and returns what went. `days` is for the trash and `aside`."""
    if not root.is_dir():
        return Plan(root)
    with writing(f"under {root}"), locked(root):
        plan, before = Plan(root), time.time() - days * DAY_S
        unread: list[str] = []
        states, there = all_states(root, unread), trashed(root)
        old = [one for one in there if one.unix_s <= before]
        half = [folder for folder in entries(root) if folder.name.startswith(GONE) or not (folder / RUN).exists()]
        plan.items = [_item("trash", one.folder, one.id) for one in old]
        plan.items += [_item("trash", folder, folder.name) for folder in half]

        stay = [(state.path, state.document) for state in states]
        stay += [(one.run, read_leniently(one.run)) for one in there if one not in old]
        kept = {ref.ref for _, document in stay for ref in refs_of(document)}
        named = {ref for item in plan.items for ref in refs_of(read_leniently(item.path / RUN))}
        plan.refs = sorted(ref for _, refs in _present(named, root) for ref in refs if ref.ref not in kept)
        plan.kept += unread
        if unread and plan.refs:
            plan.kept.append("code snapshots: a folder that cannot be read may hold a run that needs them")
            plan.refs = []

        began = [initial_weights(path, document) for path, document in stay] if aside else []
        for state in states:
            if state.liveness.word in ("running", "silent"):
                plan.kept.append(f"{state.id} was not looked at: {state.liveness.word}, {state.liveness.text}")
                continue
            try:
                check(state.path)
                if state.path.is_symlink() or state.path.parent.is_symlink():
                    plan.kept.append(f"{state.id} was not looked at: a link leads to it; name its own runs folder")
                    continue
            except RunError as error:
                plan.kept.append(str(error))
                continue
            plan.items += _parts(state.path, state.id)
            for path in sorted((state.path / "checkpoints").glob("aside-*")) if aside else ():
                if path.is_symlink() or not os.path.isdir(path) or newest(path) > before:
                    continue
                # Those that a run began with stay, known by what it loaded or by its name for it.
                manifests = manifests_below(path)
                if not any(
                    start.manifest in manifests or (path.name in start.name and is_inside(start.name, state))
                    for start in began
                ):
                    plan.items.append(_item("aside", path, f"{state.id} {path.name}"))
            if copies:
                made = [path for path in (state.path / name for name in _COPIES) if os.path.lexists(path)]
                plan.items += [_item("copies", path, f"{state.id} {path.name}") for path in made]
        own = [name for name in experiments(root) if not (root / name).is_symlink()]
        for folder in (root, *(root / name for name in own)):
            plan.items += _parts(folder, folder.name, is_deep=False)

        # A start that was killed has written what is known before step 0; where there is more, it was a run.
        for experiment in own:
            for number in numbers_in(root / experiment):
                path = root / experiment / str(number)
                if path.is_symlink() or os.path.lexists(path / "run.json"):
                    continue
                try:
                    names = os.listdir(path)
                except OSError as error:
                    plan.kept.append(f"{path} was not looked at: {reason(error)}")
                    continue
                if not all(map(_OF_A_START.fullmatch, names)):
                    plan.kept.append(f"{path} has no run.json but holds more than a start writes; look into it")
                elif newest(path) < time.time() - DAY_S:
                    plan.items.append(_item("starts", path, f"{experiment}/{number}"))
        return _delete(plan) if is_real else plan


def _item(kind: str, path: Path, name: str) -> Item:
    return Item(kind, path, name, freed_bytes(path))


def _parts(folder: Path, name: str, is_deep: bool = True) -> Iterator[Item]:
    """Unfinished files, recognised by name; a day is longer than any write takes."""
    for place, folders, files in os.walk(folder):
        for found in [n for n in (*folders, *files) if _PART.fullmatch(n)]:
            path = Path(place, found)
            with contextlib.suppress(FileNotFoundError):
                if newest(path) < time.time() - DAY_S:
                    yield _item("parts", path, f"{name} {found}")
        folders[:] = [n for n in folders if is_deep and not _PART.fullmatch(n)]


def _delete(plan: Plan) -> Plan:
    done = Plan(plan.root, kept=list(plan.kept))
    going = []
    for item in plan.items:
        if item.kind == "trash" and not item.path.name.startswith(GONE):  # from now on it cannot be restored
            apart = item.path.with_name(f"{GONE}{item.path.name}.{time.time_ns()}")
            os.rename(item.path, apart)
            item = item._replace(path=apart)
        going.append(item)
    # All refs of a repository go in one transaction.
    for repository, refs in _present(plan.refs, plan.root):
        orders = "".join(f"delete {ref.ref} {ref.commit}\n" for ref in refs)
        try:
            repository.git("update-ref", "--no-deref", "--stdin", stdin=orders.encode())
        except SnapshotError as error:
            message = f"the snapshots in {repository.top} could not be changed: {error}; try again."
            raise RunError(message, code="cannot-write") from error
        done.refs += refs
    for item in going:
        try:
            remove(plan.root, item.path.relative_to(plan.root).as_posix())
        except OSError as error:
            done.kept.append(f"{item.path} could not be deleted: {reason(error)}")
        else:
            done.items.append(item)
    with contextlib.suppress(OSError):  # only where nothing is left in it
        (plan.root / TRASH).rmdir()
    return done


def refs_of(document: Mapping[str, Any]) -> set[Ref]:
    """All code snapshots that a run.json names, of the start and of each resume."""
    segments = document.get("segments")
    found = set()
    for part in (document, *(segments if isinstance(segments, list) else [])):
        code = part.get("code") if isinstance(part, Mapping) else None
        ref = Ref(*(str(code.get(key) or "") if isinstance(code, Mapping) else "" for key in Ref._fields))
        # What a damaged or foreign run.json says must not become an order to delete a branch.
        if ref.root and _REF_NAME.fullmatch(ref.ref) and _COMMIT.fullmatch(ref.commit):
            found.add(ref)
    return found


def _present(refs: Collection[Ref], root: Path) -> list[tuple[WorkingTree, list[Ref]]]:
    """Refs that still are what a run.json says, by repository: that of the current folder, and that around the runs.

    Another one, which a run.json names, is left alone: whoever made the run wrote that.
    """
    found: dict[Path, tuple[WorkingTree, list[Ref]]] = {}
    for folder in (root.resolve().parent, Path.cwd()) if refs else ():
        with contextlib.suppress(SnapshotError, OSError):
            repository = WorkingTree.to_read(folder)
            if repository is None or repository.top in found:
                continue
            lines = repository.ask("for-each-ref", "--format=%(objectname) %(refname)", "refs/rung")
            there = {tuple(line.split(" ", 1)) for line in lines.splitlines()}
            present = [ref for ref in refs if (ref.commit, ref.ref) in there]
            if present:
                found[repository.top] = repository, present
    return list(found.values())
