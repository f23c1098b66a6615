"""`rung tag`: tags on runs, to find them by. Works on a running run."""

from __future__ import annotations

from pathlib import Path

import click

from rung.cli.options import json_option, print_json, runs_option
from rung.errors import UserError
from rung.text import echo


class _TagCommand(click.Command):
    """A command that takes `-old` as a word: as an option it would be three, and -h would ask for help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_off = [word[:1] == "-" and word[:2] != "--" and word not in ("-", "-h") for word in args]
        ctx.meta["off"] = [word[1:] for word, off in zip(args, is_off) if off]
        return super().parse_args(ctx, [word for word, off in zip(args, is_off) if not off])


@click.command("tag", cls=_TagCommand, short_help="Put tags on runs.")
@click.argument("args", nargs=-1, metavar="[RUN]... [TAG | +TAG | -TAG]...")
@runs_option
@json_option
@click.pass_context
def command(ctx: click.Context, args: tuple[str, ...], root: Path, as_json: bool) -> None:
    """Put a TAG or +TAG on RUNS, or take a -TAG off; without tags show those of RUNS, without RUNS list all tags.

    The first word is a run; of the others those with a slash are runs too (piano/4, piano/3..7). A tag is one word.

    \b
    Examples:
      rung tag
      rung tag piano/7
      rung tag piano/7 baseline
      rung tag piano/3..7 +candidate -old
    """
    from rung.report.table import print_table, printable
    from rung.runs.maintenance.selection import select, state_of
    from rung.runs.maintenance.tags import check_tag, normal, retag, tag_counts, tags_of
    from rung.runs.query import list_runs

    on, off = [word[1:] for word in args if word.startswith("+")], ctx.meta["off"]
    plain = [word for word in args if not word.startswith("+")]
    if plain:
        on = [check_tag(tag) for tag in (*(word for word in plain[1:] if "/" not in word), *on)]
        off = [normal(tag) for tag in off]
        folders = select([plain[0], *(word for word in plain[1:] if "/" in word)], root)
        if both := sorted({*on} & {*off}):
            raise UserError(f"{both[0]} is both added and removed; give one of the two", code="options-conflict")
        for state in map(state_of, folders):  # all of them, or none
            if state.problem is not None:
                raise UserError(state.problem, code="run-damaged")
        result: dict[str, list[str]] = {}
        for folder in folders:
            before = result[folder.id] = tags_of(state_of(folder).document)
            if on or off:
                before, result[folder.id] = retag(folder.path, on, off)
            if not as_json:
                without = [tag for tag in off if tag not in before]
                note = f" (had no {', '.join(map(printable, without))})" if without else ""
                echo(f"{folder.id}  {' '.join(map(printable, result[folder.id])) or 'no tags'}{note}")
        if as_json:
            print_json(result)
        return
    if on or off:
        raise UserError("which runs? Name them before the tags, as in `rung tag piano/7 +baseline`", code="missing-run")
    problems: list[str] = []
    counts = tag_counts(list_runs(root, problems=problems))
    if as_json:
        print_json(counts)
    elif counts:
        print_table(["tag", "runs"], [[printable(tag), str(number)] for tag, number in counts.items()], numeric=(1,))
    else:
        echo(f"no run under {root} has a tag")
    for problem in problems:
        echo(problem, err=True)
