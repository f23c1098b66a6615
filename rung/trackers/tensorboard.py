"""TensorBoard: mirrors a run to event files and reads them, both without TensorBoard.

A mirror is one event file per attempt under <run>/mirror/tensorboard. Every number of a row becomes a scalar, NaN and
Inf included, as float32: about seven digits. Why, verdict and notes become text, indented because TensorBoard shows
text as Markdown; the configuration goes under HPARAMS. Where a run goes back to an earlier step, a session mark tells
TensorBoard to forget what came after it.

A folder with event files is a run, and its later files continue the earlier ones, as in TensorBoard. Subfolders named
train, val, validation and the like are parts of the run above them, as Keras and others write them; their names prefix
their scalars. Scalars are read in the old form (simple_value) and the new one (a tensor of one element). A torn last
record is ignored; a damaged one ends its file with a remark. Images, audio, histograms, graphs and texts are only
counted.
"""

from __future__ import annotations

import hashlib
import shlex
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rung.errors import RunError
from rung.runs.fields import leaves
from rung.runs.files import reason
from rung.runs.metricnames import SETS
from rung.trackers.history import History, put
from rung.trackers.mirror import display_path
from rung.trackers.protobuf import (
    Malformed,
    Value,
    double,
    fields,
    message,
    of_bytes,
    of_double,
    of_int,
    of_single,
    of_text,
    part,
    signed,
    single,
    text,
)

_STRING = 7  # types.proto
_ENDED_WELL, _FAILED, _RUNNING = 1, 2, 3  # hparams' words for a session
_PARTS = {"train", "training", *SETS}
# dtype -> struct format of an element in tensor_content, and the field that holds elements one by one
_NUMBERS = {1: ("<f", 5), 2: ("<d", 6), 3: ("<i", 7), 9: ("<q", 10), 10: ("<?", 11), 19: ("<e", 13)}
_OLD_KINDS = {4: "image", 5: "histogram", 6: "audio"}  # fields of Summary.Value before there were plugins
_MOST_BYTES = 1 << 31  # a longer record is a wrong length whose checksum happens to fit


class TensorboardSink:
    """Writes event files; see mirror.Sink."""

    name = "TensorBoard"
    num_refused = 0

    def __init__(self, folder: Path, document: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._folder = folder / "tensorboard"
        self._document, self._config = document, config
        self._last_step: int | None = None
        self._has_forerunner = False
        self._file: IO[bytes] | None = None
        self._heads: dict[str, bytes] = {}

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._has_forerunner = any(self._folder.iterdir())
        now = time.time_ns()
        # Sorted by name is sorted by time: TensorBoard reads the files of a folder in that order.
        name = f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.rung"
        self._file = open(self._folder / name, "xb")  # noqa: SIM115
        self._write(time.time(), 0, of_text(3, "brain.Event:2"))
        if self._has_forerunner:
            return
        self._text("why", self._document.get("why"), 0, time.time())
        start = b""
        for key, value in leaves(self._config):
            if isinstance(value, bool):
                entry = of_int(4, int(value))
            elif isinstance(value, int | float):
                entry = of_double(2, float(value))
            else:
                entry = of_text(3, "" if value is None else str(value))
            start += of_bytes(1, of_text(1, key) + of_bytes(2, entry))
        start += of_text(4, str(self._document.get("id"))) + of_double(5, time.time())
        self._session("session_start_info", of_bytes(3, start))

    def row(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        if self._has_forerunner or (self._last_step is not None and step < self._last_step):
            self._write(unix_s, step, of_bytes(7, of_int(1, 1)))  # SessionLog.START
            self._has_forerunner = False
        self._last_step = step
        scalars = []
        for tag, value in values.items():
            # Of a tag all but the last five bytes are always the same; making them was half of the cost of a row.
            number = of_single(2, value)
            head = self._heads.get(tag)
            if head is None:
                head = self._heads[tag] = of_bytes(1, of_text(1, tag) + number)[: -len(number)]
            scalars.append(head + number)
        if scalars:
            self._write(unix_s, step, of_bytes(5, b"".join(scalars)))

    def note(self, step: int | None, unix_s: float, text: str) -> None:
        self._text("notes", text, self._last_step or 0 if step is None else step, unix_s)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self, status: str) -> None:
        if self._file is None:
            return
        word = {"finished": _ENDED_WELL, "running": _RUNNING}.get(status, _FAILED)
        self._session("session_end_info", of_bytes(4, of_int(1, word) + of_double(2, time.time())))
        self._file.close()
        self._file = None

    def summary_line(self) -> str:
        return f"mirror: tensorboard --logdir {shlex.quote(display_path(self._folder))}"

    def _write(self, unix_s: float, step: int, what: bytes) -> None:
        assert self._file is not None, "row before open"
        self._file.write(frame(of_double(1, unix_s) + of_int(2, step) + what))

    def _text(self, tag: str, text: Any, step: int, unix_s: float) -> None:
        if not text:
            return
        indented = "\n".join(f"    {line}" for line in str(text).split("\n"))
        shape = of_bytes(2, of_bytes(2, of_int(1, 1)))
        tensor = of_int(1, _STRING) + shape + of_bytes(8, indented.encode("utf-8", "backslashreplace"))
        value = of_text(1, tag) + of_bytes(8, tensor) + of_bytes(9, of_bytes(1, of_text(1, "text")) + of_int(4, 2))
        self._write(unix_s, step, of_bytes(5, of_bytes(1, value)))

    def _session(self, what: str, content: bytes) -> None:
        plugin = of_bytes(1, of_text(1, "hparams") + of_bytes(2, content))
        nothing = of_int(1, 1) + of_bytes(2, of_bytes(2, of_int(1, 0)))  # a float tensor of no elements
        value = of_text(1, f"_hparams_/{what}") + of_bytes(8, nothing) + of_bytes(9, plugin)
        self._write(time.time(), 0, of_bytes(5, of_bytes(1, value)))


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
        # Event files have no id; their names hold a time, a host and a process, and the first record another time.
        try:
            first = next(records(files[0]), b"")
        except (Damaged, OSError):
            first = b""
        id = hashlib.sha256(files[0].name.encode("utf-8", "surrogateescape") + first).hexdigest()[:16]
        name = folder.relative_to(base).as_posix()
        history = History("tensorboard", id, folder, base.resolve().name if name == "." else name)
        history.group, history.reason = base.resolve().name, "TensorBoard does not say how a run ended"
        num_unread = 0
        for file in files:
            try:
                _read_file(file, file.parent.name if file.parent != folder else "", history)
            except RunError as error:
                problems.append(str(error))
                num_unread += 1
        if num_unread < len(files):
            yield history


def _read_file(path: Path, prefix: str, history: History) -> None:
    plugins: dict[str, str] = {}  # named only by the first value of a tag
    is_event_file = False
    try:
        for record in records(path):
            event = message(record)
            unix_s, step = double(event[1]) if 1 in event else None, signed(event.get(2, 0))
            if 4 in event or 9 in event:
                history.left_out["graph"] += 1
            values: dict[str, float] = {}
            for number, value in fields(event.get(5, b"")):
                if number == 1:
                    _read_value(value, prefix, plugins, values, history)
            history.add(step, unix_s, values)
            is_event_file = True
    except Damaged as error:
        if not is_event_file:
            raise RunError(
                f"{path} is not an event file of TensorBoard, or is damaged: {error}.", code="source-damaged"
            ) from error
        history.problems.append(f"{error}; what follows it is left out")
    except Malformed as error:
        history.problems.append(f"{path}: a record cannot be decoded ({error}); the rest is left out")
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}.", code="cannot-read") from error


def _read_value(
    record: Value, prefix: str, plugins: dict[str, str], values: dict[str, float], history: History
) -> None:
    """One value of a summary: a scalar goes into `values`, hparams and the count of what is left out into `history`."""
    got = message(record)
    tag = text(got.get(1, b""))
    if 9 in got:
        metadata = message(message(got[9]).get(1, b""))
        plugins[tag] = text(metadata.get(1, b""))
        if plugins[tag] == "hparams":
            _read_hparams(metadata.get(2, b""), history)
    plugin = plugins.get(tag, "")
    # TF1 wrote "loss_1" for a second one of a name; that is the user's to tell apart.
    name = tag if not prefix or tag.lower().startswith(f"{prefix.lower()}/") else f"{prefix}/{tag}"
    if 2 in got:
        values[name] = single(got[2])
    elif plugin == "hparams":
        pass
    elif 8 in got and plugin in ("", "scalars"):
        number = _element(got[8])
        if number is None:
            history.left_out["tensor"] += 1
        else:
            values[name] = number
    else:
        kind = plugin or next((word for field, word in _OLD_KINDS.items() if field in got), "other")
        history.left_out[{"images": "image", "histograms": "histogram"}.get(kind, kind)] += 1


def _read_hparams(record: Value, history: History) -> None:
    content = message(record)
    for number, entry in fields(content.get(3, b"")):  # at the start: name and google.protobuf.Value
        if number != 1:
            continue
        got = message(entry)
        value = message(got.get(2, b""))
        setting: Any = None
        if 2 in value:
            setting = double(value[2])
            setting = int(setting) if setting.is_integer() and abs(setting) < 2**53 else setting
        elif 3 in value:
            setting = text(value[3])
        elif 4 in value:
            setting = bool(signed(value[4]))
        put(history.config, text(got.get(1, b"")).split("."), setting)
    if 4 in content:  # at the end
        word = signed(message(content[4]).get(1, 0))
        if word == _ENDED_WELL:
            history.status, history.reason = "finished", ""
        elif word == _FAILED:
            history.status, history.reason = "crashed", "so it says itself"


def _element(tensor: Value) -> float | int | None:
    """The number in a tensor of one element; None where it has more, none, or text."""
    got: dict[int, Any] = {}
    for number, value in fields(tensor):
        got[number] = value
        if number == 2 and any(signed(message(dim).get(1, 0)) != 1 for n, dim in fields(value) if n == 2):
            return None
    form, field = _NUMBERS.get(signed(got.get(1, 0)), ("", 0))
    if not form:
        return None
    data = part(got.get(4, b""))
    if not data:
        if field not in got:
            return 0  # proto3 leaves a zero out
        value = got[field]
        if form in ("<f", "<d"):
            data = part(value)
        else:
            if isinstance(value, bytes):  # packed
                value = next(iter(dict(fields(b"\x08" + value)).values()), 0)
            if form != "<e":
                return signed(value)
            data = int(value).to_bytes(2, "little")
    if struct.calcsize(form) != len(data):
        return None
    number = struct.unpack(form, data)[0]
    return int(number) if isinstance(number, bool) else number


# The framing of the files: length, its checksum, data, its checksum. A writer appends whole records with one write
# each, so a killed process leaves at most one torn record at the end. A reader stops silently there, and with an error
# at a wrong checksum: what lies behind it cannot be found again. The checksum is CRC-32C, not the CRC-32 of zlib, and
# is stored rotated and offset.


class Damaged(ValueError):
    """A record whose checksum is wrong."""


_CRC_TABLE = list(range(256))
for _ in range(8):
    _CRC_TABLE = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in _CRC_TABLE]


def crc32c(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _CRC_TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def records(path: Path) -> Iterator[bytes]:
    """The whole records of a file, in order; raises Damaged where a checksum is wrong."""
    with open(path, "rb") as file:
        at = 0
        while True:
            head = file.read(12)
            if len(head) < 12:
                return
            length, crc = struct.unpack("<QI", head)
            if masked(head[:8]) != crc or length > _MOST_BYTES:
                raise Damaged(f"the record at byte {at} of {path} has a wrong checksum of its length")
            body = file.read(length + 4)
            if len(body) < length + 4:
                return
            data = body[:length]
            if masked(data) != struct.unpack("<I", body[length:])[0]:
                raise Damaged(f"the record at byte {at} of {path} has a wrong checksum")
            yield data
            at += length + 16
