"""Tokenises a corpus in shards that lie beside the store until it is whole, so that a killed preparation goes on.

    .<name>.parts/<key>/tokenizer/    the files of the tokenizer, once it is learned
    .<name>.parts/<key>/<n>.npz       a finished shard: lengths of its documents, and all their ids

The key is a hash of every text and every setting that decides what comes out, so that a part is either right or under
another key. Which texts there are is decided before; see data.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rung.errors import DataError
from rung.files import write_whole
from rung.recipes.text.tokenizer import Tokenizer, of_files

SHARD_DOCUMENTS = 1024
SHARD_CHARACTERS = 2_000_000  # about 200 MB while `tokenizers` works on it


class Shard(NamedTuple):
    lengths: np.ndarray  # of each document, its end included
    ids: np.ndarray


class Parts:
    """What is finished of one preparation."""

    def __init__(self, out: Path, key: str) -> None:
        self._root = out.with_name(f".{out.name}.parts")
        self._folder = self._root / key
        self._new_folders = [folder for folder in self._root.parents if not folder.exists()]

    def tokenizer(self, learn: Callable[[], Tokenizer]) -> Tokenizer:
        """The one that was learned before, or else a new one, which is kept."""
        folder = self._folder / "tokenizer"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, DataError):
            about = json.loads((folder / "about.json").read_bytes())
            found = of_files(about["kind"], {name: (folder / name).read_bytes() for name in about["files"]})
            if found.description == about:
                return found
        found = learn()
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in found.files.items():
            write_whole(folder / name, data)
        write_whole(folder / "about.json", json.dumps(found.description).encode())  # last: it says that all is there
        return found

    def load(self, number: int, num_documents: int) -> Shard | None:
        """A finished shard; None where there is none, or one that is damaged."""
        try:
            with np.load(self._folder / f"{number}.npz") as found:
                shard = Shard(found["lengths"], found["ids"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        is_whole = len(shard.lengths) == num_documents and int(shard.lengths.sum()) == len(shard.ids)
        return shard if is_whole else None

    def save(self, number: int, shard: Shard) -> None:
        content = io.BytesIO()
        np.savez(content, lengths=shard.lengths, ids=shard.ids)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{number}.npz", content.getvalue())

    def remove(self) -> None:
        """Removes all parts, those of earlier settings too, and the folders made for them unless something is there."""
        shutil.rmtree(self._root, ignore_errors=True)
        for folder in self._new_folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def cut(num_characters: Sequence[int]) -> list[range]:
    """Neighbouring documents in shards, each of a size that is quickly done and fits in memory."""
    shards, first, size = [], 0, 0
    for number, characters in enumerate(num_characters):
        is_full = number - first >= SHARD_DOCUMENTS or size + characters > SHARD_CHARACTERS
        if is_full and number > first:
            shards.append(range(first, number))
            first, size = number, 0
        size += characters
    return [*shards, range(first, len(num_characters))] if len(num_characters) else []


def tokenise(
    shards: Sequence[range],
    texts: Iterable[tuple[str, str]],  # where a document comes from, and its text; as many as the shards have
    tokenizer: Tokenizer,
    parts: Parts,
) -> Iterator[tuple[range, Shard]]:
    """The shards in order. Those that are finished cost nothing but reading past their texts."""
    rest, num_passed = iter(texts), 0
    for number, documents in enumerate(shards):
        shard = parts.load(number, len(documents))
        if shard is None:
            batch = list(islice(rest, documents.start - num_passed, documents.stop - num_passed))
            num_passed = documents.stop
            assert len(batch) == len(documents), (len(batch), documents)
            shard = _encode(batch, tokenizer)
            parts.save(number, shard)
        yield documents, shard


def _encode(batch: list[tuple[str, str]], tokenizer: Tokenizer) -> Shard:
    try:
        rows = tokenizer.encode_batch([text for _, text in batch])
    except DataError:
        for where, text in batch:  # once more, to say in which document
            try:
                tokenizer.encode(text)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        raise
    end = [] if tokenizer.end is None else [np.array([tokenizer.end], dtype=tokenizer.dtype)]
    ids = np.concatenate([part for row in rows for part in (row, *end)])
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer gave id {int(ids.max())}, but has a vocabulary of {tokenizer.vocab_size}; it is damaged"
        )
    return Shard(np.array([len(row) + len(end) for row in rows], dtype=np.int64), ids)
