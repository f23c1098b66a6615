"""`rung pull`: brings runs and data sets from object storage."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.progress import reporter
from rung.cli.push import split_words
from rung.errors import UserError
from rung.units import size

if TYPE_CHECKING:
    from rung.remote.bucket import Bucket
    from rung.remote.parcel import Wish
    from rung.remote.pull import Pulled


@click.command("pull", short_help="Bring runs and data from object storage.")
@click.argument("words", nargs=-1, metavar="[RUN]... [URL]")
@click.option("--data", "data", multiple=True, metavar="NAME", help="A data set; may be repeated.")
@click.option("--as", "new_name", metavar="NAME",
              help="Bring runs as the next ones of this experiment, or a data set under this name.")  # fmt: skip
@click.option("--checkpoints", type=click.Choice(["all", "best", "last", "none"]), default="all", show_default=True,
              help="Which of the checkpoints that are there to bring.")  # fmt: skip
@click.option("--force", is_flag=True, help="Also over a later state here, which goes to the trash, or other data.")
@click.option("--runs", "runs_root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    words: tuple[str, ...], data: tuple[str, ...], new_name: str | None, checkpoints: str, force: bool, as_json: bool,
    runs_root: Path,
) -> None:  # fmt: skip
    """Bring RUNs and data sets from the place that URL names; without URL from $RUNG_REMOTE.

    RUN is piano/7, piano/3..7, or piano for all of its runs there; URL may also name one of them in full. The hash of
    every file is checked, and nothing is visible here before all of it is. A run that is here already is brought up
    to date; one of the same number that is another run is left alone, and --as gives the new one the next free number.

    \b
    Examples:
      rung pull piano/7 s3://bucket/lab
      rung pull s3://bucket/lab/runs/piano/7
      rung pull piano/7 --as theirs --checkpoints best s3://bucket/lab
      rung pull --data maestro s3://bucket/lab
    """
    from rung.remote.bucket import Bucket
    from rung.remote.listing import names_of, split_item
    from rung.remote.parcel import Wish
    from rung.remote.pull import pull_run, runs_by_uid
    from rung.runs.files import to_json

    names, url = split_words(words, runs_root)
    sets = list(data)
    if not names and not sets and (item := split_item(url)):
        url, kind, name = item
        (names if kind == "run" else sets).append(name)
    if not names and not sets:
        raise UserError("what? Name runs, as in `rung pull piano/7 URL`, or --data NAME; `rung ls --remote URL` lists.")
    if new_name is not None and len(sets) + bool(names) > 1:
        raise UserError("--as takes runs, or one data set; pull the others by themselves.")
    bucket = Bucket(url)
    report, close = reporter()
    wish = Wish(checkpoints, new_name if names else None, force, report)
    done = []
    try:
        for name in sets:
            done.append(_say(_pull_data(bucket, name, new_name, wish), as_json))
        known = runs_by_uid(runs_root) if names else {}
        for name in names_of(bucket, names):
            done.append(_say(pull_run(bucket, name, runs_root, wish, known), as_json))
    finally:
        close()
    if as_json:
        click.echo(to_json([{**dataclasses.asdict(one), "path": str(one.path)} for one in done]).decode())


def _pull_data(bucket: Bucket, name: str, new_name: str | None, wish: Wish) -> Pulled:
    from rung.data.store import Store, place
    from rung.remote.pull import pull_data

    done = pull_data(bucket, name, place(new_name or name), wish)
    Store.open(done.path)  # whole to the byte by now; this says so where it is of a newer rung
    return done


def _say(done: Pulled, as_json: bool) -> Pulled:
    if not as_json:
        what = {"new": "brought", "updated": "brought up to date", "unchanged": "was up to date"}[done.what]
        received = f", {size(done.received_bytes)} of {size(done.bytes)} received" if done.what != "unchanged" else ""
        click.echo(f"{done.name}  {what}: {done.num_files} files{received}  {done.path}")
    return done
