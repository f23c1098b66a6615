"""wandb: mirrors a run to it, through its package, and reads its own files, *.wandb, without it.

A mirror lies under <run>/mirror/wandb, offline unless WANDB_MODE says otherwise; `wandb sync` sends it, and sending it
again continues the same run there, because the id is that of the run. Only numbers, the configuration, why, tags and
notes go; no code, no console, no machine statistics. wandb takes only rising steps, so steps that an attempt repeats
are missing and counted (a resume writes a file of its own). It reserves names that begin with "_", so such names are
percent-encoded.

In what is read, media, tables and machine statistics are only counted. wandb's step is the number of the log call,
unless the run named a metric as the step of all others, as the Hugging Face trainer does; then that metric is the step
here too.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rung import parse
from rung.errors import RunError
from rung.runs.files import named, plain, reason
from rung.runs.record import STATUSES
from rung.trackers.history import History, numbers_of, put
from rung.trackers.mirror import display_path
from rung.trackers.protobuf import Malformed, Value, double, fields, message, part, signed, text, zigzag

_ODD = re.compile(r"^[_%]|[\x00-\x1f\x7f]|%(?=[0-9A-Fa-f]{2})")
_WRITE_S = 5.0  # then wandb's own process continues writing
_EMPTY = "%"  # a name that is no text at all
_SETTINGS = {
    "console": "off",
    "silent": True,
    "quiet": True,
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "reinit": "create_new",  # a run of the user's own stays what wandb.run is
    "init_timeout": 60.0,
    "finish_timeout": 8.0,
}
_KEPT = ("id", "uid", "parent", "recipe", "preset", "seed", "command", "created", "derived")  # wandb has no field for

_MAGIC = b":W&B"
_HEAD_BYTES, _BLOCK_BYTES = 7, 1 << 15  # of the file and of a part; of a block
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# The fields of a record that are read.
_READ = _ROW, _SUMMARY, _CONFIG, _STATISTICS, _ALERT, _METRIC, _RUN, _EXIT, _MACHINE = 2, 3, 5, 7, 10, 12, 17, 18, 26


class WandbSink:
    """Feeds a wandb run; see mirror.Sink."""

    name = "wandb"

    def __init__(self, folder: Path, document: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._folder, self._document, self._config = folder, document, config
        self._mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self._project = str((config.get("logging") or {}).get("wandb_project") or document.get("experiment"))
        # The same for a run wherever it lies; a run that has no uid gets one out of its name and its time.
        identity = f"{document.get('id')} {document.get('created')}"
        self._id = str(document.get("uid") or hashlib.sha256(identity.encode()).hexdigest()[:32])
        self._run: Any = None
        self._last_step = -1
        self._notes = str(document.get("why") or "")
        self.num_refused = 0

    def open(self) -> None:
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)  # wandb uses the system's folder for odds and ends otherwise
        known = getattr(wandb.Settings, "model_fields", _SETTINGS)
        about = named({key: self._document.get(key) for key in _KEPT})
        self._run = wandb.init(
            mode=self._mode,
            dir=str(self._folder),
            id=self._id,
            resume="allow",
            project=self._project,
            name=str(self._document.get("id")),
            notes=self._notes or None,
            tags=[str(tag) for tag in self._document.get("tags") or () if 1 <= len(str(tag)) <= 64],
            config={**named(plain(self._config)), "rung": about},
            settings=wandb.Settings(**{key: value for key, value in _SETTINGS.items() if key in known}),
        )

    def row(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        if step < self._last_step:
            self.num_refused += 1
            return
        self._last_step = step
        logged = {to_wandb_name(name): value for name, value in values.items()}
        self._run.log({**logged, "_timestamp": unix_s}, step=step)

    def note(self, step: int | None, unix_s: float, text: str) -> None:
        self._notes = f"{self._notes}\n\n{text}".strip()
        self._run.notes = self._notes

    def flush(self) -> None:
        """wandb writes in its own time."""

    def close(self, status: str) -> None:
        self._run.summary["rung_status"] = status
        file = self._run.settings.sync_file if self._mode == "offline" else None
        self._run.finish(exit_code=0 if status in ("finished", "stopped", "running") else 1)
        give_up = time.monotonic() + _WRITE_S
        while file and not is_ended(Path(file)) and time.monotonic() < give_up:  # finish() does not wait for the file
            time.sleep(0.02)

    def summary_line(self) -> str:
        if self._mode != "offline":
            return f"mirror: wandb, {self._mode}, as {self._project}/{self._id}"
        return f"mirror: wandb sync {shlex.quote(display_path(self._folder / 'wandb'))}/offline-run-*-{self._id}"


def to_wandb_name(name: str) -> str:
    """The name of a metric as wandb takes it; `from_wandb_name` is its inverse."""
    return _ODD.sub(lambda match: f"%{ord(match[0]):02X}", name) if name else _EMPTY


def from_wandb_name(name: str) -> str:
    return "" if name == _EMPTY else unquote(name, errors="backslashreplace")


def find(path: Path) -> list[Path]:
    """The .wandb files at or below a path, each once: wandb also links to the latest."""
    if path.is_file():
        return [path]
    return sorted({file.resolve() for file in path.rglob("*.wandb") if file.is_file()})


def read(path: Path, problems: list[str]) -> Iterator[History]:
    """The runs at or below a path; a file that cannot be read is told in `problems`.

    A run that was resumed has several files and is one run.
    """
    runs: dict[str, list[_File]] = {}
    for found in find(path):
        file = _File(found)
        try:
            file.read()
        except RunError as error:
            problems.append(str(error))
            continue
        runs.setdefault(f"{file.project}/{file.run_id or found.stem.removeprefix('run-')}", []).append(file)
    for id, files in runs.items():
        files.sort(key=lambda file: (file.started or 0.0, str(file.path)))
        last = files[-1]
        history = History("wandb", id, last.path.parent, last.name or last.run_id, last.project)
        for file in files:
            history.notes, history.tags = file.notes or history.notes, file.tags or history.tags
            history.config |= {key: value for key, value in file.config.items() if key not in ("_wandb", "rung")}
            history.summary |= file.summary
            history.environment |= file.environment
            history.command = file.command or history.command
            history.problems += file.problems
            history.remarks += [(None, None, alert) for alert in file.alerts]
            if file.num_statistics:
                history.left_out["machine statistics"] += file.num_statistics
            file.move_rows(history)
        # wandb's own times, unless this is a mirror that was replayed long after its run.
        starts = [file.started for file in files if file.started]
        if starts and (history.started is None or min(starts) <= history.started):
            history.started = min(starts)
            if last.runtime_s and last.started:
                history.ended = max(history.ended or 0.0, last.started + last.runtime_s)
        status = history.summary.get("rung_status")
        if status in STATUSES:
            history.status = str(status)
        elif last.exit_code is None:
            history.status = "crashed"
            history.reason = "the file has no end record: the process was killed, or is still running"
        elif last.exit_code:
            history.status, history.reason = "crashed", f"exit code {last.exit_code}"
        yield history


@dataclass
class _File:
    """One file: first what is said of the run, then, once it is known what its step is, the rows."""

    path: Path
    run_id: str = ""
    project: str = ""
    name: str = ""
    notes: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    alerts: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    started: float | None = None
    exit_code: int | None = None
    runtime_s: int | None = None
    step_metric: str = ""
    num_statistics: int = 0
    problems: list[str] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)

    def read(self) -> None:
        num_malformed = 0
        for record in log_records(self.path, self.problems):
            try:
                for number, value in fields(record):
                    if number in _READ:
                        self._take(number, part(value))
            except ValueError:  # no message, or no JSON in it
                num_malformed += 1
        if num_malformed:
            self.problems.append(f"{self.path}: {num_malformed} records cannot be decoded and are left out")

        # What wandb keeps beside the log: the machine, the command and the packages.
        folder = self.path.parent / "files"
        try:
            about = parse.loose_json(parse.read_bytes(folder / "wandb-metadata.json"))
        except (OSError, ValueError):
            about = {}
        if isinstance(about, dict):
            keys = {"platform": "os", "python": "python", "host": "host"}
            self.environment.update({name: str(about[key]) for name, key in keys.items() if about.get(key)})
            if about.get("program"):
                self.command = [str(about["program"]), *map(str, about.get("args") or [])]
        try:
            lines = parse.read_bytes(folder / "requirements.txt").decode("utf-8", "replace").splitlines()
        except (OSError, ValueError):
            return
        packages = dict(line.strip().split("==", 1) for line in lines if re.fullmatch(r"\s*[\w.-]+==\S+\s*", line))
        if packages:
            self.environment["packages"] = packages

    def _take(self, number: int, record: bytes) -> None:
        """One field of a record of the log."""
        if number == _ROW:
            self.rows.append(record)
            return
        if number == _STATISTICS:
            self.num_statistics += 1
            return
        if number == _SUMMARY:
            for at, value in fields(record):
                if at == 1:
                    put(self.summary, *_item(value))
            return
        if number == _CONFIG:
            for at, value in fields(record):
                keys, item = _item(value)
                if at == 1:
                    put(self.config, keys, item)
                elif at == 2:  # removed
                    tree = self.config
                    for key in keys[:-1]:
                        below = tree.get(key)
                        tree = below if isinstance(below, dict) else {}
                    tree.pop(keys[-1], None)
            return
        got = message(record)
        if number == _RUN:
            for at, name in {1: "run_id", 3: "project", 8: "name", 9: "notes"}.items():
                if at in got:
                    setattr(self, name, text(got[at]))
            self.tags = [text(value) for at, value in fields(record) if at == 10] or self.tags
            if 4 in got:
                self._take(_CONFIG, part(got[4]))
            if 17 in got:
                started = message(got[17])
                self.started = signed(started.get(1, 0)) + signed(started.get(2, 0)) / 1e9
            if 13 in got:
                self.environment.setdefault("host", text(got[13]))
        elif number == _METRIC:
            if 4 in got and text(got.get(2, b"")) == "*":
                self.step_metric = text(got[4])
        elif number == _ALERT:
            self.alerts.append(": ".join(filter(None, [text(got.get(1, b"")), text(got.get(2, b""))])))
        elif number == _EXIT:
            self.exit_code, self.runtime_s = signed(got.get(1, 0)), signed(got.get(2, 0))
        elif number == _MACHINE:
            found = {"platform": got.get(1), "python": got.get(2), "host": got.get(12)}
            self.environment.update({name: text(value) for name, value in found.items() if value is not None})
            if 6 in got:
                self.command = [text(got[6]), *(text(value) for at, value in fields(record) if at == 5)]

    def move_rows(self, history: History) -> None:
        is_own = isinstance(self.config.get("rung"), dict)  # a mirror of ours: names come back as they were
        for record in self.rows:
            tree: dict[str, Any] = {}
            step = None
            try:
                for number, value in fields(record):
                    if number == 1:
                        put(tree, *_item(value))
                    elif number == 2:
                        step = signed(message(value).get(1, 0))
            except ValueError:
                history.problems.append(f"{self.path}: a row cannot be decoded and is left out")
                continue
            unix_s, numbered = tree.pop("_timestamp", None), tree.pop("_step", None)
            tree.pop("_runtime", None)
            values = numbers_of(tree, history.left_out)
            if is_own:
                values = {from_wandb_name(name): value for name, value in values.items()}
            steps = (values.get(self.step_metric) if self.step_metric else None, step, numbered)
            whole = (int(s) for s in steps if isinstance(s, int) or (isinstance(s, float) and s.is_integer()))
            history.add(next(whole, 0), unix_s if isinstance(unix_s, int | float) else None, values)
        self.rows.clear()


def _item(record: Value) -> tuple[list[str], Any]:
    """Key path and value of an item of config, history or summary."""
    key = ""
    nested: list[str] = []
    value: Any = None
    for number, got in fields(record):
        if number == 1:
            key = text(got)
        elif number == 2:
            nested.append(text(got))
        elif number == 4:
            value = bool(got)
        elif number == 5:
            value = zigzag(got)
        elif number == 6:
            value = double(got)
        elif number == 7:
            value = text(got)
        elif number in (8, 16):  # JSON, NaN and Infinity included; most are numbers, which need no parser
            data = part(got)
            try:
                value = int(data) if data.lstrip(b"-").isdigit() else float(data)
            except ValueError:
                value = parse.loose_json(data)
    return nested or [key], value


# The framing of the files: a header of seven bytes, then records in blocks of 32 kB, as in LevelDB. A record is whole,
# or cut at the ends of blocks into a first, middle and last part; each part has its own checksum. So a reader can begin
# at any block, and lose no more than a block to damage. A file without an end is normal for a run that was killed or is
# going: wandb writes with a delay, even for a while after it said that it had finished.


def log_records(path: Path, problems: list[str]) -> Iterator[bytes]:
    """The whole records of a file; a block with a wrong checksum is passed over and told, a torn end is not."""
    try:
        data = parse.read_bytes(path, parse.MOST_DATA_BYTES)
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}.", code="cannot-read") from error
    except parse.ParseError as error:
        raise RunError(f"cannot read {path}: {error}.", code="cannot-read") from error
    if data[:4] != _MAGIC[: len(data)]:
        raise RunError(f"{path} is not a wandb file: it begins with {data[:4]!r}, not {_MAGIC!r}.", code="bad-source")
    for record, at in _parsed(data, _HEAD_BYTES):
        if record is not None:
            yield record
        else:
            problems.append(
                f"{path} is damaged at byte {at}: the rest of its block of {_BLOCK_BYTES} bytes is left out"
            )


def is_ended(path: Path) -> bool:
    """Whether the last blocks of a file say how the run ended."""
    try:
        with parse.open_file(path) as file:
            begin = max(0, os.fstat(file.fileno()).st_size // _BLOCK_BYTES - 1) * _BLOCK_BYTES
            file.seek(begin)
            found = _parsed(file.read(), 0 if begin else _HEAD_BYTES)
        return any(number == _EXIT for record, _ in found for number, _ in fields(record or b""))
    except (OSError, Malformed):
        return False


def _parsed(data: bytes, at: int) -> Iterator[tuple[bytes | None, int]]:
    """Each whole record and where it ends; None and where it is for a damaged part, whose block is passed over."""
    begun: bytes | None = None
    while at + _HEAD_BYTES <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEAD_BYTES:
            at += left
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, at)
        end = at + _HEAD_BYTES + length
        if end > len(data) and length + _HEAD_BYTES <= left:
            return
        is_sound = length + _HEAD_BYTES <= left and _WHOLE <= kind <= _LAST
        if not is_sound or zlib.crc32(data[at + 6 : end]) != crc:
            yield None, at
            at, begun = at + left, None
            continue
        body, at = data[at + _HEAD_BYTES : end], end
        if kind == _WHOLE:
            yield body, at
        elif kind == _FIRST:
            begun = body
        elif begun is not None:  # else the first part was in a damaged block
            begun += body
            if kind == _LAST:
                yield begun, at
                begun = None
