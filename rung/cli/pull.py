"""`rung pull`: downloads runs and data sets from object storage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from rung.cli.options import json_option, print_json, runs_option
from rung.cli.push import split_url
from rung.errors import UserError
from rung.progress import reporter
from rung.remote.bucket import Bucket
from rung.remote.manifest import names_of, split_item
from rung.remote.pull import PullOptions, PullResult, pull_data, pull_run, runs_by_uid
from rung.text import echo
from rung.units import size


@click.command("pull", short_help="Download runs and data from object storage.")
@click.argument("args", nargs=-1, metavar="[RUN]... [URL]")
@click.option("--data", "data", multiple=True, metavar="NAME", help="A data set; may be repeated.")
@click.option("--as", "new_name", metavar="NAME",
              help="Pull runs as the next ones of this experiment, or a data set under this name.")  # fmt: skip
@click.option("--checkpoints", type=click.Choice(["all", "best", "last", "none"]), default="all", show_default=True,
              help="Which of the remote checkpoints to download.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a later local state, which goes to the trash, or other data.")
@runs_option
@json_option
def command(
    args: tuple[str, ...], data: tuple[str, ...], new_name: str | None, checkpoints: str, force: bool, as_json: bool,
    root: Path,
) -> None:  # fmt: skip
    """Download RUNs and data sets from URL; without URL from $RUNG_REMOTE.

    RUN is piano/7, piano/3..7, or piano for all of its runs there; URL may also name one of them in full. The hash of
    every file is checked, and nothing is visible here before all of it is. A run that exists here is updated; another
    run of the same number is left alone, and --as gives the new one the next free number.

    \b
    Examples:
      rung pull piano/7 s3://bucket/lab
      rung pull s3://bucket/lab/runs/piano/7
      rung pull piano/7 --as theirs --checkpoints best s3://bucket/lab
      rung pull --data maestro s3://bucket/lab
    """
    names, url = split_url(args, root)
    sets = list(data)
    if not names and not sets and (item := split_item(url)):
        url, kind, name = item
        (names if kind == "run" else sets).append(name)
    if not names and not sets:
        raise UserError(
            "name what to pull: runs, as in `rung pull piano/7 URL`, or --data NAME; `rung ls --remote URL` lists.",
            code="missing-run",
        )
    if new_name is not None and len(sets) + bool(names) > 1:
        raise UserError("--as takes runs, or one data set; pull the others by themselves.", code="options-conflict")
    bucket = Bucket(url)
    report, close = reporter()
    options = PullOptions(checkpoints, new_name if names else None, force, report)
    done: list[PullResult] = []

    def keep(one: PullResult) -> None:
        done.append(one)
        if not as_json:
            what = {"new": "downloaded", "updated": "updated", "unchanged": "was up to date"}[one.what]
            received = f", {size(one.received_bytes)} of {size(one.bytes)} received" if one.what != "unchanged" else ""
            echo(f"{one.name}  {what}: {one.num_files} files{received}  {one.path}")

    try:
        for name in sets:
            from rung.data.store import Store, place  # numpy, which runs do without

            pulled = pull_data(bucket, name, place(new_name or name), options)
            Store.open(pulled.path)  # whole to the byte by now; this says so where it is of a newer rung
            keep(pulled)
        known = runs_by_uid(root) if names else {}
        for name in names_of(bucket, names):
            keep(pull_run(bucket, name, root, options, known))
    finally:
        close()
    if as_json:
        print_json([{**dataclasses.asdict(one), "path": str(one.path)} for one in done])
