"""Which documents are kept, and in which split; decided on what is known of them, without their texts.

A split that is published is kept. Otherwise a group of documents goes to one split as a whole, in an order that only
the seed and its name decide, until a category has its share of characters held out; a category of one or two groups is
cut by position instead, the end being held out for validation. All choices are the same on every machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rung.errors import DataError
from rung.random import key_of
from rung.recipes.text.sources import SPLITS

HELD = ("validation", "test")


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A document, or a part of one, without its text."""

    place: int  # in the order of the source
    category: str
    group: str
    source: str
    number: int
    num_characters: int
    exact: str  # digest of the text to the letter
    digest: str  # the same for texts that differ in case and spaces only
    split: str = ""  # empty: not published
    span: tuple[int, int] | None = None  # the part, in characters; None is all of it

    @property
    def rank(self) -> str:
        return f"{self.category}/{self.group}"


def assign_splits(entries: Sequence[DocumentInfo], held_out: float, seed: int) -> tuple[list[DocumentInfo], list[str]]:
    """Every entry with a split, in the same order, and notes on how that was decided."""
    published = {entry.split for entry in entries} - {""}
    if "validation" in published:
        return list(entries), []
    # A train split alone says nothing of what to hold out: it is split as if nothing were published.
    wanted = ["validation"] if "test" in published else list(HELD)
    by_category: dict[str, list[DocumentInfo]] = defaultdict(list)
    for entry in entries:
        if entry.split in ("", "train"):
            by_category[entry.category].append(entry)
    split_of: dict[str, str] = {}
    cuts: list[str] = []
    for category, members in sorted(by_category.items()):
        if len({entry.group for entry in members}) <= len(wanted):
            cuts.append(category)
        else:
            split_of |= _by_group(members, wanted, held_out, seed)
    result: list[DocumentInfo] = []
    counted: Counter[str] = Counter()
    for entry in entries:
        if entry.split not in ("", "train"):  # published, with numbers of its own
            result.append(entry)
            continue
        parts = [dataclasses.replace(entry, split=split_of.get(entry.rank, "train"))]
        if entry.category in cuts:
            where = int(entry.num_characters * (1 - 2 * held_out))
            parts = [_part(entry, "train", 0, where), _part(entry, "validation", where, entry.num_characters)]
        for part in parts:
            result.append(dataclasses.replace(part, number=counted[part.split]))
            counted[part.split] += 1
    notes = []
    if published:
        notes.append(
            f"no validation split is published: {100 * held_out:g} % of train became {' and as much '.join(wanted)}"
        )
    if cuts:
        which = "" if len(cuts) == len(by_category) else f" in {len(cuts)} categories of one or two files"
        notes.append(f"cut by position{which}: the first {100 - 200 * held_out:g} % is train, the rest validation")
    return result, notes


def _by_group(members: list[DocumentInfo], wanted: list[str], held_out: float, seed: int) -> dict[str, str]:
    """Groups to hold out, by their rank: in seeded order, until each split has its share, and none far more."""
    sizes: Counter[str] = Counter()
    for entry in members:
        sizes[entry.rank] += entry.num_characters
    share = held_out * sizes.total()
    left = sorted(sizes, key=lambda rank: (key_of(seed, "split", rank), rank))
    split_of: dict[str, str] = {}
    for number, split in enumerate(wanted):
        most = len(left) - len(wanted[number:])  # every later split, and train, wants a group too
        fitting = [rank for rank in left if sizes[rank] <= share] or [min(left, key=lambda rank: (sizes[rank], rank))]
        taken: list[str] = []
        size = 0
        for rank in fitting:
            if not taken or (len(taken) < most and size + sizes[rank] / 2 <= share):  # nearer to the share with it
                taken.append(rank)
                size += sizes[rank]
        split_of |= dict.fromkeys(taken, split)
        left = [rank for rank in left if rank not in split_of]
    return split_of


def _part(entry: DocumentInfo, split: str, start: int, stop: int) -> DocumentInfo:
    digest = hashlib.blake2b(f"{entry.digest} {(start, stop)}".encode(), digest_size=8).hexdigest()
    return dataclasses.replace(entry, split=split, span=(start, stop), num_characters=stop - start, digest=digest)


def without_leaks(entries: Sequence[DocumentInfo], dropped: dict[str, int]) -> list[DocumentInfo]:
    """Takes out of train what is also in validation or test, and out of validation what is also in test."""
    digests = {split: {entry.digest for entry in entries if entry.split == split} for split in SPLITS}
    held_out = digests["validation"] | digests["test"]
    elsewhere = {"train": held_out, "validation": digests["test"], "test": set[str]()}
    kept = [entry for entry in entries if entry.digest not in elsewhere[entry.split]]
    left = Counter(entry.split for entry in kept)
    lost = Counter(entry.split for entry in entries) - left
    dropped["copies_in_train"], dropped["copies_in_validation"] = lost["train"], lost["validation"]
    dropped["repeats_kept"] = len(kept) - len({(entry.split, entry.digest) for entry in kept})
    if not left["train"]:
        problem = f"no document is left to train on: {lost['train']} of {len(entries)} are copies of held-out ones"
        raise DataError(f"{problem}; pass --from with more than one distinct document", code="data-empty")
    return kept


def limited(entries: Sequence[DocumentInfo], most: int, seed: int) -> list[DocumentInfo]:
    """At most so many documents of each split, as many of one category as of another; 0 is all."""
    if not most:
        return list(entries)
    kept: set[int] = set()
    for split in SPLITS:
        by_category: dict[str, list[int]] = defaultdict(list)
        for at, entry in enumerate(entries):
            if entry.split == split:
                by_category[entry.category].append(at)
        columns = [
            sorted(members, key=lambda at: (key_of(seed, "limit", entries[at].source), at))
            for _, members in sorted(by_category.items())
        ]
        in_turn = (at for row in zip_longest(*columns) for at in row if at is not None)
        kept.update(at for at, _ in zip(in_turn, range(most)))
    return [entry for at, entry in enumerate(entries) if at in kept]
