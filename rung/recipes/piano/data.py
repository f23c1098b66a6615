"""Prepares piano data: the takes of a source become a store of tokens.

A record is <CLS> and the events between two long pauses. All records of a piece go to one split, and a record of the
training split that also occurs elsewhere is taken out. Nothing vanishes silently: every note that was read is in the
store or in one of the counts of the manifest, and every file that could not be read is named there.

Where music comes from, and what a piece of it is, is told in `sources`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rung import units
from rung.data.store import Store, StoreWriter
from rung.errors import ConfigError, DataError
from rung.recipe import Report, key_of
from rung.recipes.piano.notes import from_zero, in_range, quantise, split_at_pauses
from rung.recipes.piano.sources import SPLITS, Take, find_source
from rung.recipes.piano.tokenizer import CLS, VOCAB_SIZE, Tokenizer
from rung.text import printable

HELD_OUT = 0.05  # of the pieces, for validation and again for test
LONGEST_NOTE_S = 600.0  # beyond it a file is damaged: no key is held for ten minutes
LONGEST_SILENCE_S = 3600.0  # in a record, where each second takes two tokens; a torn time would take gigabytes


@dataclass
class Record:
    take: Take
    ids: np.ndarray
    num_notes: int
    seconds: float
    split: str = ""

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.ids.tobytes(), digest_size=8).hexdigest()


COUNTED = (
    "read_notes", "outside_notes", "merged_notes", "short_records", "short_notes",
    "duplicate_records", "duplicate_notes", "repeats_kept",
)  # fmt: skip


@dataclass
class Account:
    """Where everything went that is not in the store."""

    quarantined: list[dict[str, str]] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))


def prepare(
    source: Path | str | None,
    out: Path,
    *,
    pause_detection_threshold: float = 4.0,
    sustain: bool = False,
    seed: int = 0,
    name: str = "",
    replace: bool = False,
    report: Report | None = None,
) -> str:
    """Writes the store and returns what a person wants to know of it."""
    if not 0 <= pause_detection_threshold < math.inf:
        raise ConfigError(
            f"dataset.pause_detection_threshold={pause_detection_threshold} is not a time; "
            "give seconds, or 0 to split nowhere"
        )
    if source is not None and out.exists() and Path(source).resolve().is_relative_to(out.resolve()):
        raise DataError(f"{source} lies in {out}, which would be replaced; choose another place with --name")
    with StoreWriter(out, kind="piano", replace=replace) as writer:  # first: a name that is taken is found at once
        found = find_source(source, sustain, report)
        account = Account(quarantined=found.quarantined)
        records = _read(found.takes, pause_detection_threshold, account, report)
        _assign_splits(records, seed)
        records = _without_leaks(records, account)
        settings = {"pause_detection_threshold": pause_detection_threshold, "sustain": sustain, "seed": seed}
        return _write(writer, records, account, {"name": name, "settings": settings, "source": found.name})


def digests(store: Store, split: str) -> set[str]:
    """What tells the records of a split from all others: two records with one digest hold the same ids."""
    return {store.index[number]["digest"] for number in store.split(split)} if split in store.splits else set()


# Records


def _read(takes: list[Take], threshold_s: float, account: Account, report: Report | None) -> list[Record]:
    records: list[Record] = []
    tokenizer = Tokenizer()
    for number, take in enumerate(takes):
        if report is not None:
            report("reading", number, len(takes))
        try:
            notes = take.read()
            _check(notes, threshold_s)
        except DataError as error:
            account.quarantined.append({"file": take.source, "reason": str(error)})
            continue
        account.dropped["read_notes"] += len(notes)
        notes, num_outside = in_range(notes)
        account.dropped["outside_notes"] += num_outside
        for segment in split_at_pauses(notes, threshold_s):
            records += _record(take, segment, tokenizer, account)
    if report is not None:
        report("reading", len(takes), len(takes))
    if not records:
        why = f"; the first: {account.quarantined[0]['reason']}" if account.quarantined else ""
        raise DataError(
            f"nothing to learn from in {len(takes)} files: {len(account.quarantined)} could not be used{why}; "
            "pass --from a folder that has MIDI files with notes in 21..108."
        )
    return records


def _check(notes: np.ndarray, threshold_s: float) -> None:
    if len(notes) == 0:
        raise DataError("holds no notes")
    longest_s = float((notes["end"] - notes["start"]).max())
    if longest_s > LONGEST_NOTE_S:
        raise DataError(f"holds a note of {longest_s:.0f} s, more than {LONGEST_NOTE_S:.0f} s: the file is damaged")
    keeps_silence = threshold_s == 0 or threshold_s > LONGEST_SILENCE_S
    if keeps_silence and len(split_at_pauses(notes, LONGEST_SILENCE_S)) > 1:
        raise DataError(
            f"holds a silence of more than {LONGEST_SILENCE_S:.0f} s; set dataset.pause_detection_threshold to a time "
            "below that, which splits there"
        )


def _record(take: Take, segment: np.ndarray, tokenizer: Tokenizer, account: Account) -> list[Record]:
    """One record, or none when fewer than two notes are left."""
    notes = quantise(from_zero(segment))
    account.dropped["merged_notes"] += len(segment) - len(notes)
    if len(notes) < 2:
        account.dropped["short_records"] += 1
        account.dropped["short_notes"] += len(notes)
        return []
    [events] = tokenizer.encode_all([notes])
    ids = np.concatenate([np.array([CLS], dtype=np.uint16), events])
    return [Record(take, ids, len(notes), float(notes["end"].max()))]


def _assign_splits(records: list[Record], seed: int) -> None:
    """The publisher's split where there is one; else by piece, in an order that only the seed and the name decide."""
    pieces = {record.take.piece for record in records if record.take.split is None}
    order = sorted(pieces, key=lambda piece: (key_of(seed, "split", piece), piece))
    num_held = max(1, round(HELD_OUT * len(order))) if len(order) >= 3 else 0
    split_of = dict.fromkeys(order, "train")
    split_of |= dict.fromkeys(order[:num_held], "validation") | dict.fromkeys(order[num_held : 2 * num_held], "test")
    if len(order) == 2:
        split_of[order[0]] = "validation"
    for record in records:
        record.split = record.take.split or split_of[record.take.piece]


def _without_leaks(records: list[Record], account: Account) -> list[Record]:
    """Takes records out of train that are also in validation or test, and out of validation that are also in test."""
    digests = {split: {r.digest for r in records if r.split == split} for split in SPLITS}
    elsewhere = {
        "train": digests["validation"] | digests["test"],
        "validation": digests["test"],
        "test": set[str](),
    }
    kept = [record for record in records if record.digest not in elsewhere[record.split]]
    account.dropped["duplicate_records"] = len(records) - len(kept)
    account.dropped["duplicate_notes"] = sum(r.num_notes for r in records) - sum(r.num_notes for r in kept)
    account.dropped["repeats_kept"] = len(kept) - len({(record.split, record.digest) for record in kept})
    if not any(record.split == "train" for record in kept):
        raise DataError(
            f"no record is left to train on: {account.dropped['duplicate_records']} of {len(records)} are copies of "
            "held-out ones; pass --from a folder with more than one distinct piece."
        )
    return kept


# Writing and telling


def _write(writer: StoreWriter, records: list[Record], account: Account, info: dict[str, Any]) -> str:
    tokenizer = Tokenizer()
    histogram = {split: np.zeros(VOCAB_SIZE, dtype=np.int64) for split in SPLITS}
    writer.array("tokens", np.uint16)
    writer.check_ids(VOCAB_SIZE - 1, "tokens")
    for record in records:
        take, start = record.take, writer.append("tokens", record.ids)
        histogram[record.split] += np.bincount(record.ids, minlength=VOCAB_SIZE)
        writer.record(
            split=record.split, start=start, length=len(record.ids), piece=take.piece, composer=take.composer,
            source=take.source, notes=record.num_notes, seconds=round(record.seconds, 2), digest=record.digest,
        )  # fmt: skip
    counts = {split: _counts(r for r in records if r.split == split) for split in SPLITS}
    places: dict[str, set[str]] = {}
    for record in records:
        places.setdefault(record.take.piece, set()).add(record.split)
    entropy = {split: unigram_nats(histogram[split]) for split in SPLITS}
    writer.info.update(
        info,
        tokenizer=tokenizer.description,
        vocab_size=tokenizer.vocab_size,
        dropped=account.dropped,
        quarantined=account.quarantined,
        counts=counts,
        is_split_by_publisher=all(record.take.split is not None for record in records),
        pieces_in_two_splits=sorted(piece for piece, splits in places.items() if len(splits) > 1),
        unigram_nats=entropy,
        histogram={split: values.tolist() for split, values in histogram.items()},
    )
    writer.info["summary"] = _summary(writer.info)
    return str(writer.info["summary"])


def _counts(records: Iterable[Record]) -> dict[str, Any]:
    chosen = list(records)
    return {
        "pieces": len({r.take.piece for r in chosen}),
        "files": len({r.take.source for r in chosen}),
        "records": len(chosen),
        "notes": sum(r.num_notes for r in chosen),
        "hours": round(sum(r.seconds for r in chosen) / 3600, 3),
        "tokens": sum(len(r.ids) for r in chosen),
    }


def unigram_nats(histogram: np.ndarray) -> float:
    """Entropy of a histogram of ids; <CLS> is left out, as it begins a record and is never predicted."""
    counts = np.array(histogram, dtype=np.float64)
    counts[CLS] = 0
    if counts.sum() == 0:
        return 0.0
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _summary(info: dict[str, Any]) -> str:
    counts, dropped, bad = info["counts"], info["dropped"], info["quarantined"]
    total = {key: sum(counts[split][key] for split in SPLITS) for key in counts["train"]}
    lines = [
        f"{total['pieces']} pieces in {total['files']} files, {total['records']} records, {total['notes']} notes, "
        f"{total['hours']:.1f} h, {units.count(total['tokens'])} tokens of {info['vocab_size']} kinds"
    ]
    for split in SPLITS:
        c = counts[split]
        lines.append(
            f"  {split:<10}  {c['pieces']} pieces, {c['records']} records, {c['notes']} notes, {c['hours']:.2f} h, "
            f"{units.count(c['tokens'])} tokens, unigram entropy {info['unigram_nats'][split]:.3f} nats"
            if c["records"]
            else f"  {split:<10}  empty: {_why_empty(split, info['is_split_by_publisher'])}"
        )
    if bad:
        named = "; ".join(printable(f"{item['file']}: {item['reason']}") for item in bad[:3])
        lines.append(f"quarantined {len(bad)} files ({named}{'; ..' if len(bad) > 3 else ''})")
    left = {
        "lie outside 21..108": dropped["outside_notes"],
        "were merged with another of the same pitch and start": dropped["merged_notes"],
        f"were in {dropped['short_records']} records of fewer than 2 notes": dropped["short_notes"],
        f"were in {dropped['duplicate_records']} copies of held-out records": dropped["duplicate_notes"],
    }
    told = ", ".join(f"{number} {what}" for what, number in left.items() if number)
    lines.append(f"of {dropped['read_notes']} notes read, {told}" if told else "every note read is kept")
    if info["pieces_in_two_splits"]:
        lines.append(f"the publisher's splits have {len(info['pieces_in_two_splits'])} pieces in two of them")
    return "\n".join(lines)


def _why_empty(split: str, is_split_by_publisher: bool) -> str:
    if is_split_by_publisher:
        return "its publisher put nothing there that could be used"
    return f"a split by piece needs {2 if split == 'validation' else 3} pieces or more"
