"""The rows of a run: what each step measured.

A row is one JSON line, `{"step": t, "unix_s": ..., name: value, ...}`, appended by one unbuffered write, so kill -9
loses nothing that was logged (a power cut may lose what the system had not yet put on the disk). Row t describes batch
t on state t, or an eval of state t. Floats have all their digits. columns.py keeps a copy by column, for long runs.

The surprising thing is the segments. Each attempt of a run writes its own file, 000.ndjson, 001.ndjson and so on. A
resume starts at the last checkpoint and runs some steps again; rows of an earlier segment from the first step of a
later one on are superseded, and no reader here shows them.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rung.runs.files import NON_FINITE, LineFile, name_of, read_lines

Number = float | int
Cursor = tuple[int, int]  # segment and byte offset
_SEGMENT = re.compile(r"^(\d+)\.ndjson$")
_ODD = re.compile(r'[\x00-\x1f"\\]')
_TAIL_BYTES = 1 << 16  # rows of 30 values take about 1 kB


class MetricsWriter:
    """Appends rows to one new segment; for one process, rank 0."""

    def __init__(self, folder: Path, segment: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{segment:03d}.ndjson"
        self._file = LineFile(self.path, new=True)
        self._append = self._file.append
        self._encode = msgspec.json.Encoder().encode

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        """One row, out of this process when it returns."""
        assert "step" not in values and "unix_s" not in values, "step and unix_s are written here"  # noqa: PT018
        row: dict[str, Any] = {"step": step, "unix_s": time.time(), **values}
        try:
            # The check takes 0.8 of the 6.6 us that a row of 30 values takes in all.
            if not all(map(math.isfinite, row.values())):
                row = {key: value if math.isfinite(value) else name_of(value) for key, value in row.items()}
            line = self._encode(row)
        except (TypeError, OverflowError):  # a scalar of numpy or torch, a huge int, a None
            line = self._encode(numbers({**row, **values}))
        self._append(line + b"\n")

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


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
    """Number and path of each segment, in order."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(match[1]), folder / match[0]) for match in map(_SEGMENT.match, names) if match]
    return sorted(found)


def next_segment(folder: Path) -> int:
    return max((number for number, _ in segments(folder)), default=-1) + 1


def read_rows(folder: Path, faults: Faults | None = None) -> Iterator[dict[str, Any]]:
    """Every row that counts, in order; a torn last line is skipped, broken ones are counted in `faults`."""
    faults = faults if faults is not None else Faults()
    for path, end in spans(folder):
        for row in _decoded(path, ROW, faults):
            if end is None or row["step"] < end:
                yield {key: _float(value) for key, value in row.items()}


def read_columns(
    folder: Path, names: Sequence[str] | None = None, faults: Faults | None = None
) -> dict[str, list[Any]]:
    """Columns of equal length over all segments, always with `step`; None where a row has no such value.

    With `names` only these are parsed out of the text, several times faster; an unknown name is a column of None.
    """
    if names is None:
        return _all_columns(folder, faults if faults is not None else Faults())
    wanted = list(dict.fromkeys(["step", *names]))
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    appends = [columns[name].append for name in wanted]
    for values in read_values(folder, wanted[1:], faults):
        for append, value in zip(appends, values):
            append(value)
    return columns


def read_values(folder: Path, names: Sequence[str], faults: Faults | None = None) -> Iterator[tuple[Any, ...]]:
    """Of every row that counts its step and the values of `names`, None where it has none; a row at a time."""
    faults = faults if faults is not None else Faults()
    wanted = ("step", *names)
    if any(_ODD.search(name) for name in wanted) or len(set(wanted)) != len(wanted):  # msgspec has no such fields
        for row in read_rows(folder, faults):
            yield tuple(row.get(name) for name in wanted)
        return
    decoder = _column_decoder(wanted)
    for path, end in spans(folder):
        for found in _decoded(path, decoder, faults):
            values = msgspec.structs.astuple(found)
            if end is None or values[0] < end:
                yield tuple(map(_float, values))


def superseded_rows(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """step -> the rows of that step that a resume took again, oldest first: what it was, to compare with what it is."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path, end in spans(folder):
        if end is None:
            continue
        for row in _decoded(path, ROW, Faults()):
            if row["step"] >= end:
                found.setdefault(row["step"], []).append({key: _float(value) for key, value in row.items()})
    return found


def tail(folder: Path, cursor: Cursor = (0, 0)) -> tuple[list[dict[str, Any]], Cursor]:
    """The rows that were appended since `cursor`, and the next cursor; for a page that follows a running run.

    Each row also says its `segment`: the first row of a new one supersedes what was shown from its step on.
    """
    rows: list[dict[str, Any]] = []
    for number, path in segments(folder):
        if number < cursor[0]:
            continue
        offset = cursor[1] if number == cursor[0] else 0
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            row = _row(line)
            if row is not None:
                rows.append({**row, "segment": number})
        cursor = (number, offset + len(whole))
    return rows, cursor


def last_row(folder: Path) -> dict[str, Any] | None:
    """The newest row, read from the end of the file: what `rung ls` can afford for each running run."""
    for _, path in reversed(segments(folder)):
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            data = file.read()
        for line in reversed(data[: data.rfind(b"\n") + 1].splitlines()):
            row = _row(line)
            if row is not None:
                return row
    return None


ROW: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


def is_step(value: Any) -> bool:
    """A whole number that arrays can hold; a row without one is broken."""
    return type(value) is int and -(2**63) <= value < 2**63


def _float(value: Any) -> Any:
    return NON_FINITE.get(value, value) if type(value) is str else value


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = ROW.decode(line)
    except ValueError:
        return None
    return {key: _float(value) for key, value in row.items()} if is_step(row.get("step")) else None


def _decoded(path: Path, decoder: msgspec.json.Decoder[Any], faults: Faults) -> Iterator[Any]:
    is_dict = decoder is ROW
    for line in read_lines(path):
        try:
            row = decoder.decode(line)
            if is_dict and not is_step(row.get("step")):
                raise ValueError
        except ValueError:  # msgspec's errors are ValueErrors, and so is text that is not UTF-8
            faults.broken += 1
        else:
            yield row


def spans(folder: Path) -> list[tuple[Path, int | None]]:
    """Each segment in order, with the step from which later ones supersede it."""
    spans: list[tuple[Path, int | None]] = []
    end: int | None = None
    for _, path in reversed(segments(folder)):
        spans.append((path, end))
        first = next((row["step"] for row in _decoded(path, ROW, Faults())), None)
        if first is not None:
            end = first if end is None else min(first, end)
    return spans[::-1]


def _column_decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    value = bool | int | float | str | None
    step = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    fields: list[Any] = [("c0", step)] + [(f"c{i}", value, None) for i in range(1, len(names))]
    rename = {f"c{i}": name for i, name in enumerate(names)}
    return msgspec.json.Decoder(msgspec.defstruct("Columns", fields, rename=rename, gc=False))


def _all_columns(folder: Path, faults: Faults) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"step": []}
    for num_rows, row in enumerate(read_rows(folder, faults)):
        for name in row:
            if name not in columns:
                columns[name] = [None] * num_rows
        for name, column in columns.items():
            column.append(row.get(name))
    return columns
