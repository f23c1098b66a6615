"""A run as its rules see it: what was recorded, up to some step.

Made from the folder of a run, or grown row by row while it is training. Nothing here computes anything of a model.

The surprising thing: a value that is absent and one that is NaN are different things (runs/series.py). Rules count
what is not finite and never average it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rung.runs.query import Run, open_run
from rung.runs.series import EMPTY as EMPTY
from rung.runs.series import WINDOW as WINDOW
from rung.runs.series import Series
from rung.runs.tables import read_tables


class Table(NamedTuple):
    """Numbers per name and step: `columns[c][i, j]` belongs to steps[i] and names[j]."""

    steps: np.ndarray
    names: list[str]
    columns: dict[str, np.ndarray]

    def last(self, num_rows: int) -> Table:
        return Table(self.steps[-num_rows:], self.names, {c: v[-num_rows:] for c, v in self.columns.items()})


@dataclass
class History:
    run_id: str = ""
    status: str = "running"
    config: dict[str, Any] = field(default_factory=dict)  # dotted
    derived: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Series] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    evals: dict[str, dict[str, Series]] = field(default_factory=dict)  # set -> name -> values at eval steps
    events: list[dict[str, Any]] = field(default_factory=list)
    parent: History | None = None
    superseded: dict[int, list[dict[str, float]]] = field(default_factory=dict)  # step -> earlier rows of that step

    def __getitem__(self, name: str) -> Series:
        """The series of a recorded value; an empty one where it was never recorded."""
        return self.rows.get(name, EMPTY)

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    @property
    def end(self) -> int:
        """The last step recorded, plus one."""
        steps = self["loss"].steps
        return int(steps[-1]) + 1 if len(steps) else 0

    @property
    def num_steps(self) -> int | None:
        return self.derived.get("num_steps")

    @property
    def warmup_steps(self) -> int:
        return int(self.derived.get("warmup_steps") or 0)

    @property
    def steps_per_epoch(self) -> float:
        rows, a_step = self.derived.get("epoch_rows"), self.derived.get("rows_per_step")
        return rows / a_step if rows and a_step else float("inf")

    def table(self, kind: str) -> Table | None:
        return self.tables.get(kind)

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") == kind]

    def until(self, end: int) -> History:
        """The same run as it looked when `end` steps had been taken. Costs little: arrays are cut, not copied."""
        return History(
            self.run_id,
            self.status if end >= self.end else "running",
            self.config,
            self.derived,
            self.data,
            {name: series.between(0, end) for name, series in self.rows.items()},
            {kind: _cut(table, end) for kind, table in self.tables.items()},
            {name: {k: s.between(0, end + 1) for k, s in of.items()} for name, of in self.evals.items()},
            [e for e in self.events if not isinstance(e.get("step"), int) or e["step"] <= end],
            self.parent,
            self.superseded,
        )


def read(run: Run, with_parent: bool = True) -> History:
    """All that a run's folder tells. A parent that is gone is no parent."""
    from rung.runs.metrics import superseded_rows

    history = History(
        run.id,
        run.status,
        dict(flat(run.config())),
        dict(run.document.get("derived") or {}),
        run.data(),
        rows_of(run),
        tables_of(read_tables(run.path / "tables")),
        evals_of(run.evals()),
        list(run.events()),
        superseded=superseded_rows(run.path / "metrics"),
    )
    if code := run.document.get("code"):  # not an event of its own: it was known before there were any
        history.events.insert(0, {**code, "kind": "code", "step": 0})
    parent = run.document.get("parent")
    if with_parent and parent:
        try:
            history.parent = read(open_run(str(parent), run.path.parent.parent), with_parent=False)
        except Exception:  # deleted, damaged or elsewhere: rules that compare have nothing to compare with
            history.parent = None
    return history


def rows_of(run: Run) -> dict[str, Series]:
    """Every metric but those of evals; of a long run out of its copy by column."""
    arrays = run.arrays([name for name in run.names() if not name.startswith("eval/")])
    return {name: Series(arrays.steps[rows], values) for name, (rows, values) in arrays.columns.items()}


def series_of(columns: Mapping[str, Sequence[Any]]) -> dict[str, Series]:
    """Columns with None where a row has no such value -> series without these rows."""
    steps = np.asarray(columns.get("step", []), np.int64)
    found = {}
    for name, values in columns.items():
        if name in ("step", "unix_s") or name.startswith("eval/"):
            continue
        there = np.fromiter((v is not None for v in values), bool, len(values))
        kept = np.asarray([v for v in values if v is not None], np.float64)
        found[name] = Series(steps[there], kept)
    return found


def tables_of(read: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Table]:
    """Rows of the latest names only: a model whose layers changed has two tables, and the later one counts."""
    tables = {}
    for kind, all_rows in read.items():
        names = list(all_rows[-1]["names"])
        rows = [row for row in all_rows if row["names"] == names]
        columns = [c for c in rows[-1] if c not in ("names", "step")]
        values = {c: np.asarray([row.get(c, [np.nan] * len(names)) for row in rows], np.float64) for c in columns}
        tables[kind] = Table(np.asarray([row["step"] for row in rows], np.int64), names, values)
    return tables


def evals_of(evals: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Series]]:
    found: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for event in evals:
        of_set = found.setdefault(str(event["set"]), {})
        for name, value in event.items():
            if name not in ("step", "set") and isinstance(value, int | float):
                steps, values = of_set.setdefault(name, ([], []))
                steps.append(int(event["step"]))
                values.append(float(value))
    return {
        name: {k: Series(np.asarray(s, np.int64), np.asarray(v, np.float64)) for k, (s, v) in of.items()}
        for name, of in found.items()
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _cut(table: Table, end: int) -> Table:
    num_rows = int(np.searchsorted(table.steps, end))
    return Table(table.steps[:num_rows], table.names, {c: v[:num_rows] for c, v in table.columns.items()})
