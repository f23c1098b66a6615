"""MIDI files in a folder, or in a ZIP archive as it was downloaded: nothing is unpacked.

Pieces come from a table of the publisher, in the tree or right above it; else from the folders of a
composer/piece/performance tree; else each file is one. A coarser piece is safe, a finer one leaks. A file that cannot
be used is named with the reason; only a damaged archive and a tree without MIDI files are refused.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import posixpath
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np

from rung import units
from rung.errors import DataError
from rung.recipes.piano.midi import read_midi
from rung.recipes.piano.sources import SPLITS, Source, Take, reason_of, shown

SUFFIXES = (".mid", ".midi")
MOST_BYTES = 64 << 20  # of a file in an archive; the longest performance of MAESTRO has less than 1 MB
FEW_FILES = 10  # a folder with more performances than that is taken for a composer or a year
_UTF8, _ENCRYPTED = 0x800, 0x1  # flags of a member


@dataclass
class Tree:
    """Names below a top, with / between their parts; `above` is the folder's own name where it has a parent."""

    name: str  # what the manifest calls it
    where: str  # what messages call it
    files: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    tables: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    quarantined: list[dict[str, str]] = field(default_factory=list)
    above: str = ""

    def quarantine(self, name: str, reason: str) -> None:
        self.quarantined.append({"file": shown(name), "reason": reason})


class Listing(NamedTuple):
    """What is known of a file before it is read."""

    piece: str
    composer: str
    split: str | None = None  # where its publisher put it


def source(tree: Tree) -> Source:
    if not tree.files:
        bad = [f"; {item['file']} {item['reason']}" for item in tree.quarantined[:1]]
        raise DataError(
            f"no MIDI files under {tree.where} (looked for *.mid, *.midi); pass --from a folder that has some"
            f"{''.join(bad)}.",
            code="no-data",
        )
    table, listings = _find_table(tree)
    if table is None:
        for name in filter(_is_maestro, tree.tables):
            tree.quarantine(name, "lists only some of these files and is not used; pass --from the folder it is in")
    by_place = _listings_by_place(list(tree.files))
    takes = []
    for name in sorted(tree.files, key=shown):
        listing = listings.pop(name, None)
        if listing is None and table is not None and _is_maestro(table.name):
            tree.quarantine(name, f"not listed in {table.name}")
            continue
        piece, composer, split = listing or by_place[name]
        takes.append(Take(shown(name), piece, composer, tree.files[name], split))
    if table is not None and table.parts[0] != "..":  # a table above lists what lies beside the folder, too
        for name in listings:
            tree.quarantine(name, f"listed in {table.name}, but missing")
    return Source(tree.name, takes, tree.quarantined)


# Trees


def in_folder(folder: Path, sustain: bool) -> Tree:
    here = folder.resolve()
    tree = Tree(shown(here.name), shown(folder), above=here.name)
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if _is_music(name) and path.is_file():
            tree.files[name] = partial(read_midi, path, sustain=sustain)
        elif _is_table(name) and path.is_file():
            tree.tables[name] = path.read_bytes
    for path in here.parent.glob("*.csv"):
        if _is_table(path.name) and path.is_file():
            tree.tables[f"../{path.name}"] = path.read_bytes
    return tree


def in_zip(path: Path, sustain: bool) -> Tree:
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # damage shows in many ways, down to struct.error
        raise DataError(
            f"{shown(path)} is not a whole ZIP archive ({reason_of(error)}); download it again", code="file-damaged"
        ) from error
    tree = Tree(shown(path.resolve().name), shown(path))
    for member in archive.infolist():  # of two members of one name the later counts, as when unpacking
        name = member.filename
        if not member.flag_bits & _UTF8:  # many archivers write UTF-8 without saying so
            with contextlib.suppress(UnicodeError):  # where it is not, the name stays what ZIP takes it for
                name = name.encode("cp437").decode("utf-8")
        name = name.replace("\\", "/").removeprefix("./")  # as some of Windows write it
        if name.endswith("/") or not (_is_music(name) or _is_table(name)):
            continue
        if name.startswith("/") or PureWindowsPath(name).drive or ".." in PurePosixPath(name).parts:
            tree.quarantine(name, "has a name that leads out of the archive; rename it")
        elif _is_music(name):
            tree.files[name] = partial(_read_music, archive, member, sustain)
        else:
            tree.tables[name] = partial(_read_member, archive, member)
    return tree


def _is_music(name: str) -> bool:
    """Not what a desktop leaves behind: ._tune.mid, and __MACOSX in archives."""
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and "__MACOSX" not in path.parts


def _read_music(archive: zipfile.ZipFile, member: zipfile.ZipInfo, sustain: bool) -> np.ndarray:
    return read_midi(_read_member(archive, member), sustain=sustain)


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.flag_bits & _ENCRYPTED:
        raise DataError(
            "is encrypted; unpack the archive with its password and pass --from the folder", code="not-supported"
        )
    if member.file_size > MOST_BYTES:
        raise DataError(
            f"would unpack to {units.size(member.file_size)}, more than {units.size(MOST_BYTES)}", code="too-large"
        )
    try:
        return archive.read(member)
    except Exception as error:
        raise DataError(
            f"is damaged inside the archive ({reason_of(error)}); download it again", code="file-damaged"
        ) from error


# Pieces


def _is_table(name: str) -> bool:
    return (_is_maestro(name) and name.endswith(".csv")) or posixpath.basename(name) == "metadata.csv"


def _is_maestro(table: str) -> bool:
    return posixpath.basename(table).startswith("maestro-v")


def _find_table(tree: Tree) -> tuple[PurePosixPath | None, dict[str, Listing]]:
    """The nearest table, from the folder that holds all files upwards, and what it lists, by the names in the tree."""
    top = _top(list(tree.files))
    for place in (top, *top.parents, PurePosixPath("..")):
        here = [name for name in tree.tables if PurePosixPath(name).parent == place]
        for name in sorted(here, key=lambda name: (_is_maestro(name), name), reverse=True):
            if rows := _read_table(tree.tables[name], f"{tree.where}/{shown(name)}", _is_maestro(name)):
                files = (posixpath.normpath(posixpath.join(place, file)) for file in rows)
                inside = (file.removeprefix(f"../{tree.above}/") for file in files)
                return PurePosixPath(name), dict(zip(inside, rows.values()))
    return None, {}


def _read_table(read: Callable[[], bytes], where: str, is_maestro: bool) -> dict[str, Listing]:
    """By file, as the table spells it; nothing where the metadata.csv is of another kind."""
    columns = (
        ["canonical_composer", "canonical_title", "midi_filename"] if is_maestro else ["composer", "title", "midi"]
    )
    found: dict[str, Listing] = {}
    try:
        text = read().decode("utf-8-sig", "replace")
    except (OSError, DataError) as error:
        raise DataError(f"{where} cannot be read: {error}", code="bad-table") from error
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        missing = {*columns, *(["split"] if is_maestro else [])} - set(reader.fieldnames or ())
        if missing and is_maestro:
            raise DataError(
                f"{where} has no column {min(missing)}; fix it, or remove it to split by piece", code="bad-table"
            )
        if missing:
            return {}
        for row in reader:
            composer, title, file = (row[column] or "" for column in columns)
            split = row["split"] if is_maestro else None
            if split is not None and split not in SPLITS:
                raise DataError(
                    f"{where} has split {split!r} for {file}; it can be {', '.join(SPLITS)}", code="bad-table"
                )
            found[file] = Listing(f"{composer}/{title}", composer, split)
    except csv.Error as error:
        raise DataError(
            f"cannot read {where}: {error}; fix it, or remove it to split by piece", code="bad-table"
        ) from error
    return found


def _listings_by_place(names: list[str]) -> dict[str, Listing]:
    """Piece and composer of files that no table lists, from where they lie.

    A folder is a piece when it lies below another one (composer/piece), or when the folders hold so few files each that
    they are rather pieces than composers. Else each file is. Folders inside a piece belong to it.
    """
    files, top = [PurePosixPath(name) for name in names], _top(names)
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


def _top(names: list[str]) -> PurePosixPath:
    """The deepest folder that holds all of them."""
    return PurePosixPath(posixpath.commonpath([posixpath.dirname(name) or "." for name in names]))
