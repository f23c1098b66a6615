"""The sustain pedal: how long a note sounds, rather than how long its key was held.

A note whose key is released while the pedal is down sounds until the pedal goes up or its key is struck again. A pedal
belongs to a channel; the caller passes the notes of one.

The one surprising thing is that of changes at one moment only the last counts: a pedal that goes up and down again in
no time damps nothing. So doing it twice changes nothing.
"""

from __future__ import annotations

import numpy as np

from rung.recipes.piano.notes import in_order

CONTROLLER = 64
DOWN = 64  # from this value on the pedal is down; half-pedalling is not told apart


def extend(notes: np.ndarray, times: np.ndarray, is_down: np.ndarray) -> np.ndarray:
    """Notes as they sound, under a pedal that changes at `times`, ascending; one that never goes up does so where the
    last key is released."""
    notes = in_order(notes)
    if len(notes) == 0 or len(times) == 0:
        return notes
    downs, ups = _held(times, is_down, notes["end"].max())
    which = np.searchsorted(downs, notes["end"], side="right") - 1
    lifted = np.concatenate([[-np.inf], ups])[which + 1]  # of a note before any pedal: never
    notes["end"] = np.maximum(notes["end"], np.minimum(lifted, _struck_again(notes)))
    return in_order(notes)


def _held(times: np.ndarray, is_down: np.ndarray, last_end: float) -> tuple[np.ndarray, np.ndarray]:
    """When the pedal goes down, and when up again, one for one."""
    is_last = np.append(times[1:] != times[:-1], True)
    times, is_down = times[is_last], is_down[is_last].astype(bool)
    is_change = is_down != np.concatenate([[False], is_down[:-1]])
    times, is_down = times[is_change], is_down[is_change]
    downs, ups = times[is_down], times[~is_down]
    if len(ups) < len(downs):
        ups = np.append(ups, last_end)
    return downs, ups


def _struck_again(notes: np.ndarray) -> np.ndarray:
    """When the key of each note is struck next; never is infinitely late."""
    order = np.lexsort((notes["start"], notes["pitch"]))
    start, pitch = notes["start"][order], notes["pitch"][order]
    is_first = np.append(True, (start[1:] != start[:-1]) | (pitch[1:] != pitch[:-1]))
    first = np.flatnonzero(is_first)
    after = np.append(first[1:], 0)[np.cumsum(is_first) - 1]  # the first note of the next moment, or of the next key
    again = np.empty(len(notes))
    again[order] = np.where((after > 0) & (pitch[after] == pitch), start[after], np.inf)
    return again
