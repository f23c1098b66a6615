"""The lab book's store: a run is a folder, and the folder is the database.

    from rung import runs

    run = runs.open("piano/7")                  also "piano", "piano/best", or a path
    run.series("loss")                          steps and values, numpy
    run.names(), run.summary()                  what was recorded; last, min and max of each
    run.frame(["loss", "lr"], kind="polars")    or pandas
    run.evals(), run.events(), run.config(), run.status, run.best, run.document
    runs.list("piano", where=["status=finished", "lr.learning_rate>1e-4"], sort="min:loss")
    runs.table("piano", columns=["lr.learning_rate", "best", "min:norm"])       one dict per run

Runs are looked for under the folder given as `root`, else $RUNG_RUNS, else ./runs.

record writes a run, query reads one, metrics holds the rows, columns a copy of them by column, provenance says what was
run. Nothing here imports torch, and numpy is imported by what returns arrays: `rung ls` answers on a machine that has
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import builtins

    from rung.runs.query import Run


def open(ref: str | Path, root: Path | str | None = None) -> Run:
    """The run of "piano/7", "piano" or "piano/last" (the latest), "piano/best" (lowest best loss), or of a path."""
    from rung.runs.query import open_run, root_of

    return open_run(ref, root_of(root))


def list(
    *experiments: str,
    where: Sequence[str] = (),
    sort: str | None = None,
    reverse: bool = False,
    root: Path | str | None = None,
    problems: builtins.list[str] | None = None,
) -> builtins.list[Run]:
    """The runs of these experiments, or all; filtered and sorted as `rung ls --where ... --sort ...` does.

    A run that cannot be read is told in `problems`; without it, it raises RunError.
    """
    from rung.runs.fields import find
    from rung.runs.query import root_of

    return find(root_of(root), experiments, where, sort, reverse, problems)


def table(
    *experiments: str,
    columns: Sequence[str] = (),
    where: Sequence[str] = (),
    sort: str | None = None,
    reverse: bool = False,
    root: Path | str | None = None,
) -> builtins.list[dict[str, Any]]:
    """One dict per run: its id, and `columns` as `rung ls --columns` takes them, or the usual fields.

    A run that cannot be read is left out.
    """
    from rung.runs.fields import USUAL, check_names, value_of

    found = list(*experiments, where=where, sort=sort, reverse=reverse, root=root, problems=[])
    names = [name for name in columns or USUAL if name != "run"]
    check_names(names, found)
    return [{"run": run.id, **{name: value_of(run, name) for name in names}} for run in found]
