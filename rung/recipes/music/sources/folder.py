"""Sound files in a folder of your own, with what people wrote about them.

The text of song.wav is in song_prompt.txt, in song.txt, in a metadata.json, .jsonl or .csv beside it or in a folder
above, or in the tags of the file; the first of these that says anything counts. Parts of one recording and copies of
one file are one piece, so that no split tests on what another trains on. A coarser piece is safe, a finer one leaks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path

from rung.data.audio import SUFFIXES, read_recording, read_tags
from rung.data.folder import OTHER_AUDIO, Folder, clean_line, shown
from rung.errors import DataError
from rung.recipe import Report
from rung.recipes.music.sources import Source, Track

MOST_TEXT_BYTES = 1000  # of a text that is kept; what is longer is cut at a character
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
    root = folder if folder.is_dir() else folder.parent
    here = Folder(root, FILE_KEYS, TEXT_KEYS, captions=("_prompt.txt", ".txt"))
    if folder.is_dir():
        files = list(here.walk())
    elif folder.is_file():
        files = [folder]
    else:
        raise DataError(f"there is no folder {shown(folder)}; pass --from a folder of sound files", code="no-folder")
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
        said = _text_of(here, path) or ", ".join(filter(None, (tags.get(key, "").strip() for key in TAGS)))
        texts[path] = normalise(said)
    report("listing", len(files), len(files))
    here.list_ignored()
    is_sound = [Path(item["file"]).suffix.lower() in (*SUFFIXES, *OTHER_AUDIO) for item in here.quarantined]
    bad_sounds = [item for item, sounds in zip(here.quarantined, is_sound) if sounds]
    remarks = [item for item, sounds in zip(here.quarantined, is_sound) if not sounds]
    if not usable:
        wanted = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        bad = "".join(f"; {item['file']}: {item['reason']}" for item in [*bad_sounds, *remarks][:1])
        raise DataError(
            f"no sound files that can be used under {shown(folder)} (looked for {wanted}){bad}; pass --from a folder "
            "that has some.",
            code="data-empty",
        )
    names = {path: shown(path.relative_to(here.root)) for path in usable}
    pieces = _pieces(names)
    tracks = [Track(names[path], pieces[path], texts[path], partial(read_recording, path)) for path in usable]
    return Source(shown(folder.resolve().name), tracks, bad_sounds, remarks)


def normalise(text: str) -> str:
    """One clean line, cut at MOST_TEXT_BYTES of UTF-8."""
    return clean_line(text).encode()[:MOST_TEXT_BYTES].decode("utf-8", "ignore").rstrip()


def _text_of(here: Folder, path: Path) -> str:
    """What was written about a file beside it or in metadata, as it was written."""
    if text := here.caption_of(path):
        return text
    for row in here.rows_of(path):
        said = next((row[key] for key in TEXT_KEYS if row.get(key)), "")
        text = ", ".join(map(str, said)) if isinstance(said, list) else str(said)
        if text.strip():
            return text
    return ""


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
