"""Reads a Donkey Car tub as a table: version 2 (manifest.json and catalogs) and version 1 (record_N.json).

Records that the driver deleted are left out and counted; each row has its `index`, which jumps there. Steering is
`angle`, positive to the right; `throttle` is positive forwards. Both are what the user did, also where a pilot drove.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rung.errors import DataError
from rung.recipes.world.sources.tables import Table

CONTROLS = {"user/angle": "angle", "user/throttle": "throttle"}
IMAGE = "cam/image_array"


def is_tub(folder: Path) -> bool:
    return any(folder.glob("catalog_*.catalog")) or any(folder.glob("record_*.json"))


def read_tub(folder: Path) -> tuple[Table, int]:
    """The records that are not deleted, and how many are."""
    catalogs = sorted(folder.glob("catalog_*.catalog"), key=_number_in)
    records = _catalogs(catalogs) if catalogs else _records(sorted(folder.glob("record_*.json"), key=_number_in))
    deleted = _deleted(folder / "manifest.json") if catalogs else set()
    rows = [_row(record, number) for number, record in enumerate(records)]
    pictured = [row for row in rows if row["index"] not in deleted and isinstance(row["image"], str)]
    if not pictured:
        raise DataError(
            f"none of the {len(records)} records in {folder} names a picture ({IMAGE}); pass --from another tub"
        )
    return Table(folder, pictured), len(records) - len(pictured)


def _row(record: dict[str, Any], number: int) -> dict[str, Any]:
    index = record.get("_index")
    row: dict[str, Any] = {"image": record.get(IMAGE), "index": index if isinstance(index, int) else number}
    if "_session_id" in record:
        row["session"] = record["_session_id"]
    for name, unit in (("_timestamp_ms", "timestamp_ms"), ("milliseconds", "timestamp_ms"), ("timestamp", "timestamp")):
        if name in record:
            row[unit] = record[name]
            break
    return row | {ours: record.get(theirs) for theirs, ours in CONTROLS.items() if theirs in record}


def _catalogs(paths: list[Path]) -> list[dict[str, Any]]:
    lines = [(path, number, line) for path in paths for number, line in enumerate(_text(path).split("\n"), 1)]
    return [_object(line, f"{path}, line {number}") for path, number, line in lines if line.strip()]


def _records(paths: list[Path]) -> list[dict[str, Any]]:
    return [{"_index": _number_in(path)[0]} | _object(_text(path), str(path)) for path in paths]


def _deleted(manifest: Path) -> set[int]:
    """The last line of the manifest that speaks of it; a tub without a manifest has nothing deleted."""
    found: list[Any] = []
    for number, line in enumerate(_text(manifest).split("\n") if manifest.is_file() else [], 1):
        if '"deleted_indexes"' in line:
            found = _object(line, f"{manifest}, line {number}").get("deleted_indexes") or []
    if not isinstance(found, list):
        raise DataError(f"{manifest}: deleted_indexes is {found!r}, not a list; mend the tub")
    return {index for index in found if isinstance(index, int)}


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); mend the tub") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is not a record; mend the tub")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}; mend the tub") from error


def _number_in(path: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", path.stem)
    return int(digits[-1]) if digits else 0, path.name
