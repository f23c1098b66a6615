"""`rung du`: how much disk each run takes, and by what. Works without torch, and on runs that cannot be read."""

from __future__ import annotations

from pathlib import Path

import click

from rung.cli.options import print_json, runs_option
from rung.report.table import print_table, printable
from rung.runs.maintenance.disk import KINDS, bytes_below, sum_once, usage
from rung.runs.maintenance.selection import RunFolder, folders_of, select
from rung.runs.maintenance.trash import TRASH
from rung.runs.query import experiments, list_runs
from rung.text import echo
from rung.units import size


@click.command("du", short_help="Say how much disk each run takes.")
@click.argument("args", nargs=-1, metavar="[EXPERIMENT | RUN]...")
@click.option("-n", "--top", "num_top", type=click.IntRange(min=1), help="Only the N largest runs.")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
def command(args: tuple[str, ...], num_top: int | None, root: Path, as_json: bool) -> None:
    """Say how much disk the runs take, all or those that are named, the largest first.

    Sizes are those of the files; one with several names (a hard link) counts once in a run and once in the total.
    Rows, tables and events count as metrics.

    \b
    Examples:
      rung du
      rung du piano -n 10
      rung du piano/3..7
      rung du --json
    """
    folders: dict[Path, RunFolder] = {}
    problems: list[str] = []
    for word in args or experiments(root, problems):
        chosen = select([word], root) if "/" in word.rstrip("/") else folders_of(root, word.rstrip("/"))
        if not chosen:
            list_runs(root, word, [])  # says so where there is no such experiment
        folders |= {folder.path.resolve(): folder for folder in chosen}
    found = [usage(folder.path, folder.id) for folder in folders.values()]
    found.sort(key=lambda one: -one.total)
    total, trash = sum_once(found), bytes_below(root / TRASH)
    for problem in problems:
        echo(problem, err=True)
    if as_json:
        runs = [{"id": one.id, "total": one.total, **one.by_kind} for one in found[:num_top]]
        print_json({"runs": runs, "total": total, "trash": trash})
        return
    if not found:
        echo(f"no runs under {root}")
    else:
        sums = {kind: sum(one.by_kind[kind] for one in found) for kind in KINDS}
        rows = [(one.id, one.total, one.by_kind) for one in found[:num_top]]
        rows.append((f"all {len(found)}", sum(sums.values()), sums))
        cells = [[printable(name), size(num_bytes), *(size(by[kind]) if by[kind] else "-" for kind in KINDS)]
                 for name, num_bytes, by in rows]  # fmt: skip
        print_table(["run", "total", *KINDS], cells, numeric=range(1, len(KINDS) + 2), keep=(0, 1))
        if total != sum(sums.values()):
            echo(f"runs share files by hard links: together they take {size(total)}")
    if trash:
        echo(f"{size(trash)} in the trash (`rung gc` empties it)")
