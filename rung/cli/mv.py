"""`rung mv`: renames an experiment, or moves runs to another; whoever names them follows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rung.runs.house.journal import Moving


@click.command("mv", short_help="Rename an experiment, or move runs.")
@click.argument("source")
@click.argument("target")
@click.option("--force", is_flag=True, help="Also runs of which it cannot be known whether they still run.")
@click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON: old ids and new ones.")
def command(source: str, target: str, force: bool, root: Path, as_json: bool) -> None:
    """Give the experiment SOURCE another name, or move the run SOURCE (piano/7, or piano/3..7) to TARGET.

    A run gets the next number of the experiment TARGET, or the one that TARGET names if no run had it before. Runs that
    name it as their parent follow, and so do its code snapshots. Its old id is kept under `formerly` and is never
    given to another run. If this is killed, saying it again finishes it.

    \b
    Examples:
      rung mv piano bach
      rung mv piano/7 bach
      rung mv piano/7 bach/12
      rung mv piano/3..5 old
    """
    from rung.runs.files import to_json
    from rung.runs.house.moving import move

    left, moved = move(source, target, root, force)
    both = [one for one in (left, moved) if one is not None]
    if as_json:
        click.echo(to_json({old: new for one in both for old, new in one.ids.items()}).decode())
        return
    if left is not None:
        click.echo(f"finished an earlier `rung mv {left.words[0]} {left.words[1]}`")
    for one in both:
        _show(one)


def _show(moving: Moving) -> None:
    for move in moving.moves:
        click.echo(f"{move.old} is now {move.new}")
    if moving.followed:
        click.echo(f"these come from what was moved, and say so now: {', '.join(moving.followed)}")
    stay = [name for move in moving.moves for name in move.stay]
    if stay:
        click.echo(
            f"note: code snapshots whose repository is not at hand keep their names: {', '.join(stay)}", err=True
        )
