"""Where piano music comes from: every source gives takes, in an order of its own that never changes.

A take is one performance or score that is not yet read. Splits that a publisher made are kept; what becomes of the
notes (records, splits, tokens) is not decided here.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from rung.data import bach
from rung.data.musicxml import read_musicxml
from rung.data.wheel import MUSIC21
from rung.errors import DataError
from rung.recipe import Report

SPLITS = ("train", "validation", "test")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Take:
    """One performance or score, not yet read."""

    source: str  # how people find it again
    piece: str
    composer: str
    read: Callable[[], np.ndarray]
    split: str | None = None  # where its publisher put it


@dataclass(frozen=True)
class Source:
    name: str  # what the manifest calls it
    takes: list[Take]
    quarantined: list[dict[str, str]] = field(default_factory=list)  # file and reason, known before anything is read


def find_source(source: Path | str | None, sustain: bool, report: Report | None) -> Source:
    """What `--from` means: nothing, a folder or file on this disk, or the name of a set on the Hugging Face hub."""
    from rung.recipes.piano.sources import midi_files, note_sets

    if source is None:
        return _bach(report)
    path = Path(source)
    try:
        is_here = path.exists()
    except OSError as error:
        raise DataError(
            f"cannot access {shown(path)}: {error.strerror}; pass --from another place", code="no-folder"
        ) from error
    if not is_here:
        if _HUB_NAME.fullmatch(str(source)):
            return note_sets.from_datasets(str(source))
        raise DataError(
            f"there is no folder {shown(path)}; pass --from a folder that has MIDI files (*.mid, *.midi), a ZIP of "
            "them, or the name of a Hugging Face data set of notes (owner/name).",
            code="no-folder",
        )
    if note_sets.is_saved(path):
        return note_sets.from_datasets(path)
    if path.is_dir():
        tree = midi_files.in_folder(path, sustain)
        if not tree.files and (parquet := note_sets.parquet_files(path)):
            return note_sets.from_parquet(path, parquet)
        return midi_files.source(tree)
    if path.suffix.lower() == ".parquet":
        return note_sets.from_parquet(path.parent, [path])
    if path.suffix.lower() == ".zip" or zipfile.is_zipfile(path):
        return midi_files.source(midi_files.in_zip(path, sustain))
    what = "" if path.suffix.lower() in midi_files.SUFFIXES else ", neither a ZIP of MIDI files nor Parquet"
    raise DataError(f"{shown(path)} is a file{what}; pass --from the folder it is in.", code="not-supported")


def _bach(report: Report | None) -> Source:
    """The embedded music."""
    takes = [
        Take(f"bach/{name}", f"Bach/{piece}", "Bach", partial(read_musicxml, data))
        for name, piece, data in bach.scores(report)
    ]
    return Source(f"{MUSIC21.filename} (Bach)", takes)


def shown(path: Path | str) -> str:
    """The path as text on every system, also where a name is not valid text."""
    return os.fsencode(Path(path).as_posix()).decode("utf-8", "replace")


def reason_of(error: Exception) -> str:
    """The first line of what went wrong."""
    lines = str(getattr(error, "strerror", None) or error).splitlines()
    return lines[0] if lines else type(error).__name__
