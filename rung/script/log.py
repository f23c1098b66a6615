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
    from rung.doctor.history import History
    from rung.script.run import OwnRun

MOST_ROWS = 20_000  # 10 MB
MOST_TABLES = 200  # of each kind; of a model with 500 tensors 6 MB


class Log:
    def __init__(self, out: Path | None) -> None:
        self.rows: deque[dict[str, float]] = deque(maxlen=MOST_ROWS)
        self.tables: dict[str, deque[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._out = out
        self._files: tuple[MetricsWriter, TablesWriter, LineFile] | None = None

    def pushed(
        self, step: int, host: Mapping[str, float], signals: Mapping[str, Any], tables: Mapping[str, Any]
    ) -> None:
        """A step was taken, and its numbers are still on their way; `row` has them when they are here."""

    def rows_per_step(self, num_rows: int | None) -> None:
        """Of the first step, as far as its batch tells."""

    def place(self, capture: Path | None) -> str:
        """A capture as events name it."""
        return str(capture or "")

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
        from rung.doctor.history import History, series_from_rows, tables_from_rows

        return History(
            config=dict(config),
            derived=dict(derived),
            rows=series_from_rows(self.rows),
            tables=tables_from_rows({kind: list(rows) for kind, rows in self.tables.items()}),
            events=list(self.events),
            is_script=True,
        )

    def close(self) -> None:
        files, self._files, self._out = self._files, None, None
        for file in files or ():
            file.close()


class RunLog(Log):
    """The log of a guard inside a run: rows, tables and events are the run's, as those of the engine are."""

    def __init__(self, run: OwnRun, model: Any, optimizers: Sequence[Any], clip: float, clips_itself: bool) -> None:
        super().__init__(None)
        self._run, self._clips_itself = run, clips_itself
        run.take_over(model, optimizers, clip)

    def pushed(
        self, step: int, host: Mapping[str, float], signals: Mapping[str, Any], tables: Mapping[str, Any]
    ) -> None:
        """The run learns of the step at once, so that what the script logs next goes into the same row."""
        wanted = ("norm_clipped", "skipped", "scale", "lr") + (() if self._clips_itself else ("norm",))
        named = {name: value for name, value in signals.items() if name in wanted or name.startswith("logits/")}
        values = {"loss": signals["loss/sum"], **named, **host}
        # (no gradients, no losses: a tensor on the host is a number at once)
        values = {name: v.item() if getattr(v, "is_cpu", False) else v for name, v in values.items()}
        self._run.guarded_step(step, values, dict(tables))

    def rows_per_step(self, num_rows: int | None) -> None:
        if num_rows is not None:
            self._run.derive(rows_per_step=num_rows)

    def place(self, capture: Path | None) -> str:
        return "" if capture is None else f"captures/{capture.name}"

    def event(self, kind: str, step: int, **fields: Any) -> None:
        super().event(kind, step, **fields)
        if kind == "diverged":  # the row of the failed step comes before what is said of it
            self._run.write_rows()
        self._run.event(kind, step, **fields)
