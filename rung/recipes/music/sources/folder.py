"""Sound files in a folder of your own, with what people wrote about them.

The text of song.wav is in song_prompt.txt, in song.txt, in a metadata.json, .jsonl or .csv beside it or in a folder
above, or in the tags of the file; the first of these that says anything counts. Parts of one recording and copies of
one file are one piece, so that no split tests on what another trains on. A coarser piece is safe, a finer one leaks.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rung import units
from rung.data.audio import SUFFIXES, read_audio, read_tags
from rung.errors import DataError
from rung.recipe import Report
from rung.recipes.music.sources import Source, Track

MOST_TEXT_BYTES = 1000  # of a text that is kept; what is longer is cut at a character
MOST_CAPTION_BYTES = 64 << 10  # of a .txt; more is a book, not a caption
MOST_METADATA_BYTES = 256 << 20
# Sound that soundfile does not read: named in the report, where a picture or a PDF is only counted.
OTHER_AUDIO = (".m4a", ".aac", ".wma", ".webm", ".mp4", ".aif", ".aiff", ".ape", ".wv", ".mid", ".midi")
METADATA = ("metadata.json", "metadata.jsonl", "metadata.csv")
FILE_KEYS = ("file", "file_name", "path", "name")
TEXT_KEYS = ("text", "caption", "prompt", "description", "tags")
TAGS = ("title", "artist", "genre", "comment")

_PART = re.compile(r"[\s_.-]*\(?(?<![^\W\d_])(?:part|pt|clip|seg|segment|chunk|slice|excerpt)[\s_.-]*\d+\)?$", re.I)
_NUMBER = re.compile(r"(?:[\s_-]+\(?|\()(\d+)\)?$")
_SAYS_NOTHING = re.compile(
    r"(?:track|song|audio|file|sample|music|tune|piece|item|sound|output|recording|untitled)?\d*", re.I
)
SPARSE = 10  # numbers that use less than a tenth of their range are of a catalogue, not of the parts of a recording


def from_folder(folder: Path, report: Report) -> Source:
    """Every sound file below the folder, or the one file, in the order in which people count: 2 before 10."""
    here = _Folder(folder if folder.is_dir() else folder.parent)
    if folder.is_dir():
        files = list(here.walk())
    elif folder.is_file():
        files = [folder]
    else:
        raise DataError(f"there is no folder {_shown(folder)}; pass --from a folder of sound files", code="no-folder")
    usable: list[Path] = []
    texts: dict[Path, str] = {}
    for number, path in enumerate(files):
        report("listing", number, len(files))
        try:
            tags = read_tags(path)
        except DataError as error:
            here.quarantine(path, str(error))
            continue
        usable.append(path)
        said = here.text_of(path) or ", ".join(filter(None, (tags.get(key, "").strip() for key in TAGS)))
        texts[path] = normalise(said)
    report("listing", len(files), len(files))
    if here.ignored:
        kinds = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in here.ignored.most_common(5))
        more = ", .." if len(here.ignored) > 5 else ""
        here.quarantine(here.root, f"{here.ignored.total()} files in it are no sound and were ignored ({kinds}{more})")
    if not usable:
        wanted = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        bad = f"; {here.quarantined[0]['file']}: {here.quarantined[0]['reason']}" if here.quarantined else ""
        raise DataError(
            f"no sound files that can be used under {_shown(folder)} (looked for {wanted}){bad}; pass --from a folder "
            "that has some.",
            code="data-empty",
        )
    names = {path: _shown(path.relative_to(here.root)) for path in usable}
    pieces = _pieces(names)
    tracks = [Track(names[path], pieces[path], texts[path], partial(read_audio, path)) for path in usable]
    return Source(_shown(folder.resolve().name), tracks, here.quarantined)


def normalise(text: str) -> str:
    """One line without characters that steer a reader or a terminal, cut at MOST_TEXT_BYTES of UTF-8."""
    kinds = {"Cc": " ", "Cf": "", "Cs": ""}  # line ends and other controls, invisible marks, halves of a character
    line = " ".join("".join(kinds.get(unicodedata.category(char), char) for char in text).split())
    return line.encode()[:MOST_TEXT_BYTES].decode("utf-8", "ignore").rstrip()


@dataclass
class _Folder:
    """What lies below a root: the sound, what people wrote, and what cannot be used."""

    root: Path
    quarantined: list[dict[str, str]] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)  # suffix -> files
    _metadata: dict[Path, dict[str, str]] = field(default_factory=dict)  # folder -> file in it -> text

    def quarantine(self, path: Path, reason: str) -> None:
        inside = path.relative_to(self.root)
        self.quarantined.append({"file": _shown(inside if inside.parts else self.root), "reason": reason})

    def walk(self) -> Iterator[Path]:
        """Sound files, folder by folder; a folder that links lead to twice is seen once."""
        seen: set[str] = set()
        walk = os.walk(self.root, followlinks=True, onerror=lambda error: self.quarantine(
            Path(error.filename), f"cannot be listed: {error.strerror}"))  # fmt: skip
        for place, folders, names in walk:
            real = os.path.realpath(place)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted((name for name in folders if not name.startswith(".")), key=_natural)
            stems = {Path(name).stem for name in names if Path(name).suffix.lower() in SUFFIXES}
            for name in sorted(names, key=_natural):
                path = Path(place, name)
                suffix = path.suffix.lower()
                is_caption = suffix == ".txt" and (path.stem in stems or path.stem.removesuffix("_prompt") in stems)
                if name.startswith(".") or name in METADATA or is_caption:
                    continue
                if suffix in OTHER_AUDIO:
                    self.quarantine(path, f"{suffix} is not read; convert it to WAV, FLAC, OGG or MP3")
                elif suffix not in SUFFIXES:
                    self.ignored[suffix] += 1
                elif path.is_file():  # not a pipe, and not a link to nothing
                    yield path
                else:
                    self.quarantine(path, "is no regular file, or a link to one that is missing")

    def text_of(self, path: Path) -> str:
        """What was written about a file beside it or in the metadata of a folder above it, as it was written."""
        for caption in (path.with_name(f"{path.stem}_prompt.txt"), path.with_name(f"{path.stem}.txt")):
            if caption.is_file() and (text := self._read_text(caption, MOST_CAPTION_BYTES) or "").strip():
                return text
        for place in path.parents:
            if place not in self._metadata:
                self._metadata[place] = self._read_metadata(place)
            found = self._metadata[place]
            inside = path.relative_to(place).as_posix()
            whole = os.path.splitext(inside)[0]
            # As seen from the metadata, with the name of its folder, and by the bare name; with and without a suffix.
            for key in (inside, whole, f"{place.name}/{inside}", path.name, path.stem, os.path.abspath(path)):
                if found.get(key, "").strip():
                    return found[key]
            if place == self.root:
                break
        return ""

    def _read_text(self, path: Path, most_bytes: int) -> str | None:
        try:
            size = path.stat().st_size
            if size > most_bytes:
                limit = units.size(most_bytes)
                self.quarantine(path, f"has {units.size(size)}, more than {limit}; nothing is read from it")
                return None
            return path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self.quarantine(path, f"is not UTF-8 (byte {error.start}); save it as UTF-8, nothing is read from it")
        except OSError as error:
            self.quarantine(path, f"cannot be read: {error.strerror}")
        return None

    def _read_metadata(self, place: Path) -> dict[str, str]:
        """File -> text of all metadata in a folder; of two texts the first counts."""
        found: dict[str, str] = {}
        for name in METADATA:
            path = place / name
            if not path.is_file() or (text := self._read_text(path, MOST_METADATA_BYTES)) is None:
                continue
            try:
                rows: Any
                if name.endswith(".csv"):
                    rows = list(csv.DictReader(io.StringIO(text, newline="")))
                elif name.endswith(".jsonl"):
                    rows = [json.loads(line) for line in text.split("\n") if line.strip()]
                else:
                    rows = json.loads(text)
                if isinstance(rows, dict):  # file -> text, or file -> what is known of it
                    rows = [{**(known if isinstance(known, dict) else {"text": known}), "file": file}
                            for file, known in rows.items()]  # fmt: skip
                if not isinstance(rows, list):
                    raise ValueError("it holds neither a list nor a mapping of files")
            except (ValueError, csv.Error, RecursionError) as error:
                self.quarantine(path, f"cannot be understood ({error}); nothing is read from it")
                continue
            used = 0
            for row in rows:
                file = next((row[key] for key in FILE_KEYS if row.get(key)), None) if isinstance(row, dict) else None
                if not isinstance(file, str):
                    continue
                used += 1
                said = next((row[key] for key in TEXT_KEYS if row.get(key)), "")
                words = [str(word) for word in said] if isinstance(said, list) else [str(said)]
                found.setdefault(os.path.normpath(file.replace("\\", "/")), ", ".join(words))
            if not used:
                self.quarantine(
                    path,
                    f"names no files ({', '.join(FILE_KEYS)} with {', '.join(TEXT_KEYS)}); nothing is read from it",
                )
        return found


def _pieces(names: dict[Path, str]) -> dict[Path, str]:
    """Path -> piece: the name without what numbers the parts of one recording, and one for all copies of a file."""
    stems = {path: os.path.splitext(name)[0] for path, name in names.items()}
    numbered: dict[str, list[int]] = {}
    for stem in stems.values():
        if match := _NUMBER.search(stem):
            numbered.setdefault(stem[: match.start()], []).append(int(match[1]))
    pieces: dict[Path, str] = {}
    for path, stem in stems.items():
        piece = stem
        if match := _PART.search(stem):
            piece = stem[: match.start()]
            if not os.path.basename(piece):  # recording/part3: the folder is the piece
                piece = os.path.dirname(piece) or stem
        elif match := _NUMBER.search(stem):
            rest = stem[: match.start()]
            numbers = numbered[rest]
            is_catalogue = min(numbers) > 1 and max(numbers) - min(numbers) + 1 > SPARSE * len(numbers)
            if not is_catalogue and not _SAYS_NOTHING.fullmatch(os.path.basename(rest)):
                piece = rest
        pieces[path] = piece

    # Copies: only files of one size can be, so that few are hashed.
    sizes = Counter(path.stat().st_size for path in names)
    same_as: dict[str, str] = {}

    def first_of(piece: str) -> str:
        while piece in same_as:
            piece = same_as[piece]
        return piece

    by_hash: dict[bytes, str] = {}
    for path in names:
        if sizes[path.stat().st_size] < 2:
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:  # read() says what is wrong with it
            digest = hashlib.file_digest(file, "sha256").digest()
            first, own = first_of(by_hash.setdefault(digest, pieces[path])), first_of(pieces[path])
            if first != own:
                same_as[own] = first
    return {path: first_of(piece) for path, piece in pieces.items()}


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts numbers by their value, and letters without regard to their case."""
    parts = [part for part in re.split(r"(\d+)", name.casefold()) if part]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts] + [(-1, 0, name)]


def _shown(path: Path | str) -> str:
    """The path as text on every system, also where a name is not valid text."""
    return os.fsencode(Path(path).as_posix()).decode("utf-8", "replace")
