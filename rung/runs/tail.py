"""The rows that a run adds while somebody looks: only new bytes are read."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rung import parse
from rung.runs.metrics import ROW, is_step, segments

_MOST_BYTES = 1 << 20  # at one look; the rest comes with the next


class Tail:
    """The rows that a run adds from now on."""

    def __init__(self, run_id: str, folder: Path, metrics: Collection[str] = ()) -> None:
        self.run_id, self._folder, self._metrics = run_id, folder, frozenset(metrics)
        self._number, self._path, self._offset = -1, folder, 0
        for number, path in segments(folder):
            self._number, self._path, self._offset = number, path, path.stat().st_size
        if self._offset:  # a line that is being written is read when it is whole
            with parse.open_file(self._path) as file:
                back = min(self._offset, _MOST_BYTES)
                file.seek(self._offset - back)
                self._offset += file.read(back).rfind(b"\n") + 1 - back

    def read(self) -> dict[str, Any] | None:
        """The rows since the last call; None where there are none. `restarted`: they replace those from there on."""
        restarted = False
        data = self._new_bytes()
        if not data:
            # A resume writes a segment of its own.
            later = [(number, path) for number, path in segments(self._folder) if number > self._number]
            if not later:
                return None
            restarted = self._number >= 0
            self._number, self._path = later[0]
            self._offset = 0
            data = self._new_bytes()
        rows = []
        for line in data.splitlines():
            with contextlib.suppress(*parse.BROKEN):
                row = ROW.decode(line)
                if is_step(row.get("step")):
                    rows.append(self._wanted(row))
        rows = [row for row in rows if len(row) > 2 or not self._metrics]
        if not rows and not restarted:
            return None
        return {"run": self.run_id, "rows": rows, **({"restarted": True} if restarted else {})}

    def _wanted(self, row: dict[str, Any]) -> dict[str, Any]:
        if not self._metrics:
            return row
        return {name: row[name] for name in ("step", "unix_s", *self._metrics) if name in row}

    def _new_bytes(self) -> bytes:
        if self._number < 0:
            return b""
        try:
            if self._path.stat().st_size <= self._offset:
                return b""
            with parse.open_file(self._path) as file:
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except OSError:
            return b""
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole
