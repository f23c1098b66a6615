"""`rung gc`: empties the trash and clears what no run needs; only after it was shown what would go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from rung.cli.options import print_json, runs_option
from rung.report.table import print_table, printable
from rung.text import echo
from rung.units import size

_WORDS = {
    "trash": "runs in the trash",
    "starts": "starts that were killed",
    "parts": "files half written",
    "aside": "checkpoints set aside",
    "copies": "copies for fast reading",
}


@click.command("gc", short_help="Empty the trash.")
@click.option("--days", type=click.FloatRange(min=0), default=0, show_default=True,
              help="Only what was removed, or set aside, at least so many days ago.")  # fmt: skip
@click.option("--checkpoints", "aside", is_flag=True, help="Also checkpoints that a resume set aside.")
@click.option("--derived", "copies", is_flag=True, help="Also copies for fast reading, which are made again.")
@click.option("--yes", is_flag=True, help="Delete; without it this only shows what would go.")
@click.option("-n", "--dry-run", is_flag=True, help="Only show what would go, also with --yes.")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: every path, and bytes by kind.")
def command(days: float, aside: bool, copies: bool, yes: bool, dry_run: bool, root: Path, as_json: bool) -> None:
    """Delete for good: runs in the trash with their code snapshots, and what killed processes left behind.

    A code snapshot (a ref under refs/rung) goes with the run in the trash that names it, unless another run of this
    folder names it too; snapshots of other runs folders stay. Runs that are running are not touched.

    \b
    Examples:
      rung gc
      rung gc --yes
      rung gc --days 30 --checkpoints --yes
      rung gc --derived --dry-run --json
    """
    from rung.runs.maintenance.cleaning import clean

    is_real = yes and not dry_run
    plan = clean(root, days, aside=aside, copies=copies, is_real=is_real)
    if as_json:
        items = [{"kind": i.kind, "name": i.name, "path": str(i.path), "bytes": i.bytes} for i in plan.items]
        found = {"items": items, "refs": [ref._asdict() for ref in plan.refs], "bytes": plan.bytes_by_kind()}
        print_json({"deleted": is_real, **found, "kept": plan.kept})
        return
    by_kind, rows = plan.bytes_by_kind(), []
    for kind, num_bytes in by_kind.items():
        names = [item.name for item in plan.items if item.kind == kind]
        if names:
            rows.append([_WORDS[kind], str(len(names)), size(num_bytes), _some(names)])
    if plan.refs:
        rows.append(["code snapshots", str(len(plan.refs)), "-", _some([ref.ref for ref in plan.refs])])
    if rows:
        rows.append(["freed" if is_real else "would be freed", "", size(sum(by_kind.values())), ""])
        print_table(["what", "number", "size", "which"], rows, numeric=(1, 2))
    else:
        echo("nothing to clear")
    for text in plan.kept:
        echo(f"kept: {printable(text)}", err=True)
    if (plan.items or plan.refs) and not yes and not dry_run:
        echo("nothing was deleted; to delete this, add --yes")


def _some(names: Sequence[str]) -> str:
    return printable(", ".join(names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
