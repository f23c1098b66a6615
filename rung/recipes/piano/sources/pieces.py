"""What a piece is: what a table of the publisher says, else the folder of a composer/piece/performance tree, else the
file. A coarser piece is safe, a finer one leaks.

Names are those of a tree of files, with / between their parts.
"""

from __future__ import annotations

import csv
import io
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from rung.errors import DataError
from rung.recipes.piano.sources import SPLITS, shown

FEW_FILES = 10  # a folder with more performances than that is taken for a composer or a year


class Listing(NamedTuple):
    """What is known of a file before it is read."""

    piece: str
    composer: str
    split: str | None = None  # where its publisher put it


def is_table(name: str) -> bool:
    name = posixpath.basename(name)
    return name == "metadata.csv" or (name.startswith("maestro-v") and name.endswith(".csv"))


def listed(
    names: list[str], tables: Mapping[str, Callable[[], bytes]], where: str, above: str
) -> tuple[PurePosixPath | None, dict[str, Listing]]:
    """The nearest table, from the folder that holds all files upwards, and what it lists, by the names in the tree."""
    top = PurePosixPath(_top(names))
    for place in (top, *top.parents, PurePosixPath("..")):
        here = [name for name in tables if PurePosixPath(name).parent == place]
        for name in sorted(here, key=lambda name: (is_maestro(name), name), reverse=True):
            if rows := _rows(tables[name], f"{where}/{shown(name)}", is_maestro(name)):
                files = (posixpath.normpath(posixpath.join(place, file)) for file in rows)
                inside = (file.removeprefix(f"../{above}/") for file in files)
                return PurePosixPath(name), dict(zip(inside, rows.values()))
    return None, {}


def is_maestro(table: str) -> bool:
    return posixpath.basename(table).startswith("maestro")


def _rows(read: Callable[[], bytes], where: str, is_maestro: bool) -> dict[str, Listing]:
    """File, as the table spells it, -> what it says; nothing where it is a metadata.csv of somebody else."""
    columns = (
        ("canonical_composer", "canonical_title", "midi_filename") if is_maestro else ("composer", "title", "midi")
    )
    found: dict[str, Listing] = {}
    try:
        text = read().decode("utf-8-sig", "replace")
    except (OSError, DataError) as error:
        raise DataError(f"{where} cannot be read: {error}") from error
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        missing = {*columns, *(["split"] if is_maestro else [])} - set(reader.fieldnames or ())
        if missing and is_maestro:
            raise DataError(f"{where} has no column {min(missing)}; mend it, or remove it to split by piece")
        if missing:
            return {}
        for row in reader:
            composer, title, file = (row[column] or "" for column in columns)
            split = row["split"] if is_maestro else None
            if split is not None and split not in SPLITS:
                raise DataError(f"{where} has split {split!r} for {file}; it can be {', '.join(SPLITS)}")
            found[file] = Listing(f"{composer}/{title}", composer, split)
    except csv.Error as error:
        raise DataError(f"cannot read {where}: {error}; mend it, or remove it to split by piece") from error
    return found


def by_place(names: list[str]) -> dict[str, Listing]:
    """Piece and composer of files that no table lists, told from where they lie.

    A folder is a piece when it lies below another one (composer/piece), or when the folders hold so few files each that
    they are rather pieces than composers. Else each file is. Folders inside a piece belong to it.
    """
    files, top = [PurePosixPath(name) for name in names], PurePosixPath(_top(names))
    holding = {path.parent for path in files} - {top}
    home = {path: next((f for f in reversed(path.parents) if f in holding), top) for path in files}
    shallow = Counter(folder for folder in home.values() if folder.parent == top and folder != top)
    are_pieces = bool(shallow) and sum(shallow.values()) <= FEW_FILES * len(shallow)
    listings = {}
    for name, path in zip(names, files):
        parts = home[path].relative_to(top).parts
        is_piece = len(parts) >= 2 or (len(parts) == 1 and are_pieces)
        piece = home[path] if is_piece else path if path.parent in (home[path], top) else path.parent
        composer = "" if not parts or (len(parts) == 1 and are_pieces) else shown(parts[0])
        listings[name] = Listing(shown(os.fspath(piece.relative_to(top))), composer)
    return listings


def _top(names: list[str]) -> str:
    """The deepest folder that holds all of them."""
    return posixpath.commonpath([posixpath.dirname(name) or "." for name in names])
