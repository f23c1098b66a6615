"""`rung ls`: the runs, one line each, with their true status.

Works without torch and numpy, and reads one small file per run. The table printer below serves `rung show` too.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import click

from rung.runs.files import to_json
from rung.runs.query import ALL_STATUSES, Run, list_runs
from rung.units import duration

_COLOURS = {
    "running": "cyan", "finished": "green", "stopped": "yellow", "crashed": "red", "diverged": "red",
    "vanished": "magenta", "silent": "magenta",
}  # fmt: skip


@click.command("ls", short_help="List runs.")
@click.argument("experiment", required=False)
@click.option("--status", "statuses", multiple=True, type=click.Choice(ALL_STATUSES), help="Only runs of this status.")
@click.option("-n", "--last", "num_last", type=click.IntRange(min=1), help="Only the N runs that started last.")
@click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all digits.")
def command(experiment: str | None, statuses: tuple[str, ...], num_last: int | None, root: Path, as_json: bool) -> None:
    """List runs, all of them or those of one EXPERIMENT.

    The loss is that of the best eval; the step is the last that was logged. A run whose process is gone without a
    word is shown as vanished, one on a machine that cannot be seen from here, and that gave no sign of life for five
    minutes, as silent.

    \b
    Examples:
      rung ls
      rung ls piano --status running --status vanished
      rung ls -n 5 --json
    """
    problems: list[str] = []
    runs = [run for run in list_runs(root, experiment, problems) if not statuses or run.status in statuses]
    if num_last is not None:
        runs = sorted(sorted(runs, key=lambda run: str(run.document.get("created")))[-num_last:], key=_order)
    if as_json:
        click.echo(to_json([summary(run) for run in runs]).decode())
    elif runs:
        print_table(["run", "status", "step", "loss", "age", "why"], [_row(run) for run in runs], numeric=(2, 3))
    else:
        click.echo(f"no {'such ' if statuses else ''}runs under {root}")
    for problem in problems:
        click.echo(problem, err=True)


def summary(run: Run) -> dict[str, Any]:
    """What `--json` says of a run."""
    kept = ("experiment", "number", "recipe", "preset", "parent", "why", "verdict", "tags", "seed", "created", "ended")
    head = {"id": run.id, "status": run.status, "status_text": run.status_text, "step": run.step, "best": run.best}
    return {**head, **{name: run.document.get(name) for name in kept}, "path": str(run.path)}


def _order(run: Run) -> tuple[str, int]:
    return str(run.document.get("experiment")), int(run.document.get("number", 0))


def _row(run: Run) -> list[str]:
    document = run.document
    why = " ".join(str(document.get("why") or "").split())
    story = [f"from {document['parent']}" if document.get("parent") else "", why]
    best = run.best or {}
    step = run.step
    return [
        run.id,
        run.status,
        "-" if step is None else str(step),
        loss_text(best.get("loss")),
        age(document.get("created")),
        ": ".join(filter(None, story)),
    ]


def loss_text(loss: Any) -> str:
    """A loss for a narrow column; non-finite is shown as it is."""
    if not isinstance(loss, int | float):
        return "-"
    return f"{loss:.4f}" if math.isfinite(loss) else str(float(loss)).replace("nan", "NaN")


def age(created: Any) -> str:
    try:
        return duration(max(0.0, time.time() - datetime.fromisoformat(str(created)).timestamp()))
    except ValueError:
        return "?"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> None:
    """Columns that line up: rich on a terminal, plain text for everything else."""
    if sys.stdout.isatty():
        _print_rich(head, rows, numeric, _COLOURS)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in [head, *rows]:
        cells = [f"{text:{'>' if i in numeric else '<'}{widths[i]}}" for i, text in enumerate(row)]
        click.echo("  ".join(cells).rstrip())


def _print_rich(
    head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int], colours: Mapping[str, str]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(head):
        # A narrow terminal folds a number; cutting it would show another one.
        justify: Literal["left", "right"] = "right" if i in numeric else "left"
        may_wrap = i in numeric or i == len(head) - 1
        table.add_column(name, justify=justify, no_wrap=not may_wrap, overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell, style=colours.get(cell, "")) for cell in row])
    Console().print(table)
