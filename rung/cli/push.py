"""`rung push`: sends runs and data sets to object storage, or takes them away from there."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from rung.cli.options import json_option, print_json, runs_option
from rung.errors import UserError
from rung.progress import reporter
from rung.remote.bucket import Bucket, is_place
from rung.remote.manifest import names_of
from rung.remote.push import PushOptions, PushResult, delete, push, push_run
from rung.remote.snapshot import snapshot_data
from rung.runs.maintenance.selection import folders_of, select
from rung.text import echo, one_line
from rung.units import size

CHECKPOINTS = ("kept", "best", "last", "all", "none")


@click.command("push", short_help="Send runs and data to object storage.")
@click.argument("args", nargs=-1, metavar="[RUN]... [URL]")
@click.option("--data", "data", multiple=True, metavar="NAME", help="A prepared data set; may be repeated.")
@click.option("--checkpoints", type=click.Choice(CHECKPOINTS), default="kept", show_default=True,
              help="Which checkpoints to send; kept: the best, the last and those that are pinned.")  # fmt: skip
@click.option("--without", multiple=True, metavar="FOLDER", help="Leave out a folder of the run: samples, captures ...")
@click.option("--verify", is_flag=True, help="Read everything back and compare hashes before it becomes visible.")
@click.option("--force", is_flag=True, help="Replace another run or data set, or a later state of this one.")
@click.option("--delete", "is_delete", is_flag=True, help="Remove RUNs and data sets from URL instead.")
@click.option("-y", "--yes", is_flag=True, help="With --delete: do not ask.")
@runs_option
@json_option
def command(
    args: tuple[str, ...], data: tuple[str, ...], checkpoints: str, without: tuple[str, ...], verify: bool,
    force: bool, is_delete: bool, yes: bool, as_json: bool, root: Path,
) -> None:  # fmt: skip
    """Send RUNs and data sets to the place that URL names: s3://, gs://, az://, file://, or a folder as ./backup.

    RUN is piano/7, piano/3..7, piano/last, a path, or piano for all of its runs. Without URL the place is
    $RUNG_REMOTE. Files that are there already are not sent again. A run or data set becomes visible there as a whole,
    or not at all; a run that is still running is sent as it is now.

    \b
    Examples:
      rung push piano/7 s3://bucket/lab
      rung push piano/3..7 speech s3://bucket/lab
      rung push piano/7 --checkpoints all --verify
      rung push --data maestro s3://bucket/lab
      rung push --delete piano/7 s3://bucket/lab
    """
    names, url = split_url(args, root)
    if not names and not data:
        raise UserError("name what to push: runs, as in `rung push piano/7 URL`, or --data NAME.", code="missing-run")
    if is_delete:
        _delete(Bucket(url), names, data, yes, as_json)
        return
    paths: dict[Path, None] = {}
    for name in names:  # the name of an experiment means all of its runs
        folders = folders_of(root, name.rstrip("/")) if "/" not in name.rstrip("/") else []
        for folder in folders or select([name], root):
            paths[folder.path.resolve()] = None
    without = tuple(name.rstrip("/") for name in without)
    for name in without:
        if name == "checkpoints":
            raise UserError("--without checkpoints is written --checkpoints none.", code="options-conflict")
        if "/" in name or not any((path / name).is_dir() for path in paths):  # or what was meant would be sent
            message = f"--without {name}: none of these runs has a folder {name}; name one as samples."
            raise UserError(message, code="no-folder")
    bucket = Bucket(url, is_new=True)
    report, close = reporter()
    options = PushOptions(force, verify, report)
    done: list[PushResult] = []

    def keep(one: PushResult) -> None:
        done.append(one)
        if not as_json:
            sent = f"{one.num_sent} sent ({size(one.sent_bytes)})" if one.num_sent else "all there already"
            removed = f", {one.num_removed} of an earlier state removed" if one.num_removed else ""
            echo(f"{one.name}  {one.num_files} files, {size(one.bytes)}: {sent}{removed}  {one.url}")
            if one.left_out:
                more = f" and {len(one.left_out) - 3} more" if len(one.left_out) > 3 else ""
                names = ", ".join(map(one_line, one.left_out[:3]))
                echo(f"note: not sent, because no run has it: {names}{more}; put it into files/", err=True)
            if one.left:
                echo(f"note: {one.left}", err=True)

    try:
        for name in data:
            from rung.data.store import Store, place  # numpy, which runs do without

            store = Store.open(place(name))
            snapshot = snapshot_data(store.path.resolve().name, store.path, store.fingerprint, store.manifest)
            keep(push(bucket, snapshot, options))
        for path in paths:
            keep(push_run(bucket, path, checkpoints, without, options))
    finally:
        close()
    if as_json:
        print_json([dataclasses.asdict(one) for one in done])


def split_url(args: Sequence[str], root: Path) -> tuple[list[str], str]:
    """The names, and the place: the last word if it is one, else $RUNG_REMOTE."""
    if args and is_place(args[-1]) and not (Path(args[-1]).expanduser() / "run.json").is_file():
        return list(args[:-1]), args[-1]
    url = os.environ.get("RUNG_REMOTE")
    if not url:
        message = "where to? Add a URL, as s3://bucket/prefix or ./folder, or set RUNG_REMOTE."
        raise UserError(message, code="missing-url")
    return list(args), url


def _delete(bucket: Bucket, names: Sequence[str], data: Sequence[str], yes: bool, as_json: bool) -> None:
    # A name in full also finds what a killed removal left, which has no manifest any more.
    whole = [("run", name.rstrip("/")) for name in names if name.rpartition("/")[2].isdecimal()]
    meant = names_of(bucket, [name for name in names if not name.rpartition("/")[2].isdecimal()])
    items = [*whole, *(("run", name) for name in meant), *(("data", name) for name in data)]
    if not yes:
        labels = [name if kind == "run" else f"data {name}" for kind, name in items]
        listed = ", ".join(labels[:5]) + (f" and {len(labels) - 5} more" if len(labels) > 5 else "")
        if not sys.stdin.isatty():
            message = f"this would remove {listed} from {bucket.url}; add --yes if that is meant."
            raise UserError(message, code="not-confirmed")
        click.confirm(f"remove {listed} from {bucket.url}?", abort=True, err=True)
    gone = []
    for kind, name in items:
        num_files = delete(bucket, kind, name)
        gone.append({"kind": kind, "name": name, "num_files": num_files})
        if not as_json:
            echo(f"{name} is gone from {bucket.url} ({num_files} files)")
    if as_json:
        print_json(gone)
