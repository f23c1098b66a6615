"""`rung rm`: puts runs into the trash, and takes them out again. Deleting is `rung gc`'s business."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.errors import RunError, UserError

if TYPE_CHECKING:
    from rung.runs.house.places import Place, Standing
    from rung.runs.house.trash import Removed


@click.command("rm", short_help="Put runs into the trash.")
@click.argument("runs", nargs=-1)
@click.option("--failed", metavar="EXPERIMENT", help="The runs of an experiment that ended badly before any eval.")
@click.option("--undo", is_flag=True, help="Bring RUNS back, or without RUNS those of the last removal.")
@click.option("--list", "is_list", is_flag=True, help="Show what is in the trash.")
@click.option("--force", is_flag=True, help="Also runs that others need, that cannot be read, or that may be running.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done.")
@click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
    from rung.runs.files import to_json
    from rung.runs.house.trash import bring_back, remove, removed

    if is_list:
        _refuse(runs, undo, failed, "--list shows all of the trash and takes neither RUNS nor other options")
        _show(removed(root), as_json)
        return
    if undo:
        _refuse((), False, failed, "--undo takes RUNS, not --failed")
        back = bring_back(root, runs, is_real=not dry_run)
        if as_json:
            click.echo(to_json([one.id for one in back]).decode())
        for one in back if not as_json else ():
            click.echo(f"{one.id} {'would come back' if dry_run else 'is back'}")
        return
    places = _places(runs, failed, root)
    if not places:
        click.echo("[]" if as_json else f"no run of {failed} ended badly before its first eval")
        return
    _check(places, force)
    gone = [place.id for place in places]
    if not dry_run:
        remove(places, force)
    if as_json:
        click.echo(to_json(gone).decode())
        return
    for name in gone:
        click.echo(f"{name} {'would go to' if dry_run else 'is in'} the trash")
    for folder in dict.fromkeys(place.root for place in places) if not dry_run else ():
        names = [place.id for place in places if place.root == folder]
        usual = Path(os.environ.get("RUNG_RUNS", "runs"))
        where = "" if folder.resolve() == usual.resolve() else f" --runs {shlex.quote(str(folder))}"
        click.echo(f"to undo: rung rm --undo {' '.join(names) if len(names) <= 8 else ''}".rstrip() + where)


def _refuse(runs: Sequence[str], undo: bool, failed: str | None, text: str) -> None:
    if runs or undo or failed:
        raise UserError(text)


def _places(words: Sequence[str], failed: str | None, root: Path) -> list[Place]:
    from rung.runs.house.places import choose, place_of
    from rung.runs.query import list_runs

    if not words and failed is None:
        raise UserError("which runs? Name them, as in `rung rm piano/7`, or see `rung rm --help`")
    for word in words:
        if "/" not in word.rstrip("/"):
            raise RunError(f"{word} is an experiment; name runs, as {word}/last or {word}/3..7, or all: {word}/1..")
    places = choose(words, root)
    if failed is not None:
        bad = [run for run in list_runs(root, failed, []) if run.status in ("crashed", "diverged", "vanished")]
        places += [place_of(run.path) for run in bad if not run.best and not run.evals()]
    return list(dict.fromkeys(places))


def _check(places: Sequence[Place], force: bool) -> None:
    """All of them may go, or none does."""
    from rung.runs.house.needs import needed_by
    from rung.runs.house.places import refuse_running, standing

    targets: list[Standing] = [standing(place) for place in places]
    for target in targets:
        refuse_running(target, "remove", force or target.problem is not None)
        if target.problem is not None and not force:
            raise RunError(f"{target.problem} It can be removed as it is: add --force.")
    reasons = list(needed_by(targets))
    if reasons and not force:
        more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        raise RunError(f"{'; '.join(reasons[:5])}{more}; to remove all the same, add --force.")
    for reason in reasons:
        click.echo(f"note: {reason}", err=True)


def _show(there: Sequence[Removed], as_json: bool) -> None:
    from rung.cli.table import print_table
    from rung.runs.files import to_json
    from rung.runs.house.disk import bytes_below
    from rung.units import duration, size

    rows = [(one, bytes_below(one.run)) for one in there]
    if as_json:
        fields = [{"id": one.id, "removed_unix_s": one.unix_s, "bytes": b, "path": str(one.run)} for one, b in rows]
        click.echo(to_json(fields).decode())
    elif rows:
        cells = [[one.id, f"{duration(max(0.0, time.time() - one.unix_s))} ago", size(b)] for one, b in rows]
        print_table(["run", "removed", "size"], cells, numeric=(2,))
    else:
        click.echo("the trash is empty")
