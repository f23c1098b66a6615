"""What people write beside a run, from the command line or on a page: notes, a hypothesis, a verdict.

Each is an event of the run, and what was written is never changed; run.json holds the last hypothesis and verdict. A
run that is running may be written to as well.
"""

from __future__ import annotations

import time
from typing import Any

from rung.errors import RunError, UserError
from rung.runs.files import refused
from rung.runs.query import Run
from rung.runs.record import amend, append_event

WORDS = ("supported", "refuted", "inconclusive")  # of a verdict
MOST_CHARS = 100_000  # a note is one line of events.ndjson, written at once


def note(run: Run, text: str) -> None:
    write_event(run, "note", unix_s=time.time(), text=checked_text(text, "a note"))


def undo_note(run: Run) -> dict[str, Any]:
    """Takes the last note back and returns it."""
    notes = run.notes()
    if not notes:
        raise RunError(f"{run.id} has no note to take back.", code="no-note")
    write_event(run, "note_undone", of_unix_s=notes[-1].get("unix_s"), text=str(notes[-1].get("text")))
    return notes[-1]


def hypothesis(run: Run, text: str) -> None:
    """Why the run was made, or what it is to show; empty takes it back."""
    why = checked_text(text, "a hypothesis") if text.strip() else None
    amend(run.path, why=why)
    write_event(run, "hypothesis", text=why or "")


def verdict(run: Run, word: str | None, text: str = "") -> dict[str, Any] | None:
    """What became of the hypothesis; without a word the verdict is taken back."""
    if word is None and not run.document.get("verdict"):
        raise RunError(f"{run.id} has no verdict to take back.", code="no-verdict")
    if word is not None and word not in WORDS:
        raise UserError(f"{word[:100]!r} is not a verdict; {', '.join(WORDS)} are.", code="bad-value")
    given = {"word": word, "text": checked_text(text, "a verdict") if text else "", "unix_s": time.time()}
    found = None if word is None else given
    amend(run.path, verdict=found)
    write_event(run, "verdict", **(found or {**given, "text": ""}))
    return found


def checked_text(text: str, what: str) -> str:
    # What was no UTF-8 on the command line cannot be kept as text.
    text = text.encode("utf-8", "replace").decode() if not text.isascii() else text
    text = text.rstrip("\n")
    if not text.strip():
        raise UserError(f"{what} needs some text.", code="text-empty")
    if len(text) > MOST_CHARS:
        raise UserError(f"{what} of {len(text)} characters is too long; {MOST_CHARS} fit.", code="too-large")
    return text


def write_event(run: Run, kind: str, **fields: Any) -> None:
    try:
        append_event(run.path, kind, **fields)
    except OSError as error:
        raise refused(str(run.path / "events.ndjson"), error) from error
