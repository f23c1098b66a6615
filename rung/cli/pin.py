"""`rung pin`: checkpoints that stay whatever the rotation says. Works on a running run, and without torch."""

from __future__ import annotations

from pathlib import Path

import click

from rung.cli.options import print_json, runs_option
from rung.errors import UserError
from rung.text import echo


@click.command("pin", short_help="Keep a checkpoint for good.")
@click.argument("run")
@click.argument("step", required=False, metavar="[STEP|best|last]")
@click.option("--off", metavar="STEP", help="Unpin a checkpoint: a step, best or last.")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: every checkpoint with its marks.")
def command(run: str, step: str | None, off: str | None, root: Path, as_json: bool) -> None:
    """Keep the checkpoint of RUN at STEP for good; without STEP show the checkpoints and their marks.

    The best and the last checkpoint of a run stay anyway, but others take their place
    as training continues. A pinned one stays, until it is let go or the run is removed.

    \b
    Examples:
      rung pin piano/7
      rung pin piano/7 best
      rung pin piano/7 1200
      rung pin piano/7 --off 1200
    """
    from rung.report.table import print_table
    from rung.runs.maintenance.disk import bytes_below
    from rung.runs.marks import find_step, saves, set_pin
    from rung.runs.query import open_run
    from rung.units import size

    if step is not None and off is not None:
        raise UserError("STEP pins and --off unpins; give one of the two", code="options-conflict")
    found = open_run(run, root)
    folder = found.path / "checkpoints"
    word = step if step is not None else off
    if word is not None:
        at = find_step(folder, word, found.id)
        is_new = set_pin(folder, at, step is not None, found.id)
        if not as_json:
            state = "pinned" if step is not None else "not pinned"
            echo(f"{found.id}: the checkpoint at {at} {'is now' if is_new else 'was already'} {state}")
            return
    if as_json:
        print_json([save._asdict() for save in saves(folder)])
        return
    rows = []
    for save in saves(folder):
        marks = {"pinned": save.is_pinned, "best": save.is_best, "last": save.is_last}
        rows.append([str(save.step), size(save.bytes), ", ".join(name for name, is_so in marks.items() if is_so)])
    if rows:
        print_table(["step", "size", "marks"], rows, numeric=(0, 1))
    else:
        echo(f"{found.id} has no whole checkpoint")
    for aside in sorted(folder.glob("aside-*")):
        num_bytes = size(bytes_below(aside))
        echo(f"{aside.name}: set aside by a resume, {num_bytes} (`rung gc --checkpoints` deletes it)")
