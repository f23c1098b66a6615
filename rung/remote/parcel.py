"""A folder beside the place where an item will be, in which it is put together: every file whole, by its hash.

It stays where a pull fails or is killed, and the next one goes on with it. What the item here has already is not
brought again. Where the item is replaced at the place in the meantime, the new one is brought. Where it belongs is left
to pull.

The surprising thing: an update is two renames, the old folder away and the new one in; a kill between them is mended by
the next pull, which first puts the old one back.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rung.errors import RunError
from rung.files import sha256, sync
from rung.remote.bucket import Bucket, RemoteError
from rung.remote.manifest import Entry, Manifest, read_manifest
from rung.remote.snapshot import step_of
from rung.remote.workers import Meter, Report, each
from rung.runs.files import locked

MOST_CHANGES = 5  # of an item, while it is brought


@dataclass(frozen=True)
class Wish:
    """What to bring, and how: which checkpoints ("all", "best", "last", "none"), over what is here, told to whom."""

    checkpoints: str = "all"
    experiment: str | None = None  # the next free number of this one
    is_forced: bool = False
    report: Report | None = None


@dataclass
class Parcel:
    """Where an item is put together: `files` becomes the item, `incoming` holds what is half here."""

    folder: Path
    received: int = 0
    manifest: Manifest | None = None

    @property
    def files(self) -> Path:
        return self.folder / "files"

    @property
    def incoming(self) -> Path:
        return self.folder / "incoming"


def manifest_of(bucket: Bucket, kind: str, name: str) -> Manifest:
    found = read_manifest(bucket, kind, name)
    if found is None:
        raise RemoteError(f"there is no {kind} {name} at {bucket.url}; `rung ls --remote {bucket.url}` lists what is.")
    return found[0]


def wanted(manifest: Manifest, word: str) -> list[Entry]:
    told = manifest.document.get("checkpoints")
    steps = sorted({step for entry in manifest.entries if (step := step_of(entry.path)) is not None})
    best = told.get("best") if isinstance(told, dict) else None
    chosen = {"all": steps, "none": [], "last": steps[-1:], "best": [step for step in steps if step == best]}[word]
    return [entry for entry in manifest.entries if (step := step_of(entry.path)) is None or step in chosen]


@contextlib.contextmanager
def parcel_beside(target: Path, uid: str) -> Iterator[Parcel]:
    """The folder beside, for one pull at a time; it stays where the pull fails, for the next one to go on with."""
    made = [folder for folder in target.parents if not folder.exists()]
    # As all that is half written, so that `rung gc` clears one that nobody goes on with.
    parcel = Parcel(target.with_name(f".pull-{target.name}-{hashlib.sha256(uid.encode()).hexdigest()[:8]}.0.part"))
    parcel.folder.mkdir(parents=True, exist_ok=True)
    with _alone(parcel.folder) as is_alone:
        if not is_alone:
            raise RunError(f"{target} is being pulled by another process; wait for it.")
        parcel.files.mkdir(exist_ok=True)
        shutil.rmtree(parcel.incoming, ignore_errors=True)
        parcel.incoming.mkdir()
        try:
            yield parcel
        except BaseException:
            shutil.rmtree(parcel.incoming, ignore_errors=True)
            if parcel.files.is_dir() and not any(parcel.files.iterdir()):
                _forget(parcel, made)
            raise
        shutil.rmtree(parcel.folder, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether nobody else works in a folder, for as long as the body takes; on a disk without locks: yes."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    finally:
        os.close(lock)


def old_of(target: Path) -> Path:
    """Where an item steps aside for its newer state; not a name that `rung gc` clears."""
    return target.with_name(f".pull-{target.name}.old")


def swap(target: Path, parcel: Parcel) -> None:
    """The old item away, the new one in, under the lock of the folder they are in."""
    old = old_of(target)
    with locked(target.parent):
        os.rename(target, old)
        try:
            os.rename(parcel.files, target)
        except BaseException:
            os.rename(old, target)
            raise
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Mends a swap that was killed: the old item comes back where there is no new one, and goes where there is."""
    for old in folder.glob(".pull-*.old"):
        target = folder / old.name.removeprefix(".pull-").removesuffix(".old")
        with locked(folder):
            if old.exists() and not target.exists():
                os.rename(old, target)
            shutil.rmtree(old, ignore_errors=True)


def _forget(parcel: Parcel, made: list[Path]) -> None:
    """Nothing was brought: nothing is left, not even the folders that were made for it."""
    shutil.rmtree(parcel.folder, ignore_errors=True)
    for folder in made:
        with contextlib.suppress(OSError):
            folder.rmdir()


def bring(bucket: Bucket, manifest: Manifest, parcel: Parcel, here: Path | None, wish: Wish) -> None:
    """Fills the parcel with every wanted file; by a newer manifest where files of this one have gone."""
    for _ in range(MOST_CHANGES):
        entries = wanted(manifest, wish.checkpoints)
        _clear(parcel.files, {entry.path for entry in entries})
        meter = Meter(f"bringing {manifest.name}", sum(entry.bytes for entry in entries), wish.report)
        try:
            each(functools.partial(_fetch, bucket, manifest, parcel, here, meter), sorted(entries, key=_by_size))
            parcel.manifest = replace(manifest, entries=tuple(entries))
            return
        except _Gone as gone:
            now = manifest_of(bucket, manifest.kind, manifest.name)
            if now.push == manifest.push:
                raise RemoteError(f"{gone} is missing there, and nothing was brought; push the item again.") from None
            if now.uid != manifest.uid:
                raise RemoteError(f"{bucket.at(manifest.place)} was replaced by another item; pull again.") from None
            manifest = now
    raise RemoteError(f"{bucket.at(manifest.place)} changes faster than it can be brought; pull it later.")


class _Gone(Exception):
    """A file that a manifest names is not there."""


def _by_size(entry: Entry) -> int:
    return -entry.bytes


def _fetch(bucket: Bucket, manifest: Manifest, parcel: Parcel, here: Path | None, meter: Meter, entry: Entry) -> None:
    """One file: what is whole here stays, else from the item here, else from the place."""
    final = parcel.files / entry.path
    if is_whole(final, entry):
        meter.add(entry.bytes)
        return
    beside = parcel.incoming / hashlib.sha256(entry.path.encode()).hexdigest()[:32]
    if here is not None and is_whole(here / entry.path, entry):
        link(here / entry.path, beside)
        meter.add(entry.bytes)
    else:
        _download(bucket, manifest, entry, beside, meter.add)
        parcel.received += entry.bytes
    final.parent.mkdir(parents=True, exist_ok=True)
    os.replace(beside, final)


def _download(bucket: Bucket, manifest: Manifest, entry: Entry, beside: Path, add: Callable[[int], None]) -> None:
    digest, key, size = hashlib.sha256(), manifest.key(entry), 0
    with beside.open("wb") as file:
        try:
            for piece in bucket.receive(key):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
                add(len(piece))
                if size > entry.bytes:  # it cannot be the one, and may be as large as the disk
                    break
        except FileNotFoundError:
            raise _Gone(bucket.at(key)) from None
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != entry.sha256:
        beside.unlink()
        raise RemoteError(
            f"{bucket.at(key)} is damaged: it has hash {digest.hexdigest()[:8]}.. and {size} bytes, the manifest says "
            f"{entry.sha256[:8]}.. and {entry.bytes}; nothing was brought: push it again with --verify."
        )


def is_whole(file: Path, entry: Entry) -> bool:
    try:
        return file.is_file() and file.stat().st_size == entry.bytes and sha256(file) == entry.sha256
    except OSError:
        return False


def _clear(folder: Path, wanted: set[str]) -> None:
    """Removes what an earlier, killed pull left and nobody wants any more."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            file = Path(place, name)
            if file.relative_to(folder).as_posix() not in wanted:
                file.unlink()
        if place != str(folder):
            with contextlib.suppress(OSError):
                os.rmdir(place)


def link(file: Path, copy: Path) -> None:
    """Two names for a file that nobody writes to; a file of lines, which a resume goes on with, is copied."""
    copy.unlink(missing_ok=True)
    if file.suffix != ".ndjson":
        with contextlib.suppress(OSError):  # a disk that knows no links
            os.link(file, copy)
            return
    shutil.copyfile(file, copy)
