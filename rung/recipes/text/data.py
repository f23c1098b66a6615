"""Prepares text: documents of any source become a store of tokens, by category and split.

Every document that was read is in the store or in one of the counts of the manifest, and what could not be read is
named there. The source is read up to three times (to choose, to train the tokenizer, to tokenise), since a corpus may
be larger than memory; a text that changed in between is an error. splits.py decides on splits. A preparation that was
killed continues where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import shutil
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rung import parse, units
from rung.data import tokenizer
from rung.data.store import StoreWriter, check_apart, check_free
from rung.data.tokenizer import Tokenizer, of_files
from rung.errors import ConfigError, DataError
from rung.files import write_whole
from rung.recipe import Report
from rung.recipes.text.sources import SPLITS, Document, Source, find_source
from rung.recipes.text.sources.arxiv import TAGS, without_tags
from rung.recipes.text.splits import DocumentInfo, assign_splits, limited, without_leaks
from rung.recipes.text.stream import entropy_nats
from rung.text import one_line

PLAN = 1  # part of the key of parts: raise it when the same texts and settings come to give other tokens

SHARD_DOCUMENTS = 1024
SHARD_CHARACTERS = 2_000_000  # about 200 MB while `tokenizers` works on it
MOST_CATEGORIES = 16  # that a summary names
LEFT_OUT = {
    "empty": "were empty",
    "short": "were shorter than dataset.min_tokens",
    "copies_in_train": "of train are also held out, so taken out of train",
    "copies_in_validation": "of validation are also in test, so taken out of validation",
    "over_limit": "were over dataset.max_examples_per_split",
}


@dataclass(frozen=True)
class Settings:
    """What decides how a source becomes tokens: the keys of `dataset` that are marked "for `rung data`"."""

    tokenizer: str = "bpe"
    vocab_size: int = 4096
    max_examples_per_split: int = 0  # 0 is all
    min_tokens: int = 2
    seed: int = 0
    config: str = "no_ref"  # of a set of the Hugging Face hub
    strip_names: bool = False
    held_out: float = 0.05

    def check(self) -> None:
        problem = ""
        if self.max_examples_per_split < 0:
            problem = f"max_examples_per_split={self.max_examples_per_split} is below 0; give a number, or 0 for all"
        if self.min_tokens < 1:
            problem = f"min_tokens={self.min_tokens} is below 1; give the tokens of a document"
        if not 0 < self.held_out < 0.5:
            problem = (
                f"held_out={self.held_out} is not between 0 and 0.5; it is held out twice, for validation and for "
                "test: give a share such as 0.05"
            )
        if problem:
            raise ConfigError(f"dataset.{problem}", code="bad-value")
        tokenizer.check(self.tokenizer, self.vocab_size)


@dataclass
class Corpus:
    """A source, what of it is kept, and an account of what is not."""

    source: Source
    settings: Settings
    entries: list[DocumentInfo] = field(default_factory=list)
    quarantined: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self) -> Iterator[tuple[Document, str, int]]:
        """Every document, its text as it is used, and how many names of arXiv's categories it has or had."""
        for document in self.source.read(self.quarantined.__setitem__):
            text, num_tags = document.text, 0
            if self.settings.strip_names or document.category in TAGS:
                text, num_tags = without_tags(document.text)
            yield document, text if self.settings.strip_names else document.text, num_tags

    def texts(self) -> Iterator[tuple[DocumentInfo, str]]:
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

    def _changed(self, entry: DocumentInfo) -> DataError:
        problem = f"{self.source.name} has changed while it was read, at {entry.source}"
        return DataError(f"{problem}; start again", code="data-mismatch")

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
    """Writes the store and returns its summary."""
    report = report or (lambda what, done, total: None)
    check_free(out, replace)  # first: a name that is taken is found at once
    settings.check()
    if source is not None and Path(source).exists():
        check_apart(Path(source), out)
    report("finding the text", 0, 1)  # on the hub it can take a while
    corpus = Corpus(find_source(source, settings.config), settings)
    report("finding the text", 1, 1)
    _choose(corpus, report)
    parts = Parts(out, corpus.key())
    try:
        learned = parts.tokenizer(lambda: _learn(corpus, report))
        report("tokenising", 0, len(corpus.entries))
        for numbers, _ in _tokenise(corpus, learned, parts):
            report("tokenising", numbers.stop, len(corpus.entries))
        with StoreWriter(out, kind="text", replace=replace) as writer:  # not before: kill -9 leaves parts, no more
            _write(writer, corpus, _tokenise(corpus, learned, parts), learned, name)
    except DataError as error:
        if not isinstance(error.__cause__, OSError):  # on another disk it would continue; with these texts it cannot
            parts.remove()
        raise
    except OSError as error:
        problem = f"cannot write beside {out}: {error.strerror or error}"
        remedy = "fix that and start again, what is tokenised is kept"
        raise DataError(f"{problem}; {remedy}", code="cannot-write") from error
    parts.remove()
    return str(writer.info["summary"])


def _choose(corpus: Corpus, report: Report) -> None:
    """Reads everything once and decides what is kept, and where."""
    settings, dropped = corpus.settings, corpus.dropped
    entries = list(_entries(corpus, report))
    if not entries:
        bad = corpus.quarantined
        why = f": {len(bad)} could not be used, the first, {next(iter(bad))}, {next(iter(bad.values()))}" if bad else ""
        problem = f"no text to learn from in {corpus.source.name}{why}"
        raise DataError(f"{problem}; pass --from something that has some", code="data-empty")
    entries, notes = assign_splits(entries, settings.held_out, settings.seed)
    corpus.notes += [*corpus.source.notes, *notes]
    entries = without_leaks(entries, dropped)
    corpus.entries = limited(entries, settings.max_examples_per_split, settings.seed)
    dropped["over_limit"] = len(entries) - len(corpus.entries)


def _entries(corpus: Corpus, report: Report) -> Iterator[DocumentInfo]:
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
        yield DocumentInfo(
            place, document.category, document.group, document.source, document.number,
            len(text), exact, _digest(normal), document.split or "",
        )  # fmt: skip
    report("reading", dropped["read"], dropped["read"])
    if dropped["tags_removed"] and not corpus.settings.strip_names:
        num_left, dropped["tags_removed"] = dropped["tags_removed"], 0
        remedy = "dataset.strip_names=true takes them out"
        corpus.notes.append(f"the text names arXiv's categories {num_left} times, as a label would; {remedy}")


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


class Shard(NamedTuple):
    lengths: np.ndarray  # of each document, its end included
    ids: np.ndarray


class Parts:
    """What is finished of one preparation: a folder beside the store until that is whole.

        .<name>.parts/<key>/tokenizer/    the files of the tokenizer, once it is learned
        .<name>.parts/<key>/<n>.npz       a finished shard: lengths of its documents, and all their ids

    The key is a hash of every text and every setting that decides what comes out, so that a part is either right or
    under another key.
    """

    def __init__(self, out: Path, key: str) -> None:
        self._root = out.with_name(f".{out.name}.parts")
        self._folder = self._root / key
        self._new_folders = [folder for folder in self._root.parents if not folder.exists()]

    def tokenizer(self, learn: Callable[[], Tokenizer]) -> Tokenizer:
        """The one that was learned before, or else a new one, which is kept."""
        folder = self._folder / "tokenizer"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, DataError):
            about = parse.loose_json(parse.read_bytes(folder / "about.json"))
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


def _tokenise(corpus: Corpus, learned: Tokenizer, parts: Parts) -> Iterator[tuple[range, Shard]]:
    """The tokens of all entries. Shards that are finished cost nothing but reading past their texts."""
    rest, num_passed = corpus.texts(), 0
    end = [] if learned.end is None else [np.array([learned.end], dtype=learned.dtype)]
    for number, documents in enumerate(cut([entry.num_characters for entry in corpus.entries])):
        shard = parts.load(number, len(documents))
        if shard is None:
            batch = list(islice(rest, documents.start - num_passed, documents.stop - num_passed))
            num_passed = documents.stop
            assert len(batch) == len(documents), (len(batch), documents)
            try:
                rows = learned.encode_batch([text for _, text in batch])
            except DataError:
                for entry, text in batch:  # once more, to say in which document
                    try:
                        learned.encode(text)
                    except DataError as error:
                        raise DataError(f"{entry.source}: {error}", code="unknown-character") from error
                raise
            ids = np.concatenate([part for row in rows for part in (row, *end)])
            if len(ids) and int(ids.max()) >= learned.vocab_size:
                problem = f"the tokenizer gave id {int(ids.max())}, but has a vocabulary of {learned.vocab_size}"
                raise DataError(f"{problem}; it is damaged", code="tokenizer-damaged")
            shard = Shard(np.array([len(row) + len(end) for row in rows], dtype=np.int64), ids)
            parts.save(number, shard)
        yield documents, shard


def _write(
    writer: StoreWriter,
    corpus: Corpus,
    shards: Iterable[tuple[range, Shard]],
    learned: Tokenizer,
    name: str,
) -> None:
    """Tokens and records of all documents but those that are too short, and the manifest's account of them."""
    least, dropped = corpus.settings.min_tokens, corpus.dropped
    counts: dict[str, dict[str, dict[str, int]]] = {split: {} for split in SPLITS}
    histograms = {split: np.zeros(learned.vocab_size, dtype=np.int64) for split in SPLITS}
    dropped["short"] = 0
    writer.array("tokens", learned.dtype)
    for numbers, shard in shards:
        is_kept = shard.lengths >= least
        dropped["short"] += int((~is_kept).sum())
        start = writer.append("tokens", shard.ids[np.repeat(is_kept, shard.lengths)])
        ends = np.cumsum(shard.lengths)
        for entry, length, end in zip(corpus.entries[numbers.start : numbers.stop], shard.lengths, ends, strict=True):
            if length < least:
                continue
            writer.record(
                split=entry.split, start=start, length=int(length), id=f"{entry.split}_{entry.number}",
                category=entry.category, source=entry.source, digest=entry.digest,
            )  # fmt: skip
            start += int(length)
            count = counts[entry.split].setdefault(entry.category, {"documents": 0, "tokens": 0, "characters": 0})
            count["documents"] += 1
            count["tokens"] += int(length)
            count["characters"] += entry.num_characters
            np.add.at(histograms[entry.split], shard.ids[end - length : end], 1)
    if not counts["train"]:
        problem = f"no document of the train split has {least} tokens (dataset.min_tokens)"
        raise DataError(f"{problem}; pass --from with longer ones, or lower it", code="data-empty")

    for file, data in learned.files.items():
        writer.file(file, data)
    text_digest = hashlib.blake2b(digest_size=8)
    for entry in corpus.entries:
        text_digest.update(f"{entry.split} {entry.category} {entry.exact} {entry.span}\n".encode())
    filled = [split for split in SPLITS if counts[split]]
    writer.info.update(
        name=name,
        source=corpus.source.name,
        text_digest=text_digest.hexdigest(),  # of what was read, whatever the tokenizer
        tokenizer=learned.description,
        vocab_size=learned.vocab_size,
        categories=sorted({category for found in counts.values() for category in found}),
        counts={split: dict(sorted(counts[split].items())) for split in filled},
        unigram_nats={split: entropy_nats(histograms[split]) for split in filled},
        settings=dataclasses.asdict(corpus.settings),
        dropped=dropped,
        quarantined=[{"file": file, "reason": reason} for file, reason in corpus.quarantined.items()],
        notes=corpus.notes,
    )
    writer.info["summary"] = summary(writer.info)


def summary(info: dict[str, Any]) -> str:
    counts, tokens_of, names = info["counts"], info["tokenizer"], info["categories"]
    dropped, bad = info["dropped"], info["quarantined"]

    def size(*splits: str) -> tuple[str, str]:
        """How many documents and tokens."""
        parts = [count for split in splits for count in counts[split].values()]
        documents, tokens, characters = (sum(c[key] for c in parts) for key in ("documents", "tokens", "characters"))
        each = f"{characters / max(tokens, 1):.2f} characters each"
        return f"{documents} document{'' if documents == 1 else 's'}", f"{units.count(tokens)} tokens, {each}"

    documents, tokens = size(*counts)
    kinds = f"{tokens_of['vocab_size']} kinds of tokens ({tokens_of['kind']})"
    lines = [f"{documents} in {len(names)} {'category' if len(names) == 1 else 'categories'}, {tokens}; {kinds}"]
    for split in SPLITS:
        nats = f", unigram entropy {info['unigram_nats'][split]:.3f} nats" if split in counts else ""
        lines.append(f"  {split:<10}  {', '.join(size(split)) + nats if split in counts else 'empty'}")
    if len(names) > 1:
        by_category = [
            f"{one_line(name)} {'/'.join(str(found.get(name, {}).get('documents', 0)) for found in counts.values())}"
            for name in names[:MOST_CATEGORIES]
        ]
        more = f", and {len(names) - MOST_CATEGORIES} more" if len(names) > MOST_CATEGORIES else ""
        lines.append(f"  documents of {'/'.join(counts)}: {', '.join(by_category)}{more}")
    if absent := [name for name in names if name not in counts["train"]]:
        lines.append(f"not in train, only held out: {', '.join(map(one_line, absent[:MOST_CATEGORIES]))}")
    asked = info["settings"]["vocab_size"]
    if tokens_of["kind"] == "bpe" and tokens_of["vocab_size"] < asked:
        lines.append(
            f"the text gives {tokens_of['vocab_size']} kinds of tokens, not {asked}: there is nothing to merge"
        )
    lines += [one_line(note) for note in info["notes"]]

    if bad:
        named = "; ".join(f"{one_line(item['file'])} {one_line(item['reason'])}" for item in bad[:3])
        lines.append(f"quarantined {len(bad)} ({named}{'; ..' if len(bad) > 3 else ''})")
    left_out = ", ".join(f"{dropped[key]} {what}" for key, what in LEFT_OUT.items() if dropped[key])
    lines.append(f"of {dropped['read']} documents read, {left_out}" if left_out else "every document read is kept")
    if dropped["repeats_kept"]:
        lines.append(f"{dropped['repeats_kept']} documents repeat another one of their split; they are kept")
    if dropped["tags_removed"]:
        lines.append(f"{dropped['tags_removed']} names of arXiv categories were taken out of the text")
    return "\n".join(lines)
