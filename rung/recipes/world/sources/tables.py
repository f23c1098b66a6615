"""Tables beside pictures or films: JSON lines, JSON, CSV, and the records of a Donkey Car tub.

A table says which picture (image, file, frame), when (t, time, timestamp; a unit may follow: timestamp_ms), in which
recording (episode, session), from where (pose, or x, y, z with angles or a quaternion), and what was done (control, or
any other numbers). `notes` lists what had to be assumed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rung import parse
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
TUB_IMAGE = "cam/image_array"
# Both are what the user did, also where a pilot drove: angle is positive to the right, throttle forwards.
TUB_CONTROLS = {"user/angle": "angle", "user/throttle": "throttle"}
TUB_TIMES = {"_timestamp_ms": "timestamp_ms", "milliseconds": "timestamp_ms", "timestamp": "timestamp"}
ASSUMED_HZ = 20.0
MOST_COUNTED = 10_000_000  # larger whole numbers are seconds of a clock, not frames


@dataclass
class FrameTable:
    path: Path
    rows: list[dict[str, Any]]
    header: dict[str, Any] = field(default_factory=dict)  # what stands beside the rows of a JSON file
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError(
                f"{self.path} has no rows; pass --from a folder whose table has one row per frame", code="table-empty"
            )
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
        groups = []
        for key, rows in numbers.items():
            name = labelled(f"{episode} {key}" if episode else stem, within)
            groups.append((str(self.rows[rows[0]].get(label)) if label else name, np.array(rows)))
        return groups

    def numbers(self, column: str, read: Callable[[Any], float | None] | None = None) -> np.ndarray:
        """(rows,) float64, NaN where there is nothing; refuses what is not a number."""
        values = [(read or _number)(row.get(column)) for row in self.rows]
        for row, value in enumerate(values, 1):
            if value is None:
                raise bad_table(f"{self.path}, row {row}", f"{column} is {self.rows[row - 1][column]!r}, not a number")
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
                    "frames; count them from 0, or give times in seconds",
                    code="count-mismatch",
                )
            return film[count.astype(np.int64) - first]
        name = next((n for n in RATE if n in self.header), None) or self.find(RATE)
        rate = ASSUMED_HZ if name is None else _number(self.header.get(name, self.rows[0].get(name)))
        if rate is None or not 0 < rate < np.inf:
            raise bad_table(self.path, f"{name} is not a rate: frames per second, above 0")
        if name is None:
            self.notes.append(
                f"{column} counts frames and no rate is given: {ASSUMED_HZ:g} frames a second are assumed; a column "
                "rate_hz in the table says otherwise"
            )
        return count / rate

    def poses(self, axes: str) -> tuple[np.ndarray | None, tuple[float, float, float]]:
        """(rows, 4, 4), NaN where a row has none, or None; and the world's up.

        Up is z for angles; else y, against it for opencv and along it for opengl, as if the first camera were level.
        """
        up = (0.0, 1.0, 0.0) if axes == "opengl" else (0.0, -1.0, 0.0)
        column = self.find(POSE)
        if column is not None:
            values = self._lists(column)
        else:
            kinds = (POSITION + QUATERNION, POSITION + ANGLES)
            names = next((kind for kind in kinds if set(kind) <= set(self.columns)), None)
            if names is None:
                return None, up
            values = np.stack([self.numbers(name) for name in names], axis=1)
        return read_poses(values, axes, str(self.path)), (0.0, 0.0, 1.0) if values.shape[1] == 6 else up

    def controls(self) -> tuple[np.ndarray | None, list[str]]:
        """(rows, C) and their names; NaN where a row has none."""
        column = self.find(CONTROL)
        if column is not None and not any(isinstance(row.get(column), dict) for row in self.rows):
            values = self._lists(column)
            names = self.header.get("control_names") or self.rows[0].get("control_names")
            if names is None:
                names = [f"{column}_{i}" for i in range(values.shape[1])]
            if len(names) != values.shape[1]:
                raise bad_table(self.path, f"{column} has {values.shape[1]} numbers, control_names {len(names)}")
            return values, [str(name) for name in names]
        table = self
        if column is not None:
            table = FrameTable(self.path, [row.get(column) or {} for row in self.rows])
        skipped = {*NOT_CONTROLS, *POSITION, *QUATERNION, *(ANGLES if "x" in self.columns else ())}
        names = [name for name in table.columns if column is not None or not (name in skipped or name.startswith("_"))]
        names = [name for name in names if all(_number(row.get(name)) is not None for row in table.rows)]
        names = [name for name in names if np.isfinite(table.numbers(name)).any()]
        return (np.stack([table.numbers(name) for name in names], axis=1), names) if names else (None, [])

    def _finite(self, column: str) -> np.ndarray:
        values = self.numbers(column, _moment)
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0]) + 1
            raise bad_table(f"{self.path}, row {row} of {len(values)}", f"no {column}, which every row needs")
        return values

    def _lists(self, column: str) -> np.ndarray:
        lists = [None if row.get(column) is None else _flat(row[column]) for row in self.rows]
        sizes = {len(values) for values in lists if values is not None}
        if len(sizes) != 1 or 0 in sizes:
            shown = ", ".join(map(str, sorted(sizes))) or "none"
            raise bad_table(self.path, f"the lists in {column} must have one length, not {shown}")
        size = sizes.pop()
        numbers = [[np.nan] * size if values is None else [_number(v) for v in values] for values in lists]
        for row, values in enumerate(numbers, 1):
            if None in values:
                raise bad_table(f"{self.path}, row {row}", f"{column} has something that is not a number")
        return np.array(numbers, np.float64)


def read_table(path: Path) -> FrameTable:
    suffix = path.suffix.lower()
    if suffix == ".csv":
        lines = _read_text(path).splitlines()
        delimiter = max(",;\t", key=(lines or [""])[0].count)
        try:
            read = list(csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True))
        except csv.Error as error:
            raise bad_table(path, error) from error
        return FrameTable(
            path, [{k.strip(): v for k, v in row.items() if k is not None and v not in ("", None)} for row in read]
        )
    if suffix != ".json":
        return FrameTable(path, list(_json_lines(path)))
    data = _json(_read_text(path), path)
    header = data if isinstance(data, dict) else {}
    lists = [data] if isinstance(data, list) else [v for v in header.values() if isinstance(v, list) and v]
    rows = next((v for v in lists if all(isinstance(row, dict) for row in v)), None)
    if rows is None:
        raise bad_table(path, 'no list of rows; write [{...}, ...] or {"frames": [{...}, ...]}')
    return FrameTable(path, rows, header)


def is_tub(folder: Path) -> bool:
    return any(folder.glob("catalog_*.catalog")) or any(folder.glob("record_*.json"))


def read_tub(folder: Path) -> tuple[FrameTable, int]:
    """A Donkey Car tub of version 2 (manifest.json and catalogs) or 1 (record_N.json), and how many were deleted.

    Records that the driver deleted are left out; each row has its `index`, which jumps there.
    """

    def number_in(path: Path) -> tuple[int, str]:
        return int((re.findall(r"\d+", path.stem) or [0])[-1]), path.name

    catalogs = sorted(folder.glob("catalog_*.catalog"), key=number_in)
    manifest = folder / "manifest.json"
    deleted: Any = []
    if catalogs:
        records = [record for path in catalogs for record in _json_lines(path)]
        if manifest.is_file():  # its last line with the key counts
            for record in _json_lines(manifest, having='"deleted_indexes"'):
                deleted = record.get("deleted_indexes") or []
    else:
        paths = sorted(folder.glob("record_*.json"), key=number_in)
        records = [{"_index": number_in(path)[0]} | _object(_read_text(path), path) for path in paths]
    if not isinstance(deleted, list):
        raise bad_table(manifest, f"deleted_indexes is {deleted!r}, not a list")
    deleted = {index for index in deleted if isinstance(index, int)}

    rows: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        index = record["_index"] if isinstance(record.get("_index"), int) else number
        if index in deleted or not isinstance(record.get(TUB_IMAGE), str):
            continue
        row = {"image": record[TUB_IMAGE], "index": index}
        if "_session_id" in record:
            row["session"] = record["_session_id"]
        time = next((name for name in TUB_TIMES if name in record), None)
        if time is not None:
            row[TUB_TIMES[time]] = record[time]
        rows.append(row | {ours: record[theirs] for theirs, ours in TUB_CONTROLS.items() if theirs in record})
    if not rows:
        raise DataError(
            f"none of the {len(records)} records in {folder} names a picture ({TUB_IMAGE}); pass --from another tub",
            code="table-empty",
        )
    return FrameTable(folder, rows), len(records) - len(rows)


def read_poses(values: np.ndarray, axes: str, where: str) -> np.ndarray:
    """Poses out of a file's numbers; refuses what is none, and makes rotations exact that have few digits."""
    known = np.isfinite(values).all(1)
    out = np.full((len(values), 4, 4), np.nan)
    try:
        poses = geometry.from_numbers(values[known], axes)
    except ValueError as error:
        raise DataError(f"{where}: {error}; fix the poses", code="bad-pose") from error
    rigid = geometry.is_rigid(poses)
    if not rigid.all():
        row = int(np.flatnonzero(known)[np.flatnonzero(~rigid)[0]]) + 1
        raise DataError(
            f"{where}, row {row}: the pose is not a rotation and a place ({int((~rigid).sum())} of {len(values)} are "
            "not); poses are camera-to-world, as 6, 7, 12 or 16 numbers",
            code="bad-pose",
        )
    out[known] = geometry.nearest_rotation(poses) if values.shape[1] > 7 else poses
    return out


def labelled(name: str, within: str) -> str:
    return f"{within}/{name}" if within not in ("", name) else name


def is_name(value: Any) -> bool:
    """A text that is no number, since all is text in CSV."""
    return isinstance(value, str) and _number(value) is None


def bad_table(where: object, problem: object) -> DataError:
    return DataError(f"{where}: {problem}; fix the file", code="bad-table")


def _read_text(path: Path) -> str:
    try:
        return parse.text(parse.read_bytes(path, parse.MOST_DATA_BYTES), parse.MOST_DATA_BYTES)
    except (OSError, ValueError) as error:
        raise bad_table(path, error) from error


def _json(text: str, where: object) -> Any:
    try:
        return parse.loose_json(text, parse.NO_LIMIT)
    except ValueError as error:
        raise bad_table(where, f"not JSON ({error})") from error


def _object(text: str, where: object) -> dict[str, Any]:
    value = _json(text, where)
    if not isinstance(value, dict):
        raise bad_table(where, 'not an object such as {"image": ..., "t": ...}')
    return value


def _json_lines(path: Path, having: str = "") -> Iterator[dict[str, Any]]:
    """The objects of a file that has one on each line, of those lines that contain a text."""
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip() and having in line:
            yield _object(line, f"{path}, line {number}")


def _number(value: Any) -> float | None:
    """NaN for nothing, None for what is no number."""
    try:
        return float("nan") if value is None else float(value)
    except (ValueError, TypeError, OverflowError):
        return None


def _moment(value: Any) -> float | None:
    """The same, and a date is its seconds since 1970. Numbers come first: all is text in CSV, and 1706111310041 would
    pass for a date too."""
    number = _number(value)
    try:
        return datetime.fromisoformat(value).timestamp() if number is None and isinstance(value, str) else number
    except (ValueError, OverflowError, OSError):
        return None


def _flat(value: Any) -> list[Any]:
    """A list of lists as one list; a text of numbers, as CSV has them, as its numbers."""
    if isinstance(value, str):
        value = value.strip("[]() ").replace(",", " ").replace(";", " ").split()
    if not isinstance(value, list):
        return [value]
    return [number for item in value for number in (_flat(item) if isinstance(item, list) else [item])]
