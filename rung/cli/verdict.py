"""`rung verdict`: what became of a run's hypothesis, in one word and a text. Works without torch and numpy.

The last verdict stands in run.json; every one that was ever given is an event of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rung.cli.note import TextCommand, user_text
from rung.cli.options import print_json, runs_option
from rung.errors import UserError
from rung.runs.annotate import WORDS, checked_text, verdict
from rung.runs.query import open_run
from rung.text import echo


@click.command("verdict", cls=TextCommand, short_help="Say what became of a run's hypothesis.")
@click.argument("run")
@click.argument("word", required=False, type=click.Choice(WORDS))
@click.argument("text", required=False)
@click.option("--clear", "is_clear", is_flag=True, help="Take the verdict back; it stays in the events.")
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print the verdict and its history as JSON.")
def command(run: str, word: str | None, text: str | None, is_clear: bool, root: Path, as_json: bool) -> None:
    """Give RUN a verdict: WORD is supported, refuted or inconclusive, TEXT says why; `-` reads it from standard input.

    Without WORD the verdict is shown, with those before it. RUN is piano/7, piano or piano/last for the latest,
    piano/best for the lowest eval loss, or a path.

    \b
    Examples:
      rung verdict piano/7 refuted "eval loss fell, the norm did not: clipping is not the cause"
      rung verdict piano/7 inconclusive
      rung verdict piano/7
      rung verdict piano/7 --clear
    """
    found = open_run(run, root)
    if is_clear and word is not None:
        raise UserError("rung verdict takes either a word or --clear, not both.", code="options-conflict")
    if word is not None or is_clear:
        old = _shown(found.document.get("verdict"))
        given = verdict(found, word, checked_text(user_text(text), "a verdict") if text is not None else "")
        if not as_json:
            echo(f"{_shown(found.id)}: {_shown(given) or 'no verdict any more'}")
            if old:
                echo(f"before: {old}")
        found = open_run(found.path, root)
    if as_json:
        history = [{name: event.get(name) for name in ("word", "text", "unix_s")} for event in found.events("verdict")]
        print_json({"verdict": found.document.get("verdict"), "history": history})
    elif word is None and not is_clear:
        from rung.compare.page import date

        echo(f"{_shown(found.id)}: {_shown(found.document.get('verdict')) or 'no verdict yet'}")
        for event in found.events("verdict"):
            echo(f"  {date(event.get('unix_s')) or 'undated'}  {_shown(event) or 'taken back'}")


def _shown(verdict: Any) -> str:
    """Word and text on one line; older runs hold a plain text."""
    from rung.compare.lineage import text_of
    from rung.text import one_line

    parts = [verdict.get("word"), verdict.get("text")] if isinstance(verdict, dict) else [verdict]
    return ": ".join(filter(None, (one_line(text_of(part)) for part in parts)))
