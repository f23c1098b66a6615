"""Notes as a sequence of events, and back.

Events come in order of time, NOTE_OFF before NOTE_ON, pitch ascending; a velocity precedes each NOTE_ON, and a time
difference is written largest step first. Special tokens take places that every stage has, in the order of SPECIALS, so
that an id means the same wherever a checkpoint goes: new ones are added at the end. <CLS> is left to the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rung.recipes.piano.notes import HIGHEST, LOWEST, NOTE, UNIT_S, make, quantise, units

PAD, CLS = 0, 1
NUM_PITCHES = HIGHEST - LOWEST + 1
NUM_VELOCITIES = 32
BIN_WIDTH = 128 // NUM_VELOCITIES
TIME_STEPS = (1, 2, 4, 8, 16, 32, 64)
NUM_PLACES = 1024

NOTE_ON = 2
NOTE_OFF = NOTE_ON + NUM_PITCHES
VELOCITY = NOTE_OFF + NUM_PITCHES
TIME = VELOCITY + NUM_VELOCITIES
PLACE = TIME + len(TIME_STEPS)
VOCAB_SIZE = PLACE + NUM_PLACES

CLASSES = ("note_on", "note_off", "velocity", "time", "special")
ON, OFF, LOUD, WAIT, SPECIAL = range(len(CLASSES))
CLASS_OF_ID = np.full(VOCAB_SIZE, SPECIAL, dtype=np.uint8)
CLASS_OF_ID[NOTE_ON:NOTE_OFF] = ON
CLASS_OF_ID[NOTE_OFF:VELOCITY] = OFF
CLASS_OF_ID[VELOCITY:TIME] = LOUD
CLASS_OF_ID[TIME:PLACE] = WAIT
CLASS_OF_ID.flags.writeable = False

MOST_PARAMETER = 127
DATASETS = ("maestro", "asap", "pop909", "giantmidi", "atepp", "pijama", "vgmidi", "lakh", "bach", "other")
COMPOSERS = (
    "Bach", "Beethoven", "Brahms", "Chopin", "Debussy", "Handel", "Haydn", "Liszt", "Mendelssohn", "Mozart",
    "Rachmaninoff", "Scarlatti", "Schubert", "Schumann", "Scriabin", "other",
)  # fmt: skip
TASK_NAMES = (
    "continuation", "top_line", "bottom_line", "high_notes", "low_notes", "short_notes", "long_notes", "infill",
    "velocity_denoising", "timing_denoising", "harmonise",
)  # fmt: skip
SPECIALS = (
    "<GENAI>",
    "<EOGENAI>",
    *(f"<DATASET_{name.upper()}>" for name in DATASETS),
    *(f"<COMPOSER_{name.upper()}>" for name in COMPOSERS),
    *(f"<TASK_{name.upper()}>" for name in TASK_NAMES),
    *(f"<PARAMETER_{value}>" for value in range(MOST_PARAMETER + 1)),
)
GENAI, EOGENAI = PLACE, PLACE + 1

DEFAULT_BIN = NUM_VELOCITIES // 2  # of a note that a model starts before any velocity


@dataclass(frozen=True)
class Tokenizer:
    """Immutable: another list of specials is another tokenizer, with another hash."""

    specials: tuple[str, ...] = SPECIALS

    def __post_init__(self) -> None:
        if len(self.specials) > NUM_PLACES:
            raise ValueError(f"{len(self.specials)} special tokens, there are {NUM_PLACES} places")
        if len(self.ids) != VOCAB_SIZE:
            raise ValueError("a special token has a name that is taken already")

    def encode(self, notes: np.ndarray) -> np.ndarray:
        """Ids as uint16, without <CLS>. Notes are quantised first; they must lie in 21..108 and not start before 0."""
        notes = quantise(notes)
        if len(notes) and (notes["pitch"].min() < LOWEST or notes["pitch"].max() > HIGHEST):
            raise ValueError(f"notes outside {LOWEST}..{HIGHEST}; drop them with in_range()")
        if len(notes) and notes["start"][0] < 0:
            raise ValueError("notes before 0 s; move them with from_zero()")
        return self.encode_all([notes])[0]

    def encode_all(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The ids of each part, all at once: 64 short parts take a tenth of the time of one after the other.

        What `encode` makes sure of is taken for granted: notes are quantised, on the keyboard, and not before 0.
        """
        notes, num_notes = np.concatenate(parts), np.array([len(part) for part in parts])
        times = np.concatenate([units(notes["start"]), units(notes["end"])])
        if len(times) == 0:
            return [np.empty(0, dtype=np.uint16) for _ in parts]
        part = np.tile(np.repeat(np.arange(len(parts)), num_notes), 2)
        is_on = np.arange(len(times)) < len(notes)
        keys = np.tile(notes["pitch"].astype(np.int64) - LOWEST, 2)
        bins = np.tile(notes["velocity"].astype(np.int64) // BIN_WIDTH, 2).clip(0, NUM_VELOCITIES - 1)
        # By part, time, off before on, and key: as one number, which sorts four times as fast as four columns.
        order = np.argsort(((part * (times.max() + 1) + times) * 2 + is_on) * NUM_PITCHES + keys)
        times, part, is_on, keys, bins = times[order], part[order], is_on[order], keys[order], bins[order]
        waits = np.diff(times, prepend=0)
        begins = np.append(True, part[1:] != part[:-1])
        waits[begins] = times[begins]

        # Each event after its wait, largest step first. The loop is over the seven step sizes, not over events.
        num_longest, rest = np.divmod(waits, TIME_STEPS[-1])
        num_steps = num_longest + np.bitwise_count(rest)
        ends = np.cumsum(num_steps + 1 + is_on)
        ids = np.full(int(ends[-1]), PLACE - 1, dtype=np.uint16)  # the longest steps are in place already
        ids[ends - 1] = keys + np.where(is_on, NOTE_ON, NOTE_OFF)
        ids[ends[is_on] - 2] = VELOCITY + bins[is_on]
        place = ends - 1 - is_on - num_steps + num_longest
        for power in reversed(range(len(TIME_STEPS) - 1)):
            has_step = (rest >> power) & 1 == 1
            ids[place[has_step]] = TIME + power
            place += has_step
        lasts = np.append(0, ends)[2 * np.cumsum(num_notes)]  # a note has two events
        return np.split(ids, lasts[:-1])

    def decode(self, ids: np.ndarray, keep_open: bool = False) -> np.ndarray:
        """Notes out of any ids; with `keep_open` notes that never end last until the final moment.

        Exact for quantised notes whose velocities are bin midpoints. What a model emits need not be well formed: a
        NOTE_OFF without its note is ignored, a pitch started again ends its earlier note, a note that ends in the unit
        it started in is dropped, and ids that are no events are skipped.
        """
        ids = np.asarray(ids).astype(np.int64).ravel()
        classes = self.token_class(ids)
        steps = np.where(classes == WAIT, np.left_shift(1, np.clip(ids - TIME, 0, len(TIME_STEPS) - 1)), 0)
        clock = np.cumsum(steps)
        loud_at = np.maximum.accumulate(np.where(classes == LOUD, np.arange(len(ids)), -1))
        events = np.flatnonzero((classes == ON) | (classes == OFF))
        if len(events) == 0:
            return np.empty(0, dtype=NOTE)
        is_on = classes[events] == ON
        keys = ids[events] - np.where(is_on, NOTE_ON, NOTE_OFF)
        order = np.argsort(keys, kind="stable")  # key by key, each in the order of events
        events, is_on, keys = events[order], is_on[order], keys[order]
        start = clock[events]
        end = np.append(start[1:], 0)  # whatever comes next on a key ends the note before it
        is_last = np.append(keys[1:] != keys[:-1], True)
        end[is_last] = clock[-1] if keep_open else -1
        found = is_on & (end > start)
        loud_at = loud_at[events[found]]
        bins = np.where(loud_at >= 0, ids[loud_at] - VELOCITY, DEFAULT_BIN)
        velocity = bins * BIN_WIDTH + BIN_WIDTH // 2
        return make(start[found] * UNIT_S, end[found] * UNIT_S, keys[found] + LOWEST, velocity)

    def token_class(self, ids: np.ndarray) -> np.ndarray:
        """Index into CLASSES per id; a number that is no id counts as special."""
        ids = np.asarray(ids).astype(np.int64)
        is_id = (ids >= 0) & (ids < VOCAB_SIZE)
        return np.where(is_id, CLASS_OF_ID[np.where(is_id, ids, PAD)], np.uint8(SPECIAL))

    @cached_property
    def names(self) -> tuple[str, ...]:
        keys = range(LOWEST, HIGHEST + 1)
        return (
            "<PAD>",
            "<CLS>",
            *(f"NOTE_ON_{pitch}" for pitch in keys),
            *(f"NOTE_OFF_{pitch}" for pitch in keys),
            *(f"VELOCITY_{number}" for number in range(NUM_VELOCITIES)),
            *(f"TIME_{step}" for step in TIME_STEPS),
            *self.specials,
            *(f"<PLACE_{number}>" for number in range(len(self.specials), NUM_PLACES)),
        )

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each name."""
        return {name: id for id, name in enumerate(self.names)}

    @property
    def description(self) -> dict[str, Any]:
        """All that gives an id its meaning; kept in stores and checkpoints."""
        return {
            "kind": "exponential time",
            "vocab_size": VOCAB_SIZE,
            "pitches": [LOWEST, HIGHEST],
            "velocity_bins": NUM_VELOCITIES,
            "time_steps": list(TIME_STEPS),
            "unit_s": UNIT_S,
            "specials": list(self.specials),
            "hash": self.hash,
        }

    @property
    def hash(self) -> str:
        """Changes when any id changes its meaning, so also with the order of the specials."""
        text = json.dumps([self.names, UNIT_S, "off before on, velocity before on, largest step first"])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


TOKENIZER = Tokenizer()
