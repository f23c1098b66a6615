"""Whether notes from nothing could be music of the kind a model was trained on: figures of notes alone.

`statistics` are those of one piece; beside real pieces cut to the same length they tell what a model does wrong: too
many voices, notes that never end, dissonance, a key that drifts. `Copies` says how much of a piece is training data.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rung.recipes.piano.notes import in_order

LONG_S = 4.0
DISSONANT = (1, 2, 6, 10, 11)  # semitones, octaves aside
SPAN_S = 8.0  # in which pitch classes are counted
ENDS_S = 10.0  # the first and last seconds, whose pitch classes are compared
GRAM = 8  # notes; of copies and of repetition
NAMES = (
    "voices", "most_voices", "long_notes", "dissonance", "notes_per_s", "range", "pitch_classes", "key_keeps",
    "mean_leap", "steps", "repetition", "copied", "copied_run",
)  # fmt: skip


def cut(notes: np.ndarray, seconds: float) -> np.ndarray:
    """The first seconds of a piece."""
    notes = in_order(notes[notes["start"] < seconds])
    notes["end"] = np.minimum(notes["end"], seconds)
    return notes


def statistics(notes: np.ndarray) -> dict[str, float]:
    """Of one piece, all but those of `Copies`; NaN where it is too short to tell.

    voices, most_voices: keys that sound at a time, on average while any does, and at most
    long_notes: share of the notes that last longer than four seconds
    dissonance: share of pairs that sound together, weighted by time, a second, tritone or seventh apart
    notes_per_s: from the first start to the last end
    range: semitones between the lowest and the highest note
    pitch_classes: in eight seconds, on average
    key_keeps: correlation of the pitch classes (by time) of the first and the last ten seconds
    mean_leap, steps: semitones between one highest note and the next, where it moves; share of moves by one or two
    repetition: share of runs of eight pitches that came before in the piece
    """
    found = dict.fromkeys(NAMES[:-2], float("nan"))
    if len(notes) == 0:
        return found
    notes = in_order(notes)
    starts, ends, pitches = notes["start"], notes["end"], notes["pitch"].astype(np.int64)
    first_s, last_s = float(starts.min()), float(ends.max())

    # Between two moments nothing changes: which keys sound there, as a table of moments and keys.
    moments = np.unique(np.concatenate([starts, ends]))
    length_s = np.diff(moments)
    change = np.zeros((len(moments), 128), dtype=np.int64)
    np.add.at(change, (np.searchsorted(moments, starts), pitches), 1)
    np.add.at(change, (np.searchsorted(moments, ends), pitches), -1)
    sounds = (np.cumsum(change, axis=0)[:-1] > 0).astype(np.float64)
    num_sounding = sounds.sum(axis=1)
    sounding_s = length_s[num_sounding > 0].sum()
    found["voices"] = float((num_sounding * length_s).sum() / sounding_s) if sounding_s else float("nan")
    found["most_voices"] = float(num_sounding.max(initial=0))
    pair_s = np.array([(length_s[:, None] * sounds[:, by:] * sounds[:, : 128 - by]).sum() for by in range(1, 128)])
    if pair_s.sum() > 0:
        found["dissonance"] = float(pair_s[np.isin(np.arange(1, 128) % 12, DISSONANT)].sum() / pair_s.sum())
    found["long_notes"] = float((ends - starts > LONG_S + 1e-6).mean())
    found["notes_per_s"] = len(notes) / max(last_s - first_s, 0.01)
    found["range"] = float(np.ptp(pitches))

    num_spans = int((last_s - first_s) // SPAN_S)
    spans = ((starts - first_s) // SPAN_S).astype(np.int64)
    if num_spans:
        found["pitch_classes"] = float(np.mean([len(set(pitches[spans == n] % 12)) for n in range(num_spans)]))
    if last_s - first_s >= 2 * ENDS_S:
        begins, finishes = (
            np.bincount(pitches % 12, (np.minimum(ends, high) - np.maximum(starts, low)).clip(0), 12)
            for low, high in ((first_s, first_s + ENDS_S), (last_s - ENDS_S, last_s))
        )
        if np.ptp(begins) > 0 and np.ptp(finishes) > 0:
            found["key_keeps"] = float(np.corrcoef(begins, finishes)[0, 1])

    struck, which = np.unique(np.round(starts, 3), return_inverse=True)
    tops = np.zeros(len(struck), dtype=np.int64)
    np.maximum.at(tops, which, pitches)
    moves = np.abs(np.diff(tops))
    moves = moves[moves > 0]
    if len(moves):
        found["mean_leap"], found["steps"] = float(moves.mean()), float((moves <= 2).mean())
    runs = _runs(notes["pitch"].tobytes())
    if len(runs):
        found["repetition"] = 1 - len(np.unique(runs)) / len(runs)
    return found


class Copies:
    """What runs of notes the training data has, as pitches in the order of starts, in their own key."""

    def __init__(self, pieces: Iterable[np.ndarray]) -> None:
        pitches = [in_order(notes)["pitch"].tobytes() for notes in pieces]
        self._known = np.unique(np.concatenate([_runs(piece) for piece in pitches] or [_runs(b"")]))
        self._whole = b"\xff".join(pitches)

    def statistics(self, notes: np.ndarray) -> dict[str, float]:
        """copied: share of runs of eight notes that training has; copied_run: the longest run of notes it has."""
        piece = in_order(notes)["pitch"].tobytes()
        is_known = np.isin(_runs(piece), self._known)
        longest = 0
        for place in np.flatnonzero(is_known).tolist() or range(len(piece)):
            while place + longest < len(piece) and piece[place : place + longest + 1] in self._whole:
                longest += 1
        return {"copied": float(is_known.mean()) if len(is_known) else float("nan"), "copied_run": float(longest)}


def beside(made: list[dict[str, float]], real: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """By name: the median of what was made, and the 5 % and 95 % points of what is real; without NaN."""
    found = {}
    for name in NAMES:
        ours, theirs = (np.array([one[name] for one in some if name in one]) for some in (made, real))
        ours, theirs = ours[~np.isnan(ours)], theirs[~np.isnan(theirs)]
        if len(ours):
            found[name] = {"median": float(np.median(ours))}
            if name == "copied_run":
                found[name]["most"] = float(ours.max())
            if len(theirs):
                found[name] |= dict(zip(("real_5", "real_95"), np.percentile(theirs, [5, 95]).tolist()))
    return found


def _runs(pitches: bytes) -> np.ndarray:
    """Each run of eight pitches as one number."""
    assert np.dtype(np.uint64).itemsize == GRAM
    if len(pitches) < GRAM:
        return np.empty(0, dtype=np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(np.frombuffer(pitches, dtype=np.uint8), GRAM)
    return np.ascontiguousarray(runs).view(np.uint64)[:, 0]
