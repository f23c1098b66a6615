"""Numbers per layer, beside the rows of metrics: one table per kind and step, appended as it is measured.

    tables/<segment>.ndjson   {"kind": "tensors", "names": [...]}                     once, and when the names change
                              {"kind": "tensors", "step": 40, "grad": [...], ...}     one number per name

What the columns mean is the engine's business. Segments supersede each other as those of the metrics do, and numbers
that are not finite are kept by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rung.runs.files import LineFile, from_json, read_lines, to_json
from rung.runs.metrics import segments


class TablesWriter:
    def __init__(self, folder: Path, segment: int) -> None:
        self._path = folder / f"{segment:03d}.ndjson"
        self._file: LineFile | None = None
        self._names: dict[str, list[str]] = {}

    def add(self, kind: str, step: int, names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
        if self._file is None:  # most short runs have none
            self._path.parent.mkdir(parents=True, exist_ok=True)
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
                    names[kind] = row["names"]
                    continue
                step = int(row["step"])
                kept = found.setdefault(kind, {})
                if kind not in has_begun:  # the first of a segment: what lies beyond was undone
                    has_begun.add(kind)
                    found[kind] = kept = {at: old for at, old in kept.items() if at < step}
                kept[step] = {"names": names[kind], **row}
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a broken line
    return {kind: [rows[step] for step in sorted(rows)] for kind, rows in found.items()}
