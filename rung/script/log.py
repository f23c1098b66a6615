"""What a guarded script measured: in memory for the script and the doctor, and as files in the format of a run.

    out/metrics/000.ndjson    a row per step         out/tables/000.ndjson    norms per tensor
    out/events.ndjson         what happened          out/<step>/              a capture

Memory holds the newest; the files hold all. Each process that writes into a folder adds its own segment.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.runs.files import LineFile, to_json
from rung.runs.metrics import MetricsWriter, TablesWriter, next_segment

if TYPE_CHECKING:
    from rung.script.run import OwnRun

MOST_ROWS = 20_000  # 10 MB
MOST_TABLES = 200  # of each kind; of a model with 500 tensors 6 MB


class Log:
    """In a run, rows and tables reach the run by way of its own steps, and only events are passed on from here."""

    def __init__(self, out: Path | None, run: OwnRun | None) -> None:
        self.rows: deque[dict[str, float]] = deque(maxlen=MOST_ROWS)
        self.tables: dict[str, deque[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._run, self._out = run, out if run is None else None
        self._files: tuple[MetricsWriter, TablesWriter, LineFile] | None = None

    def row(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append({"step": step, **values})
        if (files := self._opened()) is not None:
            files[0].log(step, values)

    def table(self, kind: str, step: int, names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
        kept = self.tables.setdefault(kind, deque(maxlen=MOST_TABLES))
        kept.append({"step": step, "names": list(names), **columns})
        if (files := self._opened()) is not None:
            files[1].add(kind, step, names, columns)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        self.events.append({"kind": kind, "step": step, **fields})
        if (files := self._opened()) is not None:
            files[2].append(to_json({"kind": kind, "unix_s": time.time(), "step": step, **fields}) + b"\n")
        if self._run is not None:
            if kind == "diverged":  # the row of the failed step comes before what is said of it
                self._run.axis.write_rows()
            self._run.out.event(kind, step, **fields)

    def _opened(self) -> tuple[MetricsWriter, TablesWriter, LineFile] | None:
        """With the first thing to write: making a guard leaves no files behind."""
        if self._files is None and self._out is not None:
            segment = next_segment(self._out / "metrics")
            metrics = MetricsWriter(self._out / "metrics", segment)
            self._files = (metrics, TablesWriter(self._out / "tables", segment), LineFile(self._out / "events.ndjson"))
        return self._files

    def close(self) -> None:
        files, self._files, self._out = self._files, None, None
        for file in files or ():
            file.close()
