"""Downloads an item: put together in a folder beside its target, every hash checked, then moved there as a whole.

That folder survives a failed or killed pull, and the next one continues with it. Nothing that only the local run has is
lost: files stay, and lines that the remote run lacks are a reason to refuse. A run is known by its uid, so one that was
renamed here is updated under its local name. A uid can be forged: a run here is only updated by one that continues it,
whose lines begin with all lines here and in which nothing that is written once has changed. An update is two renames,
the old folder away and the new one in; after a kill between them the next pull first puts the old one back.

Only files that a run has are downloaded; see paths.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.files import exchange, sha256, sync
from rung.remote.bucket import Bucket, Meter, RemoteError, Report, in_parallel
from rung.remote.manifest import FileEntry, Manifest, check_item, read_manifest
from rung.remote.snapshot import lacking, position_of, step_of, uid_of
from rung.runs.files import locked, write_json, writing
from rung.runs.maintenance.selection import folder_at, refuse_running, state_of
from rung.runs.maintenance.trash import remove
from rung.runs.paths import check, is_known, walk
from rung.runs.paths import remove as remove_below
from rung.runs.process import HEARTBEAT
from rung.runs.query import Run, list_runs
from rung.runs.record import check_name, claimed, former_ids, read_document, reserve_number

_OF_A_STEP = re.compile(r"(?:checkpoints|captures|samples)/([0-9]{1,18})/")
MOST_CHANGES = 5  # of an item, while it is downloaded


@dataclass(frozen=True)
class PullOptions:
    """Which checkpoints to download ("all", "best", "last", "none"), whether to replace local state, and progress."""

    checkpoints: str = "all"
    experiment: str | None = None  # the next free number of this one
    is_forced: bool = False
    report: Report | None = None


_ALL = PullOptions()


@dataclass(frozen=True)
class PullResult:
    """What a pull did."""

    kind: str
    name: str  # as it is called here
    url: str
    path: Path
    num_files: int
    bytes: int
    received_bytes: int
    what: str  # new, updated or unchanged


@dataclass
class Staging:
    """A folder in which an item is put together: `files` becomes the item, `incoming` holds unfinished downloads."""

    files: Path
    incoming: Path
    received_bytes: int = 0


class _ObjectMissing(Exception):
    """A file that a manifest names is not in the bucket."""


def pull_run(
    bucket: Bucket, name: str, root: Path, options: PullOptions = _ALL, known: dict[str, Path] | None = None
) -> PullResult:
    """Downloads a run into a runs folder, under its own number, or as the next one of `options.experiment`.

    To pull many runs, ask `runs_by_uid` once and pass the answer each time; it is kept up to date.
    """
    check_item("run", name)
    if options.experiment is not None:
        check_name(options.experiment)
    manifest = _manifest(bucket, "run", name)
    known = runs_by_uid(root) if known is None else known
    here: Run | None = None  # the local copy of the same run
    if (path := known.get(manifest.uid)) is not None:
        with contextlib.suppress(RunError):  # removed, or damaged, since somebody looked
            found = Run(path, read_document(path))
            here = found if uid_of(found.document) == manifest.uid else None

    other = here if options.experiment is not None else None  # which this one may only claim to be
    if options.experiment is not None:
        here, target = None, root / options.experiment / name.replace("/", "-")
    elif here is not None:
        target = here.path
        _refuse(bucket, manifest, here, options)
    else:
        target = root / name
        check(target)
        if os.path.lexists(target):
            raise RunError(
                f"{target} is another run than {name} in the bucket; pull that one under the next free number with "
                f"`--as {target.parent.name}`, or under another name.",
                code="run-exists",
            )

    with writing(str(target)), _staging_beside(target, manifest.uid) as staging:
        if here is not None and _is_same(target, manifest, options):
            return _result(bucket, manifest, here.id, target, staging, "unchanged")
        manifest = download(bucket, manifest, staging, None if here is None else target, options)
        where = bucket.at(manifest.place)
        try:
            downloaded = Run(staging.files, read_document(staging.files))
        except RunError as error:
            message = f"{where} cannot be used; nothing was downloaded: {error}"
            raise RemoteError(message, code="run-damaged") from error
        if uid_of(downloaded.document) != manifest.uid:
            message = f"{where} is damaged; nothing was downloaded: its run.json is that of another run."
            raise RemoteError(message, code="run-damaged")

        if other is not None and _problem(where, other, staging) is None:
            shutil.rmtree(staging.files)
            staging.files.mkdir()  # empty, so that no trace is left
            message = f"{name} already exists here as {other.id}; pull it without --as to update it."
            raise RunError(message, code="run-exists")
        if here is not None:
            with locked(target):  # whoever resumes it, or writes a verdict, waits, or is seen
                here = Run(target, read_document(target))
                _refuse(bucket, manifest, here, options)  # asked again: the download took a while
                if not options.is_forced and (problem := _problem(where, here, staging)) is not None:
                    raise problem
                _keep_own(target, staging, manifest, options)
                _rename_inside(staging.files, here.id, here.document)
                if not options.is_forced:
                    _swap(target, staging)
            if options.is_forced:
                remove([folder_at(target)], is_forced=True)  # so that it can be restored; asks again whether it runs
                os.rename(staging.files, target)
                sync(target.parent)
            return _result(bucket, manifest, here.id, target, staging, "updated")
        if options.experiment is not None:
            with claimed(root, options.experiment) as target:
                name = f"{options.experiment}/{target.name}"
                _rename_inside(staging.files, name)
                if other is not None:  # two runs must not go by one uid
                    document = read_document(staging.files)
                    document |= {"uid": uuid.uuid4().hex, "copy_of": manifest.uid}
                    write_json(staging.files / "run.json", document)
                os.rename(staging.files, target)
        else:
            _rename_inside(staging.files, name)
            with locked(target.parent):
                if os.path.lexists(target):
                    message = f"{target} was created in the meantime; pull again with `--as {target.parent.name}`."
                    raise RunError(message, code="run-exists")
                os.rename(staging.files, target)
                reserve_number(target.parent, int(target.name))
            sync(target.parent)
        if other is None:
            known[manifest.uid] = target
        return _result(bucket, manifest, name, target, staging, "new")


def pull_data(bucket: Bucket, name: str, target: Path, options: PullOptions = _ALL) -> PullResult:
    """Downloads a data set into a folder; another one that is there is replaced only by force."""
    check_item("data", name)
    manifest = _manifest(bucket, "data", name)
    _finish_swaps(target.parent)
    with writing(str(target)), _staging_beside(target, manifest.uid) as staging:
        is_there = target.exists()
        if is_there and _is_same(target, manifest, options):
            return _result(bucket, manifest, name, target, staging, "unchanged")
        if is_there and not options.is_forced:
            raise RemoteError(
                f"{target} exists and is not the data set of {bucket.at(manifest.place)}; pull it under "
                "another name with --as NAME, or replace it with --force.",
                code="data-exists",
            )
        if is_there and not (target / "manifest.json").is_file():
            message = (
                f"{target} is not a data set of rung and is left alone; pull it under another name with --as NAME."
            )
            raise RemoteError(message, code="folder-exists")
        manifest = download(bucket, manifest, staging, target if is_there else None, options)
        if is_there:
            _swap(target, staging)
        else:
            os.rename(staging.files, target)
            sync(target.parent)
        return _result(bucket, manifest, name, target, staging, "updated" if is_there else "new")


def runs_by_uid(root: Path) -> dict[str, Path]:
    """uid -> folder of each run of a runs folder; finishes an update that was killed first."""
    for folder in root.iterdir() if root.is_dir() else ():
        _finish_swaps(folder)
    return {uid_of(run.document): run.path for run in list_runs(root, problems=[])}


def download(bucket: Bucket, manifest: Manifest, staging: Staging, here: Path | None, options: PullOptions) -> Manifest:
    """Fills the staging folder with every wanted file; returns the manifest of what it then holds.

    Files that the local item already has are not downloaded. Where files have gone from the bucket because somebody
    pushed in the meantime, the newer manifest is followed.
    """
    for _ in range(MOST_CHANGES):
        entries = _wanted(manifest, options.checkpoints)
        # What an earlier, killed pull left and nobody wants any more goes.
        wanted = {entry.path for entry in entries}
        for place, _, names in os.walk(staging.files, topdown=False):
            for file in (Path(place, name) for name in names):
                if file.relative_to(staging.files).as_posix() not in wanted:
                    file.unlink()
            if place != str(staging.files):
                with contextlib.suppress(OSError):
                    os.rmdir(place)
        meter = Meter(f"downloading {manifest.name}", sum(entry.bytes for entry in entries), options.report)
        fetch = functools.partial(_fetch, bucket, manifest, staging, here, meter)
        try:
            in_parallel(fetch, sorted(entries, key=lambda entry: -entry.bytes))
            return replace(manifest, entries=tuple(entries))
        except _ObjectMissing as gone:
            now = _manifest(bucket, manifest.kind, manifest.name)
            if now.push == manifest.push:
                message = f"{gone} is missing; nothing was downloaded. Push the item again."
                raise RemoteError(message, code="item-damaged") from None
            if now.uid != manifest.uid:
                message = f"{bucket.at(manifest.place)} was replaced by another item; pull again."
                raise RemoteError(message, code="item-changed") from None
            manifest = now
    message = f"{bucket.at(manifest.place)} changes faster than it can be downloaded; pull it later."
    raise RemoteError(message, code="item-changed")


def _fetch(
    bucket: Bucket, manifest: Manifest, staging: Staging, here: Path | None, meter: Meter, entry: FileEntry
) -> None:
    """Gets one file: it may be in the staging folder or in the local item already; else it is downloaded."""
    final = staging.files / entry.path
    if _is_whole(final, entry):
        meter.add(entry.bytes)
        return
    beside = staging.incoming / hashlib.sha256(entry.path.encode()).hexdigest()[:32]
    if here is not None and _is_whole(here / entry.path, entry):
        _link(here / entry.path, beside)
        meter.add(entry.bytes)
    else:
        digest, where, size = hashlib.sha256(), bucket.at(manifest.key(entry.pieces[0])), 0
        with beside.open("wb") as file:
            try:
                for piece in itertools.chain.from_iterable(bucket.receive(manifest.key(one)) for one in entry.pieces):
                    file.write(piece)
                    digest.update(piece)
                    size += len(piece)
                    meter.add(len(piece))
                    if size > entry.bytes:  # it cannot be the one, and may be as large as the disk
                        break
            except FileNotFoundError:
                raise _ObjectMissing(where) from None
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != entry.sha256:
            beside.unlink()
            raise RemoteError(
                f"{where} is damaged: it has hash {digest.hexdigest()[:8]}.. and {size} bytes, the manifest says "
                f"{entry.sha256[:8]}.. and {entry.bytes}; nothing was downloaded: push it again with --verify.",
                code="item-damaged",
            )
        staging.received_bytes += entry.bytes
    final.parent.mkdir(parents=True, exist_ok=True)
    os.replace(beside, final)


@contextlib.contextmanager
def _staging_beside(target: Path, uid: str) -> Iterator[Staging]:
    """A staging folder beside the target, for one pull at a time; after a failure the next pull continues with it."""
    made = [folder for folder in target.parents if not folder.exists()]
    # Named as all that is half written, so that `rung gc` clears one that nobody continues with.
    folder = target.with_name(f".pull-{target.name}-{hashlib.sha256(uid.encode()).hexdigest()[:8]}.0.part")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{target} is being pulled by another process; wait for it.", code="in-use") from None
        except OSError:
            pass  # a disk without locks
        staging = Staging(folder / "files", folder / "incoming")
        try:  # nobody but a pull has written here, unless the folder came from elsewhere with what lies around it
            for _ in walk(folder):
                pass
        except RunError:
            for place in (staging.files, staging.incoming):
                if os.path.lexists(place):
                    remove_below(folder, place.name)
        staging.files.mkdir(exist_ok=True)
        shutil.rmtree(staging.incoming, ignore_errors=True)
        staging.incoming.mkdir()
        try:
            yield staging
        except BaseException:
            shutil.rmtree(staging.incoming, ignore_errors=True)
            if staging.files.is_dir() and not any(staging.files.iterdir()):  # leave no trace
                shutil.rmtree(folder, ignore_errors=True)
                for empty in made:
                    with contextlib.suppress(OSError):
                        empty.rmdir()
            raise
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _refuse(bucket: Bucket, manifest: Manifest, here: Run, options: PullOptions) -> None:
    """Raises RunError for a run that is running here, or is later than the one in the bucket."""
    if (here.path / HEARTBEAT).exists():  # else it is a copy, of a run that may be running elsewhere
        refuse_running(state_of(folder_at(here.path)), "pull", options.is_forced)
    mine = {"segments": len(here.document.get("segments") or []), "step": here.step}
    if position_of(mine) > position_of(manifest.document) and not options.is_forced:
        raise RunError(
            f"{here.id} here is later than {bucket.at(manifest.place)} (step {mine['step']} here, "
            f"{manifest.document.get('step')} there); `rung push` it, or add --force to take the one there.",
            code="run-newer",
        )


def _keep_own(target: Path, staging: Staging, manifest: Manifest, options: PullOptions) -> None:
    """Keeps what only the local run has: its own checkpoints, pages, mirrors."""
    named = {entry.path for entry in manifest.entries}
    branched = _branched(read_document(target), read_document(staging.files))
    for path in walk(target, "", lambda name: not name.endswith(".tmp")):
        step = step_of(path)
        # A resume must not take saves of another future for its own.
        is_aside = branched is not None and step is not None and step > branched
        if path in named and not (is_aside and not _is_equal(target / path, staging.files / path)):
            continue
        if path not in (HEARTBEAT, "run.json", ".config.json"):
            copy = staging.files / (path.replace("/", "/aside-pulled/", 1) if is_aside else path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _link(target / path, copy)


def _branched(here: Mapping[str, Any], there: Mapping[str, Any]) -> int | None:
    """The first step that the run there took again, in attempts that are not known here."""
    mine, theirs = (document.get("segments") or [] for document in (here, there))
    firsts = [part.get("first_step") for part in theirs[len(mine) :] if isinstance(part, dict)]
    return min((first for first in firsts if isinstance(first, int)), default=None)


def _problem(where: str, here: Run, staging: Staging) -> RunError | None:
    """Why what was downloaded does not continue the run here, though it has its uid; None where it does."""
    target, new = here.path, staging.files
    mine, theirs = read_document(target), read_document(new)

    # Lines: those here are the first of those there.
    has_more = False
    for path in walk(target):
        if not path.endswith(".ndjson") or (path.startswith("tables/") and not (new / path).exists()):
            continue  # a push may leave tables out
        lines = (line for line in (target / path).open("rb") if line.endswith(b"\n"))  # a torn last line does not count
        is_prefix = (new / path).is_file()
        if is_prefix:
            with (new / path).open("rb") as file:
                is_prefix = all(file.readline() == line for line in lines)
                has_more = has_more or (is_prefix and bool(file.readline()))
        if not is_prefix:
            return RunError(
                f"{target / path} has lines that {where} lacks, notes perhaps; `rung push` them, pull that one with "
                "--as EXPERIMENT, or add --force, which puts the run here into the trash.",
                code="run-newer",
            )
    has_more = has_more or any(not (target / path).exists() for path in walk(new, "metrics"))

    # What is written once, or by people, who leave a line. An own loop gives its config and its data as it goes.
    parts = [[part for part in document.get("segments") or [] if isinstance(part, dict)] for document in (mine, theirs)]
    once = [[(part.get("number"), part.get("started"), part.get("command")) for part in found] for found in parts]
    wrong = [name for name in ("created", "seed", "recipe") if mine.get(name) != theirs.get(name)]
    if once[1][: len(once[0])] != once[0]:
        wrong.append("its attempts")
    if not has_more:
        if mine.get("status") not in ("running", theirs.get("status")):
            wrong.append("status")
        if mine.get("verdict") and theirs.get("verdict") and mine["verdict"] != theirs["verdict"]:
            wrong.append("verdict")
        best = theirs.get("best")
        if best != mine.get("best"):
            known = [(row["step"], row["set"], row.get("loss")) for row in Run(new, theirs).evals()]
            if not isinstance(best, dict) or tuple(best.get(key) for key in ("step", "set", "loss")) not in known:
                wrong.append("best")
    files = ["init.json", "env.json", "code.tar.gz"]
    if mine.get("recipe") != "own loop":
        files += ["config.yaml", "config.sources.json", "data.json", "definitions.json"]
    branched = _branched(mine, theirs)
    for path in walk(target):
        match = _OF_A_STEP.match(path)
        is_once = path in files or (match and (branched is None or int(match[1]) <= branched))
        if is_once and (new / path).exists() and not _is_equal(target / path, new / path):
            wrong.append(path)
    if not wrong:
        return None
    return RunError(
        f"{where} says that it is {here.id}, but does not continue it: {', '.join(wrong[:3])} differs; pull it as "
        f"another run with --as EXPERIMENT, or add --force, which puts {here.id} into the trash.",
        code="run-differs",
    )


def _is_equal(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    return one.samefile(other) or sha256(one) == sha256(other)


def _rename_inside(folder: Path, new: str, here: Mapping[str, Any] | None = None) -> None:
    """Writes the local name of a run into its run.json, the name it had, and what only people here wrote."""
    document = read_document(folder)
    old, mine, (experiment, _, number) = str(document["id"]), here or {}, new.partition("/")
    changed = {name: mine[name] for name in lacking(document, mine)}
    if old != new:
        known = [name for name in dict.fromkeys([*former_ids(document), *former_ids(mine), old]) if name != new]
        changed |= {"id": new, "experiment": experiment, "number": int(number), "formerly": known}
    if changed:
        write_json(folder / "run.json", {**document, **changed})


def _swap(target: Path, staging: Staging) -> None:
    """Moves the old item away and the new one in, under the lock of their folder; in one moment where the disk can."""
    old = target.with_name(f".pull-{target.name}.old")  # not a name that `rung gc` clears
    with locked(target.parent):
        if exchange(staging.files, target):
            sync(target.parent)
            shutil.rmtree(staging.files, ignore_errors=True)
            return
        os.rename(target, old)
        try:
            os.rename(staging.files, target)
        except BaseException:
            os.rename(old, target)
            raise
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def _finish_swaps(folder: Path) -> None:
    """After a kill inside `_swap`: the old item returns where there is no new one, and goes where there is."""
    for old in folder.glob(".pull-*.old"):
        target = folder / old.name.removeprefix(".pull-").removesuffix(".old")
        with locked(folder):
            if old.exists() and not target.exists():
                os.rename(old, target)
            shutil.rmtree(old, ignore_errors=True)


def _manifest(bucket: Bucket, kind: str, name: str) -> Manifest:
    found = read_manifest(bucket, kind, name)
    if found is None:
        message = f"there is no {kind} {name} at {bucket.url}; `rung ls --remote {bucket.url}` lists what is."
        raise RemoteError(message, code="no-item")
    for entry in found[0].entries:
        is_hidden = any(part.startswith(".") for part in entry.path.split("/"))
        if is_hidden or (kind == "run" and not is_known(entry.path)):
            raise RemoteError(
                f"{bucket.at(found[0].place)} has the file {entry.path!r}, which no {kind} has; nothing was "
                "downloaded: have it pushed again with this version of rung, which leaves that out.",
                code="foreign-file",
            )
    return found[0]


def _wanted(manifest: Manifest, checkpoints: str) -> list[FileEntry]:
    """The files to download: all but those of checkpoints that were not chosen."""
    marks = manifest.document.get("checkpoints")
    best = marks.get("best") if isinstance(marks, dict) else None
    steps = sorted({step for entry in manifest.entries if (step := step_of(entry.path)) is not None})
    chosen = {"all": steps, "none": [], "last": steps[-1:], "best": [step for step in steps if step == best]}
    return [e for e in manifest.entries if (step := step_of(e.path)) is None or step in chosen[checkpoints]]


def _is_same(target: Path, manifest: Manifest, options: PullOptions) -> bool:
    """Whether everything that would be downloaded is already here."""
    return all(_is_whole(target / entry.path, entry) for entry in _wanted(manifest, options.checkpoints))


def _is_whole(file: Path, entry: FileEntry) -> bool:
    try:
        return file.is_file() and file.stat().st_size == entry.bytes and sha256(file) == entry.sha256
    except OSError:
        return False


def _link(file: Path, copy: Path) -> None:
    """Hard-links a file that nobody writes to; copies a file of lines, to which a resume appends."""
    copy.unlink(missing_ok=True)
    if file.suffix != ".ndjson":
        with contextlib.suppress(OSError):  # a disk that knows no links
            os.link(file, copy)
            return
    shutil.copyfile(file, copy)


def _result(bucket: Bucket, manifest: Manifest, name: str, path: Path, staging: Staging, what: str) -> PullResult:
    url, entries = bucket.at(manifest.place), manifest.entries
    return PullResult(manifest.kind, name, url, path, len(entries), manifest.num_bytes, staging.received_bytes, what)
