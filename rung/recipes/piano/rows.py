"""Rows of tokens to train and evaluate on, cut from the records of stores.

`Performances` are windows of a record, for the next token. `TaskRows` are `notes_per_record` consecutive notes each, as
a question and its answer. Training rows draw their task and augmentation from (seed, step, row); rows of an eval set
are fixed: each stretch of notes with each task, unchanged. A row at another speed is encoded again from its notes, so
it lacks the notes that were already sounding when its window begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rung.data.store import Store
from rung.data.stream import Windows, chosen_of
from rung.errors import DataError
from rung.random import Draw
from rung.recipe import Arrays, Stream
from rung.recipes.piano.notes import HIGHEST, LOWEST, in_order, moved, quantise
from rung.recipes.piano.tasks import Choice, Example, prefix_of, sequences
from rung.recipes.piano.tokenizer import (
    CLS,
    EOGENAI,
    GENAI,
    NOTE_OFF,
    NOTE_ON,
    NUM_PITCHES,
    PAD,
    TIME,
    TIME_STEPS,
    TOKENIZER,
    VELOCITY,
)

NUM_CHECKED = 512  # rows from which the length of rows and their number of targets are estimated
NUM_PREFIX = 2  # tokens: data set and composer
BEYOND = 128  # tokens read past a window, as ends of notes from before it fall out; 64 did for all of ASAP and POP909


@dataclass(frozen=True)
class Augment:
    """A row keeps its own speed as often as it gets each of `speeds`; so it is with its own pitch and each shift."""

    speeds: tuple[float, ...] = ()
    max_shift: int = 0

    def __bool__(self) -> bool:
        return bool(self.speeds or self.max_shift)

    @property
    def name(self) -> str:
        """For a fingerprint."""
        return f"/speeds-{','.join(f'{s:g}' for s in self.speeds)}/shift-{self.max_shift}" if self else ""

    def draw_speeds(self, draw: Draw) -> np.ndarray:
        """(rows,) factors; 2 is twice as fast."""
        return np.array([1.0, *self.speeds])[draw.integers("speed", 1 + len(self.speeds))]

    def draw_shifts(self, draw: Draw, lowest: np.ndarray, highest: np.ndarray) -> np.ndarray:
        """(rows,) semitones, evenly among all that keep a row with these pitches on the keyboard."""
        least = np.maximum(-self.max_shift, np.minimum(LOWEST - lowest, 0))
        most = np.minimum(self.max_shift, np.maximum(HIGHEST - highest, 0))
        return least + draw.integers("shift", most - least + 1)


def changed(notes: np.ndarray, speed: float, shift: int) -> np.ndarray:
    """The notes `speed` times as fast and `shift` semitones higher, on the grid again."""
    notes = in_order(notes)
    notes["start"] /= speed
    notes["end"] /= speed
    notes["pitch"] = (notes["pitch"].astype(np.int64) + shift).astype(np.uint8)
    return quantise(notes)


class Records(NamedTuple):
    """Some records of one split of a store."""

    store: Store
    split: str
    numbers: np.ndarray
    dataset: str  # its name, for the prefix

    @property
    def fingerprint(self) -> str:
        return f"{self.store.fingerprint}/{self.split}{chosen_of(self.store, self.split, self.numbers)}"

    def prefix(self, record: int) -> list[int]:
        return prefix_of(self.dataset, str(self.store.index[record].get("composer") or ""))

    def ids(self, record: int) -> np.ndarray:
        start = int(self.store.starts[record])
        return self.store.arrays["tokens"][start : start + int(self.store.lengths[record])]


def _numbered_pieces(index: Iterable[Mapping[str, Any]]) -> np.ndarray:
    """A number for the piece that each of these records is of: takes and parts of one are no independent draws."""
    names = [(str(record.get("composer") or ""), str(record.get("piece") or record["source"])) for record in index]
    number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([number_of[name] for name in names], dtype=np.int64)


class Performances(Windows):
    """Rows {"tokens": (rows, context + 1)}: [prefix,] then a window of a record [, <EOGENAI> after its last token].

    With `has_state`, also {"sounding": (rows, keys)}: for how many units each key has sounded when the window begins.
    """

    def __init__(
        self,
        records: Records,
        context: int,
        augment: Augment,
        has_prefix: bool,
        *,
        has_state: bool = False,
        has_end: bool = False,
        moves: bool = False,
    ) -> None:
        """With `moves` each row begins earlier by as much as the last row of its record has room for, or less; so the
        padding that ends a record shortens its first row instead."""
        own = context - NUM_PREFIX * has_prefix
        if own < 2:
            raise DataError(
                f"data.context_size={context} leaves no room after {NUM_PREFIX} prefix tokens; raise it",
                code="bad-range",
            )
        end = EOGENAI if has_end else None
        super().__init__(records.store, records.split, own, PAD, group="composer", records=records.numbers, end=end)
        self.fingerprint += augment.name + ("/prefix" if has_prefix else "") + ("/moving" if moves else "")
        self.about = {"source": records.store.info.get("source"), "split": records.split, "tokenizer": TOKENIZER.hash}
        self._augment, self._has_prefix, self._has_state, self._moves = augment, has_prefix, has_state, moves
        self._pieces = _numbered_pieces(records.store.index[number] for number in records.numbers.tolist())
        self._prefixes = np.array([records.prefix(number) for number in records.numbers.tolist()], dtype=np.uint16)
        self._begins = records.store.starts[records.numbers]
        num_predictions = records.store.lengths[records.numbers] - 1 + has_end
        self._room = -num_predictions % own  # of the last row of each record

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        record = self._record_of(ids)
        start = ids * self.context + self._shift[record]
        length = np.full(len(ids), self.context + 1)
        if self._moves:
            start = start - draw.integers("cut", self._room[record] + 1)
            missing = np.maximum(self._begins[record] - start, 0)
            start, length = start + missing, length - missing
        tokens = self._rows_at(start, record)
        if self._moves:
            tokens = np.where(np.arange(self.context + 1) < length[:, None], tokens, np.uint16(PAD))
        sounding = np.full((len(ids), NUM_PITCHES), -1, dtype=np.int16)
        if self._has_state:
            for row in np.flatnonzero(start > self._begins[record]).tolist():
                sounding[row] = sounding_after(self._ids[self._begins[record[row]] : start[row]])
        if self._augment:
            tokens, sounding = self._changed(record, start, length, tokens, sounding, draw)
        if self._has_prefix:
            tokens = np.concatenate([self._prefixes[record], tokens], axis=1)
        return {"tokens": tokens, "sounding": sounding} if self._has_state else {"tokens": tokens}

    def cluster_of(self, ids: np.ndarray) -> np.ndarray:
        return self._pieces[self._record_of(ids)]

    def _changed(
        self,
        records: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        tokens: np.ndarray,
        sounding: np.ndarray,
        draw: Draw,
    ) -> tuple[np.ndarray, np.ndarray]:
        speeds = self._augment.draw_speeds(draw)
        tokens = tokens.copy()
        for row in np.flatnonzero(speeds != 1).tolist():
            speed, start, end = float(speeds[row]), int(starts[row]), int(self._ends[records[row]])
            wanted = BEYOND + int(self.context * (1 + max(speed, 1.0)) / 2)  # faster music takes fewer tokens
            window = self._ids[start : min(start + wanted, end)]
            head = window[:1][window[:1] == CLS]
            notes = TOKENIZER.decode(window, keep_open=True)  # what is still open here has its end past the row
            made = [head, TOKENIZER.encode(changed(notes, speed, 0))]
            if self.end is not None and start + wanted >= end:
                made.append(np.array([self.end], dtype=np.uint16))
            whole = np.concatenate(made)[: lengths[row]]
            tokens[row, : len(whole)], tokens[row, len(whole) :] = whole, PAD
            sounding[row] = -1  # these notes are not among them
        is_note = (tokens >= NOTE_ON) & (tokens < VELOCITY)
        keys = LOWEST + np.where(tokens < NOTE_OFF, tokens - NOTE_ON, tokens - NOTE_OFF).astype(np.int64)
        lowest = np.where(is_note, keys, LOWEST + NUM_PITCHES).min(axis=1)
        highest = np.where(is_note, keys, 0).max(axis=1)
        shifts = self._augment.draw_shifts(draw, lowest, highest)
        # A key that sounds on past the row may leave the keyboard: no token of the row speaks of it.
        source = np.arange(NUM_PITCHES) - shifts[:, None]
        moved = np.take_along_axis(sounding, source.clip(0, NUM_PITCHES - 1), axis=1)
        sounding = np.where((source >= 0) & (source < NUM_PITCHES), moved, np.int16(-1))
        return np.where(is_note, tokens + shifts[:, None], tokens).astype(tokens.dtype), sounding


def sounding_after(ids: np.ndarray) -> np.ndarray:
    """(keys,) how many units each key has sounded after these tokens of a record, 32767 at most; -1 = it does not."""
    ages = np.full(NUM_PITCHES, -1, dtype=np.int16)
    places = np.flatnonzero((ids >= NOTE_ON) & (ids < VELOCITY))
    last = np.full(NUM_PITCHES, -1)
    last[(ids[places].astype(np.int64) - NOTE_ON) % NUM_PITCHES] = places  # of several for one key the last stays
    sounds = last >= 0
    sounds[sounds] = ids[last[sounds]] < NOTE_OFF
    if sounds.any():
        first = int(last[sounds].min())
        steps = ids[first:].astype(np.int64) - TIME
        clock = np.cumsum(np.where((steps >= 0) & (steps < len(TIME_STEPS)), 1 << steps.clip(0, len(TIME_STEPS)), 0))
        ages[sounds] = np.minimum(clock[-1] - clock[last[sounds] - first], np.iinfo(np.int16).max)
    return ages


class Stretch(NamedTuple):
    """Consecutive notes of a record."""

    owner: int  # which of the records
    first: int  # of its notes
    notes: np.ndarray


class RowStats(NamedTuple):
    num_rows: int
    targets: list[np.ndarray]  # the ids that count, of each row
    longest: int  # predictions that the longest row would have
    cut: float  # share of rows that are longer than the context
    unanswered: float  # share of rows that lose their whole answer by that


class TaskRows(Stream):
    """Rows {"tokens": (rows, context + 1), "task": (rows,)}: question, answer, padding."""

    def __init__(
        self,
        records: Sequence[Records],
        choices: Sequence[Choice],
        notes_per_record: int,
        context: int,
        has_prefix: bool = False,
        augment: Augment | None = None,
    ) -> None:
        """`augment` None makes an eval set; rows of training may be changed by it, or by nothing."""
        self.choices, self.context = list(choices), context
        self.is_eval, self._augment, self._has_prefix = augment is None, augment or Augment(), has_prefix

        # Every record is decoded and cut into stretches; one note alone at the end of a record is left out.
        self._origins = [(some, n) for some in records for n in some.numbers.tolist()]
        self._stretches: list[Stretch] = []
        for owner, (some, number) in enumerate(self._origins):
            notes = TOKENIZER.decode(some.ids(number))
            for first in range(0, len(notes) - 1, notes_per_record):
                self._stretches.append(Stretch(owner, first, notes[first : first + notes_per_record]))
        self._owners = np.array([stretch.owner for stretch in self._stretches], dtype=np.int64)
        self.num_rows = len(self._stretches) * (len(self.choices) if self.is_eval else 1)
        if not self.num_rows:
            raise DataError("no record has two notes or more; prepare other data", code="data-empty")

        # An eval set asks each task once, however often training does: weights are no part of what it is.
        asked = [(c.task.name, *([] if self.is_eval else [c.weight]), c.ranges) for c in self.choices]
        how = f"tasks-{notes_per_record}-{context}-{asked}{self._augment.name}{'/prefix' if has_prefix else ''}"
        self.fingerprint = " + ".join([*(some.fingerprint for some in records), how])
        self.stores = [some.store for some in records]
        self._composers = [str(some.store.index[n].get("composer") or "") for some, n in self._origins]
        self._pieces = _numbered_pieces(some.store.index[n] for some, n in self._origins)
        self.groups = sorted({name for name in self._composers if name})
        weights = np.array([choice.weight for choice in self.choices])
        self._weight_below = np.cumsum(weights / weights.sum())

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        tokens = np.full((len(ids), self.context + 1), PAD, dtype=np.uint16)
        which = self._tasks(ids, draw)
        for row, made in enumerate(self._sequences(ids, which, draw)):
            tokens[row, : len(made)] = made[: self.context + 1]
        return {"tokens": tokens, "task": which}

    def _tasks(self, ids: np.ndarray, draw: Draw) -> np.ndarray:
        if self.is_eval:
            return ids // len(self._stretches)  # rows spread evenly over the set then meet every task
        return self._weight_below.searchsorted(draw.uniform("task")[:, 0], side="right").clip(0, len(self.choices) - 1)

    def _sequences(self, ids: np.ndarray, which: np.ndarray, draw: Draw) -> list[np.ndarray]:
        """The whole of each row, however long."""
        if self.is_eval:  # a row of an eval set is the same whatever is evaluated with it, and with whatever seed
            draw = Draw(0, -1, ids)
        most = max(len(choice.ranges) for choice in self.choices)
        uniform, seeds = draw.uniform("values", most + 1), draw.integers("noise", 2**31)
        numbers = ids % len(self._stretches)
        stretches = [moved(notes, -float(notes["start"][0])) for notes in (self._stretches[n].notes for n in numbers)]
        if self._augment:
            speeds = self._augment.draw_speeds(draw)
            lowest, highest = (np.array([int(f(n["pitch"])) for n in stretches]) for f in (np.min, np.max))
            shifts = self._augment.draw_shifts(draw, lowest, highest)
            stretches = [changed(n, float(f), int(s)) for n, f, s in zip(stretches, speeds, shifts)]
        examples = []
        for row, owner in enumerate(self._owners[numbers].tolist()):
            choice, (some, record) = self.choices[which[row]], self._origins[owner]
            values = choice.task.fitting(stretches[row], choice.draw(uniform[row]))
            prompt, target = choice.task.split(stretches[row], values, int(seeds[row]))
            prefix = some.prefix(record) if self._has_prefix else ()
            examples.append(Example(choice.task, values, prompt, target, prefix))
        return sequences(examples)

    def stats(self, only_answers: bool) -> RowStats:
        """Estimates over all rows from some, spread evenly."""
        ids = np.unique(np.linspace(0, self.num_rows - 1, min(self.num_rows, NUM_CHECKED)).astype(np.int64))
        draw = Draw(0, 0, np.arange(len(ids)))
        made = self._sequences(ids, self._tasks(ids, draw), draw)
        asked = [1 + int(np.flatnonzero(one == GENAI)[0]) for one in made]
        return RowStats(
            len(ids),
            [one[first if only_answers else 1 : self.context + 1] for one, first in zip(made, asked)],
            longest=max(len(one) for one in made) - 1,
            cut=float(np.mean([len(one) > self.context + 1 for one in made])),
            unanswered=float(np.mean([first > self.context for first in asked])),
        )

    def group_of(self, ids: np.ndarray) -> np.ndarray:
        number_of = {name: number for number, name in enumerate(self.groups)}
        by_owner = np.array([number_of.get(name, -1) for name in self._composers])
        return by_owner[self._owners[ids % len(self._stretches)]]

    def cluster_of(self, ids: np.ndarray) -> np.ndarray:
        return self._pieces[self._owners[ids % len(self._stretches)]]

    def places(self, ids: np.ndarray) -> list[dict[str, Any]]:
        rows, labels = [], labels_of(self.choices)
        for row in ids.tolist():
            task, number = divmod(row, len(self._stretches))
            owner, first, _ = self._stretches[number]
            some, record = self._origins[owner]
            known = {"source": some.store.index[record].get("source"), "note": first}
            rows.append({"row": row, **known, **({"task": labels[task]} if self.is_eval else {})})
        return rows


def labels_of(choices: Sequence[Choice]) -> list[str]:
    """A name for each: that of its task, numbered where a task is asked for with several ranges."""
    labels: list[str] = []
    for choice in choices:
        again = sum(label.partition("-")[0] == choice.task.name for label in labels)
        labels.append(f"{choice.task.name}-{again + 1}" if again else choice.task.name)
    return labels
