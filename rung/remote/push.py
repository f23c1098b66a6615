"""Sends an item to a bucket, or removes one from it: whole or not at all.

Files go first, skipping those that are there, and the manifest comes last, by a conditional write: of two who push at
the same time one wins and the other gets an error. A killed push leaves nothing visible, and the next one continues.
Files that the new manifest no longer names are removed last, and only those that were there before this push began:
somebody else's push may have sent the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from rung.errors import UserError
from rung.remote.bucket import Bucket, Meter, RemoteError, Report, Version, WriteConflict, in_parallel
from rung.remote.manifest import FileEntry, Manifest, Piece, check_item, place_of, read_manifest
from rung.remote.snapshot import Snapshot, SourceChanged, lacking, position_of, snapshot_run
from rung.runs.paths import is_known
from rung.runs.query import Run
from rung.runs.record import read_document, utc_now


@dataclass(frozen=True)
class PushResult:
    """What a push did."""

    kind: str
    name: str
    url: str
    num_files: int
    bytes: int
    num_sent: int = 0
    sent_bytes: int = 0
    num_removed: int = 0
    left: str = ""  # what could not be removed
    left_out: tuple[str, ...] = ()  # files in the folder that no run has, and that were not sent


@dataclass(frozen=True)
class PushOptions:
    """Whether to replace what is there, whether to read back, progress callback, and when to give up."""

    is_forced: bool = False
    is_verified: bool = False
    report: Report | None = None
    is_over: Callable[[], bool] = lambda: False


_PLAIN = PushOptions()


class PushCancelled(UserError):
    """A push that was asked to stop."""


def push_run(
    bucket: Bucket, path: Path, checkpoints: str = "kept", without: Sequence[str] = (), options: PushOptions = _PLAIN
) -> PushResult:
    """Sends a run as it is now, also one that is being written; reads again what changes meanwhile."""
    for attempt in range(3):
        with snapshot_run(Run(path, read_document(path)), checkpoints, without) as snapshot:
            try:
                return push(bucket, snapshot, options)
            except SourceChanged:
                if attempt == 2:
                    raise
    raise AssertionError("every attempt ends")


def push(bucket: Bucket, snapshot: Snapshot, options: PushOptions = _PLAIN) -> PushResult:
    """Makes the item in the bucket equal to the snapshot."""
    check_item(snapshot.kind, snapshot.name)
    there: Manifest | None = None
    version: Version | None = None
    try:
        there, version = read_manifest(bucket, snapshot.kind, snapshot.name) or (None, None)
    except RemoteError:
        raw = bucket.read(f"{place_of(snapshot.kind, snapshot.name)}/manifest.json")
        if raw is None or not options.is_forced:
            raise
        version = raw[1]  # of a damaged manifest, which is replaced
    if there is not None and not options.is_forced:
        _refuse(bucket, snapshot, there)

    # All that is sent, and what is there and stays.
    if there is not None and there.uid == snapshot.uid:
        snapshot = snapshot.continuing(there.entries)
    here = {entry.path for entry in snapshot.entries}
    kept = there.entries if there is not None and there.uid == snapshot.uid else ()
    entries = [*snapshot.entries, *(entry for entry in kept if entry.path not in here and _may_stay(snapshot, entry))]
    manifest = Manifest(
        snapshot.kind, snapshot.name, snapshot.uid, tuple(sorted(entries, key=attrgetter("path"))), snapshot.document,
        created=utc_now(), push=uuid.uuid4().hex,
    )  # fmt: skip

    before = bucket.sizes(f"{manifest.place}/files")
    pieces = {piece.key: piece for entry in snapshot.entries for piece in entry.pieces}
    missing = [piece for piece in pieces.values() if before.get(manifest.key(piece)) != piece.bytes]
    done = PushResult(
        snapshot.kind, snapshot.name, bucket.at(manifest.place), len(manifest.entries), manifest.num_bytes,
        left_out=snapshot.left_out,
    )  # fmt: skip
    is_same = there is not None and there.uid == manifest.uid and {*there.entries} == {*manifest.entries}
    if is_same and not missing and not options.is_verified:
        return done
    _send(bucket, snapshot, manifest, missing, options)
    # Every file has to be there in its full size before anybody can see the item.
    if absent := _absent(bucket, manifest):
        is_here = all(entry.path in snapshot.sources for entry in absent)
        remedy = "push again" if is_here else "it is not here either: push it from where it is, or --delete the item"
        raise RemoteError(
            f"{bucket.at(manifest.key(absent[0]))} is missing or incomplete in the bucket, with {len(absent)} of "
            f"{len(manifest.pieces)} files; nothing was made visible: {remedy}.",
            code="item-damaged",
        )
    if options.is_verified:
        _verify(bucket, snapshot, manifest, options)

    # The moment in which the item becomes visible.
    key, data = f"{manifest.place}/manifest.json", manifest.encoded()
    try:
        bucket.write(key, data, version)
    except WriteConflict as error:
        raise WriteConflict(f"{error} Push again to send yours over it.", code="write-conflict") from None
    found = bucket.read(key)  # some servers pass over the condition; then the last one to write wins
    if found is None or found[0] != data:
        message = f"{bucket.at(key)} was replaced by somebody else's push; push again to send yours over it."
        raise WriteConflict(message, code="write-conflict")
    if lost := [entry for entry in _absent(bucket, manifest) if entry.path in snapshot.sources]:
        _send(bucket, snapshot, manifest, lost, options)  # another push cleaned up after itself in that moment

    # Files of earlier states go. Leaving them does no harm, so a failure is only noted.
    named = {manifest.key(piece) for piece in manifest.pieces}
    old, num_removed, left = [key for key in before if key not in named], 0, ""
    try:
        now = read_manifest(bucket, manifest.kind, manifest.name) if old else None
        if now is not None and now[0].push == manifest.push:  # else whoever has pushed since cleans up
            bucket.delete(old)
            num_removed = len(old)
    except UserError as error:
        left = f"{len(old)} files that nothing names could not be removed: {error}"
    num_bytes = sum(piece.bytes for piece in missing)
    return dataclasses.replace(done, num_sent=len(missing), sent_bytes=num_bytes, num_removed=num_removed, left=left)


def delete(bucket: Bucket, kind: str, name: str) -> int:
    """Deletes an item, its manifest first; returns how many files went. A second call finishes a killed one."""
    check_item(kind, name)
    place = place_of(kind, name)
    keys = bucket.sizes(place)
    if not keys:
        message = f"there is no {name} at {bucket.url}; `rung ls --remote {bucket.url}` lists what is."
        raise RemoteError(message, code="no-item")
    manifest = f"{place}/manifest.json"
    bucket.delete([manifest] if manifest in keys else [])
    bucket.delete([key for key in keys if key != manifest])
    return len(keys) - (manifest in keys)


def refuse_another(bucket: Bucket, uid: str, there: Manifest) -> None:
    """Raises RemoteError where another run or data set has this name in the bucket."""
    url = bucket.at(there.place)
    if there.uid != uid and there.kind == "data":
        message = f"{url} is another data set (fingerprint {there.uid}, here {uid}); add --force to replace it."
        raise RemoteError(message, code="data-exists")
    if there.uid != uid:
        raise RemoteError(
            f"{url} is another run; give yours another name with `rung mv {there.name} NAME`, push below another "
            "prefix, or replace that one with --force.",
            code="run-exists",
        )


def _refuse(bucket: Bucket, snapshot: Snapshot, there: Manifest) -> None:
    """Raises RemoteError where a push without --force would replace another run, or a later state by an earlier one."""
    refuse_another(bucket, snapshot.uid, there)
    if there.kind != "run":
        return
    url = bucket.at(there.place)
    (attempts_there, step_there), (attempts, step) = position_of(there.document), position_of(snapshot.document)
    if (attempts_there, step_there) > (attempts, step):
        raise RemoteError(
            f"{url} is later than {snapshot.name} here (attempt {attempts_there}, step {step_there} there; attempt "
            f"{attempts}, step {step} here); `rung pull` it first, or add --force.",
            code="run-newer",
        )
    # What people wrote into the run there, notes or a verdict, and this copy has never seen.
    lines = [e.path for e in there.entries if e.path.endswith(".ndjson") and not snapshot.begins_with(e)]
    fields = lacking(snapshot.document, there.document)
    if lines or fields:
        what = f"lines in {lines[0]}" if lines else f"a {fields[0]}"
        hint = ", notes perhaps" if lines else ""
        raise RemoteError(
            f"{url} has {what} that {snapshot.name} here lacks{hint}; `rung pull` it first, or add --force to give "
            "that up.",
            code="run-newer",
        )


def _send(
    bucket: Bucket, snapshot: Snapshot, manifest: Manifest, pieces: Iterable[Piece], options: PushOptions
) -> None:
    large_first = sorted(pieces, key=lambda piece: -piece.bytes)
    meter = Meter(f"sending {snapshot.name}", sum(piece.bytes for piece in large_first), options.report)

    def send(whole: Piece) -> None:
        num_sent = 0

        def counted() -> Iterator[bytes]:
            nonlocal num_sent
            meter.add(-num_sent)  # of an attempt that failed
            num_sent = 0
            for piece in snapshot.chunks(whole):
                if options.is_over():
                    raise PushCancelled(f"{snapshot.name} was not sent completely.", code="cancelled")
                num_sent += len(piece)
                meter.add(len(piece))
                yield piece

        bucket.send(manifest.key(whole), counted, whole.bytes)

    in_parallel(send, large_first)


def _may_stay(snapshot: Snapshot, entry: FileEntry) -> bool:
    return snapshot.stays(entry) and (snapshot.kind != "run" or is_known(entry.path))


def _absent(bucket: Bucket, manifest: Manifest) -> list[Piece]:
    now = bucket.sizes(f"{manifest.place}/files")
    return [piece for piece in manifest.pieces if now.get(manifest.key(piece)) != piece.bytes]


def _verify(bucket: Bucket, snapshot: Snapshot, manifest: Manifest, options: PushOptions) -> None:
    """Hashes what is in the bucket; sends what is damaged there once more, and hashes that again."""

    def damaged(pieces: Sequence[Piece]) -> list[Piece]:
        bad: list[Piece] = []
        meter = Meter(f"reading {manifest.name} back", sum(piece.bytes for piece in pieces), options.report)

        def read(whole: Piece) -> None:
            digest = hashlib.sha256()
            with contextlib.suppress(FileNotFoundError):
                for piece in bucket.receive(manifest.key(whole)):
                    digest.update(piece)
                    meter.add(len(piece))
            if digest.hexdigest() != whole.sha256:
                bad.append(whole)

        in_parallel(read, pieces)
        return bad

    bad = damaged(manifest.pieces)
    own = [entry for entry in bad if entry.path in snapshot.sources]
    _send(bucket, snapshot, manifest, own, options)
    still = [entry for entry in bad if entry.path not in snapshot.sources] + damaged(own)
    if still:
        raise RemoteError(
            f"{bucket.at(manifest.key(still[0]))} is damaged in the bucket and cannot be repaired from here; push it "
            "from a machine that has it.",
            code="item-damaged",
        )
