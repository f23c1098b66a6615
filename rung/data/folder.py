"""Sound files in a folder of a user's, with what people wrote about them beside it or in metadata.

Everything is read as others left it: what cannot be used is listed with the reason, and the rest is read.
"""

from __future__ import annotations

import csv
import io
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rung import parse, units
from rung.data.audio import SUFFIXES

MOST_CAPTION_BYTES = 64 << 10  # of a .txt; more is a book, not a caption
MOST_METADATA_BYTES = 256 << 20
# Sound that soundfile does not read: named in the report, where a picture or a PDF is only counted.
OTHER_AUDIO = (".m4a", ".aac", ".wma", ".webm", ".mp4", ".aif", ".aiff", ".ape", ".wv", ".mid", ".midi")
METADATA = ("metadata.json", "metadata.jsonl", "metadata.csv")

Row = dict[Any, Any]  # what metadata says about a file, as it was written


def parse_rows(name: str, text: str) -> list[Any]:
    """The entries of a .csv with a header, of a .jsonl, or of a .json: a list, or a mapping from files. Raises
    ValueError and csv.Error."""
    rows: Any
    if name.endswith(".csv"):
        return list(csv.DictReader(io.StringIO(text, newline="")))
    if name.endswith(".jsonl"):
        return [parse.loose_json(line) for line in text.split("\n") if line.strip()]
    rows = parse.loose_json(text, parse.NO_LIMIT)
    if isinstance(rows, dict):  # file -> text, or file -> what is known of it
        rows = [{**(known if isinstance(known, dict) else {"text": known}), "file": file}
                for file, known in rows.items()]  # fmt: skip
    if not isinstance(rows, list):
        raise ValueError("it holds neither a list nor a mapping of files")
    return rows


@dataclass
class Folder:
    """What lies below a root: the sound, what people wrote, and what cannot be used."""

    root: Path
    file_keys: tuple[str, ...]  # where a row of metadata may name its file
    text_keys: tuple[str, ...]  # and what it may say of it: told to a user whose metadata has none of them
    captions: tuple[str, ...] = (".txt",)  # a.txt is about a.wav
    metadata: tuple[str, ...] = METADATA  # patterns of names
    parse: Callable[[str, str], list[Any]] = parse_rows
    suffixes: tuple[str, ...] = SUFFIXES
    quarantined: list[dict[str, str]] = field(default_factory=list)  # file, reason
    ignored: Counter[str] = field(default_factory=Counter)  # suffix -> files
    _rows: dict[Path, dict[str, Row]] = field(default_factory=dict)  # folder -> file in it -> row
    _matched: set[int] = field(default_factory=set)  # ids of rows whose file is there

    def quarantine(self, path: Path, reason: str) -> None:
        inside = path.relative_to(self.root)
        self.quarantined.append({"file": shown(inside if inside.parts else self.root), "reason": reason})

    def walk(self) -> Iterator[Path]:
        """Sound files, folder by folder, as people count; a folder that links lead to twice is seen once."""
        seen: set[str] = set()
        walk = os.walk(self.root, followlinks=True, onerror=lambda error: self.quarantine(
            Path(error.filename), f"cannot be listed: {error.strerror}"))  # fmt: skip
        for place, folders, names in walk:
            real = os.path.realpath(place)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural)
            captions = {
                Path(name).stem + ending
                for name in names
                if Path(name).suffix.lower() in self.suffixes
                for ending in self.captions
            }
            for name in sorted(names, key=natural):
                path = Path(place, name)
                suffix = path.suffix.lower()
                if name.startswith(".") or name in captions or any(fnmatchcase(name, one) for one in self.metadata):
                    continue
                if suffix in OTHER_AUDIO:
                    self.quarantine(path, f"{suffix} is not read; convert it to WAV, FLAC, OGG or MP3")
                elif suffix not in self.suffixes:
                    self.ignored[suffix] += 1
                elif path.is_file():  # not a pipe, and not a link to nothing
                    yield path
                else:
                    self.quarantine(path, "is no regular file, or a link to one that is missing")

    def list_ignored(self) -> None:
        """Adds to the list, as one entry, the files that walk() passed by."""
        if self.ignored:
            kinds = [f"{count} {suffix or 'without a suffix'}" for suffix, count in self.ignored.most_common(5)]
            more = ", .." if len(self.ignored) > 5 else ""
            number = "1 file in it is" if self.ignored.total() == 1 else f"{self.ignored.total()} files in it are"
            self.quarantine(self.root, f"{number} no sound and ignored ({', '.join(kinds)}{more})")

    def list_unmatched(self) -> None:
        """Adds to the list, as one entry a folder, the rows of metadata that rows_of() gave for no file."""
        for place, found in self._rows.items():
            missing = [file for file, row in found.items() if id(row) not in self._matched]
            if missing:
                number = "1 file that is" if len(missing) == 1 else f"{len(missing)} files that are"
                self.quarantine(place, f"its metadata names {number} not there ({missing[0]!r})")

    def caption_of(self, path: Path) -> str:
        """What is written in a file beside it, as it was written."""
        for ending in self.captions:
            caption = path.with_name(path.stem + ending)
            if caption.is_file() and (text := self.read_text(caption, MOST_CAPTION_BYTES) or "").strip():
                return text
        return ""

    def rows_of(self, path: Path) -> Iterator[Row]:
        """What metadata says about a file: that beside it first, then that of the folders above, up to the root."""
        for place in path.parents:
            if place not in self._rows:
                self._rows[place] = self._read_metadata(place)
            found = self._rows[place]
            inside = path.relative_to(place).as_posix()
            whole = os.path.splitext(inside)[0]
            # As seen from the metadata, with the name of its folder, and by the bare name; with and without a suffix.
            for key in (inside, whole, f"{place.name}/{inside}", path.name, path.stem, os.path.abspath(path)):
                if key in found:
                    self._matched.add(id(found[key]))
                    yield found[key]
            if place == self.root:
                break

    def read_text(self, path: Path, most_bytes: int) -> str | None:
        """None where it cannot be read, which is listed."""
        try:
            size = path.stat().st_size
            if size > most_bytes:
                limit = units.size(most_bytes)
                self.quarantine(path, f"has {units.size(size)}, more than {limit}; nothing is read from it")
                return None
            return parse.read_bytes(path, most_bytes).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self.quarantine(path, f"is not UTF-8 (byte {error.start}); save it as UTF-8, nothing is read from it")
        except OSError as error:
            self.quarantine(path, f"cannot be read: {error.strerror}")
        return None

    def _read_metadata(self, place: Path) -> dict[str, Row]:
        """File -> row of all metadata in a folder; of two rows about a file the first counts."""
        found: dict[str, Row] = {}
        for path in (path for pattern in self.metadata for path in sorted(place.glob(pattern)) if path.is_file()):
            if (text := self.read_text(path, MOST_METADATA_BYTES)) is None:
                continue
            try:
                rows = self.parse(path.name, text)
            except (ValueError, csv.Error) as error:
                self.quarantine(path, f"cannot be understood ({error}); nothing is read from it")
                continue
            is_used = False
            for row in rows:
                file = next((row[key] for key in self.file_keys if row.get(key)), None) if isinstance(row, dict) else 0
                if isinstance(file, str):
                    is_used = True
                    found.setdefault(os.path.normpath(file.replace("\\", "/")), row)
            if not is_used:
                keys = f"{', '.join(self.file_keys)} with {', '.join(self.text_keys)}"
                self.quarantine(path, f"names no files ({keys}); nothing is read from it")
        return found


def clean_line(text: str) -> str:
    """One line without characters that steer a reader or a terminal."""
    kinds = {"Cc": " ", "Cf": "", "Cs": ""}  # line ends and other controls, invisible marks, halves of a character
    return " ".join("".join(kinds.get(unicodedata.category(char), char) for char in text).split())


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts numbers by their value, and letters without regard to their case."""
    parts = [part for part in re.split(r"(\d+)", name.casefold()) if part]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts] + [(-1, 0, name)]


def shown(path: Path | str) -> str:
    """The path as text on every system, also where a name is not valid text."""
    return os.fsencode(Path(path).as_posix()).decode("utf-8", "replace")
