"""`rung import`: runs of wandb, TensorBoard and trackio, from their files; it needs neither the trackers nor torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from rung.cli.options import json_option, print_json, runs_option
from rung.errors import RunError
from rung.progress import reporter
from rung.report.table import one_line, print_table
from rung.runs.record import check_name
from rung.text import echo
from rung.trackers.history import History
from rung.trackers.import_run import ImportResult, earlier, experiment_for, import_run


@click.group("import", short_help="Import runs of other trackers.")
def command() -> None:
    """Import runs of wandb, TensorBoard or trackio, from the files they left; the trackers are not needed.

    Each becomes a run with its own number, rows, evals, configuration and times, and every verb can read it. Files are
    only read. Runs that were imported before are skipped.

    \b
    Examples:
      rung import wandb wandb/ --dry-run
      rung import tensorboard lightning_logs/version_3 --experiment resnet
      rung import trackio my-project
    """


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        json_option,
        runs_option,
        click.option("--again", is_flag=True, help="Import runs again that were imported before."),
        click.option("--dry-run", "is_dry", is_flag=True, help="Only say what would be imported."),
        click.option("--experiment", help="The series to file them under; default: the source's project or folder."),
    ):  # fmt: skip
        function = option(function)
    return function


@command.command("wandb")
@click.argument("path", type=click.Path(path_type=Path), default="wandb")
@_options
def from_wandb(path: Path, **options: Any) -> None:
    """Import the runs below PATH: a wandb folder, the folder of one run, or one .wandb file.

    Runs that only exist on a server are not there; their files usually are where they ran.

    \b
    Examples:
      rung import wandb
      rung import wandb wandb/offline-run-20261116_050003-abc123 --experiment piano
    """
    from rung.trackers import wandb as source

    missing = f"no .wandb files under {path}; name a wandb folder or the folder of one of its runs."
    if not path.exists() or not source.find(path):
        raise RunError(missing if path.exists() else f"{path} does not exist.", code="no-file")
    _import_all(functools.partial(source.read, path), **options)


@command.command("tensorboard")
@click.argument("path", type=click.Path(path_type=Path))
@_options
def from_tensorboard(path: Path, **options: Any) -> None:
    """Import the runs below PATH: a log folder, or one event file.

    \b
    Examples:
      rung import tensorboard lightning_logs
      rung import tensorboard logs/fit --experiment keras --dry-run
    """
    from rung.trackers import tensorboard as source

    missing = f"no event files of TensorBoard under {path} (looked for *tfevents*)."
    if not path.exists() or not source.find(path):
        raise RunError(missing if path.exists() else f"{path} does not exist.", code="no-file")
    _import_all(functools.partial(source.read, path), **options)


@command.command("trackio")
@click.argument("what", required=False, metavar="[DB|PROJECT]")
@_options
def from_trackio(what: str | None, **options: Any) -> None:
    """Import the runs of a trackio database or project; of all projects without a name.

    \b
    Examples:
      rung import trackio my-project
      rung import trackio backup/my-project.db --dry-run
    """
    from rung.trackers import trackio as source

    found = source.find(what)
    if not found:
        where = f"in {source.home()} (TRACKIO_DIR names another folder)"
        message = f"no trackio database {what} here or {where}." if what else f"no trackio databases {where}."
        raise RunError(message, code="no-file")
    _import_all(functools.partial(source.read, found), **options)


def _import_all(
    read: Callable[[list[str]], Iterable[History]], experiment: str | None, is_dry: bool, again: bool, root: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Imports each and prints a table; what cannot be read does not stop the others, and is reported last."""
    problems: list[str] = []
    if experiment is not None:
        check_name(experiment)
    done: list[ImportResult] = []
    here = earlier(root)
    report, close = reporter()
    try:
        for number, history in enumerate(read(problems)):
            report("importing runs", number, 0)
            before = None if again else here(history)
            if before is not None:
                remark = f"already imported as {before.id}; --again imports it once more"
                done.append(ImportResult(history, None, 0, remark))
            elif not history.num_rows:
                remark = "; ".join(["has no numbers", *history.problems])
                done.append(ImportResult(history, None, 0, f"skipped: {remark}"))
            else:
                done.append(import_run(history, root, experiment or experiment_for(history), is_dry))
    finally:
        close()
    if not done and problems:
        raise RunError(problems[0], code="file-damaged")
    found: list[dict[str, Any]] = []
    for result in done:
        history = result.history
        about = {"from": history.tracker, "id": history.id, "name": history.name, "path": str(history.path)}
        counts = {"rows": history.num_rows, "metrics": len(history.names), "evals": result.num_evals}
        found.append({**about, "run": result.run_id, "status": history.status, **counts, "remark": result.remark})
    if as_json:
        print_json(found)
    else:
        rows = [[one_line(one["name"]), one["run"] or "-", one["status"], str(one["rows"]), str(one["metrics"]),
                 str(one["evals"]), one_line(one["remark"])] for one in found]  # fmt: skip
        head = ["source", "run", "status", "rows", "metrics", "evals", "remark"]
        print_table(head, rows, numeric=(3, 4, 5), keep=(0, 1, 2))
        num_new = sum(result.run_id is not None for result in done)
        echo("nothing was written (--dry-run)" if is_dry else f"{num_new} of {len(done)} runs imported")
    for problem in problems:
        echo(one_line(problem), err=True)
