"""`rung rm`: puts runs into the trash, and takes them out again. Deleting is `rung gc`'s business."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import click

from rung.cli.options import json_option, print_json, runs_option
from rung.errors import RunError, UserError
from rung.lab import runs_folder
from rung.report.table import print_table
from rung.runs.maintenance.disk import bytes_below
from rung.runs.maintenance.selection import folder_at, select
from rung.runs.maintenance.trash import check_removal, remove, restore, trashed
from rung.runs.query import list_runs
from rung.text import echo
from rung.units import duration, size


@click.command("rm", short_help="Put runs into the trash.")
@click.argument("runs", nargs=-1)
@click.option("--failed", metavar="EXPERIMENT", help="The runs of an experiment that ended badly before any eval.")
@click.option("--undo", is_flag=True, help="Restore RUNS, or without RUNS those of the last removal.")
@click.option("--list", "is_list", is_flag=True, help="Show what is in the trash.")
@click.option("--force", is_flag=True, help="Also runs that others need, that cannot be read, or that may be running.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done.")
@runs_option
@json_option
def command(
    runs: tuple[str, ...], failed: str | None, undo: bool, is_list: bool, force: bool, dry_run: bool, root: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Put RUNS into the trash of their runs folder, whole; `rung gc` empties it.

    A run is named as piano/7, piano/3..7, piano/last or by its path. One that is running is refused. One that others
    come from or started with, or that has a pinned checkpoint, needs --force. Numbers are never given again.

    \b
    Examples:
      rung rm piano/7
      rung rm piano/3..5 piano/9 --dry-run
      rung rm --failed piano
      rung rm --undo
      rung rm --undo piano/7
      rung rm --list
    """
    if is_list:
        if runs or undo or failed:
            message = "--list shows all of the trash and takes neither RUNS nor other options"
            raise UserError(message, code="options-conflict")
        rows = [(one, bytes_below(one.run)) for one in trashed(root)]
        if as_json:
            fields = [{"id": one.id, "removed_unix_s": one.unix_s, "bytes": b, "path": str(one.run)} for one, b in rows]
            print_json(fields)
        elif rows:
            cells = [[one.id, f"{duration(max(0.0, time.time() - one.unix_s))} ago", size(b)] for one, b in rows]
            print_table(["run", "removed", "size"], cells, numeric=(2,))
        else:
            echo("the trash is empty")
        return
    if undo:
        if failed:
            raise UserError("--undo takes RUNS, not --failed", code="options-conflict")
        back = restore(root, runs, is_real=not dry_run)
        if as_json:
            print_json([one.id for one in back])
        for one in back if not as_json else ():
            echo(f"{one.id} {'would come back' if dry_run else 'is back'}")
        return
    if not runs and failed is None:
        raise UserError("which runs? Name them, as in `rung rm piano/7`, or see `rung rm --help`", code="missing-run")
    for word in runs:
        if "/" not in word.rstrip("/"):
            raise RunError(
                f"{word} is an experiment; name runs, as {word}/last or {word}/3..7, or all: {word}/1..",
                code="missing-run",
            )
    folders = select(runs, root)
    if failed is not None:
        bad = [run for run in list_runs(root, failed, []) if run.status in ("crashed", "diverged", "vanished")]
        folders += [folder_at(run.path) for run in bad if not run.best and not run.evals()]
    folders = list(dict.fromkeys(folders))
    if not folders:
        echo("[]" if as_json else f"no run of {failed} ended badly before its first eval")
        return
    reasons = check_removal(folders, force)  # all of them may go, or none does
    for reason in reasons:
        echo(f"note: {reason}", err=True)
    gone = [folder.id for folder in folders]
    if not dry_run:
        remove(folders, force)
    if as_json:
        print_json(gone)
        return
    for name in gone:
        echo(f"{name} {'would go to' if dry_run else 'is in'} the trash")
    for home in dict.fromkeys(folder.root for folder in folders) if not dry_run else ():
        names = [folder.id for folder in folders if folder.root == home]
        usual = runs_folder()
        where = "" if home.resolve() == usual.resolve() else f" --runs {shlex.quote(str(home))}"
        echo(f"to undo: rung rm --undo {' '.join(names) if len(names) <= 8 else ''}".rstrip() + where)
