"""Text stores made directly, without the preparation, so that each token of them is known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rung.data.store import StoreWriter
from rung.data.tokenizer import Bytes, Characters, Tokenizer

WORDS = {
    "birds": ("wren", "heron", "magpie", "sings", "flies", "nests", "in", "the", "reed", "and", "oak"),
    "boats": ("sloop", "ketch", "schooner", "sails", "tacks", "moors", "by", "the", "quay", "and", "buoy"),
    "bread": ("rye", "spelt", "sourdough", "rises", "proves", "bakes", "with", "the", "salt", "and", "water"),
}


class Document(NamedTuple):
    split: str
    category: str
    ids: np.ndarray


def write_store(
    out: Path, documents: Sequence[Document], characters: str | None = None, vocab_size: int = 257,
    tokenizer: Tokenizer | None = None, **info: Any,
) -> Path:  # fmt: skip
    """A store of these documents in this order, of bytes, of these characters or of a tokenizer's ids.

    The ids of the documents are `<split>_<number>`.
    """
    if tokenizer is not None or characters is not None:
        tokenizer = tokenizer or Characters(characters or "")
        vocab_size = tokenizer.vocab_size
    else:
        tokenizer = Bytes()
    numbers: dict[str, int] = {}
    with StoreWriter(out, kind="text") as writer:
        writer.array("tokens", np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        for name, data in tokenizer.files.items():
            writer.file(name, data)
        for document in documents:
            number = numbers[document.split] = numbers.get(document.split, -1) + 1
            start = writer.append("tokens", document.ids.astype(np.uint32))
            writer.record(
                split=document.split, start=start, length=len(document.ids), id=f"{document.split}_{number}",
                category=document.category, source="made up", digest=hashlib.sha256(document.ids.tobytes()).hexdigest(),
            )  # fmt: skip
        writer.info.update(
            source="made up", tokenizer=tokenizer.description, vocab_size=vocab_size,
            categories=sorted({document.category for document in documents}), summary="made up", **info,
        )  # fmt: skip
    return out


def write_letters(out: Path) -> Path:
    """Sentences of three vocabularies as bytes, 12 + 3 + 3 documents each, of 30 to 330 tokens."""
    rng = np.random.default_rng(0)
    documents = []
    for number, (category, words) in enumerate(WORDS.items()):
        for split, count in (("train", 12), ("validation", 3), ("test", 3)):
            for k in range(count):
                length = 30 + 25 * ((k + number) % 13)
                text = " ".join(rng.choice(words, size=length))[: length - 1]
                documents.append(Document(split, category, np.array([*text.encode(), 256])))
    return write_store(out, documents)
