"""The lab book as the page asks for it: a runs folder whose run.json files are read once and looked at again by time.

A run that has ended is kept as it was read until its run.json changes; of one that is running only what cannot change
is kept. Nothing that a visitor names leads out of the folder: an id is a name and a number, and an experiment that is a
link to another place is left out and reported.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.report.table import one_line
from rung.runs.fields import (
    check_names,
    condition,
    config_of,
    group_rows,
    sort_runs,
    value_of,
    verdict_word,
)
from rung.runs.files import from_json, read_lines
from rung.runs.metrics import ROW, last_row, segments
from rung.runs.paths import stays
from rung.runs.query import Run, experiments, follow_moves, numbers_in, open_run
from rung.runs.record import read_document

_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})/([1-9][0-9]{0,8})")
_JOINED = re.compile(r"\s+(?:and|&&)\s+", re.IGNORECASE)
_OPERATORS = "=<>~"
_MOST_CHANGED = 12  # keys that a row of the table names


class Book:
    """A runs folder. Its methods may be called from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._known: dict[str, tuple[tuple[int, int, int], Run]] = {}  # path of a run -> its run.json, as it was read
        self._notes: dict[str, tuple[tuple[int, int], str | None]] = {}
        self._names: dict[str, tuple[tuple[int, int], list[str]]] = {}

    def runs(self, problems: list[str] | None = None) -> list[Run]:
        """Every run, by experiment and number; what cannot be read is named in `problems`."""
        problems = [] if problems is None else problems
        found: list[Run] = []
        with self._lock:
            seen: dict[str, tuple[tuple[int, int, int], Run]] = {}
            for name in experiments(self.root, problems):
                if not stays(self.root, self.root / name):
                    problems.append(f"{name} is a link that leads out of the runs folder; it is not followed.")
                    continue
                for number in numbers_in(self.root / name, problems):
                    path = f"{self.root}/{name}/{number}"
                    try:
                        stat = os.stat(f"{path}/run.json")
                    except OSError:
                        continue  # being created at this moment, or a start that was killed
                    mark = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
                    known = self._known.get(path)
                    try:
                        if known is None or known[0] != mark:
                            folder = Path(path)
                            if os.path.islink(path) and not stays(self.root, folder):
                                message = f"{name}/{number} is a link that leads out of the runs folder."
                                raise RunError(message, code="leads-out")
                            known = mark, Run(folder, read_document(folder))
                        elif known[1].document.get("status") == "running":  # whether it still does is asked anew
                            fresh = Run(known[1].path, known[1].document)
                            fresh._config = known[1]._config
                            known = mark, fresh
                    except RunError as error:
                        problems.append(str(error))
                        continue
                    seen[path] = known
                    found.append(known[1])
            self._known = seen
            follow_moves(found, self.root, is_all=True)
        return found

    def run(self, ref: str) -> Run:
        """The run of this id, read anew; RunError for anything that is not the id of a run here."""
        return open_run(self._folder_of(ref), self.root)

    def _folder_of(self, ref: str) -> str:
        match = _ID.fullmatch(ref)
        if match is None:
            raise RunError(f"{ref[:200]!r} is not the id of a run; ids are as piano/7.", code="bad-name")
        path = self.root / match[1] / match[2]
        if not stays(self.root, path):
            raise RunError(f"{ref} is a link that leads out of the runs folder; it is not followed.", code="leads-out")
        if not os.path.lexists(path / "run.json"):
            open_run(ref, self.root)  # raises, and says what there is
        return ref

    def metric_names(self, run: Run) -> list[str]:
        """The metrics of a run; of a long one that nobody has read yet, those of its first and its last row."""
        if not run.has_unread_rows:
            return run.names()
        return list(self._names_at_ends(run))

    def _names_at_ends(self, run: Run) -> Mapping[str, Any]:
        names: dict[str, Any] = {}
        folder = run.path / "metrics"
        with contextlib.suppress(OSError, ValueError, RunError):
            for _, path in segments(folder):
                names |= dict.fromkeys(ROW.decode(next(iter(read_lines(path)), b"{}")))
            names |= dict.fromkeys(last_row(folder) or {})
        return {name: None for name in names if name not in ("step", "unix_s")}

    def rows(
        self,
        query: str = "",
        sort: str = "",
        columns: Sequence[str] = (),
        experiment: str = "",
        is_grouped: bool = False,
    ) -> dict[str, Any]:
        """What the table of runs shows: rows, groups over seeds where asked for, and what could not be read."""
        problems: list[str] = []
        everything = self.runs(problems)
        runs = [run for run in everything if not experiment or run.document.get("experiment") == experiment]
        by_id = {run.id: run for run in everything}
        runs = self._matching(runs, query)
        check_names(columns, runs)
        if sort:
            runs = sort_runs(runs, sort.removeprefix("-"), sort.startswith("-"))
        rows = [self.row(run, by_id, columns) for run in runs]
        out: dict[str, Any] = {"runs": rows, "errors": [{"run": None, "message": text} for text in problems]}
        if is_grouped:
            out["groups"] = group_rows(runs, [name for name in columns or ("best", "step") if name != "status"])
        return out

    def _matching(self, runs: list[Run], query: str) -> list[Run]:
        """`NAME>VALUE and NAME~EXPRESSION`; /expression/ and plain words look at names, hypotheses, notes and tags."""
        query = query.strip()
        if not query:
            return runs
        pattern = query[1:-1] if len(query) > 1 and query[0] == query[-1] == "/" else None
        if pattern is None and not any(mark in query for mark in _OPERATORS):
            pattern = re.escape(query)
        if pattern is not None:
            try:
                expression = re.compile(pattern, re.IGNORECASE)
            except re.error as error:
                message = f"{pattern!r} is not a regular expression: {error}."
                raise RunError(message, code="bad-value") from None
            return [run for run in runs if any(map(expression.search, self._texts(run)))]
        conditions = [condition(text) for text in _JOINED.split(query)]
        check_names([each.name for each in conditions], runs)
        return [run for run in runs if all(each.holds(run) for each in conditions)]

    def _texts(self, run: Run) -> list[str]:
        doc = run.document
        return [run.id, str(doc.get("why") or ""), self.last_note(run) or "", *map(str, doc.get("tags") or [])]

    def row(self, run: Run, by_id: Mapping[str, Run], columns: Sequence[str] = ()) -> dict[str, Any]:
        doc = run.document
        verdict = doc.get("verdict")
        return {
            "run": run.id,
            "uid": doc.get("uid"),
            "experiment": doc.get("experiment"),
            "number": doc.get("number"),
            "parent": doc.get("parent"),
            "depth": _depth(run, by_id),
            "status": run.status,
            "status_text": run.status_text,
            "started": doc.get("created"),
            "wall_s": _wall_s(run),
            "steps": run.step,
            "planned_steps": (doc.get("derived") or {}).get("num_steps"),
            "tags": doc.get("tags") or [],
            "why": doc.get("why"),
            "note": self.last_note(run),
            "verdict": verdict_word(run),
            "verdict_text": verdict.get("text") if isinstance(verdict, dict) else None,
            "changed": _changed(run, by_id.get(str(doc.get("parent")))),
            "loss": (run.best or {}).get("loss"),
            "best": run.best,
            "recipe": doc.get("recipe"),
            "preset": doc.get("preset"),
            "seed": doc.get("seed"),
            "values": {name: value_of(run, name) for name in columns},
        }

    def row_of(self, ref: str) -> dict[str, Any]:
        by_id = {run.id: run for run in self.runs()}
        return self.row(by_id[ref] if ref in by_id else self.run(ref), by_id)

    def last_note(self, run: Run) -> str | None:
        """The last note that was not undone; events are read again only where they have grown."""
        file = run.path / "events.ndjson"
        try:
            stat = os.stat(file)
        except OSError:
            return None
        mark, key = (stat.st_size, stat.st_mtime_ns), str(run.path)
        known = self._notes.get(key)
        if known is None or known[0] != mark:
            kept: list[tuple[Any, str]] = []
            with contextlib.suppress(OSError):
                for line in read_lines(file):
                    if b'"note' not in line:
                        continue
                    with contextlib.suppress(ValueError):
                        event = from_json(line)
                        if isinstance(event, dict) and event.get("kind") == "note":
                            kept.append((event.get("unix_s"), str(event.get("text"))))
                        elif isinstance(event, dict) and event.get("kind") == "note_undone":
                            undone = (event.get("of_unix_s"), str(event.get("text")))
                            if undone in kept:
                                kept.remove(undone)
            known = self._notes[key] = mark, kept[-1][1] if kept else None
        return known[1]

    def summary(self) -> dict[str, Any]:
        """Experiments, and what a column may show."""
        runs = self.runs()
        counts: dict[str, int] = {}
        keys: dict[str, None] = {}
        metrics: dict[str, None] = {}
        for run in runs:
            name = str(run.document.get("experiment"))
            counts[name] = counts.get(name, 0) + 1
            keys |= dict.fromkeys(config_of(run))
            with contextlib.suppress(RunError, OSError):
                metrics |= dict.fromkeys(self._names_of(run))
        return {
            "name": self.root.resolve().parent.name,
            "experiments": [{"name": name, "num_runs": number} for name, number in counts.items()],
            "columns": {"config": list(keys), "metrics": list(metrics)},
        }

    def _names_of(self, run: Run) -> list[str]:
        """As `metric_names`, kept as long as run.json and the rows are what they were."""
        try:
            stat = os.stat(run.path / "metrics")
            size = max((path.stat().st_size for _, path in segments(run.path / "metrics")), default=0)
        except OSError:
            return []
        mark, key = (stat.st_mtime_ns, size), str(run.path)
        known = self._names.get(key)
        if known is None or known[0] != mark:
            known = self._names[key] = mark, self.metric_names(run)
        return known[1]


def _depth(run: Run, by_id: Mapping[str, Run]) -> int:
    """How many ancestors a run has here."""
    seen, current = {run.id}, by_id.get(str(run.document.get("parent")))
    while current is not None and current.id not in seen:
        seen.add(current.id)
        current = by_id.get(str(current.document.get("parent")))
    return len(seen) - 1


def _wall_s(run: Run) -> float | None:
    seconds = (run.document.get("totals") or {}).get("elapsed_s")
    if isinstance(seconds, int | float):
        return float(seconds)
    try:
        began = datetime.fromisoformat(str(run.document.get("created")))
        ended = run.document.get("ended")
        if not ended and run.status != "running":
            return None
        return ((datetime.fromisoformat(str(ended)) if ended else datetime.now(UTC)) - began).total_seconds()
    except (ValueError, TypeError):
        return None


def _changed(run: Run, parent: Run | None) -> list[list[Any]]:
    """Config keys that are not as in the parent: [key, before, after]."""
    if parent is None:
        return []
    before, after = config_of(parent), config_of(run)
    keys = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
    return [[key, _short(before.get(key)), _short(after.get(key))] for key in keys[:_MOST_CHANGED]]


def _short(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else one_line(str(value))[:80]
