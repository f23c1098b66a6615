"""Notes as one structured array: start and end in seconds, pitch, velocity.

Every function returns new arrays sorted by start, then pitch. Quantised notes are plain notes whose times lie on the
grid. `quantise` makes each pitch monophonic, as a piano key is: striking it again ends its earlier note, and two
strikes in the same unit are one. Without that, events could not be decoded exactly.
"""

from __future__ import annotations

import numpy as np

from rung.data.notes import NOTE, in_order, join, make, seconds_at  # noqa: F401 (piano takes all of them from here)

LOWEST, HIGHEST = 21, 108  # the keys of a piano
UNIT_S = 0.01


def in_range(notes: np.ndarray) -> tuple[np.ndarray, int]:
    """The notes within the 88 keys, and how many lie outside."""
    kept = notes[(notes["pitch"] >= LOWEST) & (notes["pitch"] <= HIGHEST)]
    return kept, len(notes) - len(kept)


def from_zero(notes: np.ndarray) -> np.ndarray:
    """Moved so that the first one starts at 0."""
    notes = in_order(notes)
    return moved(notes, -notes["start"][0]) if len(notes) else notes


def moved(notes: np.ndarray, by_s: float) -> np.ndarray:
    notes = notes.copy()
    notes["start"] += by_s
    notes["end"] += by_s
    return notes


def units(seconds: np.ndarray) -> np.ndarray:
    """Whole units nearest to these times, halves upwards."""
    return np.floor(seconds / UNIT_S + 0.5).astype(np.int64)


def quantise(notes: np.ndarray) -> np.ndarray:
    """On the grid, at least one unit long, at most one note sounding per pitch. Doing it twice changes nothing."""
    start, end = units(notes["start"]), units(notes["end"])
    order = np.lexsort((start, notes["pitch"]))
    notes, start, end = notes[order], start[order], np.maximum(end, start + 1)[order]
    if len(notes) == 0:
        return notes
    is_new = np.ones(len(notes), dtype=bool)
    is_new[1:] = (np.diff(start) != 0) | (np.diff(notes["pitch"].astype(np.int16)) != 0)
    first = np.flatnonzero(is_new)
    # Strikes of one key in one unit become one note: the longest, as loud as the loudest.
    end, velocity = np.maximum.reduceat(end, first), np.maximum.reduceat(notes["velocity"], first)
    start, pitch = start[first], notes["pitch"][first]
    is_restruck = pitch[1:] == pitch[:-1]
    end[:-1] = np.where(is_restruck, np.minimum(end[:-1], start[1:]), end[:-1])
    return make(start * UNIT_S, end * UNIT_S, pitch, velocity)


def split_at_pauses(notes: np.ndarray, threshold_s: float) -> list[np.ndarray]:
    """Cut wherever nothing sounds for more than `threshold_s`; 0 = never. Together the parts hold every note."""
    if not threshold_s >= 0:
        raise ValueError(f"a pause of {threshold_s} s is not a length of time")
    notes = in_order(notes)
    if len(notes) == 0:
        return []
    if threshold_s == 0:
        return [notes]
    latest_end = np.maximum.accumulate(notes["end"])  # a long note may sound on under many short ones
    gaps = notes["start"][1:] - latest_end[:-1]
    return np.split(notes, np.flatnonzero(gaps > threshold_s) + 1)
