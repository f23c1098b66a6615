"""`rung sweep`: trains every point of a sweep file, here or on a cluster, and tells how a sweep stands.

Reading verbs (ls, show, log, report) work without torch. What is trained has processes of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.resolve import json_option, runs_option
from rung.errors import RunError, UserError
from rung.text import one_line, printable, visible

if TYPE_CHECKING:
    from rung.cli.sweep_table import Display
    from rung.sweep.launch import Launcher
    from rung.sweep.space import Sweep
    from rung.sweep.state import State

STOPPED = 3


class SweepVerbs(click.Group):
    """`rung sweep FILE` runs a sweep; `ls`, `show`, `stop`, `log` and `report` are about one that is there."""

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = super().get_command(ctx, name)
        if found is not None:
            return found
        return click.Command(
            name, params=list(run_file.params), help=run_file.help, callback=lambda **given: run(Path(name), **given)
        )


@click.group(cls=SweepVerbs, short_help="Train every point of a grid, a list or a search.", no_args_is_help=True)
def command() -> None:
    """Train every point of a sweep FILE; the same command goes on where it was stopped, and trains nothing twice.

    \b
    rung sweep FILE [--dry-run] [--retry-failed] [--on WHERE] [--name NAME] [--emit KIND [--out FILE]]
      --dry-run        check every point, show what is finished, what goes on and what is new, and stop
      --retry-failed   try points again that diverged or failed for good
      --on WHERE       local, ray, ray://HOST:PORT or slurm; default: what the file says, else local
      --emit KIND      print a file for kubernetes or skypilot instead of training

    \b
    A sweep file is YAML:
      recipe: piano
      set: {optimizer.max_iters: 2000}
      grid: {lr.learning_rate: [1e-4, 3e-4, 1e-3], seed: [0, 1, 2]}
    further keys: name, preset, config, points, search, experiment, eval, retries, ranks, launch, why

    \b
    Examples:
      rung sweep lr.yaml --dry-run
      rung sweep lr.yaml
      rung sweep lr.yaml --on slurm
      rung sweep show lr
      rung sweep log lr 3
      rung sweep stop lr
      rung sweep report lr
    """


@click.command("FILE")
@click.option("--dry-run", is_flag=True, help="Check every point, show how it stands, and stop.")
@click.option("--retry-failed", is_flag=True, help="Try points again that diverged or failed for good.")
@click.option("--name", help="What to call the sweep; default: what the file says, else the file's name.")
@click.option("--on", metavar="WHERE", help="local, ray, ray://HOST:PORT or slurm; default: as the file says.")
@click.option("--emit", type=click.Choice(["kubernetes", "skypilot"]), help="Print a file for it, and train nothing.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Where to write it; with --emit.")
@json_option
@runs_option
def run_file(**given: object) -> None:
    """Train every point of the sweep file. Every point is checked before the first one starts.

    Ctrl-C tells the trainings to save and stop, and waits for them. The same command goes on: finished points are not
    trained again, stopped ones are resumed, new ones are added. It exits with 1 where a point failed.

    \b
    Examples:
      rung sweep lr.yaml --dry-run
      rung sweep lr.yaml
      rung sweep lr.yaml --retry-failed
      rung sweep lr.yaml --on ray://head:10001
      rung sweep lr.yaml --emit kubernetes --out jobs.yaml
    """


def run(
    file: Path, dry_run: bool, retry_failed: bool, name: str | None, on: str | None, emit: str | None, out: Path | None,
    as_json: bool, runs_root: Path,
) -> None:  # fmt: skip
    from rung.cli.sweep_check import check_points
    from rung.cli.sweep_table import print_first, print_plan
    from rung.sweep import state
    from rung.sweep.launch import launcher_of
    from rung.sweep.plan import keep, read_plan, refuse_another

    if not file.exists():
        raise UserError(f"there is no sweep file {file}, and no verb of that name (see `rung sweep --help`)")
    if out is not None and emit is None:
        raise UserError("--out is where --emit writes; leave it out, or say --emit kubernetes")
    if dry_run and emit is not None:
        raise UserError("--emit writes the plan that its jobs go by, and --dry-run writes nothing; keep one")
    sweep = read_plan(file, runs_root, name)
    before = refuse_another(sweep)
    if emit is not None and sweep.search is not None:
        raise UserError("--emit is not for a search, whose points come one after the other; use --on, or give a grid")
    if retry_failed and sweep.search is not None:
        raise UserError(
            "--retry-failed is not for a search, which takes a point that failed as an answer; leave it out"
        )
    check_points(sweep)
    if before is not None and sweep.search is None:
        there = {one.key for one in sweep.points}
        gone = sum(not one.get("retired") and one["key"] not in there for one in before["points"])
        if gone:  # also where a config file was edited, or another file has the same name
            click.echo(f"{gone} points that were planned before are left out now; their runs stay", err=True)
    if emit is not None:
        _emit(sweep, emit, out)
        return
    launcher = launcher_of(sweep, on)
    if dry_run:
        print_plan(sweep, state.states(sweep), as_json)
        return
    sweep = keep(sweep)
    state.allow_again(sweep)
    found = state.states(sweep)
    if retry_failed:
        for key in [key for key, one in found.items() if one.is_final]:
            state.try_again(sweep, key)
        found = state.states(sweep)
    print_first(sweep, found, is_quiet=as_json)
    _follow(sweep, found, launcher, as_json)


def _follow(sweep: Sweep, found: dict[str, State], launcher: Launcher, as_json: bool) -> None:
    """Trains what is left, shows how it goes, and ends with the table and an exit code that says how it went."""
    from rung.cli.sweep_table import Display, print_end
    from rung.sweep import state
    from rung.sweep.plan import load

    points = [one for one in sweep.points if found[one.key].word != "finished" and not found[one.key].is_final]
    display = Display(sweep, found, is_quiet=as_json)
    farewell, is_whole = "", True
    try:
        with display:
            if sweep.search is not None:
                is_whole = _search(sweep, launcher, display)
            elif points:
                launcher.run(sweep, points, display.told)
    except KeyboardInterrupt as interrupt:
        farewell = str(interrupt) or "stopped; the same command goes on with what is there"
    sweep = load(sweep.folder)
    ended = state.states(sweep)
    print_end(sweep, ended, as_json)
    if farewell:
        click.echo(farewell, err=True)
        sys.exit(130)
    words = Counter(one.word for one in ended.values())
    # To a search, a point that diverged is an answer.
    if words["failed"] and (sweep.search is None or not words["finished"]):
        sys.exit(1)
    if not is_whole or words["finished"] + words["failed"] < len(ended):
        sys.exit(STOPPED)


def _search(sweep: Sweep, launcher: Launcher, display: Display) -> bool:
    """Whether all trials were made."""
    from rung.sweep.launch.local import Local
    from rung.sweep.search import Search, drive

    search, at_once = Search(sweep), len(launcher.slots) if isinstance(launcher, Local) else 1
    is_whole = drive(search, launcher, display.told, at_once)
    if (best := search.best()) is not None:
        click.echo(f"best: {one_line(best[0].told)}  {best[1]:.4f}", err=True)
    return is_whole


def _emit(sweep: Sweep, kind: str, out: Path | None) -> None:
    """Writes a file for a cluster, and the plan that its jobs go by."""
    from rung.files import write_whole
    from rung.runs.files import refused
    from rung.sweep import emit, state
    from rung.sweep.plan import keep

    text = getattr(emit, kind)(sweep, sweep.points)
    state.allow_again(keep(sweep))
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        write_whole(out, text.encode())
    except OSError as error:
        raise refused(str(out), error) from error
    click.echo(out)


@command.command()
@json_option
@runs_option
def ls(as_json: bool, runs_root: Path) -> None:
    """List the sweeps, and how far each is.

    \b
    Examples:
      rung sweep ls
      rung sweep ls --json
    """
    from rung.cli.sweep_table import print_sweeps
    from rung.sweep.plan import load, sweeps

    found = []
    for folder in sweeps(runs_root):
        try:
            found.append(load(folder))
        except RunError as error:  # of one, which is no reason to hide the others
            click.echo(visible(str(error)), err=True)
    print_sweeps(found, runs_root, as_json)


@command.command()
@click.argument("name")
@json_option
@runs_option
def show(name: str, as_json: bool, runs_root: Path) -> None:
    """Show every point of a sweep: how it stands, its run, its best loss.

    \b
    Examples:
      rung sweep show lr
      rung sweep show lr --json
    """
    from rung.cli.sweep_table import print_end
    from rung.sweep.plan import find_sweep
    from rung.sweep.state import states

    sweep = find_sweep(name, runs_root)
    print_end(sweep, states(sweep), as_json)


@command.command()
@click.argument("name")
@runs_option
def stop(name: str, runs_root: Path) -> None:
    """Tell every training of a sweep, on any machine, to save and stop. `rung sweep FILE` goes on with it.

    \b
    Examples:
      rung sweep stop lr
    """
    from rung.sweep import state
    from rung.sweep.plan import find_sweep

    sweep = find_sweep(name, runs_root)
    state.ask_to_stop(sweep)
    held = state.held_claims(sweep)
    num_here = sum(state.signal_here(claim) for claim in held)
    elsewhere = f", {len(held) - num_here} elsewhere hear of it in seconds" if len(held) > num_here else ""
    click.echo(f"{name}: {num_here} points here were told to save and stop{elsewhere}; `rung sweep FILE` goes on")


@command.command()
@click.argument("name")
@click.argument("key", metavar="POINT")
@json_option
@runs_option
def log(name: str, key: str, as_json: bool, runs_root: Path) -> None:
    """Print all that the trainings of a POINT have printed. POINT is its key, or its place in the list from 0 on.

    \b
    Examples:
      rung sweep log lr 3
      rung sweep log lr 5f0c1a
    """
    from rung.runs.files import to_json
    from rung.sweep.plan import find_sweep
    from rung.sweep.point import log_of

    sweep = find_sweep(name, runs_root)
    of = sweep.point(key)
    file = log_of(sweep, of.key)
    if not file.exists():
        raise UserError(f"nothing was started yet for point {key} of {name} (`rung sweep show {name}`)")
    if as_json:
        text = file.read_text("utf-8", errors="replace")
        click.echo(to_json({"key": of.key, "path": str(file), "text": text}).decode())
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            click.echo(printable(line.rstrip("\n")))


@command.command()
@click.argument("what", metavar="NAME|FILE")
@click.option("--x", help="The varied key on the axis; default: the first one that is a number and not the seed.")
@click.option("--metric", help="What to compare by; default: the eval of the sweep, else the best loss.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the page.")
@json_option
@runs_option
def report(what: str, x: str | None, metric: str | None, out: Path | None, as_json: bool, runs_root: Path) -> None:
    """Write a page that compares the points of a sweep: tables over seeds, curves, fits.

    \b
    Examples:
      rung sweep report lr
      rung sweep report lr.yaml --x lr.learning_rate
      rung sweep report components --metric test/loss --out page
    """
    from rung.compare.scaling.page import report as write
    from rung.runs.files import to_json
    from rung.sweep.plan import find_sweep, read_plan
    from rung.sweep.state import runs_of

    name = read_plan(Path(what), runs_root).name if Path(what).is_file() else what
    sweep = find_sweep(name, runs_root)
    found = runs_of(sweep)
    runs = [run for one in sweep.points for run in found.get(one.key, [])]
    if not runs:
        raise UserError(f"sweep {name} has no runs yet; `rung sweep show {name}` says how it stands")
    page = write(runs, out or sweep.folder / "report", x=x, metric=metric, name=name)
    click.echo(to_json({"path": str(page)}).decode() if as_json else page)


@command.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("key")
def point(folder: Path, key: str) -> None:
    """Do all there is to do for one point. Launchers start this; KEY may be its place in the list."""
    from rung.sweep.point import run_point

    ended = run_point(folder, key)
    click.echo(f"{ended.outcome}{': ' + ended.text if ended.text else ''}")
    sys.exit(ended.code)
