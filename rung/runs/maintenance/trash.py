"""Removing runs: why one should stay, and the trash, which keeps each as it was until `rung gc` empties it.

    <runs>/.trash/<experiment>.<number>/note.json   when it was removed, from where, and together with which others
                                        run/        the run's folder

A run is in its place or in the trash, whole, at every moment: it goes there and back by one rename. Its number is never
given again. The note is written first, so an entry without a `run` is a removal that was killed before it did anything;
nobody shows it, and `rung gc` deletes it.

A run should stay where others come from it or began with its weights, or one of its checkpoints is pinned. Weights are
recognised by the manifest of the checkpoint that was loaded, and by the name or path in init_from: the first also finds
a checkpoint that a resume has set aside, the second also one that is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rung import parse
from rung.errors import CheckpointError, RunError
from rung.files import sha256, sync
from rung.runs import paths
from rung.runs.files import locked, read_json, write_json, writing
from rung.runs.maintenance.selection import ID, RunFolder, RunState, all_states, refuse_running, state_of
from rung.runs.marks import PINNED, read_mark
from rung.runs.record import reserve_number

TRASH = ".trash"
GONE = ".gone-"  # an entry that gc has begun to delete
NOTE, RUN = "note.json", "run"
_INIT_FROM = re.compile(r"^init_from:[ ]*(.+?)[ ]*$", re.MULTILINE)


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
            paths.inside(folder.root, TRASH).mkdir(exist_ok=True)
            # Numbers are not given twice, but a run can come back under its old name and be removed again.
            for number in itertools.count(1):
                again = f"~{number}" if number > 1 else ""
                entry = folder.root / TRASH / f"{folder.experiment}.{folder.number}{again}"
                with contextlib.suppress(FileExistsError):
                    entry.mkdir()
                    break
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


def check_removal(folders: Sequence[RunFolder], is_forced: bool = False) -> list[str]:
    """Raises RunError unless all of these may go; forced, it returns why they should have stayed."""
    targets = [state_of(folder) for folder in folders]
    for target in targets:
        refuse_running(target, "remove", is_forced or target.problem is not None)
        if target.problem is not None and not is_forced:
            raise RunError(f"{target.problem} It can be removed as it is: add --force.", code="run-damaged")
    reasons = list(reasons_to_keep(targets))
    if reasons and not is_forced:
        more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        raise RunError(f"{'; '.join(reasons[:5])}{more}; to remove it anyway, add --force.", code="in-use")
    return reasons


def trashed(root: Path) -> list[TrashedRun]:
    """What is in the trash, the oldest removal first."""
    found: list[TrashedRun] = []
    for folder in entries(root):
        if folder.name.startswith(GONE) or not os.path.exists(folder / RUN):
            continue
        note: Any = None
        with contextlib.suppress(OSError, ValueError):
            note = read_json(folder / NOTE)
        # Where the note is damaged, the folder itself tells.
        note = note if isinstance(note, dict) else {}
        run_id, unix_s = note.get("id"), note.get("unix_s")
        if not isinstance(run_id, str) or not ID.fullmatch(run_id):
            run_id = "/".join(folder.name.partition("~")[0].rsplit(".", 1))
        unix_s = float(unix_s) if isinstance(unix_s, int | float) else folder.stat().st_mtime
        found.append(TrashedRun(folder, run_id, unix_s, str(note.get("removal") or folder.name)))

    def order(one: TrashedRun) -> tuple[float, str, str, int]:
        experiment, _, number = one.id.rpartition("/")
        return one.unix_s, one.removal, experiment, int(number) if number.isdecimal() else 0

    return sorted(found, key=order)


def entries(root: Path) -> list[Path]:
    """Every folder of the trash, also what a kill left half-way."""
    try:
        folders = paths.inside(root, TRASH).iterdir()
        return sorted(path for path in folders if os.path.isdir(path) and not path.is_symlink())
    except OSError:
        return []


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


class InitialWeights(NamedTuple):
    """The weights that a run began with: what init_from says, and the hash of the manifest that was loaded."""

    name: str
    manifest: str | None


def initial_weights(path: Path, document: Mapping[str, Any]) -> InitialWeights:
    derived = document.get("derived")
    loaded = derived.get("weights_from") if isinstance(derived, dict) else None
    manifest = loaded.get("manifest") if isinstance(loaded, dict) else None
    name = ""
    with contextlib.suppress(OSError, ValueError):
        match = _INIT_FROM.search(parse.read_bytes(path / "config.yaml").decode())
        name = match[1].strip("'\"") if match else ""
    return InitialWeights(name, manifest if isinstance(manifest, str) else None)


def manifests_below(folder: Path) -> set[str]:
    """Hashes of the manifests of all checkpoints below a folder."""
    found = set()
    for file in folder.glob("**/manifest.json"):
        if not paths.stays(folder, file):
            continue
        with contextlib.suppress(OSError):  # rotated away in the meantime
            found.add(sha256(file))
    return found


def is_inside(name: str, target: RunState) -> bool:
    """Whether a name, as init_from has it, means the run or something in it."""
    if name in target.names:
        return True
    inside = f"/{target.path.parent.parent.name}/{target.id}/"
    return "/" in name and (Path(name).resolve().is_relative_to(target.path.resolve()) or inside in f"/{name}/")


def reasons_to_keep(targets: Sequence[RunState]) -> Iterator[str]:
    """Why runs should stay, one sentence each."""
    going = {target.path.resolve() for target in targets}
    for root in dict.fromkeys(target.root for target in targets):
        here = [target for target in targets if target.root == root]
        by_uid = {target.document["uid"]: target for target in here if target.document.get("uid")}
        by_name = {name: target for target in here for name in target.names}
        by_manifest: dict[str, list[RunState]] | None = None  # read where somebody began with weights
        for other in all_states(root):
            if other.path.resolve() in going:
                continue
            related: list[tuple[str, RunState | None]] = []
            # A reference goes by uid; an older run.json has the name alone.
            ab = other.document.get("ab")
            for relation, holder, key in (
                ("comes from", other.document, "parent"),
                ("is compared with", ab if isinstance(ab, dict) else {}, "base"),
            ):
                uid = holder.get(f"{key}_uid")
                related.append((relation, by_uid.get(uid) if uid else by_name.get(str(holder.get(key)))))
            start = initial_weights(other.path, other.document)
            if start.manifest and by_manifest is None:
                by_manifest = {}
                for target in here:
                    for manifest in manifests_below(target.path / "checkpoints"):
                        by_manifest.setdefault(manifest, []).append(target)
            began = [*(by_manifest or {}).get(start.manifest or "", ())]
            if start.name in by_name or "/" in start.name:
                began += [target for target in here if is_inside(start.name, target)]
            related += [("started with the weights of", target) for target in began]
            named = set[str]()
            for relation, needed in related:
                if needed is not None and needed.id not in named:
                    named.add(needed.id)
                    yield f"{other.id} {relation} {needed.id}"
    for target in targets:
        pinned: list[int] = []
        with contextlib.suppress(CheckpointError, OSError):  # a mark that cannot be read protects nothing
            pinned = read_mark(target.path / "checkpoints", PINNED)
        if pinned:
            yield f"{target.id} has pinned checkpoints ({', '.join(map(str, pinned))})"
