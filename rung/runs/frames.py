"""Columns of a run for other libraries: pandas, polars, Arrow. Each is optional, and asked for by name.

An absent value is null and NaN stays NaN, also in pandas, where a column with holes has the type Float64 instead of
float64.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rung.errors import RunError

if TYPE_CHECKING:
    from rung.runs.query import Run

KINDS = ("pandas", "polars")
_EXTRA = {"duckdb": "rung[query]", "pyarrow": "rung[query]"}


def need(package: str, what_for: str) -> Any:
    """An optional library, or one sentence on how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        remedy = f"pip install '{_EXTRA.get(package, package)}'"
        message = f"{what_for} needs {package}, which is not installed: {remedy}."
        raise RunError(message, code="not-installed") from None


def frame(run: Run, names: Sequence[str] | None, kind: str | None, what_for: str = "run.frame()") -> Any:
    """The rows that have at least one of `names`, or all rows and metrics; whole numbers as int64."""
    import numpy as np

    from rung.runs.query import nearest

    library = _library(kind, what_for)
    summary = run.summary()
    wanted = list(summary) if names is None else [name for name in dict.fromkeys(names) if name != "step"]
    for name in wanted:
        if name not in summary:
            raise RunError(f"{run.id} recorded no {name}; {nearest(name, list(summary))}", code="no-metric")
    arrays = run.arrays(wanted)
    num_rows = len(arrays.steps)
    kept = np.full(num_rows, names is None or not wanted)
    for rows, _ in arrays.columns.values():
        kept[rows] = True
    columns: dict[str, Any] = {"step": arrays.steps[kept]}
    for name, (rows, found) in arrays.columns.items():
        is_whole = summary[name].is_whole and len(rows) == summary[name].count
        values = np.zeros(num_rows, np.int64 if is_whole else np.float64)
        values[rows] = found
        is_absent = np.ones(num_rows, bool)
        is_absent[rows] = False
        column, absent = values[kept], is_absent[kept]
        if not absent.any():
            columns[name] = column
        elif library.__name__ == "polars":
            columns[name] = library.Series(column).scatter(absent.nonzero()[0], None)
        else:
            nullable = library.arrays.IntegerArray if is_whole else library.arrays.FloatingArray
            columns[name] = nullable(column, absent)
    return library.DataFrame(columns)


def frames(runs: Sequence[Run], names: Sequence[str] | None, kind: str | None) -> Any:
    """The frames of several runs, one under the other, each row with the id of its run."""
    library = _library(kind, "runs.frame()")
    if not runs:
        raise RunError("no runs to make a data frame of; name at least one.", code="too-few")
    parts = [frame(run, names, library.__name__, "runs.frame()") for run in runs]
    if library.__name__ == "polars":
        named = [part.select(library.lit(run.id).alias("run"), library.all()) for part, run in zip(parts, runs)]
        return library.concat(named, how="diagonal_relaxed")
    every = dict.fromkeys(name for part in parts for name in part.columns)
    for part, run in zip(parts, runs, strict=True):
        part.insert(0, "run", run.id)
        for name in every:
            if name not in part.columns:  # or it would be NaN
                part[name] = library.array([library.NA] * len(part), dtype="Float64")
    return library.concat(parts, ignore_index=True)


def frame_of_rows(rows: Sequence[Mapping[str, Any]], kind: str | None) -> Any:
    """Rows that are dicts, as a data frame; a list in a cell becomes text."""
    library = _library(kind, "runs.table()")
    plain = [{k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    if library.__name__ == "pandas":
        return library.DataFrame(plain)
    return library.DataFrame(plain, infer_schema_length=None, strict=False)


def _library(kind: str | None, what_for: str) -> Any:
    if kind is None:
        kind = next((kind for kind in KINDS if importlib.util.find_spec(kind)), KINDS[0])
    if kind not in KINDS:
        raise RunError(f"{kind!r} is not a kind of data frame; use 'pandas' or 'polars'.", code="bad-value")
    return need(kind, what_for)
