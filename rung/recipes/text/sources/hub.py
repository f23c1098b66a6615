"""A data set of the Hugging Face hub, by its name, through the package `datasets` and its cache.

A set that is in the cache needs no network. Its splits are kept. Sets that are made by a program of their publisher are
read from the Parquet files that the hub converts them to: nothing of theirs is executed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from rung.errors import DataError
from rung.recipes.text.sources import SPLITS, Document, Quarantine, Source, split_named
from rung.recipes.text.sources.files import columns_of, row_of

CONVERTED = "refs/convert/parquet"  # where the hub keeps its own Parquet files of a set


def source(name: str, config: str) -> Source:
    loaded, config = _load(name, config)
    by_split: dict[str, Any] = {}
    others = []
    for split, rows in loaded.items():
        known = split_named(split)
        if known is None or known in by_split:
            others.append(split)
        else:
            by_split[known] = rows
    if "train" not in by_split:
        raise DataError(f"{name} has no train split, only {', '.join(loaded)}; choose another set", code="no-split")
    notes = [f"configuration {config} of {name}"]
    if others:
        notes.append(f"left aside the splits {', '.join(others)}")

    def read(quarantine: Quarantine) -> Iterator[Document]:
        for split in [split for split in SPLITS if split in by_split]:
            rows = by_split[split]
            columns = columns_of(rows.column_names, f"{name} ({split})")
            names = getattr(rows.features[columns[-1]], "names", None)
            for number, values in enumerate(rows.select_columns(columns)):
                where = f"{name}/{split}:{number}"
                try:
                    text, category = row_of(values, names, name, where)
                except ValueError as error:
                    quarantine(where, str(error))
                    continue
                yield Document(text, category, where, where, number, split)

    return Source(f"{name} ({config})", read, tuple(notes))


def _load(name: str, config: str) -> tuple[Any, str]:
    """The set and the configuration that it was read with: the only one, where it does not have the one asked for."""
    try:
        return _load_one(name, config), config
    except ValueError as error:
        known = re.findall(r"'([^']+)'", str(error).partition("vailable")[2])
        if len(known) != 1:
            has = f"it has {', '.join(known)}" if known else f"the hub says: {_first_line(error)}"
            problem = f"{name} has no configuration {config}; {has}"
            raise DataError(f"{problem}; set dataset.hub_config", code="no-config") from error
    return _load_one(name, known[0]), known[0]


def _load_one(name: str, config: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        problem = f"{name} looks like a Hugging Face data set, which needs the package datasets"
        remedy = "`pip install 'rung[hf]'` (or is it a folder that is not there?)"
        raise DataError(f"{problem}: {remedy}", code="not-installed") from error
    datasets.disable_progress_bars()
    for name_of_logger in ("datasets", "huggingface_hub"):  # a failure is one sentence at the end, not a log of retries
        logging.getLogger(name_of_logger).setLevel(logging.ERROR)
    try:
        try:
            return datasets.load_dataset(name, config)
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            return datasets.load_dataset(name, config, revision=CONVERTED)
    except ValueError:
        raise
    except Exception as error:  # the hub, its client and the network fail in many ways
        problem = f"{name} is no file or folder here, not in the cache of data sets, and the hub failed"
        remedy = "check the name and the network, or copy the cache of another machine (HF_DATASETS_CACHE)"
        raise DataError(f"{problem} ({_first_line(error)}); {remedy}", code="no-data") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
