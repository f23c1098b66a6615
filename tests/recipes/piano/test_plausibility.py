"""If this fails, a sample is praised or blamed for what it does not do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rung.recipes.piano.notes import make
from rung.recipes.piano.plausibility import NAMES, Copies, beside, cut, statistics


def test_voices_and_dissonance_by_hand() -> None:
    # C4 for 4 s, E4 for 2 s of it, then D4 for 1 s of it; a rest; one note alone.
    notes = make([0, 0, 2, 6], [4, 2, 3, 7], [60, 64, 62, 67], 64)
    found = statistics(notes)
    assert found["voices"] == pytest.approx((2 * 2 + 2 * 1 + 1 + 1) / 5)
    assert found["most_voices"] == 2
    assert found["dissonance"] == pytest.approx(1 / 3)  # a third for 2 s, a second for 1 s
    assert found["long_notes"] == 0
    assert found["range"] == 7
    assert found["notes_per_s"] == pytest.approx(4 / 7)
    assert statistics(make([0, 0], [4.5, 1], [60, 73], 64))["long_notes"] == 0.5
    assert statistics(make([0, 0], [4.5, 1], [60, 73], 64))["dissonance"] == 1  # a minor ninth
    assert statistics(make([0, 0, 0], [1, 1, 1], [60, 67, 72], 64))["dissonance"] == 0


def test_pitch_classes_and_key_by_hand() -> None:
    # Eight seconds of C, D, E, then eight of C alone; then ten of C, D, E as the first ten were.
    starts = np.arange(26.0)
    pitches = np.array([60, 62, 64, 60, 62, 64, 72, 74, *[60] * 8, 64, 62, 60, 64, 62, 60, 60, 60, 62, 60])
    found = statistics(make(starts, starts + 1, pitches, 64))
    assert found["pitch_classes"] == pytest.approx((3 + 1 + 3) / 3)
    first, last = np.bincount(pitches[:10] % 12, minlength=12), np.bincount(pitches[-10:] % 12, minlength=12)
    assert found["key_keeps"] == pytest.approx(np.corrcoef(first, last)[0, 1])
    assert math.isnan(statistics(make(starts[:19], starts[:19] + 1, pitches[:19], 64))["key_keeps"])


def test_leaps_and_repetition_by_hand() -> None:
    # The highest notes: 72, 74, 74, 67: moves of 2 and 7.
    notes = make([0, 0, 1, 2, 2, 3], [1, 1, 2, 3, 3, 4], [60, 72, 74, 48, 74, 67], 64)
    found = statistics(notes)
    assert found["mean_leap"] == 4.5
    assert found["steps"] == 0.5
    assert math.isnan(found["repetition"])
    starts = np.arange(20.0)
    assert statistics(make(starts, starts + 1, [60, 62, 64, 65, 67] * 4, 64))["repetition"] == pytest.approx(8 / 13)
    assert statistics(make(starts, starts + 1, np.arange(20) + 60, 64))["repetition"] == 0


def test_copies_are_counted_in_their_own_key() -> None:
    starts = np.arange(30.0)
    known = make(starts, starts + 1, np.arange(30) + 40, 64)
    copies = Copies([known, make(starts, starts + 1, np.arange(30)[::-1] + 60, 64)])
    made = make(starts, starts + 1, [*range(45, 55), *[40, 80] * 10], 64)
    assert copies.statistics(made) == {"copied": pytest.approx(3 / 23), "copied_run": 10}
    assert copies.statistics(known) == {"copied": 1, "copied_run": 30}
    assert copies.statistics(make(starts, starts + 1, [40, 80] * 15, 64)) == {"copied": 0, "copied_run": 1}
    few = copies.statistics(known[:4])
    assert math.isnan(few["copied"])
    assert few["copied_run"] == 4
    # not across the border of two pieces
    across = make(starts[:16], starts[:16] + 1, [*range(62, 70), *range(89, 81, -1)], 64)
    assert copies.statistics(across)["copied_run"] == 8


def test_notes_that_are_cut_end_there() -> None:
    found = cut(make([0, 5, 11], [20, 6, 12], [60, 61, 62], 64), 10)
    assert found["end"].tolist() == [10, 6]


def test_nothing_and_one_note_are_no_error() -> None:
    assert set(statistics(make([], [], [], 64))) | {"copied", "copied_run"} == set(NAMES)
    assert all(math.isnan(value) for value in statistics(make([], [], [], 64)).values())
    assert statistics(make([1], [2], [60], 64))["voices"] == 1


def test_the_median_stands_beside_the_middle_of_what_is_real() -> None:
    nan = float("nan")
    found = beside(
        [{"voices": 3.0}, {"voices": 9.0}, {"voices": 4.0, "copied_run": 7.0}],
        [{"voices": float(n), "dissonance": nan} for n in range(101)],
    )
    assert found["voices"] == {"median": 4, "real_5": 5, "real_95": 95}
    assert found["copied_run"] == {"median": 7, "most": 7}
    assert "dissonance" not in found
