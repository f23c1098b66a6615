"""Data sets whose rows are notes, such as epr-labs/maestro-sustain-v2: from the Hugging Face hub by name, from a folder
written by `save_to_disk`, or from Parquet files.

A row has `notes` (lists of start, end or duration, pitch and velocity, or a list of notes with these) and may have
`source`, a JSON text with composer and title. The splits of the set are kept; one that has nothing but train is split
by piece. Notes are taken as they are: rows hold no pedals.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rung.errors import DataError
from rung.recipes.piano.notes import make
from rung.recipes.piano.sources import SPLITS, Source, Take, shown

_WORDS = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
_NEEDS = "which needs the package {}: `pip install 'rung[hf]'`"


class Rows(NamedTuple):
    """Some rows of a set: what each says of itself, and its notes when they are wanted."""

    where: str  # how people find a row again, before its number
    split: str | None
    sources: list[Any]
    notes_of: Callable[[int], Any]


# The three places


def from_hub(name: str) -> Source:
    datasets = _datasets(f"{name} looks like a Hugging Face data set")
    datasets.disable_progress_bars()
    for name_of_logger in ("datasets", "huggingface_hub"):  # retries are told in one sentence at the end
        logging.getLogger(name_of_logger).setLevel(logging.ERROR)
    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # the hub, its client and the network fail in many ways
        if known := re.findall(r"'([^']+)'", str(error).partition("vailable config")[2]):
            raise DataError(
                f"{name} has the configurations {', '.join(known)}; fetch the one you want with datasets.load_dataset, "
                "write it with save_to_disk, and pass --from that folder"
            ) from error
        raise DataError(
            f"{name} is no file or folder here, not in the cache of Hugging Face data sets, and the hub does not give "
            f"it ({_first_line(error)}); check the name and the network, or fetch it where there is one and bring the "
            "cache along (HF_DATASETS_CACHE)"
        ) from error
    return _source(name, list(_of_datasets(name, loaded)))


def is_saved(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def from_disk(path: Path) -> Source:
    datasets = _datasets(f"{shown(path)} was written by the package datasets")
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # torn JSON, missing or torn Arrow files: each fails in its own way
        raise DataError(
            f"{shown(path)} cannot be read as a saved data set ({_first_line(error)}); write it again with save_to_disk"
        ) from error
    name = shown(path.resolve().name)
    return _source(name, list(_of_datasets(name, loaded if isinstance(loaded, dict) else {"": loaded})))


def parquet_files(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob("*.parquet") if path.is_file() and not path.name.startswith(".")]
    return sorted(found, key=shown)


def from_parquet(folder: Path, files: Sequence[Path]) -> Source:
    """Files named after their splits (train-00000-of-00002, train/part-0), or else one set without splits."""
    if len(files) == 1 and files[0].parent == folder:
        return _source(shown(files[0].name), [_of_parquet(files[0], shown(files[0].name), None)])
    splits = [_split_named(path.stem) or _split_named(path.relative_to(folder).parts[0]) for path in files]
    if any(splits) and not all(splits):
        other = files[splits.index(None)]
        raise DataError(
            f"{shown(folder)} has files of splits and others, such as {shown(other.name)}; move the others away, or "
            "name them after train, validation or test"
        )
    rows = [_of_parquet(path, shown(path.relative_to(folder)), split) for path, split in zip(files, splits)]
    return _source(shown(folder.resolve().name), rows)


# Rows


def _of_datasets(name: str, loaded: Mapping[str, Any]) -> Iterator[Rows]:
    for given, rows in loaded.items():
        where = f"{name}/{given}" if given else name
        _check_columns(rows.column_names, where)
        sources = list(rows["source"]) if "source" in rows.column_names else [None] * len(rows)
        notes = rows.select_columns(["notes"]).with_format(None)
        yield Rows(where, _split_named(given) or given or None, sources, partial(_cell, notes))


def _cell(rows: Any, number: int) -> Any:
    return rows[number]["notes"]


def _of_parquet(path: Path, where: str, split: str | None) -> Rows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{shown(path)} is Parquet, {_NEEDS.format('pyarrow')}") from error
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        _check_columns(names, where)
        sources = [None] * file.metadata.num_rows
        if "source" in names:
            sources = file.read(columns=["source"])["source"].to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{shown(path)} cannot be read as Parquet ({_first_line(error)}); fetch it again, or move it away"
        ) from error
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    ends = np.cumsum(sizes)

    @functools.lru_cache(maxsize=1)  # rows are read in their order
    def group(number: int) -> Any:
        return file.read_row_group(number, columns=["notes"])["notes"]

    def notes_of(number: int) -> Any:
        which = int(np.searchsorted(ends, number, side="right"))
        try:
            return group(which)[number - int(ends[which]) + sizes[which]].as_py()
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"cannot be read ({_first_line(error)}); fetch {where} again") from error

    return Rows(where, split, sources, notes_of)


def _source(name: str, parts: list[Rows]) -> Source:
    splits = {rows.split for rows in parts}
    if None not in splits and "train" not in splits:
        raise DataError(f"{name} has no train split, only {', '.join(sorted(map(str, splits)))}; choose another set")
    is_published = bool(splits & {"validation", "test"})
    takes, quarantined = [], []
    for rows in sorted(parts, key=lambda rows: SPLITS.index(rows.split) if rows.split in SPLITS else len(SPLITS)):
        if rows.split is not None and rows.split not in SPLITS:
            quarantined.append({"file": rows.where, "reason": f"is a split of its own, not {', '.join(SPLITS)}"})
            continue
        for number, told in enumerate(rows.sources):
            where = f"{rows.where}:{number}"
            composer, piece = _piece(told, where)
            read = partial(_read, rows.notes_of, number)
            takes.append(Take(where, piece, composer, read, rows.split if is_published else None))
    return Source(name, takes, quarantined)


def _piece(told: Any, where: str) -> tuple[str, str]:
    """Composer and piece out of the `source` of a row; a row without a title is a piece of its own."""
    if isinstance(told, str):
        try:
            told = json.loads(told)
        except (ValueError, RecursionError):
            told = None
    told = told if isinstance(told, Mapping) else {}
    composer, title = (
        next((str(told[key]) for key in (word, f"canonical_{word}") if told.get(key)), "")
        for word in ("composer", "title")
    )
    return composer, f"{composer}/{title}" if title else where


def _read(notes_of: Callable[[int], Any], number: int) -> np.ndarray:
    notes = notes_of(number)
    if isinstance(notes, list):
        if not all(isinstance(note, Mapping) for note in notes):
            raise DataError("has notes that are no records of start, end, pitch and velocity")
        notes = {key: [note.get(key) for note in notes] for key in (notes[0] if notes else ())}
        notes = notes or {key: [] for key in ("start", "end", "pitch", "velocity")}
    if not isinstance(notes, Mapping):
        raise DataError("has no notes")
    start, pitch, velocity = (_column(notes, key) for key in ("start", "pitch", "velocity"))
    if notes.get("end") is not None:
        end = _column(notes, "end")
    else:
        duration = _column(notes, "duration")
        end = start + duration if len(duration) == len(start) else duration
    if len({len(start), len(end), len(pitch), len(velocity)}) != 1:
        raise DataError(f"has {len(start)} starts, {len(end)} ends, {len(pitch)} pitches, {len(velocity)} velocities")
    if (end < start).any():
        raise DataError(f"has a note that ends before it starts, at {start[end < start][0]:g} s")
    for key, values in (("pitch", pitch), ("velocity", velocity)):
        if (odd := (values < 0) | (values > 127) | (values % 1 != 0)).any():
            raise DataError(f"has a {key} of {values[odd][0]:g}; MIDI has whole numbers from 0 to 127")
    return make(start, end, pitch, velocity)


def _column(notes: Mapping[str, Any], key: str) -> np.ndarray:
    if notes.get(key) is None:
        raise DataError(f"has notes without {key}, only {', '.join(map(str, notes)) or 'nothing'}")
    try:
        values = np.asarray(notes[key], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"has a {key} that is no number") from error
    if values.ndim != 1 or not np.isfinite(values).all():
        raise DataError(f"has a {key} that is no number")
    return values


def _check_columns(names: Sequence[str], where: str) -> None:
    if "notes" not in names:
        raise DataError(
            f"{where} has no column notes, only {', '.join(map(str, names)) or 'none'}; a data set of notes has lists "
            "of start, end, pitch and velocity there, as epr-labs/maestro-sustain-v2 has"
        )


def _split_named(word: str) -> str | None:
    """The split that a file or folder is named after: train-00000-of-00002 is of train, dev of validation."""
    first = re.split(r"[-_.]", word.lower())[0]
    name = _WORDS.get(first, first)
    return name if name in SPLITS else None


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{what}, {_NEEDS.format('datasets')} (or is it a folder that is not there?)") from error
    return datasets


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
