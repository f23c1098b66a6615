"""Columns of a run as arrays or lists: out of the copy by column where there is one, else out of the rows.

numpy is imported by what returns its arrays; `read_lists` does without.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rung.runs.columns import Index, Progress, current, is_long
from rung.runs.metrics import read_values
from rung.runs.summary import number_of

if TYPE_CHECKING:
    import numpy as np

    from rung.runs.series import Series


def read_series(folder: Path, name: str, progress: Progress | None = None) -> Series:
    """The steps that have a value of `name`, and the values; empty where nobody recorded it."""
    from rung.runs.series import Series

    arrays = read_arrays(folder, [name], progress)
    rows, values = arrays.columns[name]
    return Series(arrays.steps[rows], values)


class Arrays(NamedTuple):
    """Columns of a run: name -> the rows that have a value, and the values; `steps` of all rows."""

    steps: np.ndarray
    columns: dict[str, tuple[np.ndarray, np.ndarray]]


def read_arrays(folder: Path, names: Sequence[str], progress: Progress | None = None) -> Arrays:
    index = current(folder, progress)
    if index.mark is not None:
        with contextlib.suppress(OSError, ValueError):  # rebuilt or removed by another process at this moment
            return _from_files(folder / "columns", index, names)
    return _from_rows(folder, names)


def read_lists(folder: Path, names: Sequence[str]) -> dict[str, list[Any]] | None:
    """`step` and `names` of a long run as lists with None where a row has no value; None where there is no copy."""
    index = current(folder) if is_long(folder) else None
    if index is None or index.mark is None:
        return None

    def load(name: str, kind: str, count: int) -> list[Any]:
        numbers = array(kind)
        with open(folder / "columns" / f"{index.mark}.{name}", "rb") as file:
            numbers.fromfile(file, count)
        return numbers.tolist()

    try:
        columns: dict[str, list[Any]] = {"step": load("step", "q", index.num_rows)}
        for name in names:
            held = index.metrics.get(name)
            column: list[Any] = [None] * index.num_rows
            if held is not None:
                values = load(f"{held.number}.f8", "d", held.summary.count)
                if held.summary.is_whole:
                    values = list(map(int, values))
                pairs, at = load(f"{held.number}.rows", "q", 2 * held.num_stretches), 0
                for start, stop in zip(pairs[::2], pairs[1::2]):
                    column[start:stop] = values[at : at + stop - start]
                    at += stop - start
            if name != "step":
                columns[name] = column
    except (OSError, EOFError):  # rebuilt or removed by another process at this moment
        return None
    return columns


def _from_files(out: Path, index: Index, names: Sequence[str]) -> Arrays:
    import numpy as np

    def load(name: str, dtype: type, count: int) -> np.ndarray:
        values: np.ndarray = np.fromfile(out / f"{index.mark}.{name}", dtype, count)
        if len(values) != count:
            raise ValueError(f"{name} is cut short")
        return values

    steps = load("step", np.int64, index.num_rows)
    columns = {}
    for name in names:
        held = index.metrics.get(name)
        if held is None:
            columns[name] = np.zeros(0, np.int64), np.zeros(0)
            continue
        pairs = load(f"{held.number}.rows", np.int64, 2 * held.num_stretches)
        lengths = pairs[1::2] - pairs[::2]
        before = np.repeat(np.cumsum(lengths) - lengths, lengths)  # places of the stretches among the values
        rows = np.repeat(pairs[::2], lengths) + np.arange(held.summary.count) - before
        columns[name] = rows, load(f"{held.number}.f8", np.float64, held.summary.count)
    return Arrays(steps, columns)


def _from_rows(folder: Path, names: Sequence[str]) -> Arrays:
    import numpy as np

    wanted = list(dict.fromkeys(name for name in names if name != "step"))
    steps, places = array("q"), [array("q") for _ in wanted]
    values: list[array[float]] = [array("d") for _ in wanted]
    for at, (step, *row) in enumerate(read_values(folder, wanted)):
        steps.append(step)
        for value, place, column in zip(row, places, values):
            number = value if type(value) is float else number_of(value)
            if number is not None:
                place.append(at)
                column.append(number)
    columns = {name: (np.array(places[i], np.int64), np.array(values[i], float)) for i, name in enumerate(wanted)}
    return Arrays(np.array(steps, np.int64), columns)
