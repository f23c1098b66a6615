"""All runs as tables for DuckDB: runs, config, metrics, summaries, evals, events, notes.

A query is first explained over empty tables; only the tables and metrics that it reads are then filled. The database
lives in memory, opens no files and takes only reading statements, so no query can change a run. An absent value is NULL
and NaN stays NaN, which DuckDB sorts above all numbers: min() passes over it, max() does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rung.errors import RunError
from rung.runs.fields import code_of, leaves, summary_of, verdict_word
from rung.runs.files import to_json
from rung.runs.frames import need
from rung.runs.metrics import number_of
from rung.runs.query import Run

# Table -> column -> type of DuckDB; `metrics` has a column for each metric of the runs besides.
TABLES = {
    name: dict(column.split() for column in columns.split(","))
    for name, columns in {
        "runs": "id VARCHAR, experiment VARCHAR, number BIGINT, status VARCHAR, parent VARCHAR, why VARCHAR, "
        "verdict VARCHAR, verdict_text VARCHAR, recipe VARCHAR, preset VARCHAR, seed BIGINT, tags VARCHAR[], "
        "created TIMESTAMP, ended TIMESTAMP, step BIGINT, best_loss DOUBLE, best_step BIGINT, best_set VARCHAR, "
        "parameters BIGINT, device VARCHAR, host VARCHAR, reason VARCHAR, code VARCHAR, ab VARCHAR, arm VARCHAR, "
        "path VARCHAR, json VARCHAR",
        "config": "run VARCHAR, key VARCHAR, value VARCHAR, number DOUBLE, source VARCHAR",
        "summaries": "run VARCHAR, name VARCHAR, count BIGINT, last DOUBLE, last_step BIGINT, min DOUBLE, "
        "min_step BIGINT, max DOUBLE, max_step BIGINT, num_non_finite BIGINT",
        "evals": "run VARCHAR, step BIGINT, set VARCHAR, name VARCHAR, value DOUBLE",
        "events": "run VARCHAR, kind VARCHAR, step BIGINT, unix_s DOUBLE, text VARCHAR, json VARCHAR",
        "notes": "run VARCHAR, unix_s DOUBLE, text VARCHAR",
    }.items()
}


class Answer(NamedTuple):
    names: list[str]
    rows: list[tuple[Any, ...]]


def ask(query: str, runs: Sequence[Run]) -> Answer:
    """Runs the query; raises RunError with DuckDB's message where it refuses."""
    duckdb, arrow = need("duckdb", "rung sql"), need("pyarrow", "rung sql")
    connection = duckdb.connect(":memory:")
    try:
        for name, value in (("python_enable_replacements", "false"), ("temp_directory", "''")):
            connection.execute(f"set {name}={value}")
        connection.execute("set enable_external_access=false")
        statements = connection.extract_statements(query)
        if len(statements) != 1:
            message = f"rung sql takes one statement, this is {len(statements)}; ask one after the other."
            raise RunError(message, code="bad-query")
        if statements[0].type != duckdb.StatementType.SELECT:
            first = (query.split() or [""])[0]
            message = f"rung sql only reads, and {first} is not a query; begin with select, from, with or describe."
            raise RunError(message, code="bad-query")
        used = [name for name in (*TABLES, "metrics") if re.search(rf"\b{name}\b", query, re.IGNORECASE)]
        names = _metric_names(runs) if "metrics" in used else []
        connection.register("metrics", _metrics(arrow, [], names))
        for name in TABLES:
            connection.register(name, _table(arrow, name, []))
        read = _columns_read(connection, query) if used else set()
        for name in used if read else ():
            connection.unregister(name)
            if name == "metrics":  # a name may be written and not be read, in a part that does not matter
                known = [each for each in names if each in read or each.lower() in query.lower()]
                connection.register(name, _metrics(arrow, runs, known, read))
            else:
                connection.register(name, _table(arrow, name, runs))
        done = connection.execute(query)
        return Answer([column[0] for column in done.description or []], done.fetchall())
    except duckdb.Error as error:
        text = " ".join(str(error).split("\n\nLINE ")[0].split())  # without the picture of where it is
        end = "" if text.endswith((".", "!", "?")) else "."
        raise RunError(f"DuckDB refuses the query: {text}{end}", code="bad-query") from None
    finally:
        connection.close()


def tables_of(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Table -> column -> type."""
    metrics = {"run": "VARCHAR", "step": "BIGINT", **dict.fromkeys(_metric_names(runs), "DOUBLE")}
    return {**TABLES, "metrics": metrics}


def _columns_read(connection: Any, query: str) -> set[str]:
    """The columns that a query reads, from its plan; all other optimizers are off, or they would hide some."""
    others = [name for (name,) in connection.execute("select name from duckdb_optimizers()").fetchall()]
    others.remove("unused_columns")
    connection.execute(f"set disabled_optimizers='{','.join(others)}'")
    try:
        plan = connection.execute(f"explain (format json) {query}").fetchall()[0][1]
    except IndexError:
        plan = "[]"
    finally:
        connection.execute("set disabled_optimizers=''")
    found: set[str] = set()

    def collect(node: dict[str, Any]) -> dict[str, Any]:
        if "ARROW_SCAN" in str(node.get("name")):
            columns = (node.get("extra_info") or {}).get("Projections") or []
            found.update(columns.split("\n") if isinstance(columns, str) else columns)
            found.add("")  # it is read, even if no column of it is
        return node

    json.loads(plan, object_hook=collect)
    return found


def _metric_names(runs: Sequence[Run]) -> list[str]:
    """Every metric of these runs. To DuckDB, names that differ only in case are one: the first stands for both."""
    found: dict[str, str] = {}
    for run in runs:
        for name in summary_of(run):
            found.setdefault(name.lower(), name)
    return [name for lower, name in found.items() if lower not in ("run", "step")]


def _metrics(arrow: Any, runs: Sequence[Run], names: Sequence[str], read: Collection[str] = ()) -> Any:
    """A column for each of `names`, filled where it is read."""
    import numpy as np

    fields = [("run", arrow.string()), ("step", arrow.int64()), *((name, arrow.float64()) for name in names)]
    schema = arrow.schema(fields)
    tables = []
    for run in runs:
        arrays = run.arrays([name for name in names if name in read])
        num_rows = len(arrays.steps)
        ids = arrow.DictionaryArray.from_arrays(np.zeros(num_rows, np.int32), [run.id]).cast(arrow.string())
        columns = [ids, arrow.array(arrays.steps)]
        for name in names:
            if name not in read:
                columns.append(arrow.nulls(num_rows, arrow.float64()))
                continue
            rows, found = arrays.columns[name]
            values, absent = np.zeros(num_rows), np.ones(num_rows, bool)
            values[rows], absent[rows] = found, False
            columns.append(arrow.array(values, mask=absent))
        tables.append(arrow.Table.from_arrays(columns, schema=schema))
    return arrow.concat_tables(tables) if tables else schema.empty_table()


def _table(arrow: Any, name: str, runs: Sequence[Run]) -> Any:
    types = {
        "VARCHAR": arrow.string(), "BIGINT": arrow.int64(), "DOUBLE": arrow.float64(),
        "TIMESTAMP": arrow.timestamp("ms"), "VARCHAR[]": arrow.list_(arrow.string()),
    }  # fmt: skip
    schema = arrow.schema([(column, types[kind]) for column, kind in TABLES[name].items()])
    rows = []
    for run in runs:
        try:
            rows += list(_rows(name, run))
        except RunError:
            continue  # a damaged file: `rung show` says which
    columns: list[Sequence[Any]] = list(zip(*rows)) if rows else [[] for _ in schema]
    return arrow.Table.from_arrays([arrow.array(c, field.type) for c, field in zip(columns, schema)], schema=schema)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and -(2**63) <= value < 2**63 else None


def _moment(value: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(value)).astimezone(UTC).replace(tzinfo=None)
    except ValueError:
        return None


def _rows(table: str, run: Run) -> Iterator[tuple[Any, ...]]:
    """What a run adds to a table, in the order of its columns."""
    if table == "runs":
        doc, best = run.document, run.best or {}
        derived, verdict = doc.get("derived") or {}, doc.get("verdict")
        ab = doc.get("ab") or {}
        yield (
            run.id, _text(doc.get("experiment")), _whole(doc.get("number")), run.status, _text(doc.get("parent")),
            _text(doc.get("why")), verdict_word(run),
            _text(verdict.get("text")) if isinstance(verdict, dict) else None,
            _text(doc.get("recipe")), _text(doc.get("preset")), _whole(doc.get("seed")),
            [str(tag) for tag in doc.get("tags") or []], _moment(doc.get("created")), _moment(doc.get("ended")),
            _whole(run.step), number_of(best.get("loss")), _whole(best.get("step")), _text(best.get("set")),
            _whole(derived.get("parameters")), _text(derived.get("device")),
            _text((doc.get("process") or {}).get("host")), _text(doc.get("reason")), code_of(run),
            _text(ab.get("id")), _text(ab.get("arm")), str(run.path), to_json(doc).decode(),
        )  # fmt: skip
    elif table == "config":
        sources = run.sources()
        for key, value in leaves(run.config()):
            text = value if isinstance(value, str) else to_json(value).decode().strip('"')
            try:
                number = None if isinstance(value, bool) else float(value)
            except (TypeError, ValueError, OverflowError):
                number = None
            yield run.id, key, text, number, _text(sources.get(key))
    elif table == "summaries":
        for name, s in run.summary().items():
            yield run.id, name, s.count, s.last, s.last_step, s.min, s.min_step, s.max, s.max_step, s.num_non_finite
    elif table == "evals":
        for event in run.evals():
            for name, value in event.items():
                number = number_of(value) if name not in ("step", "set") else None
                if number is not None:
                    yield run.id, event["step"], str(event["set"]), name, number
    elif table == "events":
        for event in run.events():
            kind, step, unix_s = _text(event.get("kind")), _whole(event.get("step")), number_of(event.get("unix_s"))
            yield run.id, kind, step, unix_s, _text(event.get("text")), to_json(event).decode()
    else:
        assert table == "notes", table
        for note in run.notes():
            yield run.id, number_of(note.get("unix_s")), _text(note.get("text"))
