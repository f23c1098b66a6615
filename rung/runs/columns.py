"""A copy of a run's rows by column, and a summary of each metric: derived, never the truth, rebuilt when stale.

    metrics/columns/index.json     what it was made of, and per metric: count, last, min and max with their steps
                    <made>.step    int64, the step of every row that counts
                    <made>.N.f8    float64, the values of metric N, as many as rows have one
                    <made>.N.rows  int64 pairs: the first row and the row after the last of each stretch with a value

It is made at the first read, in chunks, so that memory does not grow with the run; later reads add only new rows. Small
runs get the index alone, and where the folder cannot be written it stays in memory. index.json names its files and is
replaced last, so concurrent readers or a kill leave the old copy or the new one. Values are float64: whole numbers
beyond 2^53 are exact only in the rows. numpy is imported by what returns its arrays.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import sys
import uuid
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from rung import parse
from rung.files import sync
from rung.runs.files import from_json, locked, to_json
from rung.runs.metrics import ROW, is_step, number_of, read_values, segments, spans

if TYPE_CHECKING:
    import numpy as np

    from rung.runs.series import Series

Progress = Callable[[int, int], None]  # bytes read, bytes in all

_VERSION = 1
_SMALL_BYTES = 8 << 20  # of text: read in a tenth of a second
_CHUNK_ROWS = 4096
_MARK = re.compile(r"[0-9a-f]{12}")
_EXACT = 2**53  # whole numbers up to here are floats without loss


class Summary(msgspec.Struct, frozen=True):
    """Of one metric of one run. min and max are of the finite values, None where there is none; of equal values the
    first. Values that are not finite are counted and never compared."""

    count: int = 0
    last: float = math.nan
    last_step: int = 0
    min: float | None = None
    min_step: int | None = None
    max: float | None = None
    max_step: int | None = None
    num_non_finite: int = 0
    is_whole: bool = True  # every value was written as a whole number


class IndexedMetric(msgspec.Struct):
    """A metric in the index: its summary, the number of its files, and how many stretches its rows form."""

    summary: Summary
    number: int
    num_stretches: int


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
    metrics: dict[str, IndexedMetric]


class Arrays(NamedTuple):
    """Columns of a run: name -> the rows that have a value, and the values; `steps` of all rows."""

    steps: np.ndarray
    columns: dict[str, tuple[np.ndarray, np.ndarray]]


def summaries(folder: Path, progress: Progress | None = None) -> dict[str, Summary]:
    """Metric -> its summary over the rows that count, `unix_s` among them; empty for a run without rows."""
    found = current(folder, progress).metrics.items()
    return {name: held.summary for name, held in found if held.summary.count}


def current(folder: Path, progress: Progress | None = None) -> Index:
    """The index of the rows as they are now; extends or rebuilds it where it is stale."""
    out = folder / "columns"
    parts, index = _stat(folder), _load(out)
    if index is not None and _is_fresh(index, parts):
        return index
    if not parts:
        return Index(_VERSION, sys.byteorder, None, [], 0, 0, {})
    if out.is_symlink() or folder.is_symlink():  # not made here: what lies there is not ours
        return _make(folder, None, None, progress)
    try:
        out.mkdir(exist_ok=True)
        with locked(out) as is_alone:
            parts, index = _stat(folder), _load(out)
            if index is not None and _is_fresh(index, parts):
                return index
            return _make(folder, out, index if is_alone else None, progress)
    except OSError:  # a disk that is full or may not be written
        return _make(folder, None, None, progress)


def is_long(folder: Path) -> bool:
    """Whether the run is large enough for a copy by column."""
    return sum(part.num_bytes for part in _stat(folder)) >= _SMALL_BYTES


def stamp(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """What changes whenever the rows do."""
    return tuple((part.number, part.num_bytes, part.mtime_ns) for part in _stat(folder))


def unread_bytes(folder: Path) -> int:
    """Bytes of rows that the copy does not have yet, and that the next reader has to read."""
    parts = _stat(folder)
    index = _load(folder / "columns") if not (folder / "columns").is_symlink() else None
    total = sum(part.num_bytes for part in parts)
    if index is None or not (_is_fresh(index, parts) or _is_extension(index, parts, folder)):
        return total
    return total - sum(part.num_bytes for part in index.parts)


def read_series(folder: Path, name: str) -> Series:
    """The steps that have a value of `name`, and the values; empty where it was not recorded."""
    from rung.runs.series import Series

    arrays = read_arrays(folder, [name])
    rows, values = arrays.columns[name]
    return Series(arrays.steps[rows], values)


def read_arrays(folder: Path, names: Sequence[str]) -> Arrays:
    """Reads columns as arrays, from the copy where there is one, else from the rows."""
    import numpy as np

    index = current(folder)
    columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if index.mark is not None:
        with contextlib.suppress(OSError, EOFError):  # rebuilt or removed by another process at this moment
            steps = _read(folder, index, "step", "q", index.num_rows)
            for name in names:
                held = index.metrics.get(name)
                if held is None:
                    columns[name] = np.zeros(0, np.int64), np.zeros(0)
                    continue
                pairs = np.asarray(_read(folder, index, f"{held.number}.rows", "q", 2 * held.num_stretches))
                lengths = pairs[1::2] - pairs[::2]
                before = np.repeat(np.cumsum(lengths) - lengths, lengths)  # places of the stretches among the values
                rows = np.repeat(pairs[::2], lengths) + np.arange(held.summary.count) - before
                columns[name] = rows, np.asarray(_read(folder, index, f"{held.number}.f8", "d", held.summary.count))
            return Arrays(np.asarray(steps), columns)

    wanted = list(dict.fromkeys(name for name in names if name != "step"))
    all_steps, places = array("q"), [array("q") for _ in wanted]
    found: list[array[float]] = [array("d") for _ in wanted]
    for at, (step, *row) in enumerate(read_values(folder, wanted)):
        all_steps.append(step)
        for value, place, column in zip(row, places, found):
            number = value if type(value) is float else number_of(value)
            if number is not None:
                place.append(at)
                column.append(number)
    columns = {name: (np.asarray(places[i]), np.asarray(found[i])) for i, name in enumerate(wanted)}
    return Arrays(np.asarray(all_steps), columns)


def read_lists(folder: Path, names: Sequence[str]) -> dict[str, list[Any]] | None:
    """`step` and `names` of a long run as lists with None where a row has no value; None where there is no copy."""
    index = current(folder) if is_long(folder) else None
    if index is None or index.mark is None:
        return None
    try:
        columns: dict[str, list[Any]] = {"step": _read(folder, index, "step", "q", index.num_rows).tolist()}
        for name in names:
            held = index.metrics.get(name)
            column: list[Any] = [None] * index.num_rows
            if held is not None:
                values = _read(folder, index, f"{held.number}.f8", "d", held.summary.count).tolist()
                if held.summary.is_whole:
                    values = list(map(int, values))
                pairs, at = _read(folder, index, f"{held.number}.rows", "q", 2 * held.num_stretches), 0
                for start, stop in zip(pairs[::2], pairs[1::2]):
                    column[start:stop] = values[at : at + stop - start]
                    at += stop - start
            if name != "step":
                columns[name] = column
    except (OSError, EOFError):  # rebuilt or removed by another process at this moment
        return None
    return columns


def _read(folder: Path, index: Index, name: str, kind: str, count: int) -> array[Any]:
    numbers = array(kind)
    with parse.open_file(folder / "columns" / f"{index.mark}.{name}") as file:
        numbers.fromfile(file, count)
    return numbers


def _make(folder: Path, out: Path | None, old: Index | None, progress: Progress | None) -> Index:
    """Builds the index and writes it to `out`; extends `old` where rows were only appended to it."""
    parts = _stat(folder)
    total, done = sum(part.num_bytes for part in parts), 0
    has_arrays = out is not None and total >= _SMALL_BYTES
    is_longer = old is not None and (old.mark is not None) == has_arrays and _is_extension(old, parts, folder)
    mark = uuid.uuid4().hex[:12] if has_arrays else None
    index = old if old is not None and is_longer else Index(_VERSION, sys.byteorder, mark, [], 0, 0, {})
    builder = _Builder(index, out if has_arrays else None)
    known = {part.number: part for part in index.parts}
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
        metrics = {name: column.held for name, column in builder.columns.items()}
        made = Index(_VERSION, sys.byteorder, index.mark, read, builder.num_rows, builder.broken, metrics)
        if out is not None:
            # The files first, the index last. An index alone is not synced: a torn one is made again.
            for name in _sizes(made) if made.mark is not None else ():
                sync(out / f"{made.mark}.{name}")
            beside = out / f".index.{uuid.uuid4().hex[:8]}.part"
            try:
                beside.write_bytes(to_json(msgspec.to_builtins(made)))
                os.replace(beside, out / "index.json")
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
            _remove(out, lambda name: name != "index.json" and (made.mark is None or not name.startswith(made.mark)))
    except BaseException:
        if out is not None and not is_longer:
            _remove(out, lambda name: index.mark is not None and name.startswith(index.mark))
        raise
    return made


class _Column:
    """One metric while rows are read: its values since the last flush, and the summary before that."""

    def __init__(self, held: IndexedMetric) -> None:
        self.held = held
        self.values, self.stretches = array("d"), array("q")

    def take(self, values: Sequence[Any], first_row: int) -> None:
        """Values of consecutive rows. What is no number is absent."""
        try:
            numbers, is_whole = array("d", values), all(map(_is_whole, values))
            self._add(numbers, first_row)
        except (TypeError, OverflowError):  # a NaN by its name, a null, a huge whole number
            is_whole = True
            for offset, value in enumerate(values):
                if (number := number_of(value)) is not None:
                    is_whole = is_whole and _is_whole(value)
                    self._add(array("d", [number]), first_row + offset)
        if not is_whole and self.held.summary.is_whole:
            self.held.summary = replace(self.held.summary, is_whole=False)

    def _add(self, numbers: array[float], first_row: int) -> None:
        if self.stretches and self.stretches[-1] == first_row:
            self.stretches[-1] += len(numbers)
        else:
            self.stretches.extend((first_row, first_row + len(numbers)))
        self.values.extend(numbers)

    def sum_up(self, steps: array[int], first_row: int) -> None:
        """Adds what was gathered to the summary, and begins anew. `steps` are those of all rows from `first_row` on."""
        old, values = self.held.summary, self.values

        def step_of(at: int) -> int:
            for start, stop in zip(self.stretches[::2], self.stretches[1::2]):
                if at < stop - start:
                    return steps[start + at - first_row]
                at -= stop - start
            raise IndexError(at)

        finite = values if all(map(math.isfinite, values)) else list(filter(math.isfinite, values))
        new = replace(
            old,
            count=old.count + len(values),
            last=values[-1],
            last_step=steps[self.stretches[-1] - 1 - first_row],
            num_non_finite=old.num_non_finite + len(values) - len(finite),
        )
        if finite:
            low, high = min(finite), max(finite)
            if new.min is None or low < new.min:
                new = replace(new, min=low, min_step=step_of(values.index(low)))
            if new.max is None or high > new.max:
                new = replace(new, max=high, max_step=step_of(values.index(high)))
        self.held.summary = new
        self.held.num_stretches += len(self.stretches) // 2
        self.values, self.stretches = array("d"), array("q")


class _Builder:
    """Reads rows into columns; with `out` it also appends the values to its files."""

    def __init__(self, index: Index, out: Path | None) -> None:
        self._mark, self._out = index.mark, out
        self.columns = {name: _Column(held) for name, held in index.metrics.items()}
        self.num_rows, self.broken = index.num_rows, index.broken
        self._steps = array("q")  # of the rows of this chunk
        self._keys: tuple[str, ...] = ()
        self._block: list[Any] = []  # consecutive rows of the same keys
        self.end_byte, self.has_rows = 0, False
        if out is not None:  # removes what an earlier extension wrote before it was killed
            for name, num_bytes in _sizes(index).items():
                os.truncate(out / f"{index.mark}.{name}", num_bytes)

    def read(self, path: Path, start: int, stop: int, end: int | None) -> Iterator[int]:
        """Takes the rows between two bytes whose step is below `end`; yields where it stands after each chunk."""
        decode, self.end_byte, self.has_rows = ROW.decode, start, False
        with parse.open_file(path) as file:
            file.seek(start)
            for line in parse.lines(file):
                if self.end_byte + len(line) > stop or line[-1] != 10:
                    break  # torn, or written since we looked
                self.end_byte += len(line)
                try:
                    row = decode(line)
                    step = row["step"]
                    if not is_step(step):
                        raise ValueError
                except (KeyError, *parse.BROKEN):
                    self.broken += 1
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

    def _close_block(self) -> None:
        if not self._block:
            return
        first_row = self.num_rows + len(self._steps)
        for name, values in zip(self._keys, zip(*self._block)):
            if name == "step":
                self._steps.extend(values)
                continue
            if name not in self.columns:
                self.columns[name] = _Column(IndexedMetric(Summary(), len(self.columns), 0))
            self.columns[name].take(values, first_row)
        self._block = []

    def _flush(self) -> None:
        self._close_block()
        if self._out is not None:
            _append(self._out / f"{self._mark}.step", self._steps)
        for column in self.columns.values():
            if column.values:
                if self._out is not None:
                    _append(self._out / f"{self._mark}.{column.held.number}.f8", column.values)
                    _append(self._out / f"{self._mark}.{column.held.number}.rows", column.stretches)
                column.sum_up(self._steps, self.num_rows)
        self.num_rows += len(self._steps)
        self._steps = array("q")


def _append(path: Path, numbers: array[Any]) -> None:
    with open(path, "ab") as file:
        numbers.tofile(file)


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_EXACT <= value <= _EXACT


def _stat(folder: Path) -> list[Part]:
    stats = [(number, path.stat()) for number, path in segments(folder)]
    return [Part(number, stat.st_size, stat.st_mtime_ns) for number, stat in stats]


def _first_line(path: Path) -> int:
    with parse.open_file(path) as file:
        return zlib.crc32(next(parse.lines(file), b""))


def _is_fresh(index: Index, parts: Sequence[Part]) -> bool:
    return [part[:3] for part in index.parts] == [part[:3] for part in parts]


def _is_extension(index: Index, parts: Sequence[Part], folder: Path) -> bool:
    """Whether rows were appended to the last segment, and nothing else has changed."""
    if not index.parts or [p[:3] for p in index.parts[:-1]] != [p[:3] for p in parts[:-1]]:
        return False
    old, new = index.parts[-1], parts[-1]
    if old.number != new.number or not old.has_rows or new.num_bytes < old.num_bytes:
        return False
    return old.head == _first_line(folder / f"{new.number:03d}.ndjson")


def _load(out: Path) -> Index | None:
    """The index, if it is of this version and its files are as long as it says."""
    try:
        if out.is_symlink() or not _is_plain(out / "index.json"):
            return None
        data = parse.read_bytes(out / "index.json")
        # Turning names of NaN back walks over every value, which takes most of the time of a listing by a metric.
        has_names = b'NaN"' in data or b'Infinity"' in data
        index = msgspec.convert(from_json(data), Index) if has_names else _DECODER.decode(data)
        if index.version != _VERSION or index.order != sys.byteorder:
            return None
        if index.mark is not None and not _MARK.fullmatch(index.mark):
            return None
        files = {out / f"{index.mark}.{name}": num_bytes for name, num_bytes in _sizes(index).items()}
        is_whole = index.mark is None or all(
            _is_plain(file) and file.stat().st_size >= num_bytes for file, num_bytes in files.items()
        )
    except (OSError, *parse.BROKEN):
        return None
    return index if is_whole else None


def _is_plain(file: Path) -> bool:
    """Whether it is a file of ours, and no link to one that may lie anywhere."""
    return stat.S_ISREG(file.lstat().st_mode)


def _sizes(index: Index) -> dict[str, int]:
    """Bytes of each file that is not empty, by its name after the mark."""
    sizes = {"step": index.num_rows * 8}
    for held in index.metrics.values():
        sizes[f"{held.number}.f8"] = held.summary.count * 8
        sizes[f"{held.number}.rows"] = held.num_stretches * 16
    return {name: num_bytes for name, num_bytes in sizes.items() if num_bytes}


def _remove(out: Path, is_old: Callable[[str], bool]) -> None:
    with contextlib.suppress(OSError):
        for name in filter(is_old, os.listdir(out)):
            with contextlib.suppress(OSError):
                os.unlink(out / name)


_DECODER = msgspec.json.Decoder(Index)
