"""`rung push`: sends runs and data sets to object storage, or takes them away from there."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.progress import reporter
from rung.errors import UserError
from rung.units import size

if TYPE_CHECKING:
    from rung.remote.bucket import Bucket
    from rung.remote.push import How, Pushed

CHECKPOINTS = ("kept", "best", "last", "all", "none")


@click.command("push", short_help="Send runs and data to object storage.")
@click.argument("words", nargs=-1, metavar="[RUN]... [URL]")
@click.option("--data", "data", multiple=True, metavar="NAME", help="A prepared data set; may be repeated.")
@click.option("--checkpoints", type=click.Choice(CHECKPOINTS), default="kept", show_default=True,
              help="Which checkpoints to send; kept: the best, the last and those that are pinned.")  # fmt: skip
@click.option("--without", multiple=True, metavar="FOLDER", help="Leave out a folder of the run: samples, captures ...")
@click.option("--verify", is_flag=True, help="Read everything back and compare hashes before it becomes visible.")
@click.option("--force", is_flag=True, help="Also over another run or data set, or over a later state of this one.")
@click.option("--delete", "is_delete", is_flag=True, help="Take RUNs and data sets away from URL instead.")
@click.option("-y", "--yes", is_flag=True, help="With --delete: do not ask.")
@click.option("--runs", "runs_root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    words: tuple[str, ...], data: tuple[str, ...], checkpoints: str, without: tuple[str, ...], verify: bool,
    force: bool, is_delete: bool, yes: bool, as_json: bool, runs_root: Path,
) -> None:  # fmt: skip
    """Send RUNs and data sets to the place that URL names: s3://, gs://, az://, file://, or a folder as ./backup.

    RUN is piano/7, piano/3..7, piano/last, a path, or piano for all of its runs. Without URL the place is
    $RUNG_REMOTE. Files that are there already are not sent again. A run or data set becomes visible there as a whole,
    or not at all; a run that is going on is sent as it is now.

    \b
    Examples:
      rung push piano/7 s3://bucket/lab
      rung push piano/3..7 speech s3://bucket/lab
      rung push piano/7 --checkpoints all --verify
      rung push --data maestro s3://bucket/lab
      rung push --delete piano/7 s3://bucket/lab
    """
    from rung.remote.bucket import Bucket
    from rung.remote.push import How, push_run

    names, url = split_words(words, runs_root)
    if not names and not data:
        raise UserError("what? Name runs, as in `rung push piano/7 URL`, or --data NAME.")
    if is_delete:
        _delete(Bucket(url), names, data, yes, as_json)
        return
    paths = _paths(names, runs_root)
    without = _folders(without, paths)
    bucket = Bucket(url, is_new=True)
    report, close = reporter()
    how = How(force, verify, report)
    done: list[Pushed] = []
    try:
        for name in data:
            _say(_push_data(bucket, name, how), done, as_json)
        for path in paths:
            _say(push_run(bucket, path, checkpoints, without, how), done, as_json)
    finally:
        close()
    if as_json:
        _print_json(done)


def split_words(words: Sequence[str], runs_root: Path) -> tuple[list[str], str]:
    """The names, and the place: the last word if it is one, else $RUNG_REMOTE."""
    from rung.remote.bucket import is_place

    if words and is_place(words[-1]) and not (Path(words[-1]).expanduser() / "run.json").is_file():
        return list(words[:-1]), words[-1]
    url = os.environ.get("RUNG_REMOTE")
    if not url:
        raise UserError("which place? Add a URL, as s3://bucket/prefix or ./folder, or set RUNG_REMOTE.")
    return list(words), url


def _paths(names: Sequence[str], runs_root: Path) -> list[Path]:
    """The folders of the runs that some words mean; the name of an experiment means all of its runs."""
    from rung.runs.house.places import choose, places_of

    paths: dict[Path, None] = {}
    for name in names:
        places = places_of(runs_root, name.rstrip("/")) if "/" not in name.rstrip("/") else []
        for place in places or choose([name], runs_root):
            paths[place.path.resolve()] = None
    return list(paths)


def _folders(names: Sequence[str], paths: Sequence[Path]) -> tuple[str, ...]:
    """Folders to leave out; one that no run has was not what somebody meant, and what they meant would be sent."""
    found = tuple(name.rstrip("/") for name in names)
    for name in found:
        if name == "checkpoints":
            raise UserError("--without checkpoints is written --checkpoints none.")
        if "/" in name or not any((path / name).is_dir() for path in paths):
            raise UserError(f"--without {name}: none of these runs has a folder {name}; name one as samples.")
    return found


def _push_data(bucket: Bucket, name: str, how: How) -> Pushed:
    from rung.data.store import Store, place
    from rung.remote.push import push
    from rung.remote.snapshot import of_data

    store = Store.open(place(name))
    return push(bucket, of_data(store.path.resolve().name, store.path, store.fingerprint, store.manifest), how)


def _say(done: Pushed, all_done: list[Pushed], as_json: bool) -> None:
    all_done.append(done)
    if as_json:
        return
    sent = f"{done.num_sent} sent ({size(done.sent_bytes)})" if done.num_sent else "all there already"
    removed = f", {done.num_removed} of an earlier state removed" if done.num_removed else ""
    click.echo(f"{done.name}  {done.num_files} files, {size(done.bytes)}: {sent}{removed}  {done.url}")
    if done.left:
        click.echo(f"note: {done.left}", err=True)


def _print_json(done: Sequence[Pushed]) -> None:
    from rung.runs.files import to_json

    click.echo(to_json([dataclasses.asdict(one) for one in done]).decode())


def _delete(bucket: Bucket, names: Sequence[str], data: Sequence[str], yes: bool, as_json: bool) -> None:
    from rung.remote.listing import names_of
    from rung.remote.push import delete
    from rung.runs.files import to_json

    # A name in full also finds what a killed removal left, which has no manifest any more.
    whole = [("run", name.rstrip("/")) for name in names if name.rpartition("/")[2].isdecimal()]
    meant = names_of(bucket, [name for name in names if not name.rpartition("/")[2].isdecimal()])
    items = [*whole, *(("run", name) for name in meant), *(("data", name) for name in data)]
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(f"this would remove {_listed(items)} from {bucket.url}; add --yes if that is meant.")
        click.confirm(f"remove {_listed(items)} from {bucket.url}?", abort=True, err=True)
    gone = []
    for kind, name in items:
        num_files = delete(bucket, kind, name)
        gone.append({"kind": kind, "name": name, "num_files": num_files})
        if not as_json:
            click.echo(f"{name} is gone from {bucket.url} ({num_files} files)")
    if as_json:
        click.echo(to_json(gone).decode())


def _listed(items: Sequence[tuple[str, str]]) -> str:
    names = [name if kind == "run" else f"data {name}" for kind, name in items]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
