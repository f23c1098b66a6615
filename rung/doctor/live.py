"""The doctor beside a run in progress: the engine gives it what it records, and it reports what is new.

It changes nothing and never ends a run: a rule that fails is left out from then on and named in `failed`. Only the
newest rows are kept, so `rung doctor`, which reads the whole run, may find what this one no longer sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rung.doctor.diagnose import ask, ordered, suppress
from rung.doctor.finding import SEVERITIES, Finding
from rung.doctor.history import EMPTY, History, Series, Table, read
from rung.doctor.rules import Rule, catalogue
from rung.runs.query import Run
from rung.runs.record import read_document

MOST_ROWS = 1500  # of each value: fifteen windows of the rules
MOST_CELLS = 500_000  # numbers kept of one kind of table, 4 MB, in at most MOST_TABLES of its rows
MOST_TABLES = 100
MOST_EVENTS = 500
EVENTS_KEPT = ("unread_keys", "code", "check", "ranks_differ", "diverged")  # rare, and true to the end


def live_doctor(path: Path) -> LiveDoctor:
    """For the run in this folder, new or resumed."""
    history = read(Run(path, read_document(path)))
    resumes = history.steps_of("resume")
    if not resumes:
        return LiveDoctor(history)

    # As the run was at the save. What it did after that will be done again, and is kept to be compared with.
    rows: dict[int, dict[str, float]] = {}
    for name in ("loss", "norm", "lr", "batch_hash"):
        later = history[name].between(resumes[-1], history.end)
        for step, value in zip(later.steps.tolist(), later.values.tolist()):
            rows.setdefault(step, {})[name] = value
    undone = {step: [*history.superseded.get(step, []), row] for step, row in rows.items()}
    return LiveDoctor(replace(history.until(resumes[-1]), superseded={**history.superseded, **undone}))


class LiveDoctor:
    """Begins with what is known of the run: its config, derived numbers and parent; after a resume also its rows."""

    def __init__(self, history: History, rules: Sequence[Rule] | None = None) -> None:
        self.failed: dict[str, str] = {}  # rule -> what it raised
        self._known = history
        self._rules = list(rules if rules is not None else catalogue())
        self._rows = {name: _recent(series) for name, series in history.rows.items()}
        self._tables = {kind: _recent_table(table) for kind, table in history.tables.items()}
        self._evals = {name: {k: _recent(s) for k, s in of.items()} for name, of in history.evals.items()}
        self._events: deque[dict[str, Any]] = deque(history.events, MOST_EVENTS)
        self._lasting = [event for event in history.events if event.get("kind") in EVENTS_KEPT]
        self._reported: dict[str, Finding] = {}
        for event in history.events_of("finding"):  # from before a resume
            if event.get("severity") in SEVERITIES:
                known = {k: event[k] for k in ("since", "hides", "title", "probe") if event.get(k) is not None}
                finding = Finding(str(event["severity"]), event.get("what") or "", rule=str(event["rule"]), **known)
                self._reported[finding.rule] = finding
        self._num_events, self._looked_at = 0, (0, 0)

    def row(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name not in self._rows:
                self._rows[name] = _recent()
            self._rows[name].add(step, value)

    def table(self, kind: str, step: int, names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
        kept = self._tables.get(kind)
        if kept is None or kept.names != list(names) or set(kept.columns) != set(columns):
            nothing = np.zeros((0, len(names)))
            kept = _recent_table(Table(np.zeros(0, np.int64), list(names), dict.fromkeys(columns, nothing)))
            self._tables[kind] = kept
        kept.add(step, *(columns[name] for name in kept.columns))

    def eval(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for set_name, values in results.items():
            of_set = self._evals.setdefault(set_name, {})
            for name, value in values.items():
                of_set.setdefault(name, _recent()).add(step, float(value))

    def event(self, event: Mapping[str, Any]) -> None:
        self._events.append(dict(event))
        self._num_events += 1
        if event.get("kind") in EVENTS_KEPT:
            self._lasting.append(self._events[-1])

    def look(self) -> list[Finding]:
        """What is new since the last look, or has become worse; worst first."""
        history = self.history()
        if (history.end, self._num_events) == self._looked_at:
            return []
        self._looked_at = (history.end, self._num_events)
        answers = ask(history, [rule for rule in self._rules if rule.id not in self.failed], only_now=True)
        self.failed |= {answer.rule.id: answer.error for answer in answers if answer.error}
        found = [finding for answer in answers for finding in answer.findings]
        kept = suppress([*self._reported.values(), *found])  # an earlier finding may explain what is found now
        new = []
        for finding in kept:
            before = self._reported.get(finding.rule)
            if any(finding is one for one in found) and (before is None or finding.rank > before.rank):
                new.append(finding)
        for finding in sorted(new, key=lambda f: f.rank):
            self._reported[finding.rule] = finding
        return ordered(new)

    def history(self) -> History:
        """What is kept, without a copy; good until the next row."""
        events = list(self._events)
        return replace(
            self._known,
            status="running",
            rows={name: rows.series for name, rows in self._rows.items()},
            tables={kind: rows.table for kind, rows in self._tables.items()},
            evals={name: {k: rows.series for k, rows in of.items()} for name, of in self._evals.items()},
            events=[*(e for e in self._lasting if all(e is not other for other in events)), *events],
        )


class Recent:
    """The newest rows of a table, in arrays with room to grow, of which a look takes views.

    A step that comes again replaces what lay there and after it.
    """

    def __init__(self, start: Table, most: int) -> None:
        num = min(len(start.steps), most)
        first = len(start.steps) - num
        self.names, self._most, self._num = start.names, most, num
        self._steps = np.zeros(2 * most, np.int64)
        self._steps[:num] = start.steps[first:]
        self.columns = {c: np.full((2 * most, *v.shape[1:]), np.nan) for c, v in start.columns.items()}
        for name, values in start.columns.items():
            self.columns[name][:num] = values[first:]
        self._arrays = list(self.columns.values())
        self._last = int(start.steps[-1]) if num else -1  # as a plain number: compared often

    def add(self, step: int, *values: float | Sequence[float]) -> None:
        """A value per column, in their order."""
        if step <= self._last:
            self._num = int(np.searchsorted(self._steps[: self._num], step))
        if self._num == len(self._steps):
            self._num = self._most
            for array in (self._steps, *self._arrays):
                array[: self._most] = array[self._most :]
        self._steps[self._num] = self._last = step
        for array, value in zip(self._arrays, values):
            array[self._num] = value
        self._num += 1

    @property
    def table(self) -> Table:
        kept = slice(max(0, self._num - self._most), self._num)
        return Table(self._steps[kept], self.names, {name: values[kept] for name, values in self.columns.items()})

    @property
    def series(self) -> Series:
        steps, _, columns = self.table
        return Series(steps, columns["value"])


def _recent(series: Series = EMPTY) -> Recent:
    return Recent(Table(series.steps, [], {"value": series.values}), MOST_ROWS)


def _recent_table(table: Table) -> Recent:
    num_cells = len(table.names) * len(table.columns)
    return Recent(table, max(10, min(MOST_TABLES, MOST_CELLS // max(num_cells, 1))))
