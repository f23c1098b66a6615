"""Reads TensorBoard's event files without TensorBoard: scalars, the configuration under HPARAMS, and times.

A folder with event files is a run, and its later files continue the earlier ones, as in TensorBoard. Subfolders named
train, val, validation and the like are parts of the run above them, as Keras and others write them; their names prefix
their scalars. Scalars are read in the old form (simple_value) and the new one (a tensor of one element). A torn last
record is ignored; a damaged one ends its file with a remark. Images, audio, histograms, graphs and texts are only
counted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.runs.metricnames import SETS
from rung.trackers.history import History, put
from rung.trackers.protobuf import Malformed, double, fields, part, signed, single, text
from rung.trackers.tfrecord import Damaged, records

_PARTS = {"train", "training", *SETS}
_END = "TensorBoard does not say how a run ended"
# dtype -> struct format of an element in tensor_content, and the field that holds elements one by one
_NUMBERS = {1: ("<f", 5), 2: ("<d", 6), 3: ("<i", 7), 9: ("<q", 10), 10: ("<?", 11), 19: ("<e", 13)}
_OLD_KINDS = {4: "image", 5: "histogram", 6: "audio"}  # fields of Summary.Value before there were plugins
_STATUSES = {1: "finished", 2: "crashed"}


def find(path: Path) -> dict[Path, list[Path]]:
    """Folder of each run at or below a path -> its event files, in the order in which they were begun."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*tfevents*") if file.is_file())
    runs: dict[Path, list[Path]] = {}
    for file in files:
        folder = file.parent
        if folder != path and not path.is_file() and folder.name.lower() in _PARTS:
            folder = folder.parent
        runs.setdefault(folder, []).append(file)
    return runs


def read(path: Path, problems: list[str]) -> Iterator[History]:
    """The runs at or below a path; a file that cannot be read is told in `problems`."""
    base = path.parent if path.is_file() else path
    for folder, files in find(path).items():
        name = folder.relative_to(base).as_posix()
        history = History("tensorboard", _id(files[0]), folder, base.resolve().name if name == "." else name)
        history.group, history.reason = base.resolve().name, _END
        unread = 0
        for file in files:
            try:
                _Reader(file, file.parent.name if file.parent != folder else "", history).fill()
            except RunError as error:
                problems.append(str(error))
                unread += 1
        if unread < len(files):
            yield history


def _id(file: Path) -> str:
    """Event files have no id; their names hold a time, a host and a process, and the first record another time."""
    try:
        first = next(records(file), b"")
    except (Damaged, OSError):
        first = b""
    return hashlib.sha256(file.name.encode("utf-8", "surrogateescape") + first).hexdigest()[:16]


class _Reader:
    """One event file into a history."""

    def __init__(self, path: Path, before: str, history: History) -> None:
        self._path, self._before, self._history = path, before, history
        self._plugins: dict[str, str] = {}  # named only by the first value of a tag

    def fill(self) -> None:
        is_event_file = False
        try:
            for record in records(self._path):
                self._event(record)
                is_event_file = True
        except Damaged as error:
            if not is_event_file:
                raise RunError(
                    f"{self._path} is not an event file of TensorBoard, or is damaged: {error}.", code="source-damaged"
                ) from error
            self._history.problems.append(f"{error}; what follows it is left out")
        except Malformed as error:
            self._history.problems.append(f"{self._path}: a record cannot be decoded ({error}); the rest is left out")
        except OSError as error:
            raise RunError(
                f"cannot read {self._path}: {(error.strerror or str(error)).lower()}.", code="cannot-read"
            ) from error

    def _event(self, record: bytes) -> None:
        got = dict(fields(record))
        unix_s, step = double(got[1]) if 1 in got else None, signed(got.get(2, 0))
        if 4 in got or 9 in got:
            self._history.left_out["graph"] += 1
        values: dict[str, float] = {}
        for number, value in fields(part(got.get(5, b""))):
            if number == 1:
                self._value(part(value), values)
        self._history.add(step, unix_s, values)

    def _value(self, record: bytes, values: dict[str, float]) -> None:
        got = dict(fields(record))
        tag = text(got.get(1, b""))
        if 9 in got:
            self._metadata(tag, part(got[9]))
        plugin = self._plugins.get(tag, "")
        if 2 in got:
            values[self._name(tag)] = single(got[2])
        elif plugin == "hparams":
            pass
        elif 8 in got and plugin in ("", "scalars"):
            number = _element(part(got[8]))
            if number is None:
                self._history.left_out["tensor"] += 1
            else:
                values[self._name(tag)] = number
        else:
            kind = plugin or next((word for field, word in _OLD_KINDS.items() if field in got), "other")
            self._history.left_out[{"images": "image", "histograms": "histogram"}.get(kind, kind)] += 1

    def _name(self, tag: str) -> str:
        # TF1 wrote "loss_1" for a second one of a name; that is the user's to tell apart.
        if not self._before or tag.lower().startswith(f"{self._before.lower()}/"):
            return tag
        return f"{self._before}/{tag}"

    def _metadata(self, tag: str, record: bytes) -> None:
        plugin = dict(fields(part(dict(fields(record)).get(1, b""))))
        name = self._plugins[tag] = text(plugin.get(1, b""))
        if name != "hparams":
            return
        content = dict(fields(part(plugin.get(2, b""))))
        if 3 in content:
            for key, value in _hparams(part(content[3])).items():
                put(self._history.config, key.split("."), value)
        if 4 in content:
            status = _STATUSES.get(signed(dict(fields(part(content[4]))).get(1, 0)))
            if status is not None:
                self._history.status, self._history.reason = status, "" if status == "finished" else "so it says itself"


def _element(tensor: bytes) -> float | int | None:
    """The number in a tensor of one element; None where it has more, none, or text."""
    got: dict[int, Any] = {}
    for number, value in fields(tensor):
        got[number] = value
        if number == 2 and any(
            signed(dict(fields(part(dim))).get(1, 0)) != 1 for n, dim in fields(part(value)) if n == 2
        ):
            return None
    dtype = signed(got.get(1, 0))
    form, field = _NUMBERS.get(dtype, ("", 0))
    if not form:
        return None
    content = part(got.get(4, b""))
    if content:
        return _unpacked(form, content)
    if field not in got:
        return 0  # proto3 leaves a zero out
    value = got[field]
    if form in ("<f", "<d"):
        return _unpacked(form, part(value))
    if isinstance(value, bytes):  # packed
        value = next(iter(dict(fields(b"\x08" + value)).values()), 0)
    if form == "<e":
        return _unpacked("<e", int(value).to_bytes(2, "little"))
    return signed(value)


def _unpacked(form: str, data: bytes) -> float | int | None:
    if struct.calcsize(form) != len(data):
        return None
    value: float | int = struct.unpack(form, data)[0]
    return int(value) if isinstance(value, bool) else value


def _hparams(record: bytes) -> dict[str, Any]:
    """Name -> value, a google.protobuf.Value: a number, a text or a bool."""
    out: dict[str, Any] = {}
    for number, entry in fields(record):
        if number != 1:
            continue
        got = dict(fields(part(entry)))
        value = dict(fields(part(got.get(2, b""))))
        shown: Any = None
        if 2 in value:
            shown = double(value[2])
            shown = int(shown) if shown.is_integer() and abs(shown) < 2**53 else shown
        elif 3 in value:
            shown = text(value[3])
        elif 4 in value:
            shown = bool(signed(value[4]))
        out[text(got.get(1, b""))] = shown
    return out
