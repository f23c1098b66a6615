"""What a guarded loop measured: in memory for the loop and the doctor, and as files in the format of a run.

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
from rung.runs.metrics import MetricsWriter, next_segment
from rung.runs.tables import TablesWriter

if TYPE_CHECKING:
    from rung.doctor.history import History

MOST_ROWS = 20_000  # 10 MB
MOST_TABLES = 200  # of each kind; of a model with 500 tensors 6 MB


class Log:
    def __init__(self, out: Path | None) -> None:
        self.rows: deque[dict[str, float]] = deque(maxlen=MOST_ROWS)
        self.tables: dict[str, deque[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._out = out
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

    def _opened(self) -> tuple[MetricsWriter, TablesWriter, LineFile] | None:
        """With the first thing to write: making a guard leaves no files behind."""
        if self._files is None and self._out is not None:
            segment = next_segment(self._out / "metrics")
            metrics = MetricsWriter(self._out / "metrics", segment)
            self._files = (metrics, TablesWriter(self._out / "tables", segment), LineFile(self._out / "events.ndjson"))
        return self._files

    def history(self, config: Mapping[str, Any], derived: Mapping[str, Any]) -> History:
        from rung.doctor.history import History, series_of, tables_of

        names = {name for row in self.rows for name in row}
        columns = {name: [row.get(name) for row in self.rows] for name in names}
        return History(
            config=dict(config),
            derived=dict(derived),
            rows=series_of(columns),
            tables=tables_of({kind: list(rows) for kind, rows in self.tables.items()}),
            events=list(self.events),
        )

    def close(self) -> None:
        files, self._files, self._out = self._files, None, None
        for file in files or ():
            file.close()
