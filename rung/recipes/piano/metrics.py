"""Compares the notes a model made with those that were played: F1 of notes, distances of distributions, the key.

`compare_notes` returns all of them as finite numbers whatever the notes, so that they can be summed over rows. Two
empty lists agree in everything; where only one is empty, each measure is at its worst, except that Wasserstein takes
the empty one for a single value of 0. `copy_last` is the simplest baseline.
"""

from __future__ import annotations

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
    velocity: float = np.inf,
    pitch_class: bool = False,
) -> F1:
    """How many notes find a partner: same pitch, onsets at most `onset_s` apart, velocities at most `velocity`.

    Partners are chosen so that as many notes as possible have one, and no note has two. How long a note lasts does not
    matter here; see weighted_f1.
    """
    if len(reference) == len(made) == 0:
        return F1(1.0, 1.0, 1.0)
    keys = [notes["pitch"] % 12 if pitch_class else notes["pitch"] for notes in (reference, made)]
    num_pairs = 0
    for key in np.intersect1d(keys[0], keys[1]):
        ours, theirs = reference[keys[0] == key], made[keys[1] == key]
        fits = np.abs(np.subtract.outer(ours["start"], theirs["start"])) <= onset_s + SLACK_S
        louds = ours["velocity"].astype(np.int64), theirs["velocity"].astype(np.int64)
        fits &= np.abs(np.subtract.outer(*louds)) <= velocity
        num_pairs += _num_pairs(fits)
    precision, recall = num_pairs / max(len(made), 1), num_pairs / max(len(reference), 1)
    return F1(precision, recall, 2 * precision * recall / (precision + recall) if precision else 0.0)


def weighted_f1(reference: np.ndarray, made: np.ndarray, *, velocity: float = VELOCITY) -> F1:
    """F1 of the keys that sound at a moment, averaged over all moments at which any does; notes must be quantised.

    So a long note weighs more than a short one, and one that is held for half as long is half right.
    """
    moments = np.unique(np.concatenate([notes[side] for notes in (reference, made) for side in ("start", "end")]))
    (ours, our_louds), (theirs, their_louds) = _sounding(reference, moments), _sounding(made, moments)
    common, i, j = np.intersect1d(ours, theirs, return_indices=True)
    common = common[np.abs(our_louds[i] - their_louds[j]) <= velocity]
    num_ours, num_theirs, matched = (
        np.bincount(sounding // NUM_KEYS, minlength=max(len(moments) - 1, 0)) for sounding in (ours, theirs, common)
    )
    weight_s = np.where(num_ours + num_theirs > 0, np.diff(moments), 0.0)
    if weight_s.sum() == 0:
        return F1(1.0, 1.0, 1.0)
    precision, recall = matched / np.maximum(num_theirs, 1), matched / np.maximum(num_ours, 1)
    f1 = 2 * matched / np.maximum(num_ours + num_theirs, 1)
    return F1(*(float((weight_s * each).sum() / weight_s.sum()) for each in (precision, recall, f1)))


def _sounding(notes: np.ndarray, moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One entry per note and moment at which it sounds: moment and key as one number, and the velocity."""
    first, end = np.searchsorted(moments, notes["start"]), np.searchsorted(moments, notes["end"])
    length = np.maximum(end - first, 0)
    which = np.repeat(np.arange(len(notes)), length)
    moment = np.arange(len(which)) - np.repeat(np.cumsum(length) - length - first, length)
    return moment * NUM_KEYS + notes["pitch"][which], notes["velocity"].astype(np.int64)[which]


def _num_pairs(fits: np.ndarray) -> int:
    """The most pairs there can be of a row and a column that fit, each in one at most.

    Pairs are changed where that makes room for one more: a search from each row, over columns that fit and the rows
    they are paired with, until a column is free.
    """
    columns_of = [np.flatnonzero(row).tolist() for row in fits]
    row_of: dict[int, int] = {}  # the pairs, column -> row
    column_of: dict[int, int] = {}  # the same, row -> column
    dead: set[int] = set()  # columns from which no free one can be reached, now or later
    for first in range(len(columns_of)):
        came_from: dict[int, int] = {}  # column -> the row that reached it
        free: int | None = None
        rows = [first]
        for row in rows:  # which grows meanwhile
            new = [column for column in columns_of[row] if column not in came_from and column not in dead]
            came_from |= dict.fromkeys(new, row)
            free = next((column for column in new if column not in row_of), None)
            if free is not None:
                break
            rows += [row_of[column] for column in new]
        else:
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
    shares, num_bars = [], len(feature.edges) - 1
    for values in (ours, theirs):
        bars = np.clip(np.searchsorted(feature.edges, values, side="right") - 1, 0, num_bars - 1)
        shares.append(np.bincount(bars, minlength=num_bars) / max(len(values), 1))
    our_shares, their_shares = shares
    if feature.is_circle:  # the last is next to the first: from B to C is one semitone
        carried = np.cumsum(our_shares - their_shares)
        move = float(np.abs(carried - np.median(carried)).sum())  # the median: what is best sent the other way round
    else:
        move = wasserstein(ours, theirs)
    if len(ours) == 0 or len(theirs) == 0:
        return Comparison(0.0, 2.0, 6.0 if feature.is_circle else move)
    taxicab = float(np.abs(our_shares - their_shares).sum())
    if np.array_equal(our_shares, their_shares):
        return Comparison(1.0, taxicab, move)
    # Pearson's; bars that are all equal correlate with their like alone.
    ours, theirs = our_shares - our_shares.mean(), their_shares - their_shares.mean()
    scale = float(np.sqrt((ours @ ours) * (theirs @ theirs)))
    return Comparison(float(np.clip(ours @ theirs / scale, -1.0, 1.0)) if scale > 1e-12 else 0.0, taxicab, move)


def wasserstein(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The mean distance between the values of both at the same quantile; none at all count as one 0."""
    ours, theirs = (np.sort(values) if len(values) else np.zeros(1) for values in (ours, theirs))
    # Quantiles as whole numbers, in steps of one value of ours times one of theirs: exact for any two lengths.
    ends = np.union1d(np.arange(1, len(ours) + 1) * len(theirs), np.arange(1, len(theirs) + 1) * len(ours))
    widths = np.diff(ends, prepend=0)
    apart = np.abs(ours[(ends - 1) // len(theirs)] - theirs[(ends - 1) // len(ours)])
    return float(apart @ widths / (len(ours) * len(theirs)))


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


# All together


def compare_notes(reference: np.ndarray, made: np.ndarray) -> dict[str, float]:
    """Every measure of quantised notes by its name, the same names in the same order for all notes; all finite."""
    plain = note_f1(reference, made)
    keys = [key and (key.tonic, key.mode) for key in map(key_of, (reference, made))]
    found = {
        "f1": plain.f1,
        "precision": plain.precision,
        "recall": plain.recall,
        "f1_velocity": note_f1(reference, made, velocity=VELOCITY).f1,
        "f1_pitch_class": note_f1(reference, made, pitch_class=True).f1,
        "f1_weighted": weighted_f1(reference, made).f1,
        "key_agrees": float(keys[0] == keys[1]),
    }
    for name, feature in FEATURES.items():
        for measure, value in compare(feature, reference, made)._asdict().items():
            found[f"{name}_{measure}"] = value
    return found


# A baseline


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
