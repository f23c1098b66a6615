"""Text on this disk: a file, a folder of text files, or JSONL or Parquet with one document a row.

A folder is read as one kind only: Parquet if there is any, else JSONL, else text; a note lists what is ignored. Splits
that are published, as names of files or of folders, are kept. The category of a text file is the first folder on the
way to it; of a row, its label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung import parse
from rung.errors import DataError
from rung.recipes.text.sources import SPLITS, Document, Quarantine, Source, path_text, split_named

PARQUET, JSONL, TEXT = (".parquet",), (".jsonl", ".ndjson"), (".txt", ".md")
LABELS = ("label", "category", "primary")
ROWS_AT_ONCE = 256

Rows = Iterator[tuple[int, str, str, str]]  # number, text, category, and where it comes from


@dataclass(frozen=True)
class File:
    path: Path
    name: str  # below the folder
    category: str  # of what has no label of its own
    split: str | None

    def rows(self, quarantine: Quarantine) -> Rows:
        suffix = self.path.suffix.lower()
        if suffix in PARQUET:
            yield from read_parquet(self.path, self.name, self.category, quarantine)
        elif suffix in JSONL:
            yield from read_jsonl(self.path, self.name, self.category, quarantine)
        else:
            try:
                text = parse.read_bytes(self.path, parse.MOST_DATA_BYTES).decode("utf-8-sig")
                yield 0, text, self.category, self.name
            except UnicodeDecodeError as error:
                quarantine(self.name, _not_utf8(error))
            except parse.ParseError as error:
                quarantine(self.name, f"cannot be read: {error}; cut it into several documents")
            except OSError as error:
                quarantine(self.name, f"cannot be read: {error.strerror or error}")


def source(path: Path) -> Source:
    notes: tuple[str, ...] = ()
    if path.is_file():
        name = path.resolve().stem
        files = [File(path, path_text(Path(path.name)), name, None)]
    else:
        name = path_text(Path(path.resolve().name))
        files, notes = _files_of(path, name)

    def read(quarantine: Quarantine) -> Iterator[Document]:
        next_number = dict.fromkeys((*SPLITS, None), 0)
        for file in files:
            first, last = next_number[file.split], -1
            for last, text, category, where in file.rows(quarantine):
                yield Document(text, category, where, where, first + last, file.split)
            next_number[file.split] = first + last + 1

    return Source(name, read, notes)


def _files_of(folder: Path, name: str) -> tuple[list[File], tuple[str, ...]]:
    """The files to read, in the order of their splits, and a note on those that are ignored."""
    found = []
    for path in sorted(folder.rglob("*"), key=path_text):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.suffix.lower() in (*PARQUET, *JSONL, *TEXT) and path.is_file():
            found.append(path)
    for suffixes in (PARQUET, JSONL, TEXT):
        if chosen := [path for path in found if path.suffix.lower() in suffixes]:
            break
    else:
        looked = "looked for *.txt, *.md, *.jsonl, *.parquet"
        raise DataError(
            f"no text under {path_text(folder)} ({looked}); pass --from a folder that has some", code="no-data"
        )

    is_text = suffixes == TEXT
    ignored = [path for path in found if path.suffix.lower() not in suffixes]
    tops = {path.relative_to(folder).parts[0] for path in chosen if path.parent != folder}
    # Where every folder with text is named after a split, those are splits and not categories.
    has_splits = is_text and bool(tops) and all(top.islower() and top.isalpha() and split_named(top) for top in tops)
    files = []
    for path in chosen:
        parts = path.relative_to(folder).parts
        split, category = None, parts[0] if len(parts) > 1 else None
        if has_splits:
            if len(parts) == 1:
                ignored.append(path)  # a README beside train/ and test/
                continue
            split, category = split_named(parts[0]), parts[1] if len(parts) > 2 else None
        elif not is_text:  # train.jsonl, train-00000-of-00002.parquet or train/part.jsonl name their split
            of_folder = split_named(parts[0]) if len(parts) > 1 else None
            split = split_named(path.stem) or of_folder
            if of_folder or category == "data":
                category = None
        files.append(
            File(path, path_text(path.relative_to(folder)), path_text(Path(category)) if category else name, split)
        )

    published = sorted({file.split for file in files if file.split is not None})
    if unnamed := [file.name for file in files if file.split is None and published]:
        problem = f"{path_text(folder)} has files of splits ({', '.join(published)}) and others, such as {unnamed[0]}"
        remedy = "move the others away, or name them after train, validation or test"
        raise DataError(f"{problem}; {remedy}", code="bad-split")
    if published and "train" not in published:
        problem = f"{path_text(folder)} has no train split, only {', '.join(published)}"
        remedy = "add one (train.jsonl, train.parquet or a folder train), or pass --from a single file of it"
        raise DataError(f"{problem}; {remedy}", code="no-split")
    notes: tuple[str, ...] = ()
    if ignored:
        some = ", ".join(path_text(path.relative_to(folder)) for path in ignored[:3])
        notes = (f"ignored {len(ignored)} other files ({some}{', ..' if len(ignored) > 3 else ''})",)
    return sorted(files, key=lambda file: SPLITS.index(file.split or "train")), notes


# Rows of tables: which columns are the text and the category, and what the labels mean.


def columns_of(names: Iterable[str], where: str) -> list[str]:
    """The columns to read: `text`, or else `title` and `abstract`, and the first of LABELS that is there."""
    names = list(names)
    text = ["text"] if "text" in names else ["title", "abstract"]
    if not set(text) <= set(names):
        known = ", ".join(map(str, names)) or "none"
        problem = f"{where} has no column text, nor title and abstract, only {known}"
        raise DataError(f"{problem}; rename the one that holds the text", code="no-column")
    return [*text, *[name for name in LABELS if name in names][:1]]


def row_of(values: Mapping[str, Any], names: Sequence[str] | None, otherwise: str, where: str) -> tuple[str, str]:
    """Text and category of a row. Raises ValueError where this row alone is at fault, DataError where all are.

    A label that is a number gets its name from `names`; without them it is its own name.
    """
    if isinstance(values.get("text"), str):
        text = values["text"]
    elif isinstance(values.get("title"), str) and isinstance(values.get("abstract"), str):
        text = f"{values['title']}\n\n{values['abstract']}"
    else:
        raise ValueError("has no text, nor title and abstract")
    label = next((values[key] for key in LABELS if key in values), otherwise)
    if isinstance(label, int) and not isinstance(label, bool) and names is not None:
        if not 0 <= label < len(names):
            known = f"0 to {len(names) - 1}, {names[0]!r} to {names[-1]!r}"
            problem = f"{where} has label {label}, but there are {len(names)} names of labels ({known})"
            raise DataError(f"{problem}; fix the labels or labels.json", code="bad-label")
        label = names[label]
    if isinstance(label, float) and label.is_integer():  # pandas makes numbers with holes into these
        label = int(label)
    if not isinstance(label, str | int) or not str(label).strip():
        raise ValueError(f"has the label {label!r}, which is neither a name nor a number")
    return text, str(label)


def read_jsonl(path: Path, name: str, category: str, quarantine: Quarantine) -> Rows:
    names = names_beside(path)
    try:
        with parse.open_file(path) as file:
            for number, line in enumerate(parse.lines(file, parse.MOST_DATA_BYTES)):
                if not line.strip():
                    continue
                where = f"{name}:{number + 1}"
                try:
                    values = parse.loose_json(line.decode("utf-8-sig"))
                    if not isinstance(values, dict):
                        raise ValueError("is not an object of JSON")
                    yield number, *row_of(values, names, category, where), where
                except UnicodeDecodeError as error:
                    quarantine(where, _not_utf8(error))
                except parse.ParseError as error:
                    quarantine(where, f"is not whole JSON ({error})")
                except ValueError as error:
                    quarantine(where, str(error))
    except OSError as error:
        quarantine(name, f"cannot be read: {error.strerror or error}")


def read_parquet(path: Path, name: str, category: str, quarantine: Quarantine) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        remedy = "`pip install 'rung[query]'`, or convert the data to JSONL"
        raise DataError(f"Parquet needs pyarrow, which is not installed: {remedy}", code="not-installed") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = columns_of(file.schema_arrow.names, name)
        try:  # what `datasets` writes into the files that it makes
            features = parse.loose_json((file.schema_arrow.metadata or {})[b"huggingface"])["info"]["features"]
            names = [str(label) for label in features[columns[-1]]["names"]] or None
        except (KeyError, TypeError, ValueError):
            names = None
        names = names or names_beside(path)
        number = -1
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
            for values in batch.to_pylist():
                number += 1
                where = f"{name}:{number}"
                try:
                    yield number, *row_of(values, names, category, where), where
                except ValueError as error:
                    quarantine(where, str(error))
    except (OSError, pyarrow.ArrowException) as error:
        problem = f"{name} cannot be read as Parquet ({error})"
        raise DataError(f"{problem}; fetch it again, or move it away", code="data-damaged") from error


def names_beside(path: Path) -> list[str] | None:
    """labels.json beside a file or one folder up: a list of names, or a mapping of numbers to names."""
    file = next((p for p in (path.parent / "labels.json", path.parent.parent / "labels.json") if p.is_file()), None)
    if file is None:
        return None
    try:
        found = parse.loose_json(parse.read_bytes(file))
        if isinstance(found, dict):
            found = [found[str(number)] for number in range(len(found))]
        if not (isinstance(found, list) and found and all(isinstance(name, str) for name in found)):
            raise ValueError("it is not a list of names of labels")
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot use {file} ({error}); fix it, or move it away", code="bad-label") from error
    return found


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}"
