"""Notes as one structured array: start and end in seconds, pitch, velocity, sorted by start, then pitch."""

from __future__ import annotations

import numpy as np

NOTE = np.dtype([("start", "<f8"), ("end", "<f8"), ("pitch", "u1"), ("velocity", "u1")])


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
