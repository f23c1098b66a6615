"""`rung sql`: a question in SQL to all runs. Imports neither torch nor numpy before the question is asked."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any

import click

from rung.cli.options import print_json, runs_option
from rung.cli.show import is_number, number
from rung.errors import RunError
from rung.report.table import hanging, print_table
from rung.runs.query import list_runs
from rung.text import echo, write

_EXAMPLES = (
    "select id, best_loss from runs where status = 'finished' order by best_loss limit 5",
    "select r.id, c.number as rate, r.best_loss from runs r join config c on c.run = r.id where c.key = "
    "'lr.learning_rate'",
    "select run, max(norm) from metrics group by run",
    'select run, step, "eval/full_val/loss" from metrics where "eval/full_val/loss" is not null',
    "select run, text from notes order by unix_s desc",
)
_NUM_METRICS = 12
_WIDEST = 80


@click.command("sql", short_help="Ask all runs a question in SQL.")
@click.argument("query", required=False)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of rows, with all digits.")
@runs_option
def command(query: str | None, as_csv: bool, as_json: bool, root: Path) -> None:
    """Ask all runs a QUERY in the SQL of DuckDB; without one, list the tables and their columns.

    An absent value is NULL; NaN is NaN. Only what the query needs is read, and nothing can be written. A metric
    whose name holds a slash is written in double quotes.

    \b
    Examples:
      rung sql
      rung sql "select id, best_loss from runs order by best_loss limit 5"
      rung sql "select run, max(norm) from metrics group by run" --csv
      rung sql "select run, key, value from config where source = 'command line'" --json
    """
    if as_csv and as_json:
        raise RunError("--csv and --json are two ways to print; keep one.", code="options-conflict")
    problems: list[str] = []
    runs = list_runs(root, None, problems)
    for problem in problems:
        echo(problem, err=True)
    from rung.runs.sql import ask, tables_of

    if query is None:
        tables = tables_of(runs)
        if as_json:
            print_json(tables)
            return
        for name, columns in tables.items():
            names = list(columns)
            more = f" ... {len(names)} columns in all" if len(names) > _NUM_METRICS and name == "metrics" else ""
            echo(hanging(f"{name:<9}  {' '.join(map(number, names[: _NUM_METRICS if more else None]))}{more}"))
        echo("\nexamples")
        for example in _EXAMPLES:
            echo(f'  rung sql "{example}"' if '"' not in example else f"  rung sql '{example}'")
        return
    answer = ask(query, runs)
    if as_json:
        print_json([dict(zip(answer.names, row)) for row in answer.rows])
    elif as_csv:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(answer.names)
        writer.writerows([["" if v is None else v for v in row] for row in answer.rows])
        write(sys.stdout, out.getvalue())
    elif answer.names:
        numeric = [i for i, column in enumerate(zip(*answer.rows)) if any(is_number(value) for value in column)]
        print_table([_shown(name) for name in answer.names], [[_shown(v) for v in row] for row in answer.rows], numeric)


def _shown(value: Any) -> str:
    """Numbers with all their digits; texts cut, which --csv and --json do not do."""
    text = number(value)
    return text if len(text) <= _WIDEST or is_number(value) else f"{text[: _WIDEST - 3]}..."
