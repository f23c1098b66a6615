"""Tags: words on runs, to find them by. A tag is kept as `check_tag` gives it, whoever puts it on."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from rung.errors import RunError
from rung.runs.house.places import Place, edit
from rung.runs.query import Run

_MOST_LETTERS = 100
_JOINER = "\u200d"  # holds some emoji together


def tags_of(document: Mapping[str, Any]) -> list[str]:
    tags = document.get("tags")
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def check_tag(tag: str) -> str:
    """The tag as it is kept; it is a single word, so that lists of tags can be read and typed."""
    tag = normal(tag)
    odd = [char for char in tag if unicodedata.category(char)[0] in "CZ" and char != _JOINER]
    if not tag or odd or len(tag) > _MOST_LETTERS or tag[0] in "+-":
        why = (
            f"holds {odd[0]!r}"
            if odd
            else f"is longer than {_MOST_LETTERS} characters"
            if len(tag) > _MOST_LETTERS
            else None
        )
        why = why or ("is empty" if not tag else "begins with + or -")
        raise RunError(
            f"{tag[:_MOST_LETTERS]!r} cannot be a tag: it {why}; use one word, without spaces or control characters."
        )
    return tag


def normal(tag: str) -> str:
    """One spelling of letters with accents, however they were typed."""
    return unicodedata.normalize("NFC", tag)


def retag(place: Place, on: Iterable[str], off: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tags before and after."""
    before: list[str] = []

    def change(document: dict[str, Any]) -> dict[str, Any]:
        before[:] = tags_of(document)
        left = [tag for tag in before if tag not in set(off)]
        return {**document, "tags": list(dict.fromkeys([*left, *on]))}

    return before, tags_of(edit(place.path, change))


def tag_counts(runs: Iterable[Run]) -> dict[str, int]:
    """How many runs have each tag, the most frequent first."""
    counts: dict[str, int] = {}
    for run in runs:
        for tag in dict.fromkeys(tags_of(run.document)):
            counts[tag] = counts.get(tag, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
