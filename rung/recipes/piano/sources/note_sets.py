"""Data sets whose rows are notes, such as epr-labs/maestro-sustain-v2: from the Hugging Face hub by name, from a folder
written by `save_to_disk`, or from Parquet files.

A row has `notes` (lists of start, end or duration, pitch and velocity, or a list of notes with these) and may have
`source`, a JSON text with composer and title. The splits of the set are kept; one that has nothing but train is split
by piece. Notes are taken as they are: rows hold no pedals.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rung import parse
from rung.errors import DataError
from rung.recipes.piano.notes import make
from rung.recipes.piano.sources import SPLITS, Source, Take, reason_of, shown

_SPLIT_NAMES = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}


class RowGroup(NamedTuple):
    """Some rows of a set: the `source` of each, and its notes when they are wanted."""

    where: str  # how people find a row again, before its number
    split: str | None
    sources: list[Any]
    notes_of: Callable[[int], Any]


# Places


def is_saved(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def from_datasets(source: Path | str) -> Source:
    """A folder that `save_to_disk` wrote, or a set on the hub by its name."""
    name = shown(source.resolve().name) if isinstance(source, Path) else source
    try:
        import datasets
    except ImportError as error:
        what = "is" if isinstance(source, Path) else "is not a folder here, but looks like"
        raise DataError(
            f"{shown(source)} {what} a Hugging Face data set; install its package: `pip install 'rung[hf]'`",
            code="not-installed",
        ) from error
    datasets.disable_progress_bars()
    for logger in ("datasets", "huggingface_hub"):  # retries are reported in one sentence at the end
        logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        loaded = datasets.load_from_disk(str(source)) if isinstance(source, Path) else datasets.load_dataset(name)
    except Exception as error:  # the hub, its client, the network and torn files fail in many ways
        if isinstance(source, Path):
            raise DataError(
                f"{shown(source)} cannot be read ({reason_of(error)}); write it again with save_to_disk",
                code="file-damaged",
            ) from error
        if known := re.findall(r"'([^']+)'", str(error).partition("vailable config")[2]):
            raise DataError(
                f"{name} has the configurations {', '.join(known)}; fetch the one you want with datasets.load_dataset, "
                "write it with save_to_disk, and pass --from that folder",
                code="not-supported",
            ) from error
        raise DataError(
            f"{name} is not a file or folder here, not in the cache of Hugging Face data sets, and could not be loaded "
            f"from the hub ({reason_of(error)}); check the name and the network, or copy the cache from another "
            "machine (HF_DATASETS_CACHE)",
            code="no-data",
        ) from error
    parts = []
    for split, rows in (loaded if isinstance(loaded, dict) else {"": loaded}).items():
        where = f"{name}/{split}" if split else name
        _check_columns(rows.column_names, where)
        sources = list(rows["source"]) if "source" in rows.column_names else [None] * len(rows)
        notes = rows.select_columns(["notes"]).with_format(None)
        read = partial(lambda notes, number: notes[number]["notes"], notes)
        parts.append(RowGroup(where, _split_named(split) or split or None, sources, read))
    return _source(name, parts)


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
            "name them after train, validation or test",
            code="bad-name",
        )
    rows = [_of_parquet(path, shown(path.relative_to(folder)), split) for path, split in zip(files, splits)]
    return _source(shown(folder.resolve().name), rows)


def _of_parquet(path: Path, where: str, split: str | None) -> RowGroup:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{shown(path)} is Parquet, which needs the package pyarrow: `pip install 'rung[hf]'`", code="not-installed"
        ) from error
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        _check_columns(names, where)
        sources = [None] * file.metadata.num_rows
        if "source" in names:
            sources = file.read(columns=["source"])["source"].to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{shown(path)} cannot be read as Parquet ({reason_of(error)}); fetch it again", code="file-damaged"
        ) from error
    sizes = (file.metadata.row_group(number).num_rows for number in range(file.num_row_groups))
    places = [(number, row) for number, size in enumerate(sizes) for row in range(size)]

    @functools.lru_cache(maxsize=1)  # rows are read in their order
    def group(number: int) -> Any:
        return file.read_row_group(number, columns=["notes"])["notes"]

    def notes_of(number: int) -> Any:
        which, row = places[number]
        try:
            return group(which)[row].as_py()
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"cannot be read ({reason_of(error)}); fetch {where} again", code="file-damaged") from error

    return RowGroup(where, split, sources, notes_of)


def _check_columns(names: Sequence[str], where: str) -> None:
    if "notes" not in names:
        raise DataError(
            f"{where} has no column notes, only {', '.join(map(str, names)) or 'none'}; a data set of notes has lists "
            "of start, end, pitch and velocity there, as epr-labs/maestro-sustain-v2 has",
            code="no-column",
        )


def _split_named(name: str) -> str | None:
    """The split that a file or folder is named after: train-00000-of-00002 is of train, dev of validation."""
    first = re.split(r"[-_.]", name.lower())[0]
    split = _SPLIT_NAMES.get(first, first)
    return split if split in SPLITS else None


# Rows


def _source(name: str, parts: list[RowGroup]) -> Source:
    splits = {rows.split for rows in parts}
    if None not in splits and "train" not in splits:
        raise DataError(f"{name} has no train split, only {', '.join(sorted(map(str, splits)))}", code="no-split")
    is_published = bool(splits & {"validation", "test"})
    takes, quarantined = [], []
    for rows in sorted(parts, key=lambda rows: SPLITS.index(rows.split) if rows.split in SPLITS else len(SPLITS)):
        if rows.split is not None and rows.split not in SPLITS:
            quarantined.append({"file": rows.where, "reason": f"is a split of its own, not {', '.join(SPLITS)}"})
            continue
        for number, about in enumerate(rows.sources):
            where = f"{rows.where}:{number}"
            if isinstance(about, str):
                try:
                    about = parse.loose_json(about)
                except ValueError:
                    about = None
            known = about if isinstance(about, Mapping) else {}
            composer, title = (
                str(known.get(key) or known.get(f"canonical_{key}") or "") for key in ("composer", "title")
            )
            piece = f"{composer}/{title}" if title else where  # a row without a title is a piece of its own
            read = partial(_read, rows.notes_of, number)
            takes.append(Take(where, piece, composer, read, rows.split if is_published else None))
    return Source(name, takes, quarantined)


def _read(notes_of: Callable[[int], Any], number: int) -> np.ndarray:
    notes = notes_of(number)
    if isinstance(notes, list):
        if not all(isinstance(note, Mapping) for note in notes):
            raise _bad("has notes that are not records of start, end, pitch and velocity")
        notes = {key: [note.get(key) for note in notes] for key in (notes[0] if notes else ())}
        notes = notes or {key: [] for key in ("start", "end", "pitch", "velocity")}
    if not isinstance(notes, Mapping):
        raise _bad("has no notes")
    start, pitch, velocity = (_column(notes, key) for key in ("start", "pitch", "velocity"))
    if notes.get("end") is not None:
        end = _column(notes, "end")
    else:
        duration = _column(notes, "duration")
        end = start + duration if len(duration) == len(start) else duration
    if len({len(start), len(end), len(pitch), len(velocity)}) != 1:
        raise _bad(f"has {len(start)} starts, {len(end)} ends, {len(pitch)} pitches, {len(velocity)} velocities")
    if (end < start).any():
        raise _bad(f"has a note that ends before it starts, at {start[end < start][0]:g} s")
    for key, values in (("pitch", pitch), ("velocity", velocity)):
        if (odd := (values < 0) | (values > 127) | (values % 1 != 0)).any():
            raise _bad(f"has a {key} of {values[odd][0]:g}; MIDI has whole numbers from 0 to 127")
    return make(start, end, pitch, velocity)


def _column(notes: Mapping[str, Any], key: str) -> np.ndarray:
    if notes.get(key) is None:
        raise _bad(f"has notes without {key}, only {', '.join(map(str, notes)) or 'nothing'}")
    try:
        values = np.asarray(notes[key], dtype=np.float64)
    except (TypeError, ValueError):
        values = np.array(np.nan)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise _bad(f"has a {key} that is not a number")
    return values


def _bad(reason: str) -> DataError:
    return DataError(reason, code="bad-row")
