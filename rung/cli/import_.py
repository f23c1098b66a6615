"""`rung import`: runs of wandb, TensorBoard and trackio, from their files; it needs neither the trackers nor torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.errors import RunError

if TYPE_CHECKING:
    from rung.neighbours.bring import Brought
    from rung.neighbours.history import History


@click.group("import", short_help="Bring in runs of other trackers.")
def command() -> None:
    """Bring in runs of wandb, TensorBoard or trackio, from the files they left; the trackers are not needed.

    Each becomes a run with its own number, rows, evals, configuration and times, and every verb can read it. Files are
    only read. A run that is here already is passed over.

    \b
    Examples:
      rung import wandb wandb/ --dry-run
      rung import tensorboard lightning_logs/version_3 --experiment resnet
      rung import trackio my-project
    """


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
                     type=click.Path(path_type=Path), help="Folder of the runs."),
        click.option("--again", is_flag=True, help="Bring it in once more, also if it is here already."),
        click.option("--dry-run", "is_dry", is_flag=True, help="Only say what would be brought in."),
        click.option("--experiment", help="The series to file them under; default: the source's project or folder."),
    ):  # fmt: skip
        function = option(function)
    return function


@command.command("wandb")
@click.argument("path", type=click.Path(path_type=Path), default="wandb")
@_options
def from_wandb(path: Path, **options: Any) -> None:
    """Bring in the runs below PATH: a wandb folder, the folder of one run, or one .wandb file.

    Runs that only exist on a server are not there; their files usually are where they ran.

    \b
    Examples:
      rung import wandb
      rung import wandb wandb/offline-run-20261116_050003-abc123 --experiment piano
    """
    from rung.neighbours import from_wandb as source

    _must_exist(path)
    if not source.find(path):
        raise RunError(f"no .wandb files under {path}; name a wandb folder or the folder of one of its runs.")
    problems: list[str] = []
    _bring_all(source.read(path, problems), problems, **options)


@command.command("tensorboard")
@click.argument("path", type=click.Path(path_type=Path))
@_options
def from_tensorboard(path: Path, **options: Any) -> None:
    """Bring in the runs below PATH: a log folder, or one event file.

    \b
    Examples:
      rung import tensorboard lightning_logs
      rung import tensorboard logs/fit --experiment keras --dry-run
    """
    from rung.neighbours import from_tensorboard as source

    _must_exist(path)
    if not source.find(path):
        raise RunError(f"no event files of TensorBoard under {path} (looked for *tfevents*).")
    problems: list[str] = []
    _bring_all(source.read(path, problems), problems, **options)


@command.command("trackio")
@click.argument("what", required=False, metavar="[DB|PROJECT]")
@_options
def from_trackio(what: str | None, **options: Any) -> None:
    """Bring in the runs of a trackio database or project; of all projects without a name.

    \b
    Examples:
      rung import trackio my-project
      rung import trackio backup/my-project.db --dry-run
    """
    from rung.neighbours import from_trackio as source

    found = source.find(what)
    if not found:
        where = f"in {source.home()} (TRACKIO_DIR names another folder)"
        raise RunError(f"no trackio database {what} here or {where}." if what else f"no trackio databases {where}.")
    problems: list[str] = []
    _bring_all(source.read(found, problems), problems, **options)


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise RunError(f"{path} does not exist.")


@dataclass(frozen=True)
class Wish:
    """What the options ask for."""

    experiment: str | None
    is_dry: bool
    again: bool
    root: Path
    as_json: bool


def _bring_all(histories: Iterable[History], problems: list[str], **options: Any) -> None:
    """Brings in each, prints a table; what cannot be read costs no other run, and is said last."""
    from rung.cli.progress import reporter
    from rung.cli.table import one_line
    from rung.runs.files import to_json

    wish = Wish(**options)
    report, close = reporter()
    try:
        done = _brought(histories, wish, report)
    finally:
        close()
    if not done and problems:
        raise RunError(problems[0])
    if wish.as_json:
        click.echo(to_json([_plain(brought) for brought in done]).decode())
    else:
        _print(done, wish.is_dry)
    for problem in problems:
        click.echo(one_line(problem), err=True)


def _brought(histories: Iterable[History], wish: Wish, report: Callable[[str, int, int], None]) -> list[Brought]:
    from rung.neighbours.bring import Brought, bring, earlier, experiment_for
    from rung.runs.record import check_name

    if wish.experiment is not None:
        check_name(wish.experiment)
    done: list[Brought] = []
    here = earlier(wish.root)
    for number, history in enumerate(histories):
        report("bringing in runs", number, 0)
        before = None if wish.again else here(history)
        if before is not None:
            done.append(Brought(history, None, 0, f"here already as {before.id}; --again brings it once more"))
        elif not history.num_rows:
            remark = "; ".join(["has no numbers", *history.problems])
            done.append(Brought(history, None, 0, f"passed over: {remark}"))
        else:
            done.append(bring(history, wish.root, wish.experiment or experiment_for(history), wish.is_dry))
    return done


def _plain(brought: Brought) -> dict[str, Any]:
    history = brought.history
    about = {"from": history.tracker, "id": history.id, "name": history.name, "path": str(history.path)}
    counts = {"rows": history.num_rows, "metrics": len(history.names), "evals": brought.num_evals}
    return {**about, "run": brought.run_id, "status": history.status, **counts, "remark": brought.remark}


def _print(done: list[Brought], is_dry: bool) -> None:
    from rung.cli.table import one_line, print_table

    rows = []
    for brought in done:
        history = brought.history
        run = brought.run_id or "-"
        counts = [str(history.num_rows), str(len(history.names)), str(brought.num_evals)]
        rows.append([one_line(history.name), run, history.status, *counts, one_line(brought.remark)])
    print_table(["source", "run", "status", "rows", "metrics", "evals", "remark"], rows, numeric=(3, 4, 5))
    num_new = sum(brought.run_id is not None for brought in done)
    click.echo("nothing was written (--dry-run)" if is_dry else f"{num_new} of {len(done)} runs brought in")
