"""Where text comes from: every source gives documents, in an order of its own that never changes.

A source can be read any number of times and keeps no text in memory that it can read again, so that a corpus may be
larger than the memory. What becomes of a document (split, limit, tokens) is not decided here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rung.errors import DataError

SPLITS = ("train", "validation", "test")
_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test",
}  # fmt: skip
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Quarantine = Callable[[str, str], None]  # what could not be read, and why


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    category: str
    source: str  # how people find it again
    group: str  # documents of one group never go to two splits
    number: int  # of the row in its split, as published, else in the source
    split: str | None = None  # where its publisher put it


@dataclass(frozen=True)
class Source:
    name: str  # what the manifest calls it
    read: Callable[[Quarantine], Iterator[Document]]
    notes: tuple[str, ...] = ()  # on how it is read, for the summary


def find_source(source: Path | str | None, hub_config: str) -> Source:
    """What `--from` means: nothing, a file or folder on this disk, or the name of a set on the Hugging Face hub."""
    from rung.recipes.text.sources import docstrings, files, hub

    if source is None:
        return docstrings.source()
    path = Path(source)
    if path.exists():
        return files.source(path)
    if _HUB_NAME.fullmatch(str(source)):
        return hub.source(str(source), hub_config)
    problem = (
        f"there is no file or folder {path_text(path)}, nor is it the name of a Hugging Face data set (owner/name)"
    )
    remedy = "pass --from a folder of text, a text file, JSONL, Parquet, or such a name"
    raise DataError(f"{problem}; {remedy}", code="no-data")


def split_named(word: str) -> str | None:
    """The split that a file or folder is named after: train-00000-of-00002 is of train, dev of validation."""
    return _WORDS.get(re.split(r"[-_.]", word.lower())[0])


def path_text(path: Path) -> str:
    """The path as text on every system, also where a name is not valid text."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")
