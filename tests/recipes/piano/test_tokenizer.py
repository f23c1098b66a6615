"""If this fails, what a model learns or plays is not the music it was given."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rung.recipes.piano.notes import NOTE, from_zero, make, quantise
from rung.recipes.piano.tokenizer import CLASSES, CLS, TIME, TIME_STEPS, TOKENIZER, VOCAB_SIZE, Tokenizer
from tests.recipes.piano.tunes import from_units, to_midpoints

NOTES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 30), st.integers(0, 100_000)),  # crowded, so that keys collide, and far apart
        st.one_of(st.integers(0, 5), st.integers(0, 3000)),
        st.one_of(st.integers(60, 62), st.integers(21, 108)),
        st.integers(0, 127),
    ),
    max_size=40,
).map(from_units)


def names(ids: np.ndarray) -> list[str]:
    return [TOKENIZER.names[int(i)] for i in ids]


@settings(deadline=None, max_examples=1000)
@given(NOTES)
@example(from_units([(0, 10, 60, 64), (5, 10, 60, 64)]))  # overlap
@example(from_units([(0, 10, 60, 64), (10, 10, 60, 64)]))  # repeat without a gap
@example(from_units([(7, 0, 60, 64)]))  # zero length
@example(from_units([(0, 9, 64, 1), (0, 9, 60, 2), (0, 5, 67, 3)]))  # chord
@example(from_units([(0, 1, 60, 64), (500, 1, 60, 64)]))  # a gap above 1 s
def test_decoding_undoes_encoding(notes: np.ndarray) -> None:
    ids = TOKENIZER.encode(notes)
    assert ids.dtype == np.uint16
    decoded = TOKENIZER.decode(ids)
    assert np.array_equal(decoded, to_midpoints(quantise(notes)))
    assert np.array_equal(TOKENIZER.encode(decoded), ids)


@settings(deadline=None)
@given(NOTES)
def test_time_differences_sum_exactly(notes: np.ndarray) -> None:
    ids = TOKENIZER.encode(notes).astype(int)
    waits = ids[(ids >= TIME) & (ids < TIME + len(TIME_STEPS))] - TIME
    end = quantise(notes)["end"].max(initial=0.0)
    assert sum(TIME_STEPS[w] for w in waits) == round(end / 0.01)


def slow_encode(notes: np.ndarray) -> list[str]:
    """The rules of the format, one event at a time."""
    events = []
    for n in quantise(notes):
        start, end = round(n["start"] * 100), round(n["end"] * 100)
        events.append((start, 1, int(n["pitch"]), int(n["velocity"]) // 4))
        events.append((end, 0, int(n["pitch"]), 0))
    out, now = [], 0
    for time, is_on, pitch, loud in sorted(events):
        wait, now = time - now, time
        for step in reversed(TIME_STEPS):
            while wait >= step:
                out.append(f"TIME_{step}")
                wait -= step
        out += [f"VELOCITY_{loud}", f"NOTE_ON_{pitch}"] if is_on else [f"NOTE_OFF_{pitch}"]
    return out


@settings(deadline=None)
@given(NOTES)
def test_encoding_equals_the_rules_written_plainly(notes: np.ndarray) -> None:
    assert names(TOKENIZER.encode(notes)) == slow_encode(notes)


def slow_decode(ids: list[int], keep_open: bool) -> list[tuple[int, int, int, int]]:
    now, loud, sounding, notes = 0, 16, dict[int, tuple[int, int]](), []

    def close(pitch: int) -> None:
        if pitch in sounding:
            start, velocity = sounding.pop(pitch)
            if now > start:
                notes.append((start, now, pitch, velocity))

    for i in ids:
        kind, _, number = TOKENIZER.names[i].rpartition("_") if 0 <= i < VOCAB_SIZE else ("", "", "")
        if kind == "TIME":
            now += int(number)
        elif kind == "VELOCITY":
            loud = int(number)
        elif kind in ("NOTE_ON", "NOTE_OFF"):
            close(int(number))
            if kind == "NOTE_ON":
                sounding[int(number)] = (now, loud * 4 + 2)
    if keep_open:
        for pitch in list(sounding):
            close(pitch)
    return sorted(notes, key=lambda n: (n[0], n[2]))


ANY_IDS = st.lists(
    st.one_of(
        st.integers(0, TIME + 7),
        st.integers(40, 43),
        st.integers(128, 131),
        st.integers(210, 216),
        st.integers(-5, 70_000),
    ),
    max_size=120,
)


@settings(deadline=None)
@given(ANY_IDS, st.booleans())
def test_any_ids_decode_to_valid_notes(ids: list[int], keep_open: bool) -> None:
    notes = TOKENIZER.decode(np.array(ids, dtype=np.int64), keep_open)
    assert np.array_equal(quantise(notes), notes)  # on the grid, no zero length, no overlap
    got = [(round(n["start"] * 100), round(n["end"] * 100), int(n["pitch"]), int(n["velocity"])) for n in notes]
    assert got == slow_decode(ids, keep_open)


def test_the_layout_of_ids() -> None:
    assert VOCAB_SIZE == len(TOKENIZER.names) == 1241
    assert [TOKENIZER.names[i] for i in (0, 1, 2, 89, 90, 177, 178, 209, 210, 216, 217, 1240)] == [
        "<PAD>", "<CLS>", "NOTE_ON_21", "NOTE_ON_108", "NOTE_OFF_21", "NOTE_OFF_108", "VELOCITY_0", "VELOCITY_31",
        "TIME_1", "TIME_64", "<GENAI>", "<PLACE_1023>",
    ]  # fmt: skip
    assert all(TOKENIZER.ids[TOKENIZER.names[i]] == i for i in range(VOCAB_SIZE))
    classes = [CLASSES[c] for c in TOKENIZER.token_class(np.array([0, 2, 90, 178, 210, 217, -1, 5000]))]
    assert classes == ["special", "note_on", "note_off", "velocity", "time", "special", "special", "special"]


def test_specials_take_places_and_their_order_matters() -> None:
    one, two = Tokenizer(("<GENAI>", "<EOGENAI>")), Tokenizer(("<EOGENAI>", "<GENAI>"))
    assert one.ids["<GENAI>"] == two.ids["<EOGENAI>"] == 217
    assert len(one.names) == len(two.names) == VOCAB_SIZE
    assert len({one.hash, two.hash, TOKENIZER.hash}) == 3
    assert one.hash == Tokenizer(("<GENAI>", "<EOGENAI>")).hash
    for taken in (("<A>", "<A>"), ("<PAD>",), tuple(f"<{i}>" for i in range(1025))):
        with pytest.raises(ValueError, match="special token"):
            Tokenizer(taken)


def test_a_changed_hash_makes_old_stores_and_checkpoints_unreadable() -> None:
    assert TOKENIZER.hash == "61f3e6bdc7bc4614"
    assert TOKENIZER.description["hash"] == TOKENIZER.hash


def test_what_encode_refuses() -> None:
    with pytest.raises(ValueError, match="in_range"):
        TOKENIZER.encode(make(0, 1, 20, 64))
    early = make(-1, 1, 60, 64)
    with pytest.raises(ValueError, match="from_zero"):
        TOKENIZER.encode(early)
    assert names(TOKENIZER.encode(from_zero(early)))[:2] == ["VELOCITY_16", "NOTE_ON_60"]


@given(st.lists(NOTES, max_size=5))
def test_parts_encoded_together_are_those_encoded_alone(parts: list[np.ndarray]) -> None:
    parts = [quantise(part) for part in parts]
    together = TOKENIZER.encode_all(parts) if parts else []
    assert [ids.tolist() for ids in together] == [TOKENIZER.encode(part).tolist() for part in parts]


def test_a_record_may_begin_with_cls_and_empty_is_empty() -> None:
    ids = TOKENIZER.encode(make([0, 1], [1, 2], [60, 64], 66))
    assert np.array_equal(TOKENIZER.decode(np.append(np.uint16(CLS), ids)), TOKENIZER.decode(ids))
    assert len(TOKENIZER.encode(np.empty(0, dtype=NOTE))) == len(TOKENIZER.decode(np.array([], dtype=np.uint16))) == 0
