"""The lab book's store: a run is a folder, and the folder is the database.

    from rung import runs

    run = runs.open("piano/7")                  also "piano", "piano/best", or a path
    run.series("loss")                          steps and values, numpy
    run.names(), run.summary()                  what was recorded; last, min and max of each
    run.frame(["loss", "lr"], kind="polars")    or pandas
    run.evals(), run.events(), run.config(), run.status, run.best, run.document
    runs.list("piano", where=["status=finished", "lr.learning_rate>1e-4"], sort="min:loss")
    runs.table("piano", columns=["lr.learning_rate", "best", "min:norm"])       one dict per run
    runs.table("piano", kind="pandas")          the same as a data frame, or kind="polars"
    runs.frame(["piano/6", "piano/7"], ["loss"])                                steps of several runs in one frame

Runs are looked for under the folder given as `root`, else $RUNG_RUNS, else ./runs. Nothing here imports torch, and
numpy is imported by what returns arrays: `rung ls` answers on a machine that has neither.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rung.runs.query import Run


def open(ref: str | Path, root: Path | str | None = None) -> Run:
    """The run of "piano/7", "piano" or "piano/last" (the latest), "piano/best" (lowest best loss), or of a path."""
    from rung.runs.query import open_run, root_of

    return open_run(ref, root_of(root))


class Runs(builtins.list["Run"]):
    """Runs, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return RunTable(_rows(self, ()))._repr_html_()


class RunTable(builtins.list[dict[str, Any]]):
    """One dict per run, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from rung.report import blocks
        from rung.report.html import fragment
        from rung.report.table import value_text

        head = builtins.list(self[0]) if self else ["run"]
        rows = [[value_text(row.get(name)) for name in head] for row in self]
        is_number = [any(isinstance(row.get(name), int | float) for row in self) for name in head]
        return fragment(blocks.Table(head, rows, [i for i, found in enumerate(is_number) if found]))


def list(
    *experiments: str,
    where: Sequence[str] = (),
    sort: str | None = None,
    reverse: bool = False,
    root: Path | str | None = None,
    problems: builtins.list[str] | None = None,
) -> Runs:
    """The runs of these experiments, or all; filtered and sorted as `rung ls --where ... --sort ...` does.

    A run that cannot be read is named in `problems`; without it, it raises RunError.
    """
    from rung.runs.fields import find
    from rung.runs.query import root_of

    return Runs(find(root_of(root), experiments, where, sort, reverse, problems))


def table(
    *experiments: str,
    columns: Sequence[str] = (),
    where: Sequence[str] = (),
    sort: str | None = None,
    reverse: bool = False,
    root: Path | str | None = None,
    kind: str | None = None,
) -> RunTable | Any:
    """One dict per run: its id, and `columns` as `rung ls --columns` takes them, or the usual fields.

    kind: "pandas" or "polars" for a data frame. A run that cannot be read is left out.
    """
    rows = _rows(list(*experiments, where=where, sort=sort, reverse=reverse, root=root, problems=[]), columns)
    if kind is None:
        return RunTable(rows)
    from rung.runs.frames import frame_of_rows

    return frame_of_rows(rows, kind)


def frame(
    runs: Sequence[str | Path | Run],
    names: Sequence[str] | None = None,
    kind: str | None = None,
    root: Path | str | None = None,
) -> Any:
    """The metrics of several runs as one data frame of "pandas" or "polars", with the columns `run` and `step`.

    Of one run: run.frame(names, kind).
    """
    from rung.runs.frames import frames
    from rung.runs.query import Run

    return frames([run if isinstance(run, Run) else open(run, root) for run in runs], names, kind)


def _rows(runs: Sequence[Run], columns: Sequence[str]) -> builtins.list[dict[str, Any]]:
    from rung.runs.fields import USUAL, check_names, value_of

    names = [name for name in columns or USUAL if name != "run"]
    check_names(names, runs)
    return [{"run": run.id, **{name: value_of(run, name) for name in names}} for run in runs]
