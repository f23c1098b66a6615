"""Reads trackio's databases, one SQLite file per project, with nothing but sqlite3.

Rows are JSON with non-finite numbers as strings, one per log call. Media, traces and machine statistics are only
counted; alerts become notes. Older databases identify runs by name alone, newer ones also by an id. trackio does not
record how a run ended, so every run is imported as finished, with that as the reason.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rung import parse
from rung.errors import RunError
from rung.trackers.history import History, numbers_of

_END = "trackio does not say how a run ended"


def home() -> Path:
    """Where trackio keeps its databases."""
    cache = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("TRACKIO_DIR") or Path(cache) / "trackio").expanduser()


def find(what: str | None) -> list[Path]:
    """The databases meant by a file, a folder or the name of a project; all of trackio's own without any."""
    if what is None:
        return sorted(home().glob("*.db"))
    path = Path(what).expanduser()
    if path.is_dir():
        return sorted(path.glob("*.db"))
    if path.exists():
        return [path]
    plain = "".join(letter for letter in what if letter.isalnum() or letter in "-_")
    named = home() / f"{plain}.db"
    return [named] if plain and named.exists() else []


def read(paths: list[Path], problems: list[str]) -> Iterator[History]:
    """The runs of some databases, in the order in which they began; one that cannot be read is told in `problems`."""
    for path in paths:
        try:
            yield from _read_database(path)
        except RunError as error:
            problems.append(str(error))
        except sqlite3.Error as error:
            problems.append(f"{path} cannot be read as a trackio database: {error}.")


def _read_database(path: Path) -> list[History]:
    found: dict[str, History] = {}

    def history_of(run: str, name: str) -> History:
        if run not in found:
            found[run] = History("trackio", f"{path.stem}/{run}", path, str(name), path.stem, reason=_END)
        return found[run]

    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        columns = {
            table: {str(row[1]) for row in database.execute(f"PRAGMA table_info({table})")}
            for table in ("metrics", "configs", "alerts", "system_metrics")
        }
        if not {"run_name", "step", "metrics"} <= columns["metrics"]:
            raise RunError(
                f"{path} is not a trackio database: it has no table metrics with run_name and step.", code="bad-source"
            )

        def select(table: str, *names: str) -> Iterator[tuple[Any, ...]]:
            """Id of the run, its name, and the named columns, in the order of writing; NULL for one that is missing."""
            has = columns[table]
            if "run_name" not in has:
                return
            run = "COALESCE(run_id, run_name, '')" if "run_id" in has else "COALESCE(run_name, '')"
            wanted = ", ".join([run, "COALESCE(run_name, '')", *(name if name in has else "NULL" for name in names)])
            yield from database.execute(f"SELECT {wanted} FROM {table} ORDER BY rowid")

        for run, name, when, step, values in select("metrics", "timestamp", "step", "metrics"):
            history = history_of(run, name)
            tree = _json(values)
            if tree is None or not isinstance(step, int):
                history.problems.append(f"{path}: a row of {name} cannot be decoded and is left out")
                continue
            history.add(step, _unix_s(when), numbers_of(tree, history.left_out))
        for run, name, config in select("configs", "config"):
            history = history_of(run, name)
            tree = _json(config) or {}
            began = _unix_s(tree.get("_Created"))
            if began is not None:
                history.started = min(began, history.started or began)
            history.config = {key: value for key, value in tree.items() if not key.startswith("_")}
        for run, name, when, step, title, words in select("alerts", "timestamp", "step", "title", "text"):
            text = ": ".join(str(part) for part in (title, words) if part)
            history_of(run, name).remarks.append((step, _unix_s(when), text))
        for run, name in select("system_metrics"):
            history_of(run, name).left_out["machine statistics"] += 1
    return list(found.values())


def _json(data: Any) -> dict[str, Any] | None:
    try:
        tree = parse.loose_json(data)
    except (TypeError, ValueError, AttributeError):
        return None
    return tree if isinstance(tree, dict) else None


def _unix_s(text: Any) -> float | None:
    try:
        when = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
