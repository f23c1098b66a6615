"""Compares the notes a model made with those that were played.

Three kinds of measure: F1 of single notes, distances between distributions, the key. `compare_notes` gives them all as
finite numbers, whatever the notes, so that they can be summed over rows; a list of notes compared with itself has the
best of each. At the end the simplest rival of a model, `copy_last`.

The one surprising thing is what no notes at all are worth. Two empty lists agree in everything. Where only one is empty
F1 and correlation are 0, taxicab is 2 (its most), and Wasserstein takes the empty one for a single value of 0; on the
circle of pitch classes, which has no 0, it is 6 (its most).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rung.recipes.piano.notes import NOTE, UNIT_S, in_order, join
from rung.recipes.piano.tokenizer import BIN_WIDTH, NUM_VELOCITIES

ONSET_S = 0.05  # as usual when transcriptions of piano music are judged
VELOCITY = 30
NUM_KEYS = 128
# Times on the grid differ from round numbers by rounding; what is meant to lie on a limit counts as within it.
SLACK_S = 1e-6

# Notes


class F1(NamedTuple):
    precision: float
    recall: float
    f1: float


def note_f1(
    reference: np.ndarray,
    made: np.ndarray,
    *,
    onset_s: float = ONSET_S,
    velocity: int | None = None,
    pitch_class: bool = False,
) -> F1:
    """How many notes find a partner: same pitch, onsets at most `onset_s` apart, velocities at most `velocity`.

    Partners are chosen so that as many notes as possible have one, and no note has two. How long a note lasts does not
    matter here; see weighted_f1.
    """
    if len(reference) == len(made) == 0:
        return F1(1.0, 1.0, 1.0)
    keys = _keys(reference, pitch_class), _keys(made, pitch_class)
    onsets, most_s = (reference["start"], made["start"]), onset_s + SLACK_S
    if velocity is None:
        num_pairs = len(_pairs_on_a_line(keys, onsets, most_s))
    else:
        louds = reference["velocity"].astype(np.int64), made["velocity"].astype(np.int64)
        num_pairs = sum(
            _num_pairs(_fits(ours, theirs, onsets, most_s) & _fits(ours, theirs, louds, velocity))
            for ours, theirs in ((keys[0] == key, keys[1] == key) for key in np.intersect1d(*keys))
        )
    return _f1(num_pairs / max(len(made), 1), num_pairs / max(len(reference), 1))


def weighted_f1(
    reference: np.ndarray, made: np.ndarray, *, velocity: int | None = VELOCITY, pitch_class: bool = False
) -> F1:
    """F1 of the keys that sound at a moment, averaged over all moments at which any does.

    So a long note weighs more than a short one, and one that is held for half as long is half right. Octaves are
    counted one by one also where `pitch_class` makes them alike.
    """
    moments = np.unique(np.concatenate([notes[side] for notes in (reference, made) for side in ("start", "end")]))
    sounding = _sounding(reference, moments, pitch_class), _sounding(made, moments, pitch_class)
    num_moments = max(len(moments) - 1, 0)
    count = [np.bincount(groups // NUM_KEYS, minlength=num_moments) for groups, _ in sounding]
    pairs = _pairs_on_a_line(
        (sounding[0][0], sounding[1][0]),
        (sounding[0][1], sounding[1][1]),
        np.inf if velocity is None else velocity,
    )
    matched = np.bincount(pairs // NUM_KEYS, minlength=num_moments)
    weight_s = np.where(count[0] + count[1] > 0, np.diff(moments), 0.0)
    if weight_s.sum() == 0:
        return F1(1.0, 1.0, 1.0)
    precision, recall = matched / np.maximum(count[1], 1), matched / np.maximum(count[0], 1)
    f1 = 2 * matched / np.maximum(count[0] + count[1], 1)
    return F1(*(float((weight_s * each).sum() / weight_s.sum()) for each in (precision, recall, f1)))


Both = tuple[np.ndarray, np.ndarray]  # of the reference and of what was made


def _f1(precision: float, recall: float) -> F1:
    return F1(precision, recall, 2 * precision * recall / (precision + recall) if precision else 0.0)


def _keys(notes: np.ndarray, pitch_class: bool) -> np.ndarray:
    keys = notes["pitch"].astype(np.int64)
    return keys % 12 if pitch_class else keys


def _sounding(notes: np.ndarray, moments: np.ndarray, pitch_class: bool) -> Both:
    """One entry per note and moment at which it sounds: moment and key as one number, and the velocity."""
    first, end = np.searchsorted(moments, notes["start"]), np.searchsorted(moments, notes["end"])
    length = np.maximum(end - first, 0)
    which = np.repeat(np.arange(len(notes)), length)
    moment = np.arange(len(which)) - np.repeat(np.cumsum(length) - length - first, length)
    return moment * NUM_KEYS + _keys(notes, pitch_class)[which], notes["velocity"].astype(np.int64)[which]


def _pairs_on_a_line(groups: Both, values: Both, most: float) -> np.ndarray:
    """The groups of the most pairs there can be with values at most `most` apart, each thing in one pair.

    In each group the lowest of both sides are taken while they fit. Where they do not, the lower one fits nobody: its
    partners would have to be lower still. That is why no choice can be wrong.
    """
    sides = []
    for group, value in zip(groups, values):
        order = np.lexsort((value, group))
        sides.append(list(zip(group[order].tolist(), value[order].tolist())))
    ours, theirs = sides
    found, i, j = [], 0, 0
    while i < len(ours) and j < len(theirs):
        if ours[i][0] == theirs[j][0] and abs(ours[i][1] - theirs[j][1]) <= most:
            found.append(ours[i][0])
            i, j = i + 1, j + 1
        elif ours[i] < theirs[j]:
            i += 1
        else:
            j += 1
    return np.array(found, dtype=np.int64)


def _fits(ours: np.ndarray, theirs: np.ndarray, values: Both, most: float) -> np.ndarray:
    """Which of ours (rows) may be paired with which of theirs (columns) as far as these values go."""
    return np.abs(values[0][ours][:, None] - values[1][theirs][None, :]) <= most


def _num_pairs(fits: np.ndarray) -> int:
    """The most pairs there can be, each row and each column in one at most.

    Two limits at once leave no line to walk along, so pairs are changed where that makes room for one more: a search
    from each row, over columns that fit and the rows they are paired with, until a column is free.
    """
    columns_of = [np.flatnonzero(row).tolist() for row in fits]
    row_of: dict[int, int] = {}  # the pairs, column -> row
    column_of: dict[int, int] = {}  # the same, row -> column
    dead: set[int] = set()  # columns from which no free one can be reached, now or later
    for first in range(len(columns_of)):
        came_from: dict[int, int] = {}  # column -> the row that reached it
        free: int | None = None
        rows = deque([first])
        while rows and free is None:
            row = rows.popleft()
            for column in columns_of[row]:
                if column in came_from or column in dead:
                    continue
                came_from[column] = row
                if column not in row_of:
                    free = column
                    break
                rows.append(row_of[column])
        if free is None:
            dead.update(came_from)
        while free is not None:  # each row on the way takes the column it reached and leaves its own to the next
            row = came_from[free]
            row_of[free], column_of[row], free = row, free, column_of.get(row)
    return len(row_of)


# Distributions


class Comparison(NamedTuple):
    correlation: float  # of the bars of both histograms; 1 is best
    taxicab: float  # between their shares, 0 .. 2
    wasserstein: float  # how far the values would have to move on average, in their own unit


class Feature(NamedTuple):
    """A number that each note has (or each step from one to the next), and the edges of its histogram."""

    values: Callable[[np.ndarray], np.ndarray]
    edges: np.ndarray
    is_circle: bool = False


# From 10 ms, the unit of the tokenizer, to 20 s; what is shorter or longer goes to the first or last bar.
_TIMES = np.concatenate([[-np.inf], np.round(UNIT_S * 2 ** (np.arange(23) / 2), 6), [np.inf]])

FEATURES = {
    "pitch_class": Feature(lambda notes: (notes["pitch"] % 12).astype(np.float64), np.arange(13), is_circle=True),
    "pitch": Feature(lambda notes: notes["pitch"].astype(np.float64), np.arange(NUM_KEYS + 1)),
    "onset": Feature(lambda notes: np.round(np.diff(np.sort(notes["start"])), 6), _TIMES),  # to the next note
    "duration": Feature(lambda notes: np.round(notes["end"] - notes["start"], 6), _TIMES),
    "velocity": Feature(lambda notes: notes["velocity"].astype(np.float64), np.arange(NUM_VELOCITIES + 1) * BIN_WIDTH),
}


def compare(feature: Feature, reference: np.ndarray, made: np.ndarray) -> Comparison:
    ours, theirs = feature.values(reference), feature.values(made)
    if len(ours) == len(theirs) == 0:
        return Comparison(1.0, 0.0, 0.0)
    shares = _shares(ours, feature.edges), _shares(theirs, feature.edges)
    move = _round_the_circle(*shares) if feature.is_circle else wasserstein(ours, theirs)
    if len(ours) == 0 or len(theirs) == 0:
        return Comparison(0.0, 2.0, 6.0 if feature.is_circle else move)
    return Comparison(_correlation(*shares), float(np.abs(shares[0] - shares[1]).sum()), move)


def wasserstein(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The mean distance between the values of both at the same quantile; none at all count as one 0."""
    ours, theirs = (np.sort(values) if len(values) else np.zeros(1) for values in (ours, theirs))
    # Quantiles as whole numbers, in steps of one value of ours times one of theirs: exact for any two lengths.
    ends = np.union1d(np.arange(1, len(ours) + 1) * len(theirs), np.arange(1, len(theirs) + 1) * len(ours))
    widths = np.diff(ends, prepend=0)
    apart = np.abs(ours[(ends - 1) // len(theirs)] - theirs[(ends - 1) // len(ours)])
    return float(apart @ widths / (len(ours) * len(theirs)))


def _round_the_circle(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The same between shares on a circle, where the last is next to the first: from B to C is one semitone."""
    carried = np.cumsum(ours - theirs)
    return float(np.abs(carried - np.median(carried)).sum())  # the median: how much is best sent the other way round


def _shares(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    bars = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    return np.bincount(bars, minlength=len(edges) - 1) / max(len(values), 1)


def _correlation(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Of Pearson; bars that are all equal correlate with their like alone."""
    if np.array_equal(ours, theirs):
        return 1.0
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    scale = float(np.sqrt((ours @ ours) * (theirs @ theirs)))
    return float(np.clip(ours @ theirs / scale, -1.0, 1.0)) if scale > 1e-12 else 0.0


# Key


class Key(NamedTuple):
    tonic: int  # 0 = C .. 11 = B
    mode: str  # major or minor
    strength: float  # correlation with the profile of the key, at most 1


# How well each pitch class fits a key in the ears of listeners (Krumhansl and Kessler 1982), from the tonic up.
_PROFILES = {
    "major": (6.35, 2.23, 3.48, 2.33, 4.38, 4.09, 2.52, 5.19, 2.39, 3.66, 2.29, 2.88),
    "minor": (6.33, 2.68, 3.52, 5.38, 2.60, 3.53, 2.54, 4.75, 3.98, 2.69, 3.34, 3.17),
}


def key_of(notes: np.ndarray) -> Key | None:
    """The key whose profile the pitch classes resemble most, each as long as it sounds; None where none stands out."""
    length_s = np.maximum(notes["end"] - notes["start"], 0.0)
    heard = np.bincount(notes["pitch"] % 12, weights=length_s, minlength=12)
    if np.ptp(heard) <= 1e-9 * heard.max():
        return None
    keys = [
        Key(tonic, mode, float(np.corrcoef(heard, np.roll(profile, tonic))[0, 1]))
        for mode, profile in _PROFILES.items()
        for tonic in range(12)
    ]
    return max(keys, key=lambda key: key.strength)


def same_key(ours: Key | None, theirs: Key | None) -> bool:
    return (ours and ours[:2]) == (theirs and theirs[:2])


# All together


def compare_notes(reference: np.ndarray, made: np.ndarray) -> dict[str, float]:
    """Every measure by its name, the same names in the same order for all notes; all finite."""
    plain = note_f1(reference, made)
    found = {
        "f1": plain.f1,
        "precision": plain.precision,
        "recall": plain.recall,
        "f1_velocity": note_f1(reference, made, velocity=VELOCITY).f1,
        "f1_pitch_class": note_f1(reference, made, pitch_class=True).f1,
        "f1_weighted": weighted_f1(reference, made).f1,
        "key_agrees": float(same_key(key_of(reference), key_of(made))),
    }
    for name, feature in FEATURES.items():
        for measure, value in compare(feature, reference, made)._asdict().items():
            found[f"{name}_{measure}"] = value
    return found


# A rival


def copy_last(prompt: np.ndarray, from_s: float, span_s: float) -> np.ndarray:
    """What a player does who has no idea: the last `span_s` of the prompt once more, from `from_s` on.

    The prompt ends at `from_s`: a rest before it is repeated too, unless it is all there is, and notes from there on
    are not looked at. A prompt shorter than the span is repeated again and again. All is over when the span is.
    """
    prompt = in_order(prompt[prompt["start"] < from_s - SLACK_S])
    if len(prompt) == 0 or not span_s > 0:
        return np.empty(0, dtype=NOTE)
    until_s = from_s
    if prompt["start"][-1] < from_s - span_s - SLACK_S:
        until_s = min(float(prompt["end"].max()), float(prompt["start"][-1]) + span_s)
    begin_s = max(until_s - span_s, float(prompt["start"][0]))
    period_s = max(until_s - begin_s, UNIT_S)
    last = prompt[prompt["start"] >= begin_s - SLACK_S]
    last["end"] = np.minimum(last["end"], until_s)
    copies = []
    for number in range(int(np.ceil((span_s - SLACK_S) / period_s))):
        copy = last.copy()
        for side in ("start", "end"):
            copy[side] += from_s - begin_s + number * period_s
        copy["end"] = np.minimum(copy["end"], from_s + span_s)
        copies.append(copy[copy["end"] - copy["start"] > SLACK_S])
    return join(copies)
