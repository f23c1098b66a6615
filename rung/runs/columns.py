"""A copy of a run's rows by column, and a summary of each metric: derived, never the truth, rebuilt when stale.

    metrics/columns/index.json     what it was made of, and per metric: count, last, min and max with their steps
                    <made>.step    int64, the step of every row that counts
                    <made>.N.f8    float64, the values of metric N, as many as rows have one
                    <made>.N.rows  int64 pairs: the first row and the row after the last of each stretch with a value

It is made at the first read, in chunks, so that memory does not grow with the run; a run that has grown since has only
its new rows read. Runs with little text get the index alone. Where the folder cannot be written, the index is made in
memory. None of it needs numpy; arrays.py reads the files.

The surprising thing: index.json names its files by a mark of its own and is replaced last, so two readers at once, or a
kill, leave either the old copy or the new one. Values are float64: whole numbers beyond 2^53 are rounded here, and
exact only in the rows.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import uuid
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rung.files import sync
from rung.runs.files import from_json, to_json
from rung.runs.metrics import ROW, is_step, segments, spans
from rung.runs.summary import Column, Held, Summary

Progress = Callable[[int, int], None]  # bytes read, bytes in all

_VERSION = 1
_SMALL_BYTES = 8 << 20  # of text: read in a tenth of a second
_CHUNK_ROWS = 4096


class Part(NamedTuple):
    """A segment as it was when it was read."""

    number: int
    num_bytes: int
    mtime_ns: int
    end_byte: int = 0  # after its last whole line
    head: int = 0  # checksum of its first line: a file that grew is another one if this differs
    has_rows: bool = False


class Index(msgspec.Struct):
    version: int
    order: str  # of the bytes: a copy from a machine of the other kind is made again
    mark: str | None  # None: no arrays
    parts: list[Part]
    num_rows: int
    broken: int  # lines that are no rows
    metrics: dict[str, Held]


_DECODER = msgspec.json.Decoder(Index)


def summaries(folder: Path, progress: Progress | None = None) -> dict[str, Summary]:
    """Metric -> its summary over the rows that count, `unix_s` among them; empty for a run without rows."""
    found = current(folder, progress).metrics.items()
    return {name: held.summary for name, held in found if held.summary.count}


def current(folder: Path, progress: Progress | None = None) -> Index:
    """The index of the rows as they are now: read, extended or made."""
    parts = _stat(folder)
    index = _load(folder / "columns")
    if index is not None and _is_fresh(index, parts):
        return index
    if not parts:
        return _empty(None)
    try:
        with _locked(folder / "columns") as is_alone:
            parts, index = _stat(folder), _load(folder / "columns")
            if index is not None and _is_fresh(index, parts):
                return index
            return _made(folder, folder / "columns", index if is_alone else None, progress)
    except OSError:  # a disk that is full or may not be written
        return _made(folder, None, None, progress)


def _made(folder: Path, out: Path | None, old: Index | None, progress: Progress | None) -> Index:
    parts = _stat(folder)
    has_arrays = out is not None and sum(part.num_bytes for part in parts) >= _SMALL_BYTES
    is_longer = old is not None and _is_extension(old, parts, folder) and (old.mark is not None) == has_arrays
    index = old if old is not None and is_longer else _empty(uuid.uuid4().hex[:12] if has_arrays else None)
    builder = _Builder(index, out if has_arrays else None)
    known = {part.number: part for part in index.parts}
    total, done = sum(part.num_bytes for part in parts), 0
    read: list[Part] = []
    try:
        for part, (path, end) in zip(parts, spans(folder)):
            before = known.get(part.number, Part(part.number, 0, 0))
            for end_byte in builder.read(path, before.end_byte, part.num_bytes, end):
                if progress is not None:
                    progress(done + end_byte, total)
            done += part.num_bytes
            has_rows = builder.has_rows or before.has_rows
            read.append(part._replace(end_byte=builder.end_byte, head=_first_line(path), has_rows=has_rows))
        made = builder.finish(read)
        if out is not None:
            _store(out, made)
    except BaseException:
        if out is not None and not is_longer:
            _remove(out, lambda name: index.mark is not None and name.startswith(index.mark))
        raise
    return made


class _Builder:
    """Takes rows, gives an Index; with `out` it also appends the values to its files."""

    def __init__(self, index: Index, out: Path | None) -> None:
        self._index, self._out = index, out
        self._columns = {name: Column(held) for name, held in index.metrics.items()}
        self._steps = array("q")  # of the rows of this chunk
        self._first_row = index.num_rows
        self._broken = index.broken
        self._keys: tuple[str, ...] = ()
        self._block: list[Any] = []  # consecutive rows of the same keys
        self.end_byte, self.has_rows = 0, False
        if out is not None:
            self._cut()

    def read(self, path: Path, start: int, stop: int, end: int | None) -> Iterator[int]:
        """Takes the rows between two bytes whose step is below `end`; yields where it stands after each chunk."""
        decode, self.end_byte, self.has_rows = ROW.decode, start, False
        with open(path, "rb") as file:
            file.seek(start)
            for line in file:
                if self.end_byte + len(line) > stop or line[-1] != 10:
                    break  # torn, or written since we looked
                self.end_byte += len(line)
                try:
                    row = decode(line)
                    step = row["step"]
                    if not is_step(step):
                        raise ValueError
                except (ValueError, KeyError):
                    self._broken += 1
                    continue
                self.has_rows = True
                if end is not None and step >= end:
                    continue
                keys = tuple(row)
                if keys != self._keys:
                    self._close_block()
                    self._keys = keys
                self._block.append(row.values())
                if len(self._block) + len(self._steps) >= _CHUNK_ROWS:
                    self._flush()
                    yield self.end_byte
        self._flush()
        yield self.end_byte

    def finish(self, parts: list[Part]) -> Index:
        held = {name: column.held for name, column in self._columns.items()}
        return Index(_VERSION, sys.byteorder, self._index.mark, parts, self._first_row, self._broken, held)

    def _close_block(self) -> None:
        if not self._block:
            return
        first = self._first_row + len(self._steps)
        for name, values in zip(self._keys, zip(*self._block)):
            if name == "step":
                self._steps.extend(array("q", values))
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = Column(Held(Summary(), len(self._columns), 0))
            column.take(values, first)
        self._block = []

    def _flush(self) -> None:
        self._close_block()
        if self._out is not None:
            _append(self._file("step"), self._steps)
        for column in self._columns.values():
            if column.values:
                if self._out is not None:
                    _append(self._file(f"{column.number}.f8"), column.values)
                    _append(self._file(f"{column.number}.rows"), column.stretches)
                column.sum_up(self._steps, self._first_row)
        self._first_row += len(self._steps)
        self._steps = array("q")

    def _file(self, name: str) -> Path:
        assert self._out is not None
        return self._out / f"{self._index.mark}.{name}"

    def _cut(self) -> None:
        """Removes what an earlier extension wrote before it was killed."""
        for name, num_bytes in _sizes(self._index).items():
            os.truncate(self._file(name), num_bytes)


def _stat(folder: Path) -> list[Part]:
    parts = []
    for number, path in segments(folder):
        stat = path.stat()
        parts.append(Part(number, stat.st_size, stat.st_mtime_ns))
    return parts


def _first_line(path: Path) -> int:
    with open(path, "rb") as file:
        return zlib.crc32(file.readline())


def _is_fresh(index: Index, parts: Sequence[Part]) -> bool:
    return [part[:3] for part in index.parts] == [part[:3] for part in parts]


def _is_extension(index: Index, parts: Sequence[Part], folder: Path) -> bool:
    """Whether only the last segment differs, and by what was appended to it."""
    if not index.parts or [p[:3] for p in index.parts[:-1]] != [p[:3] for p in parts[:-1]]:
        return False
    old, new = index.parts[-1], parts[-1]
    if old.number != new.number or not old.has_rows or new.num_bytes < old.num_bytes:
        return False
    return old.head == _first_line(folder / f"{new.number:03d}.ndjson")


def _empty(mark: str | None) -> Index:
    return Index(_VERSION, sys.byteorder, mark, [], 0, 0, {})


def _load(out: Path) -> Index | None:
    """The index, if it is of this version and its files are as long as it says."""
    try:
        data = (out / "index.json").read_bytes()
        # Turning names of NaN back walks over every value, which takes most of the time of a listing by a metric.
        has_names = b'NaN"' in data or b'Infinity"' in data
        index = msgspec.convert(from_json(data), Index) if has_names else _DECODER.decode(data)
        if index.version != _VERSION or index.order != sys.byteorder:
            return None
        is_whole = index.mark is None or all(
            (out / f"{index.mark}.{name}").stat().st_size >= num_bytes for name, num_bytes in _sizes(index).items()
        )
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return None
    return index if is_whole else None


def _sizes(index: Index) -> dict[str, int]:
    sizes = {"step": index.num_rows * 8}
    for held in index.metrics.values():
        sizes[f"{held.number}.f8"] = held.summary.count * 8
        sizes[f"{held.number}.rows"] = held.num_stretches * 16
    return {name: num_bytes for name, num_bytes in sizes.items() if num_bytes}


def _store(out: Path, index: Index) -> None:
    """The files first, the index last. An index alone is not synced: a torn one is made again."""
    for name in _sizes(index) if index.mark is not None else ():
        sync(out / f"{index.mark}.{name}")
    beside = out / f".index.{uuid.uuid4().hex[:8]}.part"
    try:
        beside.write_bytes(to_json(msgspec.to_builtins(index)))
        os.replace(beside, out / "index.json")
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _remove(out, lambda name: name != "index.json" and (index.mark is None or not name.startswith(index.mark)))


def _remove(out: Path, is_old: Callable[[str], bool]) -> None:
    with contextlib.suppress(OSError):
        for name in filter(is_old, os.listdir(out)):
            with contextlib.suppress(OSError):
                os.unlink(out / name)


def _append(path: Path, numbers: array[Any]) -> None:
    with open(path, "ab") as file:
        numbers.tofile(file)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[bool]:
    """One builder at a time; says whether it is alone for sure, which some disks do not tell."""
    out.mkdir(exist_ok=True)
    fd = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            is_alone = True
        except OSError:
            is_alone = False
        yield is_alone
    finally:
        os.close(fd)


def is_long(folder: Path) -> bool:
    """Whether the rows are worth a copy by column."""
    return sum(part.num_bytes for part in _stat(folder)) >= _SMALL_BYTES
