"""`rung du`: how much disk each run takes, and by what. Works without torch, and on runs that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rung.runs.house.disk import Usage
    from rung.runs.house.places import Place


@click.command("du", short_help="Say how much disk each run takes.")
@click.argument("words", nargs=-1, metavar="[EXPERIMENT | RUN]...")
@click.option("-n", "--top", "num_top", type=click.IntRange(min=1), help="Only the N largest runs.")
@click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
def command(words: tuple[str, ...], num_top: int | None, root: Path, as_json: bool) -> None:
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
    from rung.runs.files import to_json
    from rung.runs.house.disk import bytes_below, sum_once, usage
    from rung.runs.house.places import choose, places_of
    from rung.runs.house.trash import TRASH
    from rung.runs.query import experiments, list_runs

    places: dict[Path, Place] = {}
    for word in words or experiments(root):
        chosen = choose([word], root) if "/" in word.rstrip("/") else places_of(root, word.rstrip("/"))
        if not chosen:
            list_runs(root, word, [])  # says so where there is no such experiment
        places |= {place.path.resolve(): place for place in chosen}
    found = [usage(place.path, place.id) for place in places.values()]
    found.sort(key=lambda one: -one.total)
    total, trash = sum_once(found), bytes_below(root / TRASH)
    if as_json:
        runs = [{"id": one.id, "total": one.total, **one.by_kind} for one in found[:num_top]]
        click.echo(to_json({"runs": runs, "total": total, "trash": trash}).decode())
        return
    if not found:
        click.echo(f"no runs under {root}")
    else:
        _show(found, num_top, total)
    if trash:
        from rung.units import size

        click.echo(f"{size(trash)} in the trash (`rung gc` empties it)")


def _show(found: list[Usage], num_top: int | None, total: int) -> None:
    from rung.cli.table import print_table, printable
    from rung.runs.house.disk import KINDS
    from rung.units import size

    def cells(name: str, num_bytes: int, by_kind: dict[str, int]) -> list[str]:
        return [printable(name), size(num_bytes), *(size(by_kind[kind]) if by_kind[kind] else "-" for kind in KINDS)]

    rows = [cells(one.id, one.total, one.by_kind) for one in found[:num_top]]
    sums = {kind: sum(one.by_kind[kind] for one in found) for kind in KINDS}
    rows.append(cells(f"all {len(found)}", sum(sums.values()), sums))
    print_table(["run", "total", *KINDS], rows, numeric=range(1, len(KINDS) + 2))
    if total != sum(sums.values()):
        click.echo(f"runs share files by hard links: together they take {size(total)}")
