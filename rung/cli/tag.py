"""`rung tag`: words on runs, to find them by. Works on a run that is going on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from rung.errors import UserError


class _Words(click.Command):
    """A command that takes `-old` as a word: as an option it would be three, and -h would ask for help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_off = [word[:1] == "-" and word[:2] != "--" and word not in ("-", "-h") for word in args]
        ctx.meta["off"] = [word[1:] for word, off in zip(args, is_off) if off]
        return super().parse_args(ctx, [word for word, off in zip(args, is_off) if not off])


@click.command("tag", cls=_Words, short_help="Put tags on runs.")
@click.argument("words", nargs=-1, metavar="[RUN]... [TAG | +TAG | -TAG]...")
@click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...], root: Path, as_json: bool) -> None:
    """Put a TAG or +TAG on RUNS, or take a -TAG off; without tags show those of RUNS, without RUNS list all tags.

    The first word is a run; of the others those with a slash are runs too (piano/4, piano/3..7). A tag is one word.

    \b
    Examples:
      rung tag
      rung tag piano/7
      rung tag piano/7 baseline
      rung tag piano/3..7 +candidate -old
    """
    from rung.cli.table import print_table, printable
    from rung.runs.files import to_json
    from rung.runs.house.tags import tag_counts
    from rung.runs.query import list_runs

    on, off = [word[1:] for word in words if word.startswith("+")], ctx.meta["off"]
    plain = [word for word in words if not word.startswith("+")]
    if plain:
        runs = [plain[0], *(word for word in plain[1:] if "/" in word)]
        _tag(runs, [*(word for word in plain[1:] if "/" not in word), *on], off, root, as_json)
        return
    if on or off:
        raise UserError("which runs? Name them before the tags, as in `rung tag piano/7 +baseline`")
    problems: list[str] = []
    counts = tag_counts(list_runs(root, problems=problems))
    if as_json:
        click.echo(to_json(counts).decode())
    elif counts:
        print_table(["tag", "runs"], [[printable(tag), str(number)] for tag, number in counts.items()], numeric=(1,))
    else:
        click.echo(f"no run under {root} has a tag")
    for problem in problems:
        click.echo(problem, err=True)


def _tag(words: Sequence[str], on: Sequence[str], off: Sequence[str], root: Path, as_json: bool) -> None:
    from rung.cli.table import printable
    from rung.runs.files import to_json
    from rung.runs.house.places import choose, standing
    from rung.runs.house.tags import check_tag, normal, retag, tags_of

    on, off, places = [check_tag(tag) for tag in on], [normal(tag) for tag in off], choose(words, root)
    both = sorted({*on} & {*off})
    if both:
        raise UserError(f"{both[0]} is to be put on and taken off; say one of the two")
    for found in map(standing, places):  # all of them, or none
        if found.problem is not None:
            raise UserError(found.problem)
    result: dict[str, list[str]] = {}
    for place in places:
        before = tags_of(standing(place).document)
        if on or off:
            before, result[place.id] = retag(place, on, off)
        else:
            result[place.id] = before
        if not as_json:
            without = [tag for tag in off if tag not in before]
            note = f" (had no {', '.join(map(printable, without))})" if without else ""
            click.echo(f"{place.id}  {' '.join(map(printable, result[place.id])) or 'no tags'}{note}")
    if as_json:
        click.echo(to_json(result).decode())
