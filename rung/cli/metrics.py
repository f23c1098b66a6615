"""`rung metrics`: what a run measured, for other programs, at full resolution. Needs neither torch nor numpy.

A row at a time from the record to the output, so that memory does not grow with the run.
"""

from __future__ import annotations

import csv
import math
import os
import sys
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import click

from rung.cli.options import runs_option
from rung.cli.show import is_number
from rung.errors import RunError
from rung.runs.files import name_of, refused, to_json
from rung.runs.metrics import number_of, read_values
from rung.runs.query import Run, nearest, open_run

_CHUNK_ROWS = 1 << 16


class ExportTable(NamedTuple):
    """Names of the columns, those that are texts or whole numbers, and the rows; None is absent."""

    names: list[str]
    kinds: dict[str, str]
    rows: Iterable[Sequence[Any]]


@click.command("metrics", short_help="Write a run's metrics as CSV, JSON or Parquet.")
@click.argument("run")
@click.argument("names", nargs=-1)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV: the default. Absent is empty, NaN is NaN.")
@click.option("--json", "as_json", is_flag=True, help='Print JSON: a list of rows, with "NaN" as a text.')
@click.option("--parquet", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a Parquet file; needs rung[query].")  # fmt: skip
@click.option("--evals", is_flag=True, help="The evals that count: step, set and what was measured.")
@click.option("--every", type=click.IntRange(min=1), default=1, help="Only steps that are multiples of N.", metavar="N")
@click.option("--last", "num_last", type=click.IntRange(min=1), help="Only the last N rows.", metavar="N")
@runs_option
def command(run: str, names: tuple[str, ...], as_csv: bool, as_json: bool, root: Path, **asked: Any) -> None:
    """Print what RUN recorded, one row per step and eval: all metrics, or those of these NAMES, with all digits.

    Rows that a resume or a rollback took again are left out. With NAMES, so are rows that have none of them.

    \b
    Examples:
      rung metrics piano/7
      rung metrics piano/7 loss norm lr --every 100
      rung metrics piano/best --evals --json
      rung metrics piano/7 --parquet piano-7.parquet
    """
    if as_csv + as_json + (asked["parquet"] is not None) > 1:
        raise RunError(
            "--csv, --json and --parquet are three ways to write the same rows; keep one.", code="options-conflict"
        )
    found = open_run(run, root)
    table = _evals(found, names) if asked["evals"] else _rows(found, names)
    rows: Iterable[Sequence[Any]] = (row for row in table.rows if row[0] % asked["every"] == 0)
    if asked["num_last"] is not None:
        rows = deque(rows, maxlen=asked["num_last"])
    table = table._replace(rows=rows)
    if asked["parquet"] is not None:
        num_rows = _write_parquet(asked["parquet"], table)
        click.echo(f"{num_rows} rows, {len(table.names)} columns in {asked['parquet']}", err=True)
    elif as_json:
        separator = "[\n"
        for row in table.rows:
            there = {name: value for name, value in zip(table.names, row) if value is not None}
            click.echo(separator + to_json(there).decode(), nl=False)
            separator = ",\n"
        click.echo("[]" if separator == "[\n" else "\n]")
    else:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(table.names)
        writer.writerows([_cell(value) for value in row] for row in table.rows)
        sys.stdout.flush()


def _rows(run: Run, names: Sequence[str]) -> ExportTable:
    from rung.runs.columns import summaries

    known = summaries(run.path / "metrics")
    wanted = [name for name in dict.fromkeys(names or known) if name != "step"]
    for name in wanted:
        if name not in known:
            raise RunError(f"{run.id} recorded no {name}; {nearest(name, [*known])}", code="no-metric")
    kinds = {"step": "whole", **{name: "whole" for name in wanted if known[name].is_whole}}
    rows: Iterator[tuple[Any, ...]] = read_values(run.path / "metrics", wanted)
    if names and wanted:
        rows = (row for row in rows if any(value is not None for value in row[1:]))
    return ExportTable(["step", *wanted], kinds, rows)


def _evals(run: Run, names: Sequence[str]) -> ExportTable:
    evals = run.evals()
    known = list(
        dict.fromkeys(n for e in evals for n, value in e.items() if n not in ("step", "set") and is_number(value))
    )
    for name in names:
        if name not in known:
            raise RunError(f"no eval of {run.id} measured {name}; {nearest(name, known)}", code="no-metric")
    columns = ["step", "set", *(names or known)]
    return ExportTable(columns, {"step": "whole", "set": "text"}, [[e.get(name) for name in columns] for e in evals])


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if type(value) is float:
        return repr(value) if math.isfinite(value) else name_of(value).replace("Infinity", "inf")
    return value


def _write_parquet(path: Path, table: ExportTable) -> int:
    from rung.runs.frames import need

    arrow, parquet = need("pyarrow", "--parquet"), need("pyarrow.parquet", "--parquet")
    types = {"whole": arrow.int64(), "text": arrow.string()}
    schema = arrow.schema([(name, types.get(table.kinds.get(name, ""), arrow.float64())) for name in table.names])
    floats = [name for name in table.names if name not in table.kinds]
    # A third smaller than the defaults on rows of training.
    options = {"compression": "zstd", "use_dictionary": False, "use_byte_stream_split": floats}
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    num_rows, rows = 0, iter(table.rows)
    try:
        with parquet.ParquetWriter(beside, schema, **options) as writer:
            while chunk := list(islice(rows, _CHUNK_ROWS)):
                columns = []
                for values, field in zip(zip(*chunk), schema):
                    if field.name in floats:
                        values = tuple(None if value is None else number_of(value) for value in values)
                    columns.append(arrow.array(values, field.type))
                writer.write_table(arrow.Table.from_arrays(columns, schema=schema))
                num_rows += len(chunk)
        os.replace(beside, path)
    except OSError as error:
        raise refused(str(path), error) from error
    finally:
        beside.unlink(missing_ok=True)
    return num_rows
