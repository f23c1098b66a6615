"""What of a run or a data set is sent, as of one moment; also of a run that is being written.

Files of a run are hard-linked (else copied) into a folder of ours before they are read, so that the rotation of
checkpoints, or a file that is replaced, cannot pull them away. Files of lines end with their last whole line, and a
checkpoint is taken by its own manifest, whole or not at all. Hashes from that manifest are checked as bytes are sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.files import sha256
from rung.remote.bucket import RemoteError
from rung.remote.manifest import FileEntry, Piece
from rung.runs.files import read_json, reason
from rung.runs.marks import BEST, PINNED, read_mark, save_folder, saved_steps
from rung.runs.metrics import last_row_of
from rung.runs.paths import inside, is_known, walk
from rung.runs.process import HEARTBEAT
from rung.runs.query import Run
from rung.runs.record import named_by_folder

CHECKPOINTS = ("kept", "best", "last", "all", "none")  # kept: the best, the last and those that are pinned
_CHUNK = 1 << 20
_LEAST_BYTES = 64 << 10  # a file of lines is sent whole up to here
_MOST_PIECES = 64  # of one file; then it is sent whole once more
_SAVE = re.compile(r"checkpoints/([0-9]{1,18})/.")
_ROWS = re.compile(r"metrics/([0-9]{1,18})\.ndjson")
_WRITTEN = ("verdict", "tags", "why")  # by people, at any time
_SHOWN = ("experiment", "number", "recipe", "preset", "parent", "why", "verdict", "tags", "seed", "created", "ended")


class SourceChanged(RemoteError):
    """A file is no longer what it was when its hash was taken."""


@dataclass(frozen=True)
class Snapshot:
    """An item as it will be listed, and where the bytes of each file are."""

    kind: str
    name: str
    uid: str
    entries: tuple[FileEntry, ...]
    sources: Mapping[str, Path]
    document: Mapping[str, Any] = field(default_factory=dict)
    # Which files that are there already, and not in this snapshot, stay.
    stays: Callable[[FileEntry], bool] = lambda entry: False
    left_out: tuple[str, ...] = ()  # files of the folder that no run has

    def continuing(self, there: Sequence[FileEntry]) -> Snapshot:
        """The same, with files of lines that have grown in the pieces that are there and one of what came since."""
        known = {entry.path: entry for entry in there}
        return replace(self, entries=tuple(self._continued(entry, known.get(entry.path)) for entry in self.entries))

    def _continued(self, entry: FileEntry, there: FileEntry | None) -> FileEntry:
        if there is None or entry == there:
            return there or entry
        is_longer = entry.path.endswith(".ndjson") and _LEAST_BYTES < there.bytes < entry.bytes
        if not is_longer or len(there.pieces) >= _MOST_PIECES or not self.begins_with(there):
            return entry
        parts = [(piece.bytes, piece.sha256) for piece in there.pieces]
        num_new = entry.bytes - there.bytes
        parts.append((num_new, _hash(self.sources[entry.path], num_new, there.bytes)))
        return replace(entry, parts=tuple(parts))

    def chunks(self, entry: Piece) -> Iterator[bytes]:
        """Yields the bytes of a piece; raises SourceChanged before the end if they are not those of its hash."""
        digest, left = hashlib.sha256(), entry.bytes
        try:
            for piece in _chunks(self.sources[entry.path], entry.start, left):
                digest.update(piece)
                left -= len(piece)
                if not left and digest.hexdigest() != entry.sha256:
                    break
                yield piece
        except OSError as error:
            message = f"{entry.path} of {self.name} cannot be read: {reason(error)}; push it again."
            raise SourceChanged(message, code="file-changed") from error
        if left or digest.hexdigest() != entry.sha256:
            raise SourceChanged(
                f"{entry.path} of {self.name} is not what its hash says: it is damaged, or was changed while it was "
                "sent; fix it, or push again.",
                code="file-changed",
            )

    def begins_with(self, entry: FileEntry) -> bool:
        """Whether a file of lines continues this earlier state of it; also true where the file is not here."""
        source = self.sources.get(entry.path)
        return source is None or entry in self.entries or _hash(source, entry.bytes) == entry.sha256


def snapshot_data(name: str, path: Path, fingerprint: str, manifest: Mapping[str, Any]) -> Snapshot:
    """A prepared data set: the files that its own manifest names."""
    entries = [FileEntry(file, int(spec["bytes"]), str(spec["sha256"])) for file, spec in manifest["files"].items()]
    own = path / "manifest.json"
    entries.append(FileEntry(own.name, own.stat().st_size, sha256(own)))
    info = manifest.get("info") or {}
    document = {"kind": manifest.get("kind"), "records": manifest.get("records"), "summary": info.get("summary")}
    sources = {entry.path: inside(path, entry.path) for entry in entries}
    return Snapshot("data", name, fingerprint, tuple(entries), sources, document)


@contextlib.contextmanager
def snapshot_run(run: Run, checkpoints: str = "kept", without: Sequence[str] = ()) -> Iterator[Snapshot]:
    """A run as it is now. `checkpoints` is one of CHECKPOINTS, `without` names folders of the run to leave out."""
    folder = run.path / "checkpoints"
    with _stage(run.path) as stage:
        try:
            found = _Files(run.path, stage)
            found.add("run.json")  # first: where it says that the run has ended, all rows and events are written
            saved = saved_steps(folder)
            best = read_mark(folder, BEST)[:1]
            marked = set(best if checkpoints in ("kept", "best") else [])
            marked |= set(read_mark(folder, PINNED) if checkpoints == "kept" else [])
            wanted = {*marked, *(saved[-1:] if checkpoints in ("kept", "last") else [])}
            steps = [step for step in saved if (checkpoints == "all" or step in wanted) and found.save(step)]
            if checkpoints == "all":
                found.below("checkpoints", lambda path: path.startswith("checkpoints/aside-"))
            skipped = {"run.json", "checkpoints", *without}
            found.below("", lambda path: path.split("/")[0] not in skipped)
            for mark in (BEST, PINNED):
                found.add(f"checkpoints/{mark}")

            # What a listing shows, out of the run.json that is sent.
            if "run.json" not in found.sources:
                raise RunError(f"{run.path} has no run.json any more; was it removed?", code="no-run")
            recorded = named_by_folder(read_json(found.sources["run.json"]), run.path)
            now, step = Run(run.path, recorded), recorded.get("last_step")
            if recorded.get("status") == "running" and (logged := found.last_step()) is not None:
                step = logged
            document = {
                "id": now.id,
                "status": now.status,
                "step": step,
                "best": now.best,
                **{name: recorded.get(name) for name in _SHOWN},
                "segments": len(recorded.get("segments") or []),
                "checkpoints": {"steps": steps, "best": best[0] if best else None},
            }
            here = saved_steps(folder)
            aside = {int(path.name) for path in folder.glob("aside-*/*") if path.name.isdecimal()}
        except OSError as error:
            message = f"{run.id} cannot be sent: {error.filename or run.path}: {reason(error)}."
            raise RunError(message, code="cannot-read") from error

        def stays(entry: FileEntry) -> bool:
            """A checkpoint that is not here stays if this run still names it, or has no later one: it was not rotated
            away but never downloaded. One that a resume set aside goes."""
            step = step_of(entry.path)
            if step is None:
                return entry.path.split("/")[0] in without
            if step in steps or step in aside:
                return False
            is_later = not here or step > here[-1]
            return checkpoints == "none" or (step not in here and (checkpoints == "all" or step in marked or is_later))

        yield Snapshot("run", run.id, uid_of(run.document), tuple(found.entries), found.sources, document, stays,
                       tuple(found.left_out))  # fmt: skip


def uid_of(document: Mapping[str, Any]) -> str:
    """What a run is, wherever it lies; runs of other trackers have no uid, and go by their start."""
    return str(document.get("uid") or document.get("created") or "")


def position_of(document: Mapping[str, Any]) -> tuple[int, int]:
    """How far a run has come: its attempts, then its last step. Of two copies of a run, the larger is the later."""
    segments, step = document.get("segments"), document.get("step")
    return (segments if isinstance(segments, int) else 0, step if isinstance(step, int) else -1)


def lacking(document: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Fields that people filled in in the run.json of another copy and not in this one. Of two values that differ,
    nobody knows which is the later."""
    return [name for name in _WRITTEN if other.get(name) and not document.get(name)]


def step_of(path: str) -> int | None:
    """The step of the checkpoint that a file of a run belongs to; None for any other file."""
    match = _SAVE.match(path)
    return int(match[1]) if match else None


class _Files:
    """Collects files of a run: links them into the stage, and notes size and hash."""

    def __init__(self, path: Path, stage: Path | None) -> None:
        self.path, self.stage, self._numbers = path, stage, itertools.count()
        self.entries: list[FileEntry] = []
        self.sources: dict[str, Path] = {}
        self.left_out: list[str] = []  # what no run has, and no pull would take

    def save(self, step: int) -> bool:
        """Adds a checkpoint, as its manifest lists it; False if it has been removed meanwhile."""
        folder = save_folder(self.path / "checkpoints", step)
        name = f"checkpoints/{folder.name}"
        before = len(self.entries)
        try:
            self._take(f"{name}/manifest.json")
            files = read_json(self.sources[f"{name}/manifest.json"])["files"]
            for file, spec in files.items():
                self._take(f"{name}/{file}", int(spec["bytes"]), str(spec["sha256"]))
        except FileNotFoundError:
            for entry in self.entries[before:]:
                del self.sources[entry.path]
            del self.entries[before:]
            return False
        except (ValueError, KeyError, TypeError, AttributeError):
            message = (
                f"{folder} is damaged: its manifest.json cannot be read; push with --checkpoints none, or remove it."
            )
            raise RunError(message, code="checkpoint-damaged") from None
        return True

    def below(self, top: str, is_wanted: Callable[[str], bool]) -> None:
        """Adds every file below a folder of the run, except derived and unfinished ones and the heartbeat."""
        for path in sorted(walk(self.path, top, lambda name: not name.startswith("."))):
            if not is_wanted(path) or path == HEARTBEAT or path.startswith("metrics/columns/"):
                continue
            if not is_known(path):
                self.left_out.append(path)
                continue
            self.add(path)

    def add(self, path: str) -> None:
        """Adds a file, unless it has been removed."""
        try:
            path.encode()
        except UnicodeEncodeError:
            shown = path.encode("utf-8", "backslashreplace").decode()
            message = f"{self.path}/{shown} cannot be sent: its name is not UTF-8; rename it."
            raise RunError(message, code="bad-name") from None
        with contextlib.suppress(FileNotFoundError):
            self._take(path)

    def last_step(self) -> int | None:
        """The last step in the rows that are sent; the run may have logged more by now."""
        parts = {int(match[1]): entry for entry in self.entries if (match := _ROWS.fullmatch(entry.path))}
        for _, entry in sorted(parts.items(), reverse=True):
            if row := last_row_of(self.sources[entry.path], entry.bytes, _CHUNK):
                return int(row["step"])
        return None

    def _take(self, path: str, num_bytes: int | None = None, digest: str | None = None) -> None:
        """Links the file as it is now into the stage, and lists it with its size and hash."""
        source = inside(self.path, path)
        if not source.is_file():  # gone, or a pipe, which nobody would ever have read to its end
            raise FileNotFoundError(path)
        if self.stage is not None:
            held = self.stage / str(next(self._numbers))
            try:
                os.link(os.path.realpath(source), held)
            except FileNotFoundError:
                raise
            except OSError:  # another disk, or one that knows no links
                shutil.copyfile(source, held)
            source = held
        if num_bytes is None:
            num_bytes = _whole_lines(source) if path.endswith(".ndjson") else source.stat().st_size
        self.entries.append(FileEntry(path, num_bytes, digest or _hash(source, num_bytes)))
        self.sources[path] = source


@contextlib.contextmanager
def _stage(path: Path) -> Iterator[Path | None]:
    """A temporary folder for hard links, on the run's own disk; None where it cannot be created."""
    stage = path / f".push-{os.urandom(4).hex()}.{os.getpid()}.tmp"  # as all that is half written: `rung gc` knows it
    try:
        stage.mkdir()
    except OSError:
        yield None
        return
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _whole_lines(file: Path) -> int:
    """How many bytes the file has up to its last newline."""
    with file.open("rb") as handle:
        end = handle.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _CHUNK)
            handle.seek(start)
            found = handle.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _chunks(file: Path, start: int, num_bytes: int) -> Iterator[bytes]:
    with file.open("rb") as handle:
        handle.seek(start)
        while num_bytes and (piece := handle.read(min(_CHUNK, num_bytes))):
            num_bytes -= len(piece)
            yield piece


def _hash(file: Path, num_bytes: int, start: int = 0) -> str:
    digest = hashlib.sha256()
    for piece in _chunks(file, start, num_bytes):
        digest.update(piece)
    return digest.hexdigest()
