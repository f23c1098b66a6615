"""`rung mv`: renames an experiment, or moves runs to another."""

from __future__ import annotations

from pathlib import Path

import click

from rung.cli.options import print_json, runs_option
from rung.text import echo


@click.command("mv", short_help="Rename an experiment, or move runs.")
@click.argument("source")
@click.argument("target")
@click.option("--force", is_flag=True, help="Also runs that may still be running.")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: old ids and new ones.")
def command(source: str, target: str, force: bool, root: Path, as_json: bool) -> None:
    """Give the experiment SOURCE another name, or move the run SOURCE (piano/7, or piano/3..7) to TARGET.

    A run gets the next number of the experiment TARGET, or the one that TARGET names if no run had it before. Runs that
    come from it still find it, and so does its code snapshot: they know it by its uid. Its old id is kept under
    `formerly` and is never given to another run. If this is killed, the same command again moves the rest.

    \b
    Examples:
      rung mv piano bach
      rung mv piano/7 bach
      rung mv piano/7 bach/12
      rung mv piano/3..5 old
    """
    from rung.runs.maintenance.moving import move

    moved = move(source, target, root, force)
    if as_json:
        print_json(moved)
        return
    for old, new in moved.items():
        echo(f"{old} is now {new}")
