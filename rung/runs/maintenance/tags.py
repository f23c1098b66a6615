"""Tags on runs, to find them by. A tag is always kept as `check_tag` returns it."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rung.errors import RunError
from rung.runs.files import locked, write_json, writing
from rung.runs.query import Run
from rung.runs.record import read_document

_MOST_LETTERS = 100
_JOINER = "\u200d"  # holds some emoji together


def tags_of(document: Mapping[str, Any]) -> list[str]:
    tags = document.get("tags")
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def check_tag(tag: str) -> str:
    """The tag as it is kept; it is a single word, so that lists of tags can be read and typed."""
    tag = normal(tag)
    odd = [char for char in tag if unicodedata.category(char)[0] in "CZ" and char != _JOINER]
    why = (
        "is empty" if not tag
        else f"holds {odd[0]!r}" if odd
        else f"is longer than {_MOST_LETTERS} characters" if len(tag) > _MOST_LETTERS
        else "begins with + or -" if tag[0] in "+-"
        else None
    )  # fmt: skip
    if why is not None:
        shown = repr(tag[:_MOST_LETTERS])
        message = f"{shown} cannot be a tag: it {why}; use one word, without spaces or control characters."
        raise RunError(message, code="bad-name")
    return tag


def normal(tag: str) -> str:
    """One spelling of letters with accents, however they were typed."""
    return unicodedata.normalize("NFC", tag)


def retag(path: Path, on: Iterable[str], off: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tags of a run before and after; nothing is written where nothing changes."""
    with writing(str(path / "run.json")), locked(path):
        document = read_document(path)
        before = tags_of(document)
        after = list(dict.fromkeys([*(tag for tag in before if tag not in set(off)), *on]))
        if after != document.get("tags"):
            write_json(path / "run.json", {**document, "tags": after})
    return before, after


def tag_counts(runs: Iterable[Run]) -> dict[str, int]:
    """How many runs have each tag, the most frequent first."""
    counts = Counter(tag for run in runs for tag in dict.fromkeys(tags_of(run.document)))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
