"""Prepares piano data: the takes of a source become a store of tokens.

A record is <CLS> and the events between two long pauses. All records of a piece go to one split, as do pieces that are
nearly the same, and a record of the training split that also occurs elsewhere is taken out. Nothing vanishes silently:
every note that was read is in the store or in one of the counts of the manifest, and every file that could not be read
is named there.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rung import units
from rung.data.store import Store, StoreWriter
from rung.errors import ConfigError, DataError
from rung.random import key_of, scramble
from rung.recipe import Report
from rung.recipes.piano.notes import from_zero, in_range, quantise, split_at_pauses
from rung.recipes.piano.sources import SPLITS, Take, find_source
from rung.recipes.piano.tokenizer import CLS, TOKENIZER, VOCAB_SIZE
from rung.text import printable

HELD_OUT = 0.05  # of the pieces, for validation and again for test
# Pieces that share a fifth of their runs of 13 notes, in any key, are one piece for the split: 29 of the embedded ones.
RUN = 12  # intervals
SHARED = 0.2
MOST_PIECES = 8  # a run that more pieces share, such as a scale, says nothing
LONGEST_NOTE_S = 600.0  # beyond it a file is damaged: no key is held for ten minutes
LONGEST_SILENCE_S = 3600.0  # in a record, where each second takes two tokens; a torn time would take gigabytes
COUNTED = (
    "read_notes", "outside_notes", "merged_notes", "short_records", "short_notes",
    "duplicate_records", "duplicate_notes", "repeats_kept",
)  # fmt: skip


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
    """Writes the store and returns a summary of it."""
    if not 0 <= pause_detection_threshold < math.inf:
        raise ConfigError(
            f"dataset.pause_detection_threshold={pause_detection_threshold} is not a time; "
            "give seconds, or 0 to split nowhere",
            code="bad-range",
        )
    if source is not None and out.exists() and Path(source).resolve().is_relative_to(out.resolve()):
        raise DataError(
            f"{source} lies in {out}, which would be replaced; choose another place with --name",
            code="options-conflict",
        )
    with StoreWriter(out, kind="piano", replace=replace) as writer:  # first: a name that is taken is found at once
        found = find_source(source, sustain, report)
        takes, quarantined, dropped = found.takes, found.quarantined, dict.fromkeys(COUNTED, 0)
        records: list[Record] = []
        for number, take in enumerate(takes):
            if report is not None:
                report("reading", number, len(takes))
            try:
                notes = take.read()
                _check(notes, pause_detection_threshold)
            except DataError as error:
                quarantined.append({"file": take.source, "reason": str(error)})
                continue
            dropped["read_notes"] += len(notes)
            notes, num_outside = in_range(notes)
            dropped["outside_notes"] += num_outside
            for segment in split_at_pauses(notes, pause_detection_threshold):
                notes = quantise(from_zero(segment))
                dropped["merged_notes"] += len(segment) - len(notes)
                if len(notes) < 2:
                    dropped["short_records"] += 1
                    dropped["short_notes"] += len(notes)
                    continue
                [events] = TOKENIZER.encode_all([notes])
                ids = np.concatenate([np.array([CLS], dtype=np.uint16), events])
                records.append(Record(take, ids, len(notes), float(notes["end"].max())))
        if report is not None:
            report("reading", len(takes), len(takes))
        if not records:
            why = f"; the first: {quarantined[0]['reason']}" if quarantined else ""
            raise DataError(
                f"nothing to learn from in {len(takes)} files: {len(quarantined)} could not be used{why}; "
                "pass --from a folder that has MIDI files with notes in 21..108.",
                code="data-empty",
            )
        alike = near_duplicates(records)
        _assign_splits(records, alike, seed)
        records = _without_leaks(records, dropped)
        settings = {"pause_detection_threshold": pause_detection_threshold, "sustain": sustain, "seed": seed}
        writer.info.update(name=name, settings=settings, source=found.name)
        writer.info.update(tokenizer=TOKENIZER.description, vocab_size=VOCAB_SIZE)
        writer.info.update(dropped=dropped, quarantined=quarantined, near_duplicates=alike)
        return _write(writer, records)


def digests(store: Store, split: str) -> set[str]:
    """What tells the records of a split from all others: two records with one digest hold the same ids."""
    return {store.index[number]["digest"] for number in store.split(split)} if split in store.splits else set()


def _check(notes: np.ndarray, threshold_s: float) -> None:
    if len(notes) == 0:
        raise DataError("holds no notes", code="file-empty")
    longest_s = float((notes["end"] - notes["start"]).max())
    if longest_s > LONGEST_NOTE_S:
        raise DataError(
            f"holds a note of {longest_s:.0f} s, more than {LONGEST_NOTE_S:.0f} s: it is damaged", code="file-damaged"
        )
    keeps_silence = threshold_s == 0 or threshold_s > LONGEST_SILENCE_S
    if keeps_silence and len(split_at_pauses(notes, LONGEST_SILENCE_S)) > 1:
        raise DataError(
            f"holds a silence of more than {LONGEST_SILENCE_S:.0f} s; set dataset.pause_detection_threshold to a time "
            "below that, which splits there",
            code="too-large",
        )


def near_duplicates(records: list[Record]) -> list[list[str]]:
    """Groups of pieces that are nearly the same, also where one is transposed, slower or cut; sorted.

    Those whose split is their publisher's are left out.
    """
    pieces = sorted({record.take.piece for record in records if record.take.split is None})
    number_of = {piece: number for number, piece in enumerate(pieces)}
    runs, owners = [], []
    for record in records:
        pitches = TOKENIZER.decode(record.ids)["pitch"].astype(np.int64)
        if record.take.split is None and len(pitches) > RUN:
            intervals = np.lib.stride_tricks.sliding_window_view(np.diff(pitches), RUN)
            hashed = scramble((intervals.astype(np.uint64) * _PLACES).sum(axis=1, dtype=np.uint64))
            runs.append(hashed)
            owners.append(np.full(len(hashed), number_of[record.take.piece]))
    if not runs:
        return []
    run, owner = np.concatenate(runs), np.concatenate(owners)
    order = np.lexsort((owner, run))
    run, owner = run[order], owner[order]
    is_first = np.append(True, (run[1:] != run[:-1]) | (owner[1:] != owner[:-1]))  # a piece may repeat itself
    run, owner = run[is_first], owner[is_first]
    num_runs = np.bincount(owner, minlength=len(pieces))
    number = np.cumsum(np.append(True, run[1:] != run[:-1])) - 1
    is_rare = np.bincount(number)[number] <= MOST_PIECES
    # Of runs that many pieces share, each is paired with the next alone: versions of one piece form a chain.
    pairs = [
        (owner[:-by] * len(pieces) + owner[by:])[(run[:-by] == run[by:]) & (is_rare[by:] | (by == 1))]
        for by in range(1, min(MOST_PIECES, len(run)))
    ]
    if not pairs:
        return []
    codes, num_shared = np.unique(np.concatenate(pairs), return_counts=True)
    firsts, seconds = np.divmod(codes, len(pieces))
    is_near = num_shared >= SHARED * np.minimum(num_runs[firsts], num_runs[seconds])
    group_of = {piece: {piece} for piece in pieces}
    for first, second in zip(firsts[is_near].tolist(), seconds[is_near].tolist()):
        joined = group_of[pieces[first]] | group_of[pieces[second]]
        group_of |= dict.fromkeys(joined, joined)
    groups = {tuple(sorted(group)) for group in group_of.values() if len(group) > 1}
    return [list(group) for group in sorted(groups)]


_PLACES = scramble(np.arange(RUN, dtype=np.uint64)) | np.uint64(1)  # odd factors that tell the intervals of a run apart


def _assign_splits(records: list[Record], alike: list[list[str]], seed: int) -> None:
    """The publisher's split where there is one; else by piece, in an order that only the seed and the name decide.

    Pieces that are `alike` go where the first of them goes.
    """
    pieces = {record.take.piece for record in records if record.take.split is None}
    first_of = {piece: group[0] for group in alike for piece in group}
    order = sorted(
        pieces - (first_of.keys() - set(first_of.values())), key=lambda one: (key_of(seed, "split", one), one)
    )
    num_held = max(1, round(HELD_OUT * len(order))) if len(order) >= 3 else 0
    split_of = dict.fromkeys(order, "train")
    split_of |= dict.fromkeys(order[:num_held], "validation") | dict.fromkeys(order[num_held : 2 * num_held], "test")
    if len(order) == 2:
        split_of[order[0]] = "validation"
    for record in records:
        record.split = record.take.split or split_of[first_of.get(record.take.piece, record.take.piece)]


def _without_leaks(records: list[Record], dropped: dict[str, int]) -> list[Record]:
    """Takes records out of train that are also in validation or test, and out of validation that are also in test."""
    validation, test = ({r.digest for r in records if r.split == split} for split in ("validation", "test"))
    elsewhere = {"train": validation | test, "validation": test, "test": set[str]()}
    kept = [record for record in records if record.digest not in elsewhere[record.split]]
    dropped["duplicate_records"] = len(records) - len(kept)
    dropped["duplicate_notes"] = sum(r.num_notes for r in records) - sum(r.num_notes for r in kept)
    dropped["repeats_kept"] = len(kept) - len({(record.split, record.digest) for record in kept})
    if not any(record.split == "train" for record in kept):
        raise DataError(
            f"no record is left to train on: {dropped['duplicate_records']} of {len(records)} are copies of "
            "held-out ones; pass --from a folder with more than one distinct piece.",
            code="data-empty",
        )
    return kept


def _write(writer: StoreWriter, records: list[Record]) -> str:
    histogram = {split: np.zeros(VOCAB_SIZE, dtype=np.int64) for split in SPLITS}
    splits_of_piece: dict[str, set[str]] = {}
    writer.array("tokens", np.uint16)
    writer.check_ids(VOCAB_SIZE - 1, "tokens")
    for record in records:
        take, start = record.take, writer.append("tokens", record.ids)
        histogram[record.split] += np.bincount(record.ids, minlength=VOCAB_SIZE)
        splits_of_piece.setdefault(take.piece, set()).add(record.split)
        writer.record(
            split=record.split, start=start, length=len(record.ids), piece=take.piece, composer=take.composer,
            source=take.source, notes=record.num_notes, seconds=round(record.seconds, 2), digest=record.digest,
        )  # fmt: skip
    counts = {}
    for split in SPLITS:
        chosen = [record for record in records if record.split == split]
        counts[split] = {
            "pieces": len({r.take.piece for r in chosen}),
            "files": len({r.take.source for r in chosen}),
            "records": len(chosen),
            "notes": sum(r.num_notes for r in chosen),
            "hours": round(sum(r.seconds for r in chosen) / 3600, 3),
            "tokens": sum(len(r.ids) for r in chosen),
        }
    writer.info.update(
        counts=counts,
        is_split_by_publisher=all(record.take.split is not None for record in records),
        pieces_in_two_splits=sorted(piece for piece, splits in splits_of_piece.items() if len(splits) > 1),
        unigram_nats={split: unigram_nats(histogram[split]) for split in SPLITS},
        histogram={split: values.tolist() for split, values in histogram.items()},
    )
    writer.info["summary"] = summary = _summary(writer.info)
    return summary


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
    for split, c in counts.items():
        text = (
            f"{c['pieces']} pieces, {c['records']} records, {c['notes']} notes, {c['hours']:.2f} h, "
            f"{units.count(c['tokens'])} tokens, unigram entropy {info['unigram_nats'][split]:.3f} nats"
        )
        if not c["records"] and info["is_split_by_publisher"]:
            text = "empty: its publisher put nothing usable there"
        elif not c["records"]:
            text = f"empty: a split by piece needs {2 if split == 'validation' else 3} pieces or more"
        lines.append(f"  {split:<10}  {text}")
    if bad:
        named = "; ".join(printable(f"{item['file']}: {item['reason']}") for item in bad[:3])
        lines.append(f"quarantined {len(bad)} files ({named}{'; ..' if len(bad) > 3 else ''})")
    left = {
        "lie outside 21..108": dropped["outside_notes"],
        "were merged with another of the same pitch and start": dropped["merged_notes"],
        f"were in {dropped['short_records']} records of fewer than 2 notes": dropped["short_notes"],
        f"were in {dropped['duplicate_records']} copies of held-out records": dropped["duplicate_notes"],
    }
    listed = ", ".join(f"{number} {what}" for what, number in left.items() if number)
    lines.append(f"of {dropped['read_notes']} notes read, {listed}" if listed else "every note read is kept")
    if groups := info["near_duplicates"]:
        shown = "; ".join(printable(", ".join(group)) for group in groups[:3])
        lines.append(
            f"{sum(map(len, groups))} pieces are nearly another one and share its split ({shown}"
            f"{'; ..' if len(groups) > 3 else ''})"
        )
    if info["pieces_in_two_splits"]:
        lines.append(f"the publisher's splits have {len(info['pieces_in_two_splits'])} pieces in two of them")
    return "\n".join(lines)
