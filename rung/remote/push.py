"""Sends an item to a place, or takes one away from it: whole or not at all.

Files go first, those that are there already are passed over, and the manifest comes last, by a conditional write: of
two who push an item at the same time one wins and the other is told, and nothing is mixed. A push that was killed
leaves nothing that anybody sees, and the next one goes on where it was. What is sent, is left to snapshot.

The surprising thing: files that the new manifest no longer names are removed after it is in place, and only those that
were there before this push began; somebody else's push may have brought the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rung.errors import UserError
from rung.remote.bucket import Bucket, Lost, RemoteError, Version
from rung.remote.manifest import Entry, Manifest, check_item, place_of, read_manifest
from rung.remote.snapshot import Changed, Snapshot, ahead, lacking, of_run
from rung.remote.workers import Meter, Report, each
from rung.runs.query import Run
from rung.runs.record import read_document, utc_now


@dataclass(frozen=True)
class Pushed:
    """What a push did."""

    kind: str
    name: str
    url: str
    num_files: int
    bytes: int
    num_sent: int
    sent_bytes: int
    num_removed: int = 0
    left: str = ""  # what could not be removed


@dataclass(frozen=True)
class How:
    """How to push: over what is there, with reading back, told to whom, given up when."""

    is_forced: bool = False
    is_verified: bool = False
    report: Report | None = None
    is_over: Callable[[], bool] = lambda: False


_PLAIN = How()


class GivenUp(UserError):
    """A push that was told to end."""


def push_run(
    bucket: Bucket, path: Path, checkpoints: str = "kept", without: Sequence[str] = (), how: How = _PLAIN
) -> Pushed:
    """Sends a run as it is now, also one that is being written; what changes under our hands is taken again."""
    for attempt in range(3):
        with of_run(Run(path, read_document(path)), checkpoints, without) as snapshot:
            try:
                return push(bucket, snapshot, how)
            except Changed:
                if attempt == 2:
                    raise
    raise AssertionError("every attempt ends")


def push(bucket: Bucket, snapshot: Snapshot, how: How = _PLAIN) -> Pushed:
    """Makes the item at the place what the snapshot says."""
    check_item(snapshot.kind, snapshot.name)
    there, version = _there(bucket, snapshot, how.is_forced)
    _refuse(bucket, snapshot, there, how.is_forced)
    manifest = _manifest(snapshot, there)
    url = bucket.at(manifest.place)
    done = Pushed(snapshot.kind, snapshot.name, url, len(manifest.entries), manifest.num_bytes, 0, 0)
    before = bucket.sizes(f"{manifest.place}/files")
    missing = [entry for entry in snapshot.entries if before.get(manifest.key(entry)) != entry.bytes]
    is_same = there is not None and _content(there) == _content(manifest)
    if is_same and not missing and not how.is_verified:
        return done
    _send(bucket, snapshot, manifest, missing, how)
    _check(bucket, snapshot, manifest)
    if how.is_verified:
        _read_back(bucket, snapshot, manifest, how)
    _write(bucket, manifest, version)
    if lost := [entry for entry in _absent(bucket, manifest) if entry.path in snapshot.sources]:
        _send(bucket, snapshot, manifest, lost, how)  # another push cleaned up after itself in that moment
    num_removed, left = _remove_unnamed(bucket, manifest, before)
    num_bytes = sum(entry.bytes for entry in missing)
    return dataclasses.replace(done, num_sent=len(missing), sent_bytes=num_bytes, num_removed=num_removed, left=left)


def delete(bucket: Bucket, kind: str, name: str) -> int:
    """Takes an item away, its manifest first; returns how many files went. A second call finishes a killed one."""
    check_item(kind, name)
    place = place_of(kind, name)
    keys = bucket.sizes(place)
    if not keys:
        raise RemoteError(f"there is no {name} at {bucket.url}; `rung ls --remote {bucket.url}` lists what is.")
    manifest = f"{place}/manifest.json"
    bucket.delete([manifest] if manifest in keys else [])
    bucket.delete([key for key in keys if key != manifest])
    return len(keys) - (manifest in keys)


def _there(bucket: Bucket, snapshot: Snapshot, is_forced: bool) -> tuple[Manifest | None, Version | None]:
    try:
        found = read_manifest(bucket, snapshot.kind, snapshot.name)
    except RemoteError:
        raw = bucket.read(f"{place_of(snapshot.kind, snapshot.name)}/manifest.json")
        if raw is None or not is_forced:
            raise
        return None, raw[1]
    return found if found is not None else (None, None)


def _refuse(bucket: Bucket, snapshot: Snapshot, there: Manifest | None, is_forced: bool) -> None:
    """Nobody's run is replaced by another one, nor a later state by an earlier one, unless somebody says so."""
    if there is None or is_forced:
        return
    url = bucket.at(there.place)
    refuse_another(bucket, snapshot.uid, there)
    if there.kind == "run" and ahead(there.document) > ahead(snapshot.document):
        (attempts_there, step_there), (attempts, step) = ahead(there.document), ahead(snapshot.document)
        raise RemoteError(
            f"{url} is later than {snapshot.name} here (attempt {attempts_there}, step {step_there} there; attempt "
            f"{attempts}, step {step} here); `rung pull` it first, or add --force."
        )
    if there.kind == "run" and (what := _only_there(snapshot, there)):
        raise RemoteError(f"{url} has {what}; `rung pull` it first, or add --force to give that up.")


def refuse_another(bucket: Bucket, uid: str, there: Manifest) -> None:
    """What has this name there has to be what has it here."""
    url = bucket.at(there.place)
    if there.uid != uid and there.kind == "data":
        raise RemoteError(
            f"{url} is another data set (fingerprint {there.uid}, here {uid}); add --force to replace it."
        )
    if there.uid != uid:
        raise RemoteError(
            f"{url} is another run; give yours another name with `rung mv {there.name} NAME`, push below another "
            "prefix, or replace that one with --force."
        )


def _only_there(snapshot: Snapshot, there: Manifest) -> str:
    """What people wrote into the run there, notes or a verdict, and this copy has never seen."""
    for entry in there.entries:
        if entry.path.endswith(".ndjson") and not snapshot.begins_with(entry):
            return f"lines in {entry.path} that {snapshot.name} here lacks, notes perhaps"
    words = lacking(snapshot.document, there.document)
    return f"a {words[0]} that {snapshot.name} here lacks" if words else ""


def _manifest(snapshot: Snapshot, there: Manifest | None) -> Manifest:
    """All that is sent, and what is there and stays."""
    here = {entry.path for entry in snapshot.entries}
    kept: list[Entry] = []
    if there is not None and there.uid == snapshot.uid:
        kept = [entry for entry in there.entries if entry.path not in here and snapshot.stays(entry)]
    entries = tuple(sorted([*snapshot.entries, *kept], key=lambda entry: entry.path))
    push, now = uuid.uuid4().hex, utc_now()
    return Manifest(snapshot.kind, snapshot.name, snapshot.uid, entries, snapshot.document, now, push)


def _content(manifest: Manifest) -> tuple[str, tuple[Entry, ...]]:
    return manifest.uid, tuple(sorted(manifest.entries, key=lambda entry: entry.path))


def _send(bucket: Bucket, snapshot: Snapshot, manifest: Manifest, entries: Iterable[Entry], how: How) -> None:
    large_first = sorted(entries, key=lambda entry: -entry.bytes)
    meter = Meter(f"sending {snapshot.name}", sum(entry.bytes for entry in large_first), how.report)

    def send(entry: Entry) -> None:
        told = 0

        def counted() -> Iterator[bytes]:
            nonlocal told
            meter.add(-told)  # of an attempt that failed
            told = 0
            for piece in snapshot.chunks(entry):
                if how.is_over():
                    raise GivenUp(f"{snapshot.name} was not sent to the end.")
                told += len(piece)
                meter.add(len(piece))
                yield piece

        bucket.send(manifest.key(entry), counted, entry.bytes)

    each(send, large_first)


def _absent(bucket: Bucket, manifest: Manifest) -> list[Entry]:
    now = bucket.sizes(f"{manifest.place}/files")
    return [entry for entry in manifest.entries if now.get(manifest.key(entry)) != entry.bytes]


def _check(bucket: Bucket, snapshot: Snapshot, manifest: Manifest) -> None:
    """Every file is there in its full size before anybody can see the item."""
    absent = _absent(bucket, manifest)
    if absent:
        is_here = all(entry.path in snapshot.sources for entry in absent)
        remedy = "push again" if is_here else "it is not here either: push it from where it is, or --delete the item"
        raise RemoteError(
            f"{bucket.at(manifest.key(absent[0]))} is not there in full size ({len(absent)} of {len(manifest.entries)} "
            f"files); nothing was made visible: {remedy}."
        )


def _read_back(bucket: Bucket, snapshot: Snapshot, manifest: Manifest, how: How) -> None:
    """Hashes what is there; what is damaged there is sent once more, and hashed again."""
    bad = _damaged(bucket, manifest, manifest.entries, how)
    own = [entry for entry in bad if entry.path in snapshot.sources]
    _send(bucket, snapshot, manifest, own, how)
    still = [entry for entry in bad if entry.path not in snapshot.sources] + _damaged(bucket, manifest, own, how)
    if still:
        where = bucket.at(manifest.key(still[0]))
        raise RemoteError(f"{where} is damaged there, and cannot be mended from here; push it from where it is whole.")


def _damaged(bucket: Bucket, manifest: Manifest, entries: Sequence[Entry], how: How) -> list[Entry]:
    bad: list[Entry] = []
    meter = Meter(f"reading {manifest.name} back", sum(entry.bytes for entry in entries), how.report)

    def read(entry: Entry) -> None:
        digest = hashlib.sha256()
        with contextlib.suppress(FileNotFoundError):
            for piece in bucket.receive(manifest.key(entry)):
                digest.update(piece)
                meter.add(len(piece))
        if digest.hexdigest() != entry.sha256:
            bad.append(entry)

    each(read, entries)
    return bad


def _write(bucket: Bucket, manifest: Manifest, version: Version | None) -> None:
    """The moment in which the item becomes visible."""
    key, data = f"{manifest.place}/manifest.json", manifest.encoded()
    try:
        bucket.write(key, data, version)
    except Lost as error:
        raise Lost(f"{error} Push again to send yours over it.") from None
    found = bucket.read(key)  # some servers pass over the condition; then the last one to write wins
    if found is None or found[0] != data:
        raise Lost(f"{bucket.at(key)} was replaced by somebody else's push; push again to send yours over it.")


def _remove_unnamed(bucket: Bucket, manifest: Manifest, before: Iterable[str]) -> tuple[int, str]:
    """Files of earlier states; leaving them does no harm, so that a failure is only told."""
    named = {manifest.key(entry) for entry in manifest.entries}
    keys = [key for key in before if key not in named]
    try:
        now = read_manifest(bucket, manifest.kind, manifest.name) if keys else None
        if now is None or now[0].push != manifest.push:
            return 0, ""  # whoever has pushed since cleans up
        bucket.delete(keys)
    except UserError as error:
        return 0, f"{len(keys)} files that nothing names could not be removed: {error}"
    return len(keys), ""
