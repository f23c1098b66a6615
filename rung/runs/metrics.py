"""The rows of a run, what each step measured; and its tables, numbers per layer.

A row is one JSON line, `{"step": t, "unix_s": ..., name: value, ...}`, appended by one unbuffered write, so kill -9
loses nothing that was logged. Row t describes batch t on state t, or an eval of state t. Each attempt of a run writes
its own segment, 000.ndjson, 001.ndjson and so on. A resume repeats some steps: rows of an earlier segment from the
first step of a later one on are superseded, and no reader here shows them.

A table is a row of lists, one number per layer or tensor, for some steps only; segments of tables supersede each other
as those of the metrics do:

    tables/<segment>.ndjson   {"kind": "tensors", "names": [...]}                     once, and when the names change
                              {"kind": "tensors", "step": 40, "grad": [...], ...}     one number per name
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rung import parse
from rung.runs.files import NON_FINITE, LineFile, from_json, name_of, read_lines, to_json
from rung.runs.paths import check_file

Number = float | int
_SEGMENT = re.compile(r"^([0-9]{1,9})\.ndjson$")
_ODD = re.compile(r'[\x00-\x1f"\\]')
_TAIL_BYTES = 1 << 16  # rows of 30 values take about 1 kB


class MetricsWriter(LineFile):
    """Appends rows to one new segment; for one process, rank 0."""

    def __init__(self, folder: Path, segment: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / f"{segment:03d}.ndjson", new=True)
        self._encode = msgspec.json.Encoder().encode

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """Writes one row; the system has it when this returns."""
        assert "step" not in values and "unix_s" not in values, "step and unix_s are written here"  # noqa: PT018
        row: dict[str, Any] = {"step": step, "unix_s": time.time(), **values}
        try:
            # The check takes 0.8 of the 6.6 us that a row of 30 values takes in all.
            if not all(map(math.isfinite, row.values())):
                row = {key: value if math.isfinite(value) else name_of(value) for key, value in row.items()}
            line = self._encode(row)
        except (TypeError, OverflowError):  # a scalar of numpy or torch, a huge int, a None
            line = self._encode(numbers({**row, **values}))
        self.append(line + b"\n")


def numbers(row: Mapping[str, Any]) -> dict[str, Number | str]:
    """The row with plain numbers; non-finite ones by name, None left out."""
    out: dict[str, Number | str] = {}
    for key, value in row.items():
        if value is None:
            continue
        if isinstance(value, str) or not hasattr(value, "__float__"):
            raise TypeError(f"metric {key!r} is {value!r}, not a number")
        if isinstance(value, int) and -(2**63) <= value < 2**63:
            out[key] = int(value)
            continue
        try:
            number = float(value)
        except OverflowError:
            number = math.inf if value > 0 else -math.inf
        out[key] = number if math.isfinite(number) else name_of(number)
    return out


@dataclass
class Faults:
    """What a reader had to leave out."""

    broken: int = 0  # lines in the middle that are not JSON rows


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Number and path of each segment, in order; RunError where one is a link out of the run, or no file."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(match[1]), folder / match[0]) for match in map(_SEGMENT.match, names) if match]
    for _, path in found:
        check_file(folder.parent, path)
    return sorted(found)


def next_segment(folder: Path) -> int:
    return max((number for number, _ in segments(folder)), default=-1) + 1


def read_rows(folder: Path, faults: Faults | None = None) -> Iterator[dict[str, Any]]:
    """Every row that counts, in order; a torn last line is skipped, broken ones are counted in `faults`."""
    for path, end in spans(folder):
        for row in _rows(read_lines(path), faults):
            if end is None or row["step"] < end:
                yield row


def read_columns(
    folder: Path, names: Sequence[str] | None = None, faults: Faults | None = None
) -> dict[str, list[Any]]:
    """Columns of equal length over all segments, always with `step`; None where a row has no such value.

    With `names` only these are parsed out of the text, several times faster; an unknown name is a column of None.
    """
    columns: dict[str, list[Any]] = {"step": []}
    if names is None:
        for num_rows, row in enumerate(read_rows(folder, faults)):
            for name in row:
                if name not in columns:
                    columns[name] = [None] * num_rows
            for name, column in columns.items():
                column.append(row.get(name))
        return columns
    columns |= {name: [] for name in names if name != "step"}
    appends = [column.append for column in columns.values()]
    for values in read_values(folder, list(columns)[1:], faults):
        for append, value in zip(appends, values):
            append(value)
    return columns


def read_values(folder: Path, names: Sequence[str], faults: Faults | None = None) -> Iterator[tuple[Any, ...]]:
    """Yields the step and the values of `names` for every row that counts; None where a row has no such value."""
    wanted = ("step", *names)
    if any(_ODD.search(name) for name in wanted) or len(set(wanted)) != len(wanted):  # msgspec has no such fields
        for row in read_rows(folder, faults):
            yield tuple(row.get(name) for name in wanted)
        return
    value = bool | int | float | str | None
    step = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    fields: list[Any] = [("c0", step)] + [(f"c{i}", value, None) for i in range(1, len(wanted))]
    rename = {f"c{i}": name for i, name in enumerate(wanted)}
    decoder = msgspec.json.Decoder(msgspec.defstruct("Columns", fields, rename=rename, gc=False))
    for path, end in spans(folder):
        for line in read_lines(path):
            try:
                values = msgspec.structs.astuple(decoder.decode(line))
            except parse.BROKEN:  # of a value that is no number, or of the whole line
                found: dict[str, Any] | None = next(_rows([line], faults), None)
                if found is None:
                    continue
                values = tuple(found.get(name) for name in wanted)
            if end is None or values[0] < end:
                yield tuple(map(_float, values))


def superseded_rows(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """step -> the rows of that step that a resume replaced, oldest first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path, end in spans(folder):
        for row in _rows(read_lines(path)) if end is not None else ():
            if row["step"] >= end:
                found.setdefault(row["step"], []).append(row)
    return found


def last_row(folder: Path) -> dict[str, Any] | None:
    """The newest row, read from the end of the file: what `rung ls` can afford for each running run."""
    found = (last_row_of(path, path.stat().st_size) for _, path in reversed(segments(folder)))
    return next(filter(None, found), None)


def last_row_of(path: Path, end: int, tail_bytes: int = _TAIL_BYTES) -> dict[str, Any] | None:
    """The last row of a segment before byte `end`; looks at the last `tail_bytes` only."""
    with parse.open_file(path) as file:
        file.seek(max(0, end - tail_bytes))
        data = file.read(min(end, tail_bytes))
    return next(_rows(reversed(data[: data.rfind(b"\n") + 1].splitlines())), None)


ROW: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


def is_step(value: Any) -> bool:
    """A whole number that arrays can hold; a row without one is broken."""
    return type(value) is int and -(2**63) <= value < 2**63


def number_of(value: Any) -> float | None:
    """A value of a row as a float; None where it is not a number."""
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int


def _float(value: Any) -> Any:
    """A value as its readers take it: what is no number is absent, as in the copies by column."""
    return value if type(value) is float or type(value) is int else number_of(value)


def _rows(lines: Iterable[bytes], faults: Faults | None = None) -> Iterator[dict[str, Any]]:
    """Decodes lines into rows; skips and counts what is not a row."""
    for line in lines:
        try:
            row = ROW.decode(line)
            if not is_step(row.get("step")):
                raise ValueError
        except parse.BROKEN:
            if faults is not None:
                faults.broken += 1
        else:
            found = {key: _float(value) for key, value in row.items()}
            yield {key: value for key, value in found.items() if value is not None}


def spans(folder: Path) -> list[tuple[Path, int | None]]:
    """Each segment in order, with the step from which later ones supersede it."""
    spans: list[tuple[Path, int | None]] = []
    end: int | None = None
    for _, path in reversed(segments(folder)):
        spans.append((path, end))
        first = next((row["step"] for row in _rows(read_lines(path))), None)
        if first is not None:
            end = first if end is None else min(first, end)
    return spans[::-1]


class TablesWriter:
    """Appends tables to one segment; what their columns mean is the engine's business."""

    def __init__(self, folder: Path, segment: int) -> None:
        self._path = folder / f"{segment:03d}.ndjson"
        self._file: LineFile | None = None
        self._names: dict[str, list[str]] = {}

    def add(self, kind: str, step: int, names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
        if self._file is None:  # most short runs have none
            self._path.parent.mkdir(parents=True, exist_ok=True)
            check_file(self._path.parents[1], self._path)
            self._file = LineFile(self._path)
        if self._names.get(kind) != list(names):
            self._names[kind] = list(names)
            self._file.append(to_json({"kind": kind, "names": names}) + b"\n")
        # Six digits are enough of a norm, and a third of the bytes.
        short = {
            name: [float(f"{value:.6g}") if math.isfinite(value) else value for value in values]
            for name, values in columns.items()
        }
        self._file.append(to_json({"kind": kind, "step": step, **short}) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_tables(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """kind -> [{"step", "names", column: [..]}], in order of steps; what a later segment did again replaces it."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for _, path in segments(folder):
        names: dict[str, list[str]] = {}
        has_begun: set[str] = set()
        for line in read_lines(path):
            try:
                row = from_json(line)
                kind = row.pop("kind")
                if "step" not in row:
                    if parse.mismatch(row["names"], [str], "names") is None:
                        names[str(kind)] = row["names"] or []
                    continue
                step = row.pop("step")
                if not is_step(step) or kind not in names:
                    continue
                num_names, columns = len(names[kind]), {name: row[name] for name in row if name != "names"}
                if any(
                    not isinstance(column, list) or len(column) != num_names or not all(map(_is_number, column))
                    for column in columns.values()
                ):
                    continue
                kept = found.setdefault(kind, {})
                if kind not in has_begun:  # the first of a segment: what lies beyond was undone
                    has_begun.add(kind)
                    found[kind] = kept = {at: old for at, old in kept.items() if at < step}
                kept[step] = {"names": names[kind], "step": step, **columns}
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a broken line
    return {kind: [rows[step] for step in sorted(rows)] for kind, rows in found.items()}
