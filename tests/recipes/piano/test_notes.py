"""If this fails, notes are lost or moved between a file and the tokens made of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.recipes.piano.notes import from_zero, in_range, join, make, quantise, seconds_at, split_at_pauses

NOTES = st.lists(
    st.tuples(st.floats(0, 60), st.floats(0, 8), st.integers(0, 127), st.integers(1, 127)), max_size=40
).map(lambda rows: make(*(np.array([r[i] for r in rows]) for i in range(4))) if rows else join([]))


def lengthened(notes: np.ndarray) -> np.ndarray:
    notes = notes.copy()
    notes["end"] = notes["start"] + notes["end"]
    return notes


@settings(deadline=None)
@given(NOTES.map(lengthened), st.floats(0, 5))
def test_segments_together_hold_every_note(notes: np.ndarray, threshold_s: float) -> None:
    parts = split_at_pauses(notes, threshold_s)
    assert np.array_equal(join(parts), notes)
    assert all(len(part) for part in parts)
    for number in range(1, len(parts)):
        assert parts[number]["start"][0] - join(parts[:number])["end"].max() > threshold_s
    if threshold_s > 0:
        for part in parts:
            latest = np.maximum.accumulate(part["end"])
            assert (part["start"][1:] - latest[:-1] <= threshold_s).all()


def test_a_gap_is_measured_from_the_latest_end() -> None:
    notes = make([0, 1, 8, 20], [9, 2, 10, 21], [60, 62, 64, 65], 64)  # the first note sounds on under the second
    assert [len(part) for part in split_at_pauses(notes, 4)] == [3, 1]
    assert [len(part) for part in split_at_pauses(notes, 10)] == [4]
    assert [len(part) for part in split_at_pauses(notes, 0)] == [4]
    assert split_at_pauses(notes[:0], 4) == []


@pytest.mark.parametrize("threshold_s", [-1.0, float("nan")])
def test_a_pause_that_is_no_time(threshold_s: float) -> None:
    with pytest.raises(ValueError, match="not a length of time"):
        split_at_pauses(make(0, 1, 60, 64), threshold_s)


@settings(deadline=None)
@given(NOTES.map(lengthened))
def test_quantised_notes_lie_on_the_grid_and_never_overlap_on_a_key(notes: np.ndarray) -> None:
    once = quantise(notes)
    assert np.array_equal(quantise(once), once)
    for time in (once["start"], once["end"]):
        assert np.array_equal(time, np.rint(time / 0.01) * 0.01)
    assert (once["end"] > once["start"]).all()
    for pitch in np.unique(once["pitch"]):
        key = once[once["pitch"] == pitch]
        assert (key["end"][:-1] <= key["start"][1:]).all()
    # Every strike is still there, to half a unit.
    strikes = {(round(n["start"] * 100), int(n["pitch"])) for n in once}
    assert strikes == {(int(np.floor(n["start"] / 0.01 + 0.5)), int(n["pitch"])) for n in notes}


def test_quantise_by_example() -> None:
    notes = make([0.0, 0.004, 1.0, 1.5, 2.0], [0.3, 0.5, 2.0, 1.6, 2.0], [60, 60, 62, 62, 64], [10, 90, 50, 60, 70])
    expected = make([0.0, 1.0, 1.5, 2.0], [0.5, 1.5, 1.6, 2.01], [60, 62, 62, 64], [90, 50, 60, 70])
    got = quantise(notes)
    assert np.allclose(got["start"], expected["start"])
    assert np.allclose(got["end"], expected["end"])
    assert np.array_equal(got[["pitch", "velocity"]], expected[["pitch", "velocity"]])


def test_range_is_counted_and_time_starts_at_zero() -> None:
    kept, num_dropped = in_range(make([3, 1, 2, 4], [4, 2, 3, 5], [20, 21, 108, 109], 64))
    assert (kept["pitch"].tolist(), num_dropped) == ([21, 108], 2)
    assert from_zero(kept)["start"].tolist() == [0, 1]
    assert kept["start"].tolist() == [1, 2]  # the argument is left alone
    assert len(from_zero(kept[:0])) == 0


def test_tempo_changes() -> None:
    seconds = seconds_at(np.array([0, 2, 4, 6, 8]), np.array([0, 4]), np.array([0.5, 0.25]))
    assert seconds.tolist() == [0, 1, 2, 2.5, 3]
