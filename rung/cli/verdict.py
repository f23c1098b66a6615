"""`rung verdict`: what became of a run's hypothesis, in one word and a text. Works without torch and numpy.

The last verdict stands in run.json; every one that was ever given is an event of the run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from rung.cli.note import Words, user_text, write_event
from rung.errors import RunError, UserError
from rung.runs.files import to_json
from rung.runs.query import Run, open_run
from rung.runs.record import amend

WORDS = ("supported", "refuted", "inconclusive")


@click.command("verdict", cls=Words, short_help="Say what became of a run's hypothesis.")
@click.argument("run")
@click.argument("word", required=False, type=click.Choice(WORDS))
@click.argument("text", required=False)
@click.option("--clear", "is_clear", is_flag=True, help="Take the verdict back; it stays in the events.")
@click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
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
        raise UserError("rung verdict takes either a word or --clear, not both.")
    if is_clear and not found.document.get("verdict"):
        raise RunError(f"{found.id} has no verdict to take back.")
    if word is not None or is_clear:
        words = user_text(text, "a verdict") if text is not None else ""
        _give(found, None if word is None else {"word": word, "text": words, "unix_s": time.time()}, as_json)
        found = open_run(found.path, root)
    if as_json:
        history = [{name: event.get(name) for name in ("word", "text", "unix_s")} for event in found.events("verdict")]
        click.echo(to_json({"verdict": found.document.get("verdict"), "history": history}).decode())
    elif word is None and not is_clear:
        _show(found)


def _give(run: Run, verdict: dict[str, Any] | None, is_quiet: bool) -> None:
    old = _words(run.document.get("verdict"))
    amend(run.path, verdict=verdict)
    write_event(run, "verdict", **(verdict or {"word": None, "text": "", "unix_s": time.time()}))
    if not is_quiet:
        click.echo(f"{_words(run.id)}: {_words(verdict) or 'no verdict any more'}")
        if old:
            click.echo(f"before: {old}")


def _show(run: Run) -> None:
    from rung.compare.page import date

    click.echo(f"{_words(run.id)}: {_words(run.document.get('verdict')) or 'no verdict yet'}")
    for event in list(run.events("verdict")):
        click.echo(f"  {date(event.get('unix_s')) or 'undated'}  {_words(event) or 'taken back'}")


def _words(verdict: Any) -> str:
    """Word and text on one line; older runs hold a plain text."""
    from rung.compare.lineage import text_of
    from rung.text import one_line

    parts = [verdict.get("word"), verdict.get("text")] if isinstance(verdict, dict) else [verdict]
    return ": ".join(filter(None, (one_line(text_of(part)) for part in parts)))
