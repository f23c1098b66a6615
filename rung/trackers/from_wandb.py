"""Reads wandb's own files, *.wandb, without wandb: settings, history, notes and how a run ended.

The file is a log of records (wandblog.py), each a protocol buffer. A torn end means that the run was killed or is still
going; a damaged block is skipped with a remark. Media, tables and machine statistics are only counted. wandb's step is
the number of the log call, unless the run named a metric as the step of all others, as the Hugging Face trainer does;
then that metric is the step here too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.runs.record import STATUSES
from rung.trackers.history import History, numbers_of, put
from rung.trackers.protobuf import double, fields, part, signed, text, zigzag
from rung.trackers.wandb import inward
from rung.trackers.wandblog import log_records

_CUT = "the file has no end record: the process was killed, or is still running"


def find(path: Path) -> list[Path]:
    """The .wandb files at or below a path, each once: wandb also links to the latest."""
    if path.is_file():
        return [path]
    return sorted({file.resolve() for file in path.rglob("*.wandb") if file.is_file()})


def read(path: Path, problems: list[str]) -> Iterator[History]:
    """The runs at or below a path; a file that cannot be read is told in `problems`.

    A run that was resumed has several files and is one run.
    """
    pieces: dict[str, list[_Reader]] = {}
    for file in find(path):
        reader = _Reader(file)
        try:
            reader.look()
        except RunError as error:
            problems.append(str(error))
            continue
        pieces.setdefault(f"{reader.project}/{reader.run_id or file.stem.removeprefix('run-')}", []).append(reader)
    for id, readers in pieces.items():
        yield _joined(id, readers)


class _Reader:
    """One file: first what is said of the run, then, once it is known what its step is, the rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = self.project = self.name = self.notes = ""
        self.tags: list[str] = []
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.alerts: list[str] = []
        self.environment: dict[str, Any] = {}
        self.command: list[str] = []
        self.started: float | None = None
        self.exit_code: int | None = None
        self.runtime_s: int | None = None
        self.step_metric = ""
        self.problems: list[str] = []
        self._history: list[bytes] = []
        self.num_statistics = 0

    def look(self) -> None:
        by_number = {
            2: self._history.append, 3: self._see_summary, 5: self._see_config, 7: self._see_statistics,
            10: self._see_alert, 12: self._see_metric, 17: self._see_run, 18: self._see_exit, 26: self._see_machine,
        }  # fmt: skip
        num_malformed = 0
        for record in log_records(self.path, self.problems):
            try:
                for number, value in fields(record):
                    if see := by_number.get(number):
                        see(part(value))
            except ValueError:  # no message, or no JSON in it
                num_malformed += 1
        if num_malformed:
            self.problems.append(f"{self.path}: {num_malformed} records cannot be decoded and are left out")
        self._see_files(self.path.parent / "files")

    def fill(self, history: History) -> None:
        """Puts the rows into a history."""
        is_own = isinstance(self.config.get("rung"), dict)  # a mirror of ours: names come back as they were
        for record in self._history:
            try:
                tree, step = _row(record)
            except ValueError:
                history.problems.append(f"{self.path}: a row cannot be decoded and is left out")
                continue
            unix_s = tree.pop("_timestamp", None)
            numbered = tree.pop("_step", None)
            tree.pop("_runtime", None)
            values = numbers_of(tree, history.left_out)
            if is_own:
                values = {inward(name): value for name, value in values.items()}
            step = _whole(values.get(self.step_metric) if self.step_metric else None, step, numbered)
            history.add(step, unix_s if isinstance(unix_s, int | float) else None, values)
        self._history.clear()

    def _see_run(self, record: bytes) -> None:
        got = {number: value for number, value in fields(record)}
        names = {1: "run_id", 3: "project", 8: "name", 9: "notes"}
        for number, name in names.items():
            if number in got:
                setattr(self, name, text(got[number]))
        self.tags = [text(value) for number, value in fields(record) if number == 10] or self.tags
        if 4 in got:
            self._see_config(part(got[4]))
        if 17 in got:
            time = dict(fields(part(got[17])))
            self.started = signed(time.get(1, 0)) + signed(time.get(2, 0)) / 1e9
        if 13 in got:
            self.environment.setdefault("host", text(got[13]))

    def _see_config(self, record: bytes) -> None:
        for number, value in fields(record):
            keys, item = _item(part(value))
            if number == 1:
                put(self.config, keys, item)
            elif number == 2:
                _take(self.config, keys)

    def _see_summary(self, record: bytes) -> None:
        for number, value in fields(record):
            if number == 1:
                put(self.summary, *_item(part(value)))

    def _see_metric(self, record: bytes) -> None:
        got = dict(fields(record))
        if 4 in got and text(got.get(2, b"")) == "*":
            self.step_metric = text(got[4])

    def _see_statistics(self, record: bytes) -> None:
        self.num_statistics += 1

    def _see_alert(self, record: bytes) -> None:
        got = dict(fields(record))
        self.alerts.append(": ".join(filter(None, [text(got.get(1, b"")), text(got.get(2, b""))])))

    def _see_exit(self, record: bytes) -> None:
        got = dict(fields(record))
        self.exit_code = signed(got.get(1, 0))
        self.runtime_s = signed(got.get(2, 0))

    def _see_machine(self, record: bytes) -> None:
        got = dict(fields(record))
        found = {"platform": got.get(1), "python": got.get(2), "host": got.get(12)}
        self.environment.update({name: text(value) for name, value in found.items() if value is not None})
        if 6 in got:
            self.command = [text(got[6]), *(text(value) for number, value in fields(record) if number == 5)]

    def _see_files(self, folder: Path) -> None:
        """What wandb keeps beside the log: the machine, the command and the packages."""
        try:
            about = json.loads((folder / "wandb-metadata.json").read_bytes())
        except (OSError, ValueError):
            about = {}
        if isinstance(about, dict):
            keys = {"platform": "os", "python": "python", "host": "host"}
            self.environment.update({name: str(about[key]) for name, key in keys.items() if about.get(key)})
            if about.get("program"):
                self.command = [str(about["program"]), *map(str, about.get("args") or [])]
        try:
            lines = (folder / "requirements.txt").read_text("utf-8", "replace").splitlines()
        except OSError:
            return
        packages = dict(line.strip().split("==", 1) for line in lines if re.fullmatch(r"\s*[\w.-]+==\S+\s*", line))
        if packages:
            self.environment["packages"] = packages


def _joined(id: str, readers: list[_Reader]) -> History:
    readers.sort(key=lambda reader: (reader.started or 0.0, str(reader.path)))
    last = readers[-1]
    history = History("wandb", id, last.path.parent, last.name or last.run_id, last.project)
    for reader in readers:
        history.notes, history.tags = reader.notes or history.notes, reader.tags or history.tags
        history.config |= {key: value for key, value in reader.config.items() if key not in ("_wandb", "rung")}
        history.summary |= reader.summary
        history.environment |= reader.environment
        history.command = reader.command or history.command
        history.problems += reader.problems
        history.remarks += [(None, None, alert) for alert in reader.alerts]
        if reader.num_statistics:
            history.left_out["machine statistics"] += reader.num_statistics
        reader.fill(history)
    _see_end(history, readers)
    return history


def _see_end(history: History, readers: list[_Reader]) -> None:
    """wandb's own times, unless this is a mirror that was replayed long after its run."""
    last, starts = readers[-1], [reader.started for reader in readers if reader.started]
    if starts and (history.started is None or min(starts) <= history.started):
        history.started = min(starts)
        if last.runtime_s and last.started:
            history.ended = max(history.ended or 0.0, last.started + last.runtime_s)
    said = history.summary.get("rung_status")
    if said in STATUSES:
        history.status = str(said)
    elif last.exit_code is None:
        history.status, history.reason = "crashed", _CUT
    elif last.exit_code:
        history.status, history.reason = "crashed", f"exit code {last.exit_code}"


def _row(record: bytes) -> tuple[dict[str, Any], int | None]:
    tree: dict[str, Any] = {}
    step = None
    for number, value in fields(record):
        if number == 1:
            put(tree, *_item(part(value)))
        elif number == 2:
            step = signed(dict(fields(part(value))).get(1, 0))
    return tree, step


def _item(record: bytes) -> tuple[list[str], Any]:
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
        elif number in (8, 16):
            value = _json(part(got))
    return nested or [key], value


def _json(data: bytes) -> Any:
    """A JSON value, NaN and Infinity included; most are numbers, which need no parser."""
    try:
        return int(data) if data.lstrip(b"-").isdigit() else float(data)
    except ValueError:
        try:
            return json.loads(data)
        except RecursionError:
            raise ValueError("a value is nested too deep") from None


def _take(tree: dict[str, Any], keys: list[str]) -> None:
    for key in keys[:-1]:
        below = tree.get(key)
        if not isinstance(below, dict):
            return
        tree = below
    tree.pop(keys[-1], None)


def _whole(*candidates: Any) -> int:
    """The first that is a whole number."""
    for each in candidates:
        if isinstance(each, int) or (isinstance(each, float) and each.is_integer()):
            return int(each)
    return 0
