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
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click

from rung.cli.options import runs_option
from rung.cli.show import is_number
from rung.errors import RunError
from rung.runs.columns import summaries
from rung.runs.files import name_of, refused, to_json
from rung.runs.metrics import number_of, read_values
from rung.runs.query import nearest, open_run
from rung.text import echo, echo_json, visible

_CHUNK_ROWS = 1 << 16


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
def command(
    run: str, names: tuple[str, ...], as_csv: bool, as_json: bool, parquet: Path | None, evals: bool, every: int,
    num_last: int | None, root: Path,
) -> None:  # fmt: skip
    """Print what RUN recorded, one row per step and eval: all metrics, or those of these NAMES, with all digits.

    Rows that a resume or a rollback took again are left out. With NAMES, so are rows that have none of them.

    \b
    Examples:
      rung metrics piano/7
      rung metrics piano/7 loss norm lr --every 100
      rung metrics piano/best --evals --json
      rung metrics piano/7 --parquet piano-7.parquet
    """
    if as_csv + as_json + (parquet is not None) > 1:
        raise RunError(
            "--csv, --json and --parquet are three ways to write the same rows; keep one.", code="options-conflict"
        )
    found = open_run(run, root)
    # The columns, those of them that are texts or whole numbers, and the rows; None is absent.
    rows: Iterable[Sequence[Any]]
    if evals:
        events = found.evals()
        measured = [n for event in events for n in event if n not in ("step", "set") and is_number(event[n])]
        known = list(dict.fromkeys(measured))
        for name in names:
            if name not in known:
                raise RunError(f"no eval of {found.id} measured {name}; {nearest(name, known)}", code="no-metric")
        columns, kinds = ["step", "set", *(names or known)], {"step": "whole", "set": "text"}
        rows = [[event.get(name) for name in columns] for event in events]
    else:
        recorded = summaries(found.path / "metrics")
        wanted = [name for name in dict.fromkeys(names or recorded) if name != "step"]
        for name in wanted:
            if name not in recorded:
                raise RunError(f"{found.id} recorded no {name}; {nearest(name, [*recorded])}", code="no-metric")
        columns = ["step", *wanted]
        kinds = {"step": "whole", **{name: "whole" for name in wanted if recorded[name].is_whole}}
        rows = read_values(found.path / "metrics", wanted)
        if names and wanted:
            rows = (row for row in rows if any(value is not None for value in row[1:]))
    rows = (row for row in rows if row[0] % every == 0)
    if num_last is not None:
        rows = deque(rows, maxlen=num_last)

    if parquet is not None:
        num_rows = _write_parquet(parquet, columns, kinds, rows)
        echo(f"{num_rows} rows, {len(columns)} columns in {parquet}", err=True)
    elif as_json:
        separator = "[\n"
        for row in rows:
            there = {name: value for name, value in zip(columns, row) if value is not None}
            echo_json(separator + to_json(there).decode(), nl=False)
            separator = ",\n"
        echo("[]" if separator == "[\n" else "\n]")
    else:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(map(_cell, columns))
        writer.writerows([_cell(value) for value in row] for row in rows)
        sys.stdout.flush()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if type(value) is float:
        return repr(value) if math.isfinite(value) else name_of(value).replace("Infinity", "inf")
    return visible(value) if isinstance(value, str) else value


def _write_parquet(path: Path, names: Sequence[str], kinds: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> int:
    from rung.runs.frames import need

    arrow, parquet = need("pyarrow", "--parquet"), need("pyarrow.parquet", "--parquet")
    types = {"whole": arrow.int64(), "text": arrow.string()}
    schema = arrow.schema([(name, types.get(kinds.get(name, ""), arrow.float64())) for name in names])
    floats = [name for name in names if name not in kinds]
    # A third smaller than the defaults on rows of training.
    options = {"compression": "zstd", "use_dictionary": False, "use_byte_stream_split": floats}
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    num_rows, rows = 0, iter(rows)
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
