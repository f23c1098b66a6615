"""`rung sweep`: trains every point of a sweep file, here or on a cluster, and shows how a sweep stands.

Reading verbs (ls, show, log, report) work without torch. What is trained has processes of its own.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from rung.cli.options import GroupWithDefault, json_option, print_json, runs_option
from rung.cli.sweep_table import Display, print_end, print_first, print_plan
from rung.errors import ConfigError, RunError, UserError
from rung.files import write_whole
from rung.report.table import print_table
from rung.runs.files import refused
from rung.sweep import launch, state
from rung.sweep.emit import kubernetes, skypilot
from rung.sweep.launch.local import LocalLauncher
from rung.sweep.plan import find_sweep, keep, load, read_plan, refuse_another, sweeps
from rung.sweep.point import STOPPED, log_of, run_point
from rung.sweep.search import Search, drive, read_settings
from rung.sweep.space import Point, Sweep, point_of, split_files
from rung.text import echo, one_line, printable, visible

MOST_REASONS = 20  # why points cannot be trained


@click.group(cls=GroupWithDefault, short_help="Train every point of a grid, a list or a search.", no_args_is_help=True)
def command() -> None:
    """Train every point of a sweep FILE; the same command continues where it was stopped, and trains nothing twice.

    \b
    rung sweep FILE [--dry-run] [--retry-failed] [--on WHERE] [--name NAME] [--emit KIND [--out FILE]]
      --dry-run        check every point, show what is finished, what continues and what is new, and stop
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
def run_file(
    path: str, dry_run: bool, retry_failed: bool, name: str | None, on: str | None, emit: str | None, out: Path | None,
    as_json: bool, root: Path,
) -> None:  # fmt: skip
    """Train every point of the sweep file. Every point is checked before the first one starts.

    Ctrl-C tells the trainings to save and stop, and waits for them. The same command continues: finished points are not
    trained again, stopped ones are resumed, new ones are added. It exits with 1 where a point failed.

    \b
    Examples:
      rung sweep lr.yaml --dry-run
      rung sweep lr.yaml
      rung sweep lr.yaml --retry-failed
      rung sweep lr.yaml --on ray://head:10001
      rung sweep lr.yaml --emit kubernetes --out jobs.yaml
    """
    file = Path(path)
    if not file.exists():
        message = f"there is no sweep file {file}, and no verb of that name (see `rung sweep --help`)"
        raise UserError(message, code="no-file")
    if out is not None and emit is None:
        raise UserError("--out is where --emit writes; leave it out, or add --emit kubernetes", code="options-conflict")
    if dry_run and emit is not None:
        message = "--emit writes the plan that its jobs follow, and --dry-run writes nothing; keep one"
        raise UserError(message, code="options-conflict")
    sweep = read_plan(file, root, name)
    before = refuse_another(sweep)
    if sweep.search is not None and emit is not None:
        message = "--emit is not for a search, whose points come one after the other; use --on, or give a grid"
        raise UserError(message, code="not-supported")
    if sweep.search is not None and retry_failed:
        message = "--retry-failed is not for a search, which takes a point that failed as an answer; leave it out"
        raise UserError(message, code="not-supported")
    check_points(sweep)
    if before is not None and sweep.search is None:
        there = {one.key for one in sweep.points}
        gone = sum(not one.get("retired") and one["key"] not in there for one in before["points"])
        if gone:  # also where a config file was edited, or another file has the same name
            echo(f"{gone} points that were planned before are now left out; their runs stay", err=True)
    if emit is not None:
        text = {"kubernetes": kubernetes, "skypilot": skypilot}[emit](sweep, sweep.points)
        state.allow_again(keep(sweep))  # the plan that the jobs of the file follow
        if out is None:
            echo(text, nl=False)
            return
        try:
            write_whole(out, text.encode())
        except OSError as error:
            raise refused(str(out), error) from error
        echo(out)
        return
    launcher = launch.launcher_of(sweep, on)
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
    points = [one for one in sweep.points if found[one.key].word != "finished" and not found[one.key].is_final]
    farewell, is_whole = "", True
    try:
        with Display(sweep, found, is_quiet=as_json) as display:
            if sweep.search is not None:
                search, at_once = Search(sweep), len(launcher.slots) if isinstance(launcher, LocalLauncher) else 1
                is_whole = drive(search, launcher, display.report, at_once)
                if (best := search.best()) is not None:
                    echo(f"best: {one_line(best[0].label)}  {best[1]:.4f}", err=True)
            elif points:
                launcher.run(sweep, points, display.report)
    except KeyboardInterrupt as interrupt:
        farewell = str(interrupt) or "stopped; the same command continues from here"
    sweep = load(sweep.folder)
    ended = state.states(sweep)
    print_end(sweep, ended, as_json)
    if farewell:
        echo(farewell, err=True)
        sys.exit(130)
    counts = Counter(one.word for one in ended.values())
    # To a search, a point that diverged is an answer.
    if counts["failed"] and (sweep.search is None or not counts["finished"]):
        sys.exit(1)
    if not is_whole or counts["finished"] + counts["failed"] < len(ended):
        sys.exit(STOPPED)


command.default = run_file


def check_points(sweep: Sweep) -> None:
    """Raises ConfigError where the recipe would refuse a point, with all such points and the reasons.

    Of a search, points at the ends of what it may choose from are asked.
    """
    from rung.config import Layer, load_file
    from rung.recipe import has_splits
    from rung.recipes import find_recipe, preset_layer
    from rung.resolve import resolve

    recipe = find_recipe(sweep.recipe)  # one that is not there is one mistake, and not one for each point
    if sweep.eval_split is not None and not has_splits(recipe):
        message = f"eval: {sweep.recipe} has no split {sweep.eval_split!r} to evaluate on; leave eval out"
        raise ConfigError(message, code="no-split")
    points: Sequence[Point] = sweep.points
    if sweep.search is not None:
        space = read_settings(sweep.search).space
        ends = [(one[0], one[-1]) if isinstance(one, tuple) else (one.low, one.high) for one in space.values()]
        points = [point_of(sweep, dict(zip(space, values))) for values in zip(*ends)]

    @functools.cache  # reading YAML takes longer than checking a point
    def base_of(preset: str | None, files: tuple[str, ...]) -> list[Layer]:
        return [*preset_layer(recipe, preset), *(Layer(f"file {one}", load_file(Path(one))) for one in files)]

    wrong: dict[str, list[Point]] = {}
    for point in points:
        words, files = split_files(point.words)
        presets = [one.partition("=")[2] for one in words if one.startswith("preset=")]
        rest = [one for one in words if not one.startswith("preset=")]
        try:
            base = base_of(presets[0] if presets else None, tuple(files))
            if resolve(sweep.recipe, rest, base=base, runs=sweep.runs).config.values["eval_only"]:
                message = "eval_only=true trains nothing, so there would be no run; leave it out"
                raise ConfigError(message, code="bad-sweep")
        except ConfigError as error:
            wrong.setdefault(str(error), []).append(point)
    if not wrong:
        return
    num = sum(map(len, wrong.values()))
    lines = [f"{num} of {len(points)} points cannot be trained; nothing was started:"]
    for reason, of in list(wrong.items())[:MOST_REASONS]:
        who = "every point" if len(of) == len(points) > 1 else ", ".join(point.label for point in of[:3])
        more = f" and {len(of) - 3} more" if len(of) > 3 and len(of) < len(points) else ""
        lines += [f"  {who}{more}:", *(f"    {line}" for line in reason.splitlines())]
    if len(wrong) > MOST_REASONS:
        lines.append(f"  and {len(wrong) - MOST_REASONS} more reasons")
    raise ConfigError("\n".join(lines), code="bad-sweep")


@command.command()
@json_option
@runs_option
def ls(as_json: bool, root: Path) -> None:
    """List the sweeps, and how far each is.

    \b
    Examples:
      rung sweep ls
      rung sweep ls --json
    """
    rows, cells = [], []
    for folder in sweeps(root):
        try:
            sweep = load(folder)
        except RunError as error:  # of one, which is no reason to hide the others
            echo(visible(str(error)), err=True)
            continue
        counts = Counter(one.word for one in state.states(sweep).values())
        about = {"name": sweep.name, "recipe": sweep.recipe, "experiment": sweep.experiment}
        rows.append({**about, "points": len(sweep.points), "states": dict(counts), "path": str(sweep.folder)})
        counted = ", ".join(f"{num} {word}" for word, num in counts.items())
        cells.append([*about.values(), str(len(sweep.points)), counted])
    if as_json:
        print_json(rows)
    elif not rows:
        echo(f"no sweeps under {root}")
    else:
        print_table(["sweep", "recipe", "experiment", "points", "states"], cells, [3])


@command.command()
@click.argument("name")
@json_option
@runs_option
def show(name: str, as_json: bool, root: Path) -> None:
    """Show every point of a sweep: how it stands, its run, its best loss.

    \b
    Examples:
      rung sweep show lr
      rung sweep show lr --json
    """
    sweep = find_sweep(name, root)
    print_end(sweep, state.states(sweep), as_json)


@command.command()
@click.argument("name")
@runs_option
def stop(name: str, root: Path) -> None:
    """Tell every training of a sweep, on any machine, to save and stop. `rung sweep FILE` continues it.

    \b
    Examples:
      rung sweep stop lr
    """
    sweep = find_sweep(name, root)
    state.ask_to_stop(sweep)
    held = state.held_claims(sweep)
    num_here = sum(state.signal_here(claim) for claim in held)
    elsewhere = f", {len(held) - num_here} elsewhere will follow within seconds" if len(held) > num_here else ""
    echo(f"{name}: told {num_here} points here to save and stop{elsewhere}; `rung sweep FILE` continues it")


@command.command()
@click.argument("name")
@click.argument("key", metavar="POINT")
@json_option
@runs_option
def log(name: str, key: str, as_json: bool, root: Path) -> None:
    """Print all that the trainings of a POINT have printed. POINT is its key, or its place in the list from 0 on.

    \b
    Examples:
      rung sweep log lr 3
      rung sweep log lr 5f0c1a
    """
    sweep = find_sweep(name, root)
    of = sweep.point(key)
    file = log_of(sweep, of.key)
    if not file.exists():
        raise UserError(
            f"nothing has been started yet for point {key} of {name} (`rung sweep show {name}`)", code="no-log"
        )
    if as_json:
        text = file.read_text("utf-8", errors="replace")
        print_json({"key": of.key, "path": str(file), "text": text})
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            echo(printable(line.rstrip("\n")))


@command.command()
@click.argument("what", metavar="NAME|FILE")
@click.option("--x", help="The varied key on the axis; default: the first one that is a number and not the seed.")
@click.option("--metric", help="What to compare by; default: the eval of the sweep, else the best loss.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the page.")
@json_option
@runs_option
def report(what: str, x: str | None, metric: str | None, out: Path | None, as_json: bool, root: Path) -> None:
    """Write a page that compares the points of a sweep: tables over seeds, curves, fits.

    \b
    Examples:
      rung sweep report lr
      rung sweep report lr.yaml --x lr.learning_rate
      rung sweep report components --metric test/loss --out page
    """
    from rung.compare.scaling.page import report as write

    name = read_plan(Path(what), root).name if Path(what).is_file() else what
    sweep = find_sweep(name, root)
    found = state.runs_of(sweep)
    runs = [run for one in sweep.points for run in found.get(one.key, [])]
    if not runs:
        raise UserError(
            f"sweep {name} has no runs yet; `rung sweep show {name}` says how it stands", code="sweep-empty"
        )
    page = write(runs, out or sweep.folder / "report", x=x, metric=metric, name=name)
    if as_json:
        print_json({"path": str(page)})
    else:
        echo(page)


@command.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("key")
def point(folder: Path, key: str) -> None:
    """Do all there is to do for one point. Launchers start this; KEY may be its place in the list."""
    ended = run_point(folder, key)
    echo(f"{ended.outcome}{': ' + ended.text if ended.text else ''}")
    sys.exit(ended.code)
