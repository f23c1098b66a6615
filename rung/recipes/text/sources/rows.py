"""Documents as rows of JSONL or Parquet: which columns are the text and the category, and what the labels mean.

The text is `text`, or else `title` and `abstract` with a blank line between. The category is `label`, `category` or
`primary`, the first that is there. A label that is a number gets its name from the file itself where a ClassLabel wrote
it down, else from labels.json beside it or one folder up, else it is its own name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rung.errors import DataError
from rung.recipes.text.sources import Quarantine

LABELS = ("label", "category", "primary")
ROWS_AT_ONCE = 256


class Row(NamedTuple):
    text: str
    category: str
    source: str


def columns_of(names: Iterable[str], where: str) -> list[str]:
    """The columns to read; refuses a table without text."""
    names = list(names)
    text = ["text"] if "text" in names else ["title", "abstract"]
    if not set(text) <= set(names):
        raise DataError(
            f"{where} has no column text, nor title and abstract, only {', '.join(map(str, names)) or 'none'}; rename "
            "the one that holds the text"
        )
    return [*text, *[name for name in LABELS if name in names][:1]]


def row_of(values: Mapping[str, Any], names: Sequence[str] | None, otherwise: str, where: str) -> Row:
    """A row out of its columns. Raises ValueError where this row alone is at fault, DataError where all are."""
    if isinstance(values.get("text"), str):
        text = values["text"]
    elif isinstance(values.get("title"), str) and isinstance(values.get("abstract"), str):
        text = f"{values['title']}\n\n{values['abstract']}"
    else:
        raise ValueError("has no text, nor title and abstract")
    label = next((values[key] for key in LABELS if key in values), otherwise)
    if isinstance(label, int) and not isinstance(label, bool) and names is not None:
        if not 0 <= label < len(names):
            raise DataError(
                f"{where} has label {label}, but there are {len(names)} names of labels (0 to {len(names) - 1}, "
                f"{names[0]!r} to {names[-1]!r}); mend the labels or labels.json"
            )
        label = names[label]
    if isinstance(label, float) and label.is_integer():  # pandas makes numbers with holes into these
        label = int(label)
    if not isinstance(label, str | int) or not str(label).strip():
        raise ValueError(f"has the label {label!r}, which is neither a name nor a number")
    return Row(text, str(label), where)


def read_jsonl(path: Path, name: str, category: str, quarantine: Quarantine) -> Iterator[tuple[int, Row]]:
    names = names_beside(path)
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                where = f"{name}:{number + 1}"
                try:
                    values = json.loads(line.decode("utf-8-sig")) if line.strip() else None
                    if values is None:
                        continue
                    if not isinstance(values, dict):
                        raise ValueError("is not an object of JSON")
                    yield number, row_of(values, names, category, where)
                except UnicodeDecodeError as error:
                    quarantine(where, f"is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}")
                except json.JSONDecodeError as error:
                    quarantine(where, f"is not whole JSON ({error.msg} at {error.pos})")
                except (ValueError, RecursionError) as error:
                    quarantine(where, str(error))
    except OSError as error:
        quarantine(name, f"cannot be read: {error.strerror or error}")


def read_parquet(path: Path, name: str, category: str, quarantine: Quarantine) -> Iterator[tuple[int, Row]]:
    pyarrow, parquet = _package()
    try:
        file = parquet.ParquetFile(path)
        columns = columns_of(file.schema_arrow.names, name)
        names = _names_inside(file.schema_arrow.metadata or {}, columns[-1]) or names_beside(path)
        number = -1
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
            for values in batch.to_pylist():
                number += 1
                try:
                    yield number, row_of(values, names, category, f"{name}:{number}")
                except ValueError as error:
                    quarantine(f"{name}:{number}", str(error))
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{name} cannot be read as Parquet ({error}); fetch it again, or move it away") from error


def names_beside(path: Path) -> list[str] | None:
    """labels.json: a list of names, or a mapping of numbers to names."""
    file = next((p for p in (path.parent / "labels.json", path.parent.parent / "labels.json") if p.is_file()), None)
    if file is None:
        return None
    try:
        found = json.loads(file.read_text("utf-8"))
        if isinstance(found, dict):
            found = [found[str(number)] for number in range(len(found))]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot read {file} ({error}); mend it: a list of names of labels") from error
    if not (isinstance(found, list) and found and all(isinstance(name, str) for name in found)):
        raise DataError(f"{file} is not a list of names of labels; mend it, or move it away")
    return found


def _names_inside(metadata: Mapping[bytes, bytes], column: str) -> list[str] | None:
    """What `datasets` writes into the files that it makes."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features[column]["names"]] or None
    except (KeyError, TypeError, ValueError):
        return None


def _package() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "Parquet needs the package pyarrow, which is not installed: `pip install 'rung[query]'`, or convert the "
            "data to JSONL"
        ) from error
    return pyarrow, pyarrow.parquet
