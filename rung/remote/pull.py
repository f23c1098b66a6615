"""Brings an item from a place: put together beside (parcel), every hash checked, then moved to where it belongs.

It is there whole or not at all. Which checkpoints to bring can be chosen; everything else always comes. Nothing that
only the run here has is lost: files stay, and lines that the run there lacks are a reason to refuse.

The surprising thing: a run is known by its uid, and not by its name; one that was renamed here is updated under the
name it has here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.files import sync
from rung.remote.bucket import Bucket, RemoteError
from rung.remote.manifest import Manifest, check_item
from rung.remote.parcel import Parcel, Wish, bring, is_whole, link, manifest_of, parcel_beside, put_back, swap, wanted
from rung.remote.snapshot import ahead, lacking, step_of, uid_of, walk
from rung.runs.files import locked, refused, write_json
from rung.runs.house.journal import refuse_unfinished
from rung.runs.house.places import former_ids, place_of, raise_counter, refuse_running, standing
from rung.runs.house.trash import remove
from rung.runs.process import HEARTBEAT
from rung.runs.query import Run, list_runs
from rung.runs.record import check_name, claimed, read_document


@dataclass(frozen=True)
class Pulled:
    """What a pull did."""

    kind: str
    name: str  # as it is called here
    url: str
    path: Path
    num_files: int
    bytes: int
    received_bytes: int
    what: str  # new, updated or unchanged


_ALL = Wish()


def pull_run(bucket: Bucket, name: str, root: Path, wish: Wish = _ALL, known: dict[str, Path] | None = None) -> Pulled:
    """Brings a run into a runs folder, under its own number, or as the next one of `wish.experiment`.

    Whoever brings many asks `runs_by_uid` once and passes the answer each time; it is kept up to date.
    """
    check_item("run", name)
    if wish.experiment is not None:
        check_name(wish.experiment)
    manifest = manifest_of(bucket, "run", name)
    known = runs_by_uid(root) if known is None else known
    here = _same(known.get(manifest.uid), manifest.uid)
    target = _target(root, manifest, here, wish)
    if here is not None:
        _refuse(bucket, manifest, here, wish)
    with _refusing(target), parcel_beside(target, manifest.uid) as parcel:
        if here is not None and _is_same(target, manifest, wish):
            return _pulled(bucket, manifest, here.id, target, parcel, "unchanged")
        bring(bucket, manifest, parcel, target if here is not None else None, wish)
        assert parcel.manifest is not None
        brought = parcel.manifest
        _check_run(bucket, brought, parcel.files)
        if here is not None:
            _update(bucket, brought, target, parcel, wish)
            return _pulled(bucket, brought, here.id, target, parcel, "updated")
        if wish.experiment is not None:
            with claimed(root, wish.experiment) as place:
                new = f"{wish.experiment}/{place.name}"
                _rename_inside(parcel.files, new)
                os.rename(parcel.files, place)
                target = place
        else:
            new = name
            _rename_inside(parcel.files, name)
            _place(target, parcel)
        known[manifest.uid] = target
        return _pulled(bucket, brought, new, target, parcel, "new")


def pull_data(bucket: Bucket, name: str, target: Path, wish: Wish = _ALL) -> Pulled:
    """Brings a data set to a folder; one that is there stays unless it is the same, or force is used."""
    check_item("data", name)
    manifest = manifest_of(bucket, "data", name)
    put_back(target.parent)
    with _refusing(target), parcel_beside(target, manifest.uid) as parcel:
        is_there = target.exists()
        if is_there and _is_same(target, manifest, wish):
            return _pulled(bucket, manifest, name, target, parcel, "unchanged")
        if is_there and not wish.is_forced:
            raise RemoteError(
                f"{target} is there already and is not the data set of {bucket.at(manifest.place)}; bring it under "
                "another name with --as NAME, or replace it with --force."
            )
        if is_there and not (target / "manifest.json").is_file():
            raise RemoteError(
                f"{target} is not a data set of rung and is left alone; bring it elsewhere with --as NAME."
            )
        bring(bucket, manifest, parcel, target if is_there else None, wish)
        assert parcel.manifest is not None
        if is_there:
            swap(target, parcel)
        else:
            os.rename(parcel.files, target)
            sync(target.parent)
        return _pulled(bucket, parcel.manifest, name, target, parcel, "updated" if is_there else "new")


def runs_by_uid(root: Path) -> dict[str, Path]:
    """Where each run of a runs folder lies, whatever it is called by now; an update that was killed is mended first."""
    for folder in root.iterdir() if root.is_dir() else ():
        put_back(folder)
    return {uid_of(run.document): run.path for run in list_runs(root, problems=[])}


def _same(path: Path | None, uid: str) -> Run | None:
    """The run here that is the same run."""
    with contextlib.suppress(RunError):
        if path is not None and uid_of((run := Run(path, read_document(path))).document) == uid:
            return run
    return None


def _target(root: Path, manifest: Manifest, here: Run | None, wish: Wish) -> Path:
    if here is not None:
        if wish.experiment is not None:
            raise RunError(f"{manifest.name} is here already, as {here.id}; pull it without --as to update it.")
        return here.path
    if wish.experiment is not None:
        return root / wish.experiment / manifest.name.replace("/", "-")
    target = root / manifest.name
    if target.exists():
        raise RunError(
            f"{target} is another run than {manifest.name} there; bring it under the next free number with "
            f"`--as {target.parent.name}`, or under another name."
        )
    return target


def _refuse(bucket: Bucket, manifest: Manifest, here: Run, wish: Wish) -> None:
    """A run that goes on here is not touched, nor one that is later than the one there."""
    if (here.path / HEARTBEAT).exists():  # else it is a copy, of a run that may go on elsewhere
        refuse_running(standing(place_of(here.path)), "pull", wish.is_forced)
    mine = {"segments": len(here.document.get("segments") or []), "step": here.step}
    if ahead(mine) > ahead(manifest.document) and not wish.is_forced:
        raise RunError(
            f"{here.id} here is later than {bucket.at(manifest.place)} (step {mine['step']} here, "
            f"{manifest.document.get('step')} there); `rung push` it, or add --force to take the one there."
        )


@contextlib.contextmanager
def _refusing(target: Path) -> Iterator[None]:
    """A disk that says no is told in one sentence."""
    try:
        yield
    except OSError as error:
        raise refused(str(target), error) from error


def _is_same(target: Path, manifest: Manifest, wish: Wish) -> bool:
    """Whether all that would be brought is here already."""
    return all(is_whole(target / entry.path, entry) for entry in wanted(manifest, wish.checkpoints))


def _check_run(bucket: Bucket, manifest: Manifest, folder: Path) -> None:
    """What was brought is a run that can be read, and the one that the manifest speaks of."""
    where = bucket.at(manifest.place)
    try:
        run = Run(folder, read_document(folder))
    except RunError as error:
        raise RemoteError(f"{where} cannot be used, and nothing was brought: {error}") from error
    if uid_of(run.document) != manifest.uid:
        raise RemoteError(f"{where} is damaged, and nothing was brought: its run.json is that of another run.")


def _keep_own(target: Path, parcel: Parcel, manifest: Manifest, wish: Wish) -> None:
    """What only the run here has stays: its own checkpoints, pages, mirrors. Lines that the one there lacks are not
    thrown away unasked."""
    named = {entry.path for entry in manifest.entries}
    branched = _branched(target, parcel)
    for path in walk(target, "", lambda name: not name.endswith(".tmp")):
        file = target / path
        if path in named:
            if path.endswith(".ndjson") and not wish.is_forced and not _begins_with(parcel.files / path, file):
                raise RunError(
                    f"{file} has lines that {manifest.name} there lacks, notes perhaps; `rung push` them, or add "
                    "--force, which puts the run here into the trash."
                )
        elif path not in (HEARTBEAT, "run.json", ".config.json"):
            step = step_of(path)
            is_aside = branched is not None and step is not None and step > branched
            copy = parcel.files / (path.replace("/", "/aside-pulled/", 1) if is_aside else path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            link(file, copy)


def _branched(target: Path, parcel: Parcel) -> int | None:
    """The step from which the run went on elsewhere, if it did: saves here that are later have another future, and a
    resume must not take them for its own."""
    mine, theirs = (read_document(folder).get("segments") or [] for folder in (target, parcel.files))
    firsts = [part.get("first_step") for part in theirs[len(mine) :] if isinstance(part, dict)]
    return min((first for first in firsts if isinstance(first, int)), default=None)


def _begins_with(long: Path, short: Path) -> bool:
    """Whether a file of lines goes on where another one ends; a torn last line of that one does not count."""
    with long.open("rb") as one, short.open("rb") as other:
        for line in other:
            if line.endswith(b"\n") and one.readline() != line:
                return False
    return True


def _rename_inside(folder: Path, new: str, here: Mapping[str, Any] | None = None) -> None:
    """run.json says what the run is called here, keeps what it was called there, and what only people here wrote."""
    document = read_document(folder)
    old, mine, (experiment, _, number) = str(document["id"]), here or {}, new.partition("/")
    changed = {name: mine[name] for name in lacking(document, mine)}
    if old != new:
        known = [name for name in dict.fromkeys([*former_ids(document), *former_ids(mine), old]) if name != new]
        changed |= {"id": new, "experiment": experiment, "number": int(number), "formerly": known}
    if changed:
        write_json(folder / "run.json", {**document, **changed})


def _place(target: Path, parcel: Parcel) -> None:
    """A run that was not here, under its own number, which no start is given from now on."""
    refuse_unfinished(target.parent.parent)
    with locked(target.parent):
        if target.exists():
            raise RunError(
                f"{target} has come into being in the meantime; pull again with `--as {target.parent.name}`."
            )
        os.rename(parcel.files, target)
        raise_counter(target.parent, int(target.name))
    sync(target.parent)


def _update(bucket: Bucket, manifest: Manifest, target: Path, parcel: Parcel, wish: Wish) -> None:
    """Replaces the run here, if it is still one that may be: bringing it took a while."""
    place = place_of(target)
    refuse_unfinished(place.root)
    with locked(target):  # whoever resumes it, or writes a verdict, waits, or is seen
        here = Run(target, read_document(target))
        _refuse(bucket, manifest, here, wish)
        _keep_own(target, parcel, manifest, wish)
        _rename_inside(parcel.files, here.id, here.document)
        if not wish.is_forced:
            swap(target, parcel)
            return
    remove([place], is_forced=True)  # what is given up can be had back; asks again whether it runs
    os.rename(parcel.files, target)
    sync(target.parent)


def _pulled(bucket: Bucket, manifest: Manifest, name: str, path: Path, parcel: Parcel, what: str) -> Pulled:
    url, entries = bucket.at(manifest.place), manifest.entries
    return Pulled(manifest.kind, name, url, path, len(entries), manifest.num_bytes, parcel.received, what)
