"""Notes as one structured array: start and end in seconds, pitch, velocity.

Every function returns new arrays sorted by start, then pitch. Quantised notes are plain notes whose times lie on the
grid. `quantise` makes each pitch monophonic, as a piano key is: striking it again ends its earlier note, and two
strikes in the same unit are one. Without that, events could not be decoded exactly.
"""

from __future__ import annotations

import numpy as np

NOTE = np.dtype([("start", "<f8"), ("end", "<f8"), ("pitch", "u1"), ("velocity", "u1")])
LOWEST, HIGHEST = 21, 108  # the keys of a piano
UNIT_S = 0.01


def make(start: object, end: object, pitch: object, velocity: object) -> np.ndarray:
    """Notes out of four columns (or scalars that apply to all), sorted."""
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(c)) for c in (start, end, pitch, velocity)))
    notes = np.empty(len(columns[0]), dtype=NOTE)
    for name, column in zip(NOTE.names or (), columns):
        notes[name] = column
    return in_order(notes)


def in_order(notes: np.ndarray) -> np.ndarray:
    """By start, then pitch, then end: the one order in which notes are kept."""
    return notes[np.lexsort((notes["velocity"], notes["end"], notes["pitch"], notes["start"]))]


def join(parts: list[np.ndarray]) -> np.ndarray:
    return in_order(np.concatenate(parts)) if parts else np.empty(0, dtype=NOTE)


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


def seconds_at(positions: np.ndarray, change_at: np.ndarray, s_per_unit: np.ndarray) -> np.ndarray:
    """Score positions as seconds, under a tempo that is `s_per_unit[i]` from position `change_at[i]` on.

    `change_at` ascends; the first tempo also holds before its position.
    """
    change_at, s_per_unit = change_at.astype(np.float64), s_per_unit.astype(np.float64)
    lengths_s = np.diff(change_at) * s_per_unit[:-1]
    s_at_change = np.cumsum(np.concatenate([change_at[:1] * s_per_unit[:1], lengths_s]))
    piece = np.maximum(np.searchsorted(change_at, positions, side="right") - 1, 0)
    seconds: np.ndarray = s_at_change[piece] + (positions - change_at[piece]) * s_per_unit[piece]
    return seconds
