"""`rung doctor`: why a run is sick, from the record alone. Works without torch, also while the run is running."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from rung.cli.options import json_option, print_json, runs_option
from rung.text import echo


@click.command("doctor", short_help="Say why a run is sick.")
@click.argument("run")
@click.option("--severity", type=click.Choice(["info", "warn", "sick", "fatal"]), default="warn", show_default=True,
              help="Show findings from this one on.")  # fmt: skip
@click.option("--all", "is_all", is_flag=True, help="Show all findings; the same as --severity info.")
@click.option("--check", is_flag=True, help="Exit with 1 when something is sick or fatal, for scripts.")
@json_option
@runs_option
def command(run: str, severity: str, is_all: bool, check: bool, as_json: bool, root: Path) -> None:
    """Look at all that RUN recorded and say what is wrong with it, since when, by which evidence, and what to try.

    RUN is piano/7, piano or piano/last for the latest, piano/best for the lowest eval loss, or a path. A run that is
    still running is judged by what it has recorded so far.

    \b
    Examples:
      rung doctor piano/7
      rung doctor piano --all
      rung doctor piano/best --json
      rung doctor piano/7 --check && rung export piano/7
    """
    from rung.doctor.history import read
    from rung.doctor.report import lines, report_of
    from rung.runs.query import open_run, ref

    found = open_run(run, root)
    name = ref(found.path, found.id)
    report = report_of(read(found))
    report = replace(report, findings=[finding.at(found.id, name) for finding in report.findings])
    if as_json:
        print_json(report.to_dict(name))
    else:
        for line in lines(report, name, "info" if is_all else severity):
            echo(line)
    if check and report.is_sick:
        sys.exit(1)
