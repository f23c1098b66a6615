"""The doctor beside a run in progress: it is fed what the engine records, and says what is new.

It changes nothing, reads files only to begin with (`watch_of`), and never ends a run: a rule that fails is left out
from then on and named in `failed`. How often to look is the engine's choice; a state counts when it held at three
looks in a row.

The surprising thing: only the newest rows are kept, in arrays with room to grow, so that a look takes views of them and
copies nothing. `rung doctor` reads the whole run, and may therefore find what this one can no longer see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rung.doctor.diagnose import IN_A_ROW, LEAST, ordered, suppress
from rung.doctor.finding import SEVERITIES, Finding
from rung.doctor.history import History, Series, Table, read
from rung.doctor.rules import Rule, catalogue
from rung.runs.query import Run
from rung.runs.record import read_document

MOST_ROWS = 1500  # of each value: fifteen windows of the rules
MOST_CELLS = 500_000  # numbers kept of one kind of table, 4 MB, in at most MOST_TABLES of its rows
MOST_TABLES = 100
MOST_EVENTS = 500
EVENTS_KEPT = ("unread_keys", "code", "check", "ranks_differ")  # happen once, and stay true


def watch_of(path: Path) -> Watch:
    """For the run in this folder, new or resumed."""
    history = read(Run(path, read_document(path)))
    resumes = [event["step"] for event in history.events_of("resume") if isinstance(event.get("step"), int)]
    return Watch(_rewound(history, resumes[-1]) if resumes else history)


def _rewound(history: History, step: int) -> History:
    """The run as it was at a save. What it did after that will be done again, and is kept to be compared with."""
    rows: dict[int, dict[str, float]] = {}
    for name in ("loss", "norm", "lr", "batch_hash"):
        later = history[name].between(step, history.end)
        for at, value in zip(later.steps.tolist(), later.values.tolist()):
            rows.setdefault(at, {})[name] = value
    undone = {at: [*history.superseded.get(at, []), row] for at, row in rows.items()}
    return replace(history.until(step), superseded={**history.superseded, **undone})


class Watch:
    """Begins with what is known of the run: its config, derived numbers and parent; after a resume also its rows."""

    def __init__(self, history: History, rules: Sequence[Rule] | None = None) -> None:
        self.failed: dict[str, str] = {}  # rule -> what it raised
        self._known = history
        self._rules = list(rules if rules is not None else catalogue())
        self._rows = {name: Column(series) for name, series in history.rows.items()}
        self._tables = {kind: Rows(table) for kind, table in history.tables.items()}
        self._evals = {name: {k: Column(s) for k, s in of.items()} for name, of in history.evals.items()}
        self._events: deque[dict[str, Any]] = deque(history.events, MOST_EVENTS)
        self._lasting = [event for event in history.events if event.get("kind") in EVENTS_KEPT]
        self._streaks: dict[str, tuple[int, int]] = {}  # rule -> looks in a row, and the step of the first
        told = [event for event in history.events if event.get("kind") == "finding"]
        self._told = {str(event["rule"]): _told(event) for event in told if event.get("severity") in SEVERITIES}
        self._num_events, self._looked_at = 0, (0, 0)

    def row(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name not in self._rows:
                self._rows[name] = Column()
            self._rows[name].add(step, value)

    def table(self, kind: str, step: int, names: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
        kept = self._tables.get(kind)
        if kept is None or kept.names != list(names) or set(kept.columns) != set(columns):
            kept = self._tables[kind] = Rows(Table(np.zeros(0, np.int64), list(names), dict.fromkeys(columns, NOTHING)))
        kept.add(step, columns)

    def eval(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for set_name, values in results.items():
            of_set = self._evals.setdefault(set_name, {})
            for name, value in values.items():
                of_set.setdefault(name, Column()).add(step, float(value))

    def event(self, event: Mapping[str, Any]) -> None:
        self._events.append(dict(event))
        self._num_events += 1
        if event.get("kind") in EVENTS_KEPT:
            self._lasting.append(dict(event))

    def look(self) -> list[Finding]:
        """What is new since the last look, or has become worse; worst first."""
        history = self._history()
        if (history.end, self._num_events) == self._looked_at:
            return []
        self._looked_at = (history.end, self._num_events)
        found = [finding for rule in self._rules for finding in self._ask(rule, history)]
        kept = suppress([*self._told.values(), *found])  # what was told may explain what is found now
        new = [f for f in kept if any(f is one for one in found) and self._is_news(f)]
        for finding in sorted(new, key=lambda f: f.rank):
            self._told[finding.rule] = finding
        return ordered(new)

    def _is_news(self, finding: Finding) -> bool:
        before = self._told.get(finding.rule)
        return before is None or finding.rank > before.rank

    def _ask(self, rule: Rule, history: History) -> list[Finding]:
        if rule.id in self.failed:
            return []
        is_early = history.end < max(LEAST, 0 if rule.in_warmup else history.warmup_steps + 1)
        if rule.kind == "state" and is_early:
            return []
        try:
            found = rule(history)
        except Exception as error:  # a fault of ours must not cost the user a run
            self.failed[rule.id] = f"{type(error).__name__}: {error}"
            return []
        if rule.kind == "scan":
            return found
        looks, began = self._streaks.get(rule.id, (0, history.end))
        looks, began = (looks + 1, began) if found else (0, history.end)
        self._streaks[rule.id] = (looks, began if looks > 1 else history.end)
        began = self._streaks[rule.id][1]
        return [replace(f, since=f.since if f.since is not None else began) for f in found] if looks >= IN_A_ROW else []

    def _history(self) -> History:
        events = list(self._events)
        return replace(
            self._known,
            status="running",
            rows={name: column.series for name, column in self._rows.items()},
            tables={kind: rows.table for kind, rows in self._tables.items()},
            evals={name: {k: c.series for k, c in of.items()} for name, of in self._evals.items()},
            events=[*(e for e in self._lasting if all(e is not other for other in events)), *events],
        )


class Column:
    """The newest values of one name. A step that comes again replaces what lay there and after it."""

    def __init__(self, series: Series | None = None) -> None:
        self._steps, self._values = np.zeros(2 * MOST_ROWS, np.int64), np.zeros(2 * MOST_ROWS)
        self._num = 0
        if series is not None:
            newest = series.last(MOST_ROWS)
            self._num = len(newest)
            self._steps[: self._num], self._values[: self._num] = newest.steps, newest.values

    def add(self, step: int, value: float) -> None:
        if self._num and step <= self._steps[self._num - 1]:
            self._num = int(np.searchsorted(self._steps[: self._num], step))
        if self._num == len(self._steps):
            self._num = MOST_ROWS
            for array in (self._steps, self._values):
                array[:MOST_ROWS] = array[MOST_ROWS:]
        self._steps[self._num], self._values[self._num] = step, value
        self._num += 1

    @property
    def series(self) -> Series:
        """At most twice MOST_ROWS, without a copy; good until the next row."""
        first = max(0, self._num - MOST_ROWS)
        return Series(self._steps[first : self._num], self._values[first : self._num])


class Rows:
    """The newest rows of one kind of table, all with the same names."""

    def __init__(self, table: Table) -> None:
        self.names = list(table.names)
        most = MOST_CELLS // max(len(self.names) * len(table.columns), 1)
        self._most = max(10, min(MOST_TABLES, most))
        self.columns = {name: np.full((2 * self._most, len(self.names)), np.nan) for name in table.columns}
        self._steps, self._num = np.zeros(2 * self._most, np.int64), 0
        for i, step in enumerate(table.steps[-self._most :], start=max(0, len(table.steps) - self._most)):
            self.add(int(step), {name: values[i] for name, values in table.columns.items()})

    def add(self, step: int, columns: Mapping[str, Sequence[float] | np.ndarray]) -> None:
        if self._num and step <= self._steps[self._num - 1]:
            self._num = int(np.searchsorted(self._steps[: self._num], step))
        if self._num == len(self._steps):
            self._num = self._most
            for array in (self._steps, *self.columns.values()):
                array[: self._most] = array[self._most :]
        self._steps[self._num] = step
        for name, values in columns.items():
            self.columns[name][self._num] = values
        self._num += 1

    @property
    def table(self) -> Table:
        kept = slice(max(0, self._num - self._most), self._num)
        return Table(self._steps[kept], self.names, {name: values[kept] for name, values in self.columns.items()})


NOTHING = np.zeros((0, 0))


def _told(event: Mapping[str, Any]) -> Finding:
    """A finding out of the event in which it was told, before a resume."""
    known = {name: event[name] for name in ("since", "what", "hides", "title") if event.get(name) is not None}
    return Finding(**{"rule": str(event["rule"]), "severity": str(event["severity"]), "what": "", **known})
