"""Prepares text: documents of any source become a store of tokens, by category and split.

Nothing vanishes silently: every document that was read is in the store or in one of the counts of the manifest, and
what could not be read is named there. Which split a document goes to is decided in splits.py; a killed preparation goes
on where it was, see packing.py.

The one surprising thing is that the source is read up to three times (to choose, to learn the tokenizer, to tokenise)
rather than kept: a corpus may be larger than the memory. A text that has changed in between is found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rung.data.store import StoreWriter, check_apart, check_free
from rung.errors import ConfigError, DataError
from rung.recipe import Report
from rung.recipes.text import packing, tokenizer
from rung.recipes.text.counts import Counts, summary
from rung.recipes.text.sources import Document, Source, find_source
from rung.recipes.text.sources.arxiv import without_tags
from rung.recipes.text.splits import Entry, assign_splits, limited, without_leaks
from rung.recipes.text.tokenizer import Tokenizer

PLAN = 1  # part of the key of parts: raise it when the same texts and settings come to give other tokens


@dataclass(frozen=True)
class Settings:
    """What decides how a source becomes tokens: the keys of `dataset` that are marked "of preparation"."""

    tokenizer: str = "bpe"
    vocab_size: int = 4096
    max_examples_per_split: int = 0  # 0 is all
    min_tokens: int = 2
    seed: int = 0
    config: str = "no_ref"  # of a set of the Hugging Face hub
    strip_names: bool = True
    held_out: float = 0.05

    def check(self) -> None:
        if self.max_examples_per_split < 0:
            raise ConfigError(
                f"dataset.max_examples_per_split={self.max_examples_per_split} is below 0; give a number of documents, "
                "or 0 for all"
            )
        if self.min_tokens < 1:
            raise ConfigError(f"dataset.min_tokens={self.min_tokens} is below 1; give the tokens of a document")
        if not 0 < self.held_out < 0.5:
            raise ConfigError(
                f"dataset.held_out={self.held_out} is not between 0 and 0.5; it is held out twice, for validation and "
                "for test: give a share such as 0.05"
            )
        tokenizer.check(self.tokenizer, self.vocab_size)


@dataclass
class Corpus:
    """A source, what of it is kept, and an account of what is not."""

    source: Source
    settings: Settings
    entries: list[Entry] = field(default_factory=list)
    quarantined: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self) -> Iterator[tuple[Document, str, int]]:
        """Every document, its text as it is used, and the number of names that were taken out."""
        for document in self.source.read(self.quarantined.__setitem__):
            text, num_tags = without_tags(document.text) if self.settings.strip_names else (document.text, 0)
            yield document, text, num_tags

    def texts(self) -> Iterator[tuple[Entry, str]]:
        """The entries with their texts, in order, read once more from the source."""
        rest = iter(self.entries)
        entry = next(rest, None)
        for place, (_, text, _) in enumerate(self.read()):
            while entry is not None and entry.place == place:
                if _digest(text) != entry.exact:
                    raise self._changed(entry)
                yield entry, text if entry.span is None else text[slice(*entry.span)]
                entry = next(rest, None)
            if entry is None:
                return
        if entry is not None:
            raise self._changed(entry)

    def _changed(self, entry: Entry) -> DataError:
        return DataError(f"{self.source.name} has changed while it was read, at {entry.source}; start again")

    def key(self) -> str:
        """Of all that decides the tokens: settings, tokenizer, each text, where it goes."""
        settings = self.settings
        foreign = "" if settings.tokenizer in tokenizer.KINDS else Tokenizer.of_folder(Path(settings.tokenizer)).hash
        digest = hashlib.blake2b(digest_size=12)
        digest.update(json.dumps([PLAN, tokenizer.version(), dataclasses.asdict(settings), foreign]).encode())
        for entry in self.entries:
            digest.update(json.dumps([entry.exact, entry.split, entry.span]).encode())
        return digest.hexdigest()


def prepare(
    source: Path | str | None,
    out: Path,
    settings: Settings,
    *,
    name: str = "",
    replace: bool = False,
    report: Report | None = None,
) -> str:
    """Writes the store and returns what a person wants to know of it."""
    report = report or (lambda what, done, total: None)
    check_free(out, replace)  # first: a name that is taken is found at once
    settings.check()
    if source is not None and Path(source).exists():
        check_apart(Path(source), out)
    report("finding the text", 0, 1)  # on the hub it can take a while
    corpus = Corpus(find_source(source, settings.config), settings)
    report("finding the text", 1, 1)
    _choose(corpus, report)
    parts = packing.Parts(out, corpus.key())
    try:
        learned = parts.tokenizer(lambda: _learn(corpus, report))
        report("tokenising", 0, len(corpus.entries))
        for numbers, _ in _shards(corpus, learned, parts):
            report("tokenising", numbers.stop, len(corpus.entries))
        with StoreWriter(out, kind="text", replace=replace) as writer:  # not before: kill -9 leaves parts, no more
            counts = _write(writer, corpus, _shards(corpus, learned, parts), learned)
            told = _describe(writer, corpus, learned, counts, name)
    except DataError as error:
        if not isinstance(error.__cause__, OSError):  # on another disk it would go on; with these texts it cannot
            parts.remove()
        raise
    except OSError as error:
        why = error.strerror or error
        raise DataError(
            f"cannot write beside {out}: {why}; mend that and start again, what is tokenised is kept"
        ) from error
    parts.remove()
    return told


# Choosing


def _choose(corpus: Corpus, report: Report) -> None:
    """Reads everything once and decides what is kept, and where."""
    settings, dropped = corpus.settings, corpus.dropped
    entries = list(_entries(corpus, report))
    if not entries:
        bad = corpus.quarantined
        why = f": {len(bad)} could not be used, the first, {next(iter(bad))}, {next(iter(bad.values()))}" if bad else ""
        raise DataError(f"no text to learn from in {corpus.source.name}{why}; pass --from something that has some")
    entries, notes = assign_splits(entries, settings.held_out, settings.seed)
    corpus.notes += [*corpus.source.notes, *notes]
    entries = without_leaks(entries, dropped)
    corpus.entries = limited(entries, settings.max_examples_per_split, settings.seed)
    dropped["over_limit"] = len(entries) - len(corpus.entries)


def _entries(corpus: Corpus, report: Report) -> Iterator[Entry]:
    dropped = corpus.dropped
    dropped |= {"read": 0, "empty": 0, "tags_removed": 0}
    for place, (document, text, num_tags) in enumerate(corpus.read()):
        if place % 256 == 0:
            report("reading", place, 0)
        dropped["read"] += 1
        try:
            exact = _digest(text)
            document.category.encode()
        except UnicodeEncodeError:
            corpus.quarantined[document.source] = "holds half a character (a lone surrogate), which UTF-8 cannot write"
            continue
        if not text.strip():
            dropped["empty"] += 1
            continue
        dropped["tags_removed"] += num_tags
        normal = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
        yield Entry(
            place, document.category, document.group, document.source, document.number,
            len(text), exact, _digest(normal), document.split or "",
        )  # fmt: skip
    report("reading", dropped["read"], dropped["read"])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _learn(corpus: Corpus, report: Report) -> Tokenizer:
    """The tokenizer that was asked for, fitted to the train split alone."""
    settings = corpus.settings
    if settings.tokenizer not in tokenizer.KINDS:
        return Tokenizer.of_folder(Path(settings.tokenizer))
    total = sum(entry.split == "train" for entry in corpus.entries)

    def of_train() -> Iterator[str]:
        for number, text in enumerate(text for entry, text in corpus.texts() if entry.split == "train"):
            if number % 256 == 0:
                report("learning the tokenizer", number, total)
            yield text

    learned = tokenizer.learn(settings.tokenizer, of_train(), settings.vocab_size)
    report("learning the tokenizer", total, total)
    return learned


def _shards(corpus: Corpus, learned: Tokenizer, parts: packing.Parts) -> Iterator[tuple[range, packing.Shard]]:
    """The tokens of all entries, from the parts where they are finished."""
    shards = packing.cut([entry.num_characters for entry in corpus.entries])
    return packing.tokenise(shards, ((entry.source, text) for entry, text in corpus.texts()), learned, parts)


# Writing


def _write(
    writer: StoreWriter, corpus: Corpus, shards: Iterable[tuple[range, packing.Shard]], learned: Tokenizer
) -> Counts:
    """Tokens and records, all but documents that are too short; returns how much there is of what."""
    counts = Counts(learned.vocab_size)
    corpus.dropped["short"] = 0
    writer.array("tokens", learned.dtype)
    for numbers, shard in shards:
        is_kept = shard.lengths >= corpus.settings.min_tokens
        corpus.dropped["short"] += int((~is_kept).sum())
        start = writer.append("tokens", shard.ids[np.repeat(is_kept, shard.lengths)])
        ends = np.cumsum(shard.lengths)
        for entry, length, end in zip(corpus.entries[numbers.start : numbers.stop], shard.lengths, ends, strict=True):
            if length < corpus.settings.min_tokens:
                continue
            writer.record(
                split=entry.split, start=start, length=int(length), id=f"{entry.split}_{entry.number}",
                category=entry.category, source=entry.source, digest=entry.digest,
            )  # fmt: skip
            counts.add(entry, shard.ids[end - length : end])
            start += int(length)
    if not counts.documents("train"):
        raise DataError(
            f"no document of the train split has {corpus.settings.min_tokens} tokens (dataset.min_tokens); pass --from "
            "with longer ones, or lower it"
        )
    return counts


def _describe(writer: StoreWriter, corpus: Corpus, learned: Tokenizer, counts: Counts, name: str) -> str:
    for file, data in learned.files.items():
        writer.file(file, data)
    text_digest = hashlib.blake2b(digest_size=8)
    for entry in corpus.entries:
        text_digest.update(f"{entry.split} {entry.category} {entry.exact} {entry.span}\n".encode())
    writer.info.update(
        name=name,
        source=corpus.source.name,
        text_digest=text_digest.hexdigest(),  # of what was read, whatever the tokenizer
        tokenizer=learned.description,
        vocab_size=learned.vocab_size,
        categories=counts.categories,
        counts=counts.by_split,
        unigram_nats=counts.unigram_nats,
        settings=dataclasses.asdict(corpus.settings),
        dropped=corpus.dropped,
        quarantined=[{"file": file, "reason": reason} for file, reason in corpus.quarantined.items()],
        notes=corpus.notes,
    )
    writer.info["summary"] = summary(writer.info)
    return str(writer.info["summary"])
