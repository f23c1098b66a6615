"""Text on this disk: a file, a folder of text files, or JSONL or Parquet with one document a row.

A folder is read as one kind only: Parquet if there is any, else JSONL, else text; what is left aside is told. Splits
that are published, as names of files or of folders, are kept. The category of a text file is the first folder on the
way to it; of a row, its label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rung.errors import DataError
from rung.recipes.text.sources import SPLITS, Document, Quarantine, Source, shown, split_named
from rung.recipes.text.sources.rows import Row, read_jsonl, read_parquet

TEXT = (".txt", ".md")
KINDS = ((".parquet",), (".jsonl", ".ndjson"), TEXT)


@dataclass(frozen=True)
class File:
    path: Path
    name: str  # below the folder
    category: str  # of what has no label of its own
    split: str | None


def source(path: Path) -> Source:
    if path.is_file():
        return _of_files(path.resolve().stem, [File(path, shown(Path(path.name)), path.resolve().stem, None)], ())
    found = sorted((file for file in path.rglob("*") if _is_wanted(file, path)), key=lambda file: shown(file))
    for suffixes in KINDS:
        chosen = [file for file in found if file.suffix.lower() in suffixes]
        aside = [file for file in found if file.suffix.lower() not in suffixes]
        if chosen:
            break
    else:
        raise DataError(
            f"no text under {shown(path)} (looked for *.txt, *.md, *.jsonl, *.parquet); pass --from a folder that has "
            "some"
        )
    is_text = chosen[0].suffix.lower() in TEXT
    folder = shown(Path(path.resolve().name))
    files, outside = (_text_files if is_text else _row_files)(path, chosen, folder)
    _check_splits(path, files)
    note = _aside(path, [*(() if is_text else aside), *outside])
    return _of_files(folder, sorted(files, key=lambda file: SPLITS.index(file.split or "train")), note)


def _is_wanted(file: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not is_hidden and file.is_file() and any(file.suffix.lower() in kind for kind in KINDS)


def _text_files(folder: Path, paths: list[Path], name: str) -> tuple[list[File], list[Path]]:
    """Files of text; where every folder is named after a split, those are splits and not categories."""
    tops = {path.relative_to(folder).parts[0] for path in paths if path.parent != folder}
    is_split = bool(tops) and all(top.lower() == top and split_named(top) and top.isalpha() for top in tops)
    files, outside = [], []
    for path in paths:
        parts = path.relative_to(folder).parts
        if is_split and len(parts) == 1:
            outside.append(path)  # a README beside train/ and test/
            continue
        split = split_named(parts[0]) if is_split else None
        below = parts[1:] if is_split else parts
        category = shown(Path(below[0])) if len(below) > 1 else name
        files.append(File(path, shown(path.relative_to(folder)), category, split))
    return files, outside


def _row_files(folder: Path, paths: list[Path], name: str) -> tuple[list[File], list[Path]]:
    """Files of rows; train.jsonl, train-00000-of-00002.parquet or train/part.jsonl say their split."""
    files = []
    for path in paths:
        parts = path.relative_to(folder).parts
        split = split_named(path.stem) or (split_named(parts[0]) if len(parts) > 1 else None)
        is_category = len(parts) > 1 and split_named(parts[0]) is None and parts[0] != "data"
        category = shown(Path(parts[0])) if is_category else name
        files.append(File(path, shown(path.relative_to(folder)), category, split))
    return files, []


def _check_splits(folder: Path, files: list[File]) -> None:
    published = {file.split for file in files} - {None}
    if not published:
        return
    if unnamed := [file.name for file in files if file.split is None]:
        raise DataError(
            f"{shown(folder)} has files of splits ({', '.join(sorted(map(str, published)))}) and others, such as "
            f"{unnamed[0]}; move the others away, or name them after train, validation or test"
        )
    if "train" not in published:
        raise DataError(
            f"{shown(folder)} has no train split, only {', '.join(sorted(map(str, published)))}; add one (train.jsonl, "
            "train.parquet or a folder train), or pass --from a single file of it"
        )


def _aside(folder: Path, paths: list[Path]) -> tuple[str, ...]:
    if not paths:
        return ()
    some = ", ".join(shown(path.relative_to(folder)) for path in paths[:3])
    return (f"left aside {len(paths)} other files ({some}{', ..' if len(paths) > 3 else ''})",)


def _of_files(name: str, files: list[File], notes: tuple[str, ...]) -> Source:
    def read(quarantine: Quarantine) -> Iterator[Document]:
        next_number = dict.fromkeys((*SPLITS, None), 0)
        for file in files:
            suffix = file.path.suffix.lower()
            rows = read_parquet if suffix in KINDS[0] else read_jsonl if suffix in KINDS[1] else _read_text
            first, last = next_number[file.split], -1
            for last, row in rows(file.path, file.name, file.category, quarantine):
                yield Document(row.text, row.category, row.source, row.source, first + last, file.split)
            next_number[file.split] = first + last + 1

    return Source(name, read, notes)


def _read_text(path: Path, name: str, category: str, quarantine: Quarantine) -> Iterator[tuple[int, Row]]:
    try:
        yield 0, Row(path.read_bytes().decode("utf-8-sig"), category, name)
    except UnicodeDecodeError as error:
        quarantine(name, f"is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}")
    except OSError as error:
        quarantine(name, f"cannot be read: {error.strerror or error}")
