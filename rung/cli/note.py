"""`rung note`: dated notes beside a run, also while it is running. Works without torch and numpy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from rung.cli.options import print_json, runs_option
from rung.errors import UserError
from rung.runs.annotate import MOST_CHARS, note, undo_note
from rung.runs.query import open_run
from rung.text import echo, one_line


class TextCommand(click.Command):
    """A command whose last argument is text: "- like this" is no option, though it begins as one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = [name for param in self.get_params(ctx) for name in param.opts if name.startswith("-")]
        text = next((arg for arg in args if arg.startswith("-") and len(arg.split()) > 1
                     and arg.partition("=")[0] not in known), None)  # fmt: skip
        if text is not None and "--" not in args:
            args.remove(text)
            args = [*args, "--", text]
        return super().parse_args(ctx, args)


@click.command("note", cls=TextCommand, short_help="Write a dated note beside a run.")
@click.argument("run")
@click.argument("text", required=False)
@click.option("--undo", "is_undo", is_flag=True, help="Take the last note back; it stays in the events.")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print the notes as JSON.")
def command(run: str, text: str | None, is_undo: bool, root: Path, as_json: bool) -> None:
    """Write TEXT beside RUN, with the date; without TEXT, list its notes. `-` reads the text from standard input.

    RUN is piano/7, piano or piano/last for the latest, piano/best for the lowest eval loss, or a path. Notes are events
    of the run: nothing that was written is ever changed.

    \b
    Examples:
      rung note piano/7 "grad norm still clips right after 1k steps"
      rung note piano/7 - < thoughts.txt
      rung note piano/7
      rung note piano/7 --undo
    """
    from rung.compare.lineage import text_of
    from rung.compare.page import notes_of

    found = open_run(run, root)
    if is_undo and text is not None:
        raise UserError("rung note takes either a text or --undo, not both.", code="options-conflict")
    name = one_line(found.id)
    if is_undo:
        taken = undo_note(found)
        echo(f"taken back from {name}: {_shown({**taken, 'text': text_of(taken.get('text'))})}")
    elif text is not None:
        note(found, user_text(text))
        echo(f"noted beside {name}", err=as_json)
    if as_json:
        notes = [{"text": one["text"], "unix_s": one.get("unix_s")} for one in notes_of(found)]
        print_json(notes)
    elif text is None and not is_undo:
        for line in [_shown(one) for one in notes_of(found)] or [f"{name} has no notes yet"]:
            echo(line)


def user_text(text: str) -> str:
    """The text as given, or from standard input for `-`."""
    if text == "-":
        return sys.stdin.buffer.read(4 * MOST_CHARS + 4).decode("utf-8", "replace")
    return text


def _shown(note: dict[str, Any]) -> str:
    """Date and text; further lines are indented."""
    from rung.compare.page import date
    from rung.report.blocks import paragraphs

    lines = paragraphs(note["text"]).split("\n")
    return "\n".join([f"{date(note.get('unix_s')) or 'undated'}  {lines[0]}", *(f"  {line}" for line in lines[1:])])
