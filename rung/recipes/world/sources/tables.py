"""Tables beside pictures or films: JSON lines, JSON or CSV, with the columns people use.

A table says which picture (image, file, frame), when (t, time, timestamp; a unit may follow: timestamp_ms), in which
recording (episode, session), from where (pose, or x, y, z with angles or a quaternion), and what was done (control, or
any other numbers). What had to be assumed is said in `notes`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rung.errors import DataError
from rung.recipes.world import geometry

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv")
IMAGE = ("image", "file", "image_path", "file_path", "filename", "path", "frame")
EPISODE = ("episode", "session", "sequence", "_session_id")
LABEL = ("map", "label", "name", "scene")
POSE = ("pose", "transform_matrix", "camera_to_world", "c2w")
CONTROL = ("control", "controls", "action")
RATE = ("rate_hz", "fps")
TIME = ("timestamp", "time", "t")
COUNTER = ("frame", "frame_index", "frame_number", "index")
UNITS = {"": 1.0, "_s": 1.0, "_ms": 1e3, "_us": 1e6, "_ns": 1e9}  # parts of a second
POSITION, ANGLES, QUATERNION = ("x", "y", "z"), ("yaw", "pitch", "roll"), ("qx", "qy", "qz", "qw")
NOT_CONTROLS = {
    *IMAGE, *EPISODE, *LABEL, *POSE, *CONTROL, *RATE, *(name + unit for name in TIME for unit in UNITS),
    *COUNTER, "id", "row", "frame_id", "width", "height", "control_names",
}  # fmt: skip
ASSUMED_HZ = 20.0
MOST_COUNTED = 10_000_000  # larger whole numbers are seconds of a clock, not frames


@dataclass
class Table:
    path: Path
    rows: list[dict[str, Any]]
    header: dict[str, Any] = field(default_factory=dict)  # what stands beside the rows of a JSON file
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError(f"{self.path} has no rows; pass --from a folder whose table has one row per frame")
        self.columns = list(dict.fromkeys(name for row in self.rows for name in row))

    def find(self, names: Sequence[str]) -> str | None:
        """The first of these columns that the table has."""
        return next((name for name in names if name in self.columns), None)

    def groups(self, within: str = "") -> list[tuple[str, np.ndarray]]:
        """Label and row numbers of each recording, in the order in which they begin.

        `within` is the folder among others that the table lies in. It becomes a part of the label, unless the table
        itself names a place: the same map in two folders is one place, log.jsonl in two folders is not.
        """
        episode, label = self.find(EPISODE), self.find(LABEL)
        numbers: dict[str, list[int]] = {}
        for number, row in enumerate(self.rows):
            numbers.setdefault(str(row.get(episode)) if episode else "", []).append(number)
        stem = self.path.parent.name if self.path.stem == "frames" else self.path.stem
        return [
            (
                str(self.rows[rows[0]].get(label))
                if label
                else labelled(f"{episode} {key}" if episode else stem, within),
                np.array(rows),
            )
            for key, rows in numbers.items()
        ]

    def numbers(self, column: str, read: Callable[[Any], float | None] | None = None) -> np.ndarray:
        """(rows,) float64, NaN where there is nothing; refuses what is not a number."""
        values = [(read or _number)(row.get(column)) for row in self.rows]
        for row, value in enumerate(values, 1):
            if value is None:
                raise DataError(
                    f"{self.path}, row {row}: {column} is {self.rows[row - 1][column]!r}, not a number; mend the table"
                )
        return np.array(values, np.float64)

    def times(self, film: np.ndarray | None = None) -> np.ndarray | None:
        """(rows,) seconds; None where the table has no clock and counts no frames, whose times `film` may have."""
        column = self.find([name + unit for name in TIME for unit in UNITS])
        if column is None:
            counter = self.find(COUNTER)
            if counter is None or any(_number(row.get(counter)) is None for row in self.rows):
                return None
            return self.counted(self._finite(counter), counter, film)
        values = self._finite(column)
        unit = next(unit for unit in reversed(UNITS) if column.endswith(unit))
        if not unit and np.abs(values).max() > 1e11:  # seconds since 1970 have ten digits
            unit = "_ms" if np.abs(values).max() < 1e14 else "_us" if np.abs(values).max() < 1e17 else "_ns"
            self.notes.append(f"{column} is taken for a time in {unit[1:]}, by its size")
        is_whole = not unit and (values == np.rint(values)).all() and np.abs(values).max() < MOST_COUNTED
        steps = np.concatenate([np.diff(values[rows]) for _, rows in self.groups()])
        if is_whole and len(steps) and np.median(steps) == 1:
            if film is None:
                return self.counted(values, column)
            self.notes.append(f"{column} is taken for whole seconds of the film; call it `frame` if it counts frames")
        return values / UNITS[unit]

    def counted(self, count: np.ndarray, column: str, film: np.ndarray | None = None) -> np.ndarray:
        """Seconds out of a count of frames: those of the film, or by the table's rate, or by an assumed one."""
        if film is not None:
            first = int(count.max() == len(film))  # some count from 1
            if count.min() < first or count.max() >= len(film) + first or (count != np.rint(count)).any():
                raise DataError(
                    f"{self.path}: {column} runs from {count.min():g} to {count.max():g}, the film has {len(film)} "
                    "frames; count them from 0, or give times in seconds"
                )
            return film[count.astype(np.int64) - first]
        name = next((n for n in RATE if n in self.header), None) or self.find(RATE)
        rate = ASSUMED_HZ if name is None else _number(self.header.get(name, self.rows[0].get(name)))
        if rate is None or not 0 < rate < np.inf:
            raise DataError(f"{self.path}: {name} is not a rate; give frames per second, above 0")
        if name is None:
            self.notes.append(
                f"{column} counts frames and no rate is given: {ASSUMED_HZ:g} frames a second are assumed; a column "
                "rate_hz in the table says otherwise"
            )
        return count / rate

    def poses(self, axes: str) -> np.ndarray | None:
        """(rows, 4, 4), NaN where a row has none."""
        column = self.find(POSE)
        if column is not None:
            values = self._lists(column)
        elif all(name in self.columns for name in POSITION + QUATERNION):
            values = np.stack([self.numbers(name) for name in POSITION + QUATERNION], axis=1)
        elif all(name in self.columns for name in POSITION + ANGLES):
            values = np.stack([self.numbers(name) for name in POSITION + ANGLES], axis=1)
        else:
            return None
        return read_poses(values, axes, str(self.path))

    def up(self, axes: str) -> tuple[float, float, float]:
        """The world's up: z for angles; else y, downwards in opencv's and upwards in opengl's."""
        pose = self.find(POSE)
        has_angles = self._lists(pose).shape[1] == 6 if pose else not all(name in self.columns for name in QUATERNION)
        return (0.0, 0.0, 1.0) if has_angles else up_of(axes)

    def controls(self) -> tuple[np.ndarray | None, list[str]]:
        """(rows, C) and their names; NaN where a row has none."""
        column = self.find(CONTROL)
        if column is not None and not any(isinstance(row.get(column), dict) for row in self.rows):
            values = self._lists(column)
            names = self.header.get("control_names") or self.rows[0].get("control_names")
            if names is None:
                names = [f"{column}_{i}" for i in range(values.shape[1])]
            if len(names) != values.shape[1]:
                raise DataError(
                    f"{self.path}: {column} has {values.shape[1]} numbers, control_names {len(names)}; mend it"
                )
            return values, [str(name) for name in names]
        table = self
        if column is not None:
            table = Table(self.path, [row.get(column) or {} for row in self.rows])
        skipped = {*NOT_CONTROLS, *POSITION, *QUATERNION, *(ANGLES if "x" in self.columns else ())}
        names = [name for name in table.columns if column is not None or not (name in skipped or name.startswith("_"))]
        names = [name for name in names if all(_number(row.get(name)) is not None for row in table.rows)]
        names = [name for name in names if np.isfinite(table.numbers(name)).any()]
        return (np.stack([table.numbers(name) for name in names], axis=1), names) if names else (None, [])

    def _finite(self, column: str) -> np.ndarray:
        values = self.numbers(column, _moment)
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0]) + 1
            raise DataError(f"{self.path}, row {row} of {len(values)} has no {column}; every row needs one")
        return values

    def _lists(self, column: str) -> np.ndarray:
        lists = [None if row.get(column) is None else _flat(row[column]) for row in self.rows]
        sizes = {len(values) for values in lists if values is not None}
        if len(sizes) != 1 or 0 in sizes:
            shown = ", ".join(map(str, sorted(sizes))) or "no"
            raise DataError(f"{self.path}: the lists in {column} have {shown} numbers; they must have one length")
        size = sizes.pop()
        numbers = [[np.nan] * size if values is None else [_number(v) for v in values] for values in lists]
        for row, values in enumerate(numbers, 1):
            if None in values:
                raise DataError(
                    f"{self.path}, row {row}: {column} holds something that is not a number; mend the table"
                )
        return np.array(numbers, np.float64)


def read_table(path: Path) -> Table:
    try:
        text = path.read_text("utf-8-sig")
        if path.suffix.lower() == ".csv":
            return _read_csv(path, text)
        if path.suffix.lower() != ".json":
            return Table(path, [_row(path, i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()])
        data = json.loads(text)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}; mend the table") from error
    header = data if isinstance(data, dict) else {}
    lists = [data] if isinstance(data, list) else [v for v in header.values() if isinstance(v, list) and v]
    rows = next((v for v in lists if all(isinstance(row, dict) for row in v)), None)
    if rows is None:
        raise DataError(f'{path} holds no list of rows; write [{{...}}, ...] or {{"frames": [{{...}}, ...]}}')
    return Table(path, rows, header)


def read_poses(values: np.ndarray, axes: str, where: str) -> np.ndarray:
    """Poses out of a file's numbers; refuses what is none, and makes rotations exact that have few digits."""
    known = np.isfinite(values).all(1)
    out = np.full((len(values), 4, 4), np.nan)
    try:
        poses = geometry.from_numbers(values[known], axes)
    except ValueError as error:
        raise DataError(f"{where}: {error}; mend the poses") from error
    rigid = geometry.is_rigid(poses)
    if not rigid.all():
        row = int(np.flatnonzero(known)[np.flatnonzero(~rigid)[0]]) + 1
        raise DataError(
            f"{where}, row {row}: the pose is not a rotation and a place ({int((~rigid).sum())} of {len(values)} are "
            "not); poses are camera-to-world, as 6, 7, 12 or 16 numbers"
        )
    out[known] = geometry.nearest_rotation(poses) if values.shape[1] > 7 else poses
    return out


def up_of(axes: str) -> tuple[float, float, float]:
    """What is up in a world whose first camera was held level: against opencv's y, along opengl's."""
    return (0.0, 1.0, 0.0) if axes == "opengl" else (0.0, -1.0, 0.0)


def labelled(name: str, within: str) -> str:
    return f"{within}/{name}" if within not in ("", name) else name


def is_name(value: Any) -> bool:
    """A text that is no number, since all is text in CSV."""
    return isinstance(value, str) and _number(value) is None


def _read_csv(path: Path, text: str) -> Table:
    head = text.split("\n", 1)[0]
    reader = csv.DictReader(text.splitlines(), delimiter=max(",;\t", key=head.count), skipinitialspace=True)
    rows = [{(k or "").strip(): v for k, v in row.items() if k is not None} for row in reader]
    return Table(path, [{k: v for k, v in row.items() if v not in ("", None)} for row in rows])


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number} is not JSON ({error}); mend the table") from error
    if not isinstance(row, dict):
        raise DataError(f'{path}, line {number} is not an object with names; write {{"image": ..., "t": ...}}')
    return row


def _number(value: Any) -> float | None:
    """NaN for nothing, None for what is no number."""
    try:
        return float("nan") if value is None else float(value)
    except (ValueError, TypeError):
        return None


def _moment(value: Any) -> float | None:
    """The same, and a date is its seconds since 1970. Numbers come first: all is text in CSV, and 1706111310041 would
    pass for a date too."""
    number = _number(value)
    try:
        return datetime.fromisoformat(value).timestamp() if number is None and isinstance(value, str) else number
    except ValueError:
        return None


def _flat(value: Any) -> list[Any]:
    """A list of lists as one list; a text of numbers, as CSV has them, as its numbers."""
    if isinstance(value, str):
        value = value.strip("[]() ").replace(",", " ").replace(";", " ").split()
    if not isinstance(value, list):
        return [value]
    return [number for item in value for number in (_flat(item) if isinstance(item, list) else [item])]
