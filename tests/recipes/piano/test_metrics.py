"""If this fails, a model is called better or worse than it plays."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import networkx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rung.recipes.piano.metrics import (
    F1,
    FEATURES,
    Comparison,
    compare,
    compare_notes,
    copy_last,
    key_of,
    note_f1,
    wasserstein,
    weighted_f1,
)
from rung.recipes.piano.midi import read_midi
from rung.recipes.piano.notes import NOTE, make, quantise
from tests.conftest import shared_data

NOTHING = np.empty(0, dtype=NOTE)
METRICS = tuple(compare_notes(NOTHING, NOTHING))


def from_units(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    """start and end in units, pitch, velocity"""
    return make(*np.array(rows).T * [[0.01], [0.01], [1], [1]]) if rows else NOTHING


def notes_of(lengths: st.SearchStrategy[int], pitches: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    """Crowded, so that notes compete for partners."""
    one = st.tuples(st.integers(0, 40), lengths, pitches, st.integers(1, 127))
    return st.lists(one.map(lambda n: (n[0], n[0] + n[1], *n[2:])), max_size=25).map(from_units)


OCTAVES = st.sampled_from([48, 60, 61, 72])
NOTES = notes_of(st.integers(0, 20), OCTAVES)
ANY_NOTES = st.one_of(NOTES, notes_of(st.integers(0, 3000), st.integers(0, 127)))
MODES = st.fixed_dictionaries({"velocity": st.sampled_from([math.inf, 0, 30]), "pitch_class": st.booleans()})
DOUBLED = make([0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1], [48, 60, 48, 72], [60, 90, 50, 50])


# Notes


def most_pairs(ours: np.ndarray, theirs: np.ndarray, onset_s: float, velocity: float, pitch_class: bool) -> int:
    graph = networkx.Graph()
    graph.add_nodes_from(("ours", i) for i in range(len(ours)))
    for (i, one), (j, two) in itertools.product(enumerate(ours), enumerate(theirs)):
        fits = abs(one["start"] - two["start"]) <= onset_s + 1e-9
        fits &= abs(int(one["velocity"]) - int(two["velocity"])) <= velocity
        same = int(one["pitch"]) - int(two["pitch"])
        if fits and (same % 12 if pitch_class else same) == 0:
            graph.add_edge(("ours", i), ("theirs", j))
    top = [("ours", i) for i in range(len(ours))]
    return len(networkx.bipartite.hopcroft_karp_matching(graph, top)) // 2


@given(NOTES, NOTES, st.sampled_from([0.0, 0.03, 0.05, 0.2]), MODES)
def test_as_many_notes_as_possible_find_a_partner(
    ours: np.ndarray, theirs: np.ndarray, onset_s: float, mode: dict
) -> None:
    found = note_f1(ours, theirs, onset_s=onset_s, **mode)
    pairs = most_pairs(ours, theirs, onset_s, **mode)
    if len(ours) and len(theirs):
        f1 = 2 * pairs / (len(ours) + len(theirs))
        assert found == pytest.approx((pairs / len(theirs), pairs / len(ours), f1))
    else:
        assert found == ((1, 1, 1) if len(ours) == len(theirs) else (0, 0, 0))


# One key, times and velocities around both limits: what fits in one often does not in the other.
RIVALS = st.lists(st.tuples(st.integers(0, 14), st.just(100), st.just(60), st.integers(1, 9)), max_size=14)


@settings(max_examples=300)
@given(RIVALS.map(from_units), RIVALS.map(from_units))
def test_as_many_as_possible_also_where_two_limits_contend(ours: np.ndarray, theirs: np.ndarray) -> None:
    pairs = most_pairs(ours, theirs, 0.03, 2, False)
    assert note_f1(ours, theirs, onset_s=0.03, velocity=2).f1 * (len(ours) + len(theirs)) == pytest.approx(
        2 * pairs if len(ours) + len(theirs) else 0
    )


@given(ANY_NOTES, MODES)
@example(DOUBLED, {"velocity": math.inf, "pitch_class": True})
@example(DOUBLED, {"velocity": 30, "pitch_class": True})
@example(NOTHING, {"velocity": 30, "pitch_class": True})
def test_notes_agree_with_themselves(notes: np.ndarray, mode: dict) -> None:
    quantised = quantise(notes)
    assert note_f1(notes, notes, **mode) == weighted_f1(quantised, quantised, velocity=0) == F1(1, 1, 1)


@given(NOTES, NOTES, MODES)
def test_exchanging_both_exchanges_precision_and_recall(ours: np.ndarray, theirs: np.ndarray, mode: dict) -> None:
    one, other = note_f1(ours, theirs, **mode), note_f1(theirs, ours, **mode)
    assert one == pytest.approx((other.recall, other.precision, other.f1))
    one, other = weighted_f1(quantise(ours), quantise(theirs)), weighted_f1(quantise(theirs), quantise(ours))
    assert one == pytest.approx((other.recall, other.precision, other.f1))


def test_the_limit_itself_is_within_it() -> None:
    """Sums of hundredths are rounded; 0.35 - 0.3 is not 0.05."""
    for at_s, (apart_s, f1) in itertools.product(np.arange(0, 3, 0.01), ((0.05, 1), (-0.05, 1), (0.06, 0), (-0.06, 0))):
        note, other = make(at_s, at_s + 1, 60, 64), make(at_s + apart_s, at_s + 1, 60, 64)
        assert note_f1(note, other).f1 == note_f1(note, other, velocity=30).f1 == f1


def test_octaves_and_velocities_matter_as_asked() -> None:
    low, high = make(0, 1, 48, 40), make(0, 1, 60, 71)
    assert note_f1(low, high).f1 == 0
    assert note_f1(low, high, pitch_class=True).f1 == 1
    assert note_f1(low, high, pitch_class=True, velocity=30).f1 == 0
    assert note_f1(low, high, pitch_class=True, velocity=31).f1 == 1


def test_a_pair_is_given_up_where_that_makes_two() -> None:
    """The soft note fits both; taken by the first that comes, the second would be left alone."""
    ours = make([0.0, 0.01], 1, 60, [60, 20])
    theirs = make([0.0, 0.01], 1, 60, [40, 70])
    assert note_f1(ours, theirs, velocity=30).f1 == 1


def test_a_long_chain_of_changes() -> None:
    """Each note fits its own partner and the next one, and takes the next; the last has none, unless all move back."""
    times = np.arange(1500) * 0.08
    ours, theirs = make(times, 1000, 60, 60), make(times - 0.04, 1000, 60, 60)[::-1]
    assert note_f1(ours, theirs, velocity=30).f1 == 1


def framewise(ours: np.ndarray, theirs: np.ndarray, velocity: float) -> tuple[float, ...]:
    """The mean over frames of 10 ms, in each the best of all ways to pair what sounds."""
    scores = []
    for frame in np.arange(0, 70):
        now = frame * 0.01 + 0.005
        heard = [notes[(notes["start"] < now) & (now < notes["end"])] for notes in (ours, theirs)]
        if len(heard[0]) + len(heard[1]) == 0:
            continue
        pairs = most_pairs(heard[0], heard[1], math.inf, velocity, False)
        sizes = len(heard[1]), len(heard[0]), (len(heard[0]) + len(heard[1])) / 2
        scores.append([pairs / size if size else 0 for size in sizes])
    return tuple(np.mean(scores, axis=0)) if scores else (1, 1, 1)


@given(st.lists(NOTES, min_size=2, max_size=2), st.sampled_from([0, 30, math.inf]))
def test_weighted_f1_is_the_mean_over_all_moments_that_sound(both: list[np.ndarray], velocity: float) -> None:
    ours, theirs = (quantise(notes[:10]) for notes in both)
    assert weighted_f1(ours, theirs, velocity=velocity) == pytest.approx(framewise(ours, theirs, velocity))


def test_a_long_note_weighs_more_than_a_short_one() -> None:
    played = make([0, 9], [9, 10], [60, 62], 64)
    assert weighted_f1(played, played[:1]).f1 == pytest.approx(0.9)
    assert weighted_f1(played, played[1:]).f1 == pytest.approx(0.1)
    assert weighted_f1(make(0, 1, 60, 64), make(0, 0.5, 60, 64)) == pytest.approx((0.5, 0.5, 0.5))


# Distributions


@given(ANY_NOTES)
def test_distributions_agree_with_themselves(notes: np.ndarray) -> None:
    for feature in FEATURES.values():
        assert compare(feature, notes, notes) == Comparison(1, 0, 0)


VALUES = st.lists(st.integers(-50, 50), min_size=1, max_size=9).map(lambda v: np.array(v, dtype=float))


@given(VALUES, VALUES)
def test_wasserstein_is_the_cheapest_way_to_move_values(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Repeated until both are equally many, the sorted ones are partners."""
    size = math.lcm(len(ours), len(theirs))
    repeated = [np.sort(np.repeat(values, size // len(values))) for values in (ours, theirs)]
    assert wasserstein(ours, theirs) == pytest.approx(np.abs(repeated[0] - repeated[1]).mean())


@given(st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, 11), min_size=2 * size, max_size=2 * size)))
def test_pitch_classes_move_round_the_circle(pitches: list[int]) -> None:
    half = len(pitches) // 2
    ways = [
        sum(min((a - b) % 12, (b - a) % 12) for a, b in zip(pitches[:half], way))
        for way in itertools.permutations(pitches[half:])
    ]
    ours, theirs = make(0, 1, np.array(pitches[:half]) + 60, 64), make(0, 1, np.array(pitches[half:]) + 60, 64)
    assert compare(FEATURES["pitch_class"], ours, theirs).wasserstein == pytest.approx(min(ways) / half)


def test_wasserstein_knows_how_far_values_are_apart() -> None:
    """Bars that are merely re-ordered are as high as before; the values are not where they were."""
    played = make([0, 1, 2.5], [1, 2, 3.5], [60, 64, 67], [40, 50, 60])
    near, far = played.copy(), played.copy()
    near["pitch"] += 1
    far["pitch"] += 24
    assert compare(FEATURES["pitch"], played, near).wasserstein == pytest.approx(1)
    assert compare(FEATURES["pitch"], played, far).wasserstein == pytest.approx(24)
    assert compare(FEATURES["pitch"], played, near).taxicab == compare(FEATURES["pitch"], played, far).taxicab == 2
    slow = make(played["start"] * 2, played["end"] * 2, played["pitch"], played["velocity"])
    assert compare(FEATURES["onset"], played, slow).wasserstein == pytest.approx(1.25)  # 1 and 1.5 become 2 and 3
    assert compare(FEATURES["duration"], played, slow).wasserstein == pytest.approx(1)


@given(ANY_NOTES, st.integers(1, 3000))
def test_when_music_begins_changes_no_distribution(notes: np.ndarray, units: int) -> None:
    later = make(notes["start"] + units * 0.01, notes["end"] + units * 0.01, notes["pitch"], notes["velocity"])
    for feature in FEATURES.values():
        assert compare(feature, notes, later) == Comparison(1, 0, 0)


def test_correlation_and_taxicab_against_numpy() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = (make(np.arange(200), 200, rng.integers(40, 80, 200), 64) for _ in range(2))
    bars = [np.bincount(notes["pitch"], minlength=128) / 200 for notes in (ours, theirs)]
    found = compare(FEATURES["pitch"], ours, theirs)
    assert found.correlation == pytest.approx(np.corrcoef(*bars)[0, 1])
    assert found.taxicab == pytest.approx(np.abs(bars[0] - bars[1]).sum())


def test_bars_that_are_all_equal_correlate_with_their_like_alone() -> None:
    every = make(np.arange(12), 12, np.arange(60, 72), 64)
    assert compare(FEATURES["pitch_class"], every, every).correlation == 1
    assert compare(FEATURES["pitch_class"], every, every[:3]).correlation == 0


def test_what_nothing_is_worth() -> None:
    some = make([0, 1], [0.5, 2], [60, 62], [40, 60])
    for both in ((some, NOTHING), (NOTHING, some)):
        assert compare(FEATURES["pitch_class"], *both) == (0, 2, 6)
        assert compare(FEATURES["pitch"], *both) == (0, 2, 61)
        assert compare(FEATURES["duration"], *both) == (0, 2, 0.75)
    assert compare(FEATURES["onset"], some, some[:1]) == (0, 2, 1)  # one note has no next


# Key


def scale(tonic: int, steps: tuple[int, ...]) -> np.ndarray:
    """Up and down, ending on a long tonic."""
    pitches = [tonic + step for step in (*steps, 12, *reversed(steps))]
    lengths = np.append(np.ones(len(pitches) - 1), 4)
    starts = np.cumsum(lengths) - lengths
    return make(starts, starts + lengths, pitches, 64)


@pytest.mark.parametrize("tonic", range(12))
def test_the_key_of_a_scale(tonic: int) -> None:
    for mode, steps in (("major", (0, 2, 4, 5, 7, 9, 11)), ("minor", (0, 2, 3, 5, 7, 8, 11))):
        key = key_of(scale(48 + tonic, steps))
        assert key is not None
        assert key[:2] == (tonic, mode)
        assert 0.7 < key.strength <= 1


@given(notes_of(st.integers(1, 50), st.integers(40, 80)), st.integers(-12, 12))
def test_moved_music_has_a_moved_key(notes: np.ndarray, shift: int) -> None:
    moved = notes.copy()
    moved["pitch"] += np.array(shift).astype(np.uint8)
    before, after = key_of(notes), key_of(moved)
    assert (before is None) == (after is None)
    if before and after:
        assert after.strength == pytest.approx(before.strength)


def test_no_key_and_the_same_key() -> None:
    every = make(np.arange(12), np.arange(12) + 1, np.arange(60, 72), 64)  # every key alike
    assert key_of(NOTHING) is None
    assert key_of(every) is None
    major, minor = scale(48, (0, 2, 4, 5, 7, 9, 11)), scale(48, (0, 2, 3, 5, 7, 8, 11))
    higher = scale(60, (0, 2, 4, 5, 7, 9, 11))
    for ours, theirs, agrees in ((every, NOTHING, 1), (major, higher, 1), (major, every, 0), (major, minor, 0)):
        assert compare_notes(ours, theirs)["key_agrees"] == agrees


def relation(ours: tuple[int, str], theirs: tuple[int, str]) -> str:
    if ours == theirs:
        return "same"
    if ours[1] == theirs[1]:
        return "fifth" if (ours[0] - theirs[0]) % 12 in (5, 7) else "other"
    (major, _), (minor, _) = sorted((ours, theirs), key=lambda key: key[1])
    return "relative" if (major - minor) % 12 == 3 else "other"


def annotated_key(text: str) -> tuple[int, str]:
    """The key that holds longest, out of lines of begin, end, Bb:min."""
    held_s: Counter[tuple[int, str]] = Counter()
    for begin, end, name in (line.split() for line in text.splitlines() if line.strip()):
        tonic, mode = name.split(":")
        number = "C D EF G A B".index(tonic[0]) - tonic.count("b") + tonic.count("#")
        held_s[number % 12, {"maj": "major", "min": "minor"}[mode]] += round((float(end) - float(begin)) * 1000)
    return held_s.most_common(1)[0][0]


def test_the_keys_of_pop_songs() -> None:
    """Of 120 songs 101 were found in the key of the annotation, 16 more in its relative or a fifth away."""
    folder = shared_data("piano_pop909")
    found: Counter[str] = Counter()
    for file in sorted((folder / "key").glob("*.txt")):
        key = key_of(read_midi(folder / "midi" / f"{file.stem}.mid"))
        assert key is not None
        found[relation(annotated_key(file.read_text()), key[:2])] += 1
    assert found.total() == 120
    assert found["same"] >= 96, found
    assert found["other"] <= 6, found


# All together


@given(ANY_NOTES, ANY_NOTES)
@example(NOTHING, NOTHING)
@example(NOTHING, DOUBLED)
@example(DOUBLED, NOTHING)
@example(DOUBLED[:1], DOUBLED)
def test_every_measure_is_a_finite_number(ours: np.ndarray, theirs: np.ndarray) -> None:
    found = compare_notes(ours, theirs)
    assert tuple(found) == METRICS
    assert all(type(value) is float and math.isfinite(value) for value in found.values()), found


@given(ANY_NOTES.map(quantise))
def test_the_best_of_each_measure_is_to_be_the_same(notes: np.ndarray) -> None:
    worst = ("taxicab", "wasserstein")
    assert compare_notes(notes, notes) == {name: 0.0 if name.endswith(worst) else 1.0 for name in METRICS}


def test_the_names_that_runs_are_compared_by() -> None:
    assert {"f1", "precision", "recall", "f1_velocity", "f1_pitch_class", "f1_weighted", "key_agrees"} <= set(METRICS)
    assert {"pitch_class_correlation", "onset_wasserstein", "duration_wasserstein", "pitch_taxicab"} <= set(METRICS)


# A rival


def test_the_last_bars_once_more() -> None:
    prompt = make([0, 1, 2, 3], [1, 2, 3, 3.5], [60, 62, 64, 65], [10, 20, 30, 40])
    assert np.array_equal(copy_last(prompt, 4, 2), make([4, 5], [5, 5.5], [64, 65], [30, 40]))
    assert np.array_equal(
        copy_last(prompt, 4, 4), make([4, 5, 6, 7], [5, 6, 7, 7.5], prompt["pitch"], prompt["velocity"])
    )


def test_a_short_prompt_is_repeated_and_cut() -> None:
    prompt = make([0, 1], [1, 2], [60, 62], 64)
    made = copy_last(prompt, 2, 4.5)
    assert np.array_equal(made, make([2, 3, 4, 5, 6], [3, 4, 5, 6, 6.5], [60, 62, 60, 62, 60], 64))


def test_a_note_that_rings_on_ends_before_it_comes_again() -> None:
    made = copy_last(make([0, 0.5], [2, 0.8], [60, 62], 64), 1, 2)
    assert np.array_equal(made, make([1, 1.5, 2, 2.5], [2, 1.8, 3, 2.8], [60, 62, 60, 62], 64))


def test_only_what_came_before_is_repeated() -> None:
    prompt = make([0, 1, 3], [1.8, 2.6, 4], [60, 62, 64], 64)  # the last comes after the gap to fill
    assert np.array_equal(copy_last(prompt, 2, 1), make(2, 3, 62, 64))  # cut where it ran into the gap
    assert len(copy_last(prompt, 0, 1)) == 0
    assert len(copy_last(NOTHING, 5, 1)) == len(copy_last(prompt, 2, 0)) == 0


def test_a_rest_that_is_all_there_is_is_not_repeated() -> None:
    prompt = make([0, 1], [1, 2], [60, 62], 64)
    assert np.array_equal(copy_last(prompt, 3, 2), make(3, 4, 62, 64))  # a note, and the rest after it
    assert np.array_equal(copy_last(prompt, 9, 1), make(9, 10, 62, 64))
    held = make([0, 1], [20, 2], [48, 62], 64)
    assert 62 in copy_last(held, 9, 1)["pitch"]


@given(ANY_NOTES.map(quantise), st.integers(1, 200), st.integers(1, 200))
def test_copies_lie_in_the_span_and_one_note_sounds_per_pitch(notes: np.ndarray, begin: int, span: int) -> None:
    from_s, span_s = begin * 0.01, span * 0.01
    made = copy_last(notes, from_s, span_s)
    assert np.all(made["start"] >= from_s - 1e-6)
    assert np.all(made["end"] <= from_s + span_s + 1e-6)
    assert len(quantise(made)) == len(made)
    if np.any(notes["start"] < from_s - 1e-6):
        assert len(made)
