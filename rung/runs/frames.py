"""Columns of a run for other libraries: pandas, polars, Arrow. Each is optional, and asked for by name.

The surprising thing: a value that is absent is null and one that is NaN is NaN, also in pandas, where a column with
holes therefore has the type Float64 instead of float64.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rung.errors import RunError

if TYPE_CHECKING:
    import numpy as np

    from rung.runs.query import Run

KINDS = ("pandas", "polars")
_EXTRA = {"duckdb": "rung[query]", "pyarrow": "rung[query]"}


class Aligned(NamedTuple):
    """Columns of equal length: name -> values, and where they are absent (the value there means nothing)."""

    steps: np.ndarray
    columns: dict[str, tuple[np.ndarray, np.ndarray]]


def need(package: str, what_for: str) -> Any:
    """An optional library, or one sentence on how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        remedy = f"pip install '{_EXTRA.get(package, package)}'"
        raise RunError(f"{what_for} needs {package}, which is not installed: {remedy}.") from None


def aligned(run: Run, names: Sequence[str] | None = None) -> Aligned:
    """The rows that have at least one of `names`, or all rows and metrics; whole numbers as int64."""
    import numpy as np

    from rung.runs.query import nearest

    summary = run.summary()
    wanted = list(summary) if names is None else [name for name in dict.fromkeys(names) if name != "step"]
    for name in wanted:
        if name not in summary:
            raise RunError(f"{run.id} recorded no {name}; {nearest(name, list(summary))}")
    arrays = run.arrays(wanted)
    num_rows = len(arrays.steps)
    kept = np.full(num_rows, names is None or not wanted)
    for rows, _ in arrays.columns.values():
        kept[rows] = True
    columns = {}
    for name, (rows, values) in arrays.columns.items():
        is_whole = summary[name].is_whole and len(rows) == summary[name].count
        column = np.zeros(num_rows, np.int64 if is_whole else np.float64)
        column[rows] = values
        absent = np.ones(num_rows, bool)
        absent[rows] = False
        columns[name] = column[kept], absent[kept]
    return Aligned(arrays.steps[kept], columns)


def frame(run: Run, names: Sequence[str] | None, kind: str | None) -> Any:
    if kind is None:
        kind = next((kind for kind in KINDS if importlib.util.find_spec(kind)), KINDS[0])
    if kind not in KINDS:
        raise RunError(f"{kind!r} is no kind of data frame; use 'pandas' or 'polars'.")
    library = need(kind, "run.frame()")
    made = _pandas if kind == "pandas" else _polars
    return made(library, aligned(run, names))


def _pandas(pandas: Any, found: Aligned) -> Any:
    columns: dict[str, Any] = {"step": found.steps}
    for name, (values, absent) in found.columns.items():
        if not absent.any():
            columns[name] = values
        elif values.dtype.kind == "i":
            columns[name] = pandas.arrays.IntegerArray(values, absent)
        else:
            columns[name] = pandas.arrays.FloatingArray(values, absent)
    return pandas.DataFrame(columns)


def _polars(polars: Any, found: Aligned) -> Any:
    columns = [polars.Series("step", found.steps)]
    for name, (values, absent) in found.columns.items():
        column = polars.Series(name, values)
        columns.append(column.scatter(absent.nonzero()[0], None) if absent.any() else column)
    return polars.DataFrame(columns)
