"""MIDI files in a folder, or in a ZIP archive as it was downloaded: nothing is unpacked.

Both are a tree of names. A table of the publisher in it, or right above a folder, says what the pieces are; where there
is none, the place of a file does. A file that cannot be used is named with the reason; only an archive that cannot be
opened at all, and a tree without MIDI files, are refused.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np

from rung import units
from rung.errors import DataError
from rung.recipes.piano.midi import read_midi
from rung.recipes.piano.sources import Source, Take, shown
from rung.recipes.piano.sources.pieces import Listing, by_place, is_maestro, is_table, listed

SUFFIXES = (".mid", ".midi")
MOST_BYTES = 64 << 20  # of a file in an archive; the longest performance of MAESTRO has less than 1 MB
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

    def set_aside(self, name: str, reason: str) -> None:
        self.quarantined.append({"file": shown(name), "reason": reason})


def source(tree: Tree) -> Source:
    if not tree.files:
        bad = [f"; {item['file']} {item['reason']}" for item in tree.quarantined[:1]]
        raise DataError(
            f"no MIDI files under {tree.where} (looked for *.mid, *.midi); pass --from a folder that has some"
            f"{''.join(bad)}."
        )
    table, listings = listed(list(tree.files), tree.tables, tree.where, tree.above)
    if table is None:
        for name in filter(is_maestro, tree.tables):
            tree.set_aside(name, "lists only some of these files and is not used; pass --from the folder it lies in")
    places = by_place(list(tree.files))
    takes = []
    for name in sorted(tree.files, key=shown):
        listing: Listing | None = listings.pop(name, None)
        if listing is None and table is not None and is_maestro(table.name):
            tree.set_aside(name, f"not listed in {table.name}")
            continue
        piece, composer, split = listing or places[name]
        takes.append(Take(shown(name), piece, composer, tree.files[name], split))
    if table is not None and table.parts[0] != "..":  # a table above lists what lies beside the folder, too
        for name in listings:
            tree.set_aside(name, f"listed in {table.name}, but missing")
    return Source(tree.name, takes, tree.quarantined)


def in_folder(folder: Path, sustain: bool) -> Tree:
    here = folder.resolve()
    tree = Tree(shown(here.name), shown(folder), above=here.name)
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if _is_music(name) and path.is_file():
            tree.files[name] = partial(read_midi, path, sustain=sustain)
        elif is_table(name) and path.is_file():
            tree.tables[name] = path.read_bytes
    for path in here.parent.glob("*.csv"):
        if is_table(path.name) and path.is_file():
            tree.tables[f"../{path.name}"] = path.read_bytes
    return tree


def in_zip(path: Path, sustain: bool) -> Tree:
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # damage shows in many ways, down to struct.error
        raise DataError(
            f"{shown(path)} is not a whole ZIP archive ({_reason(error)}); download it again, or unpack it and pass "
            "--from the folder."
        ) from error
    tree = Tree(shown(path.resolve().name), shown(path))
    for member in archive.infolist():  # of two members of one name the later counts, as when unpacking
        name = _name_of(member)
        if name.endswith("/") or not (_is_music(name) or is_table(name)):
            continue
        if name.startswith("/") or PureWindowsPath(name).drive or ".." in PurePosixPath(name).parts:
            tree.set_aside(name, "has a name that leads out of the archive; rename it")
        elif _is_music(name):
            tree.files[name] = partial(_read_member, archive, member, sustain)
        else:
            tree.tables[name] = partial(_bytes_of, archive, member)
    return tree


def _is_music(name: str) -> bool:
    """Not what a desktop leaves behind: ._tune.mid, and __MACOSX in archives."""
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and "__MACOSX" not in path.parts


def _name_of(member: zipfile.ZipInfo) -> str:
    """Many archivers write UTF-8 without saying so, and some of Windows write backslashes."""
    name = member.filename
    if not member.flag_bits & _UTF8:
        with contextlib.suppress(UnicodeError):  # where it is not, the name stays what ZIP takes it for
            name = name.encode("cp437").decode("utf-8")
    return name.replace("\\", "/").removeprefix("./")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, sustain: bool) -> np.ndarray:
    return read_midi(_bytes_of(archive, member), sustain=sustain)


def _bytes_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.flag_bits & _ENCRYPTED:
        raise DataError("is encrypted; unpack the archive with its password and pass --from the folder")
    if member.file_size > MOST_BYTES:
        raise DataError(f"would unpack to {units.size(member.file_size)}, more than {units.size(MOST_BYTES)}")
    try:
        return archive.read(member)
    except Exception as error:
        raise DataError(f"is damaged inside the archive ({_reason(error)}); download it again") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
