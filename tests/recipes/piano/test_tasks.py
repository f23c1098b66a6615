"""If this fails, a model is asked other things than its config says, or learns to answer with other notes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rung.errors import ConfigError
from rung.recipes.piano.notes import NOTE, in_range, join, make, quantise, units
from rung.recipes.piano.tasks import TASKS, Example, Task, line, parse, prefix_of, question, read_answer, sequences
from rung.recipes.piano.tokenizer import CLASSES, CLS, EOGENAI, GENAI, MOST_PARAMETER, PAD, TASK_NAMES, TOKENIZER
from tests.conftest import shared_data
from tests.errors import raises_code
from tests.recipes.piano import tunes
from tests.recipes.piano.tunes import answer, to_midpoints


def from_units(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    return quantise(tunes.from_units(rows))


ROWS = st.tuples(
    st.one_of(st.integers(0, 60), st.integers(0, 3000), st.integers(0, 30_000)),  # chords, a piece, long silences
    st.one_of(st.integers(1, 40), st.integers(1, 800)),
    st.one_of(st.integers(60, 66), st.integers(21, 108)),
    st.integers(1, 127),
)
NOTES = st.lists(ROWS, min_size=2, max_size=40).map(from_units).filter(lambda notes: len(notes) >= 2)
SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def asked(draw: st.DrawFn) -> tuple[Task, tuple[int, ...]]:
    task = TASKS[draw(st.sampled_from(TASK_NAMES))]
    return task, tuple(draw(st.integers(p.low, p.high)) for p in task.parameters)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype == NOTE and np.array_equal(one, other)


@given(NOTES, asked(), SEEDS)
@example(from_units([(0, 1, 60, 64), (1, 1, 60, 64)]), (TASKS["top_line"], ()), 0)  # nothing hides anything
@example(from_units([(0, 9, 60, 64), (0, 9, 64, 64)]), (TASKS["infill"], (90, 1)), 0)  # all in one half second
@example(from_units([(0, 9, 60, 64), (30_000, 9, 64, 64)]), (TASKS["infill"], (3, 2)), 0)  # the second after 300 s
def test_a_split_leaves_nothing_empty_and_nothing_lost(
    notes: np.ndarray, what: tuple[Task, tuple[int, ...]], seed: int
) -> None:
    (task, values), before = what, notes.copy()
    notes.flags.writeable = False
    prompt, target = task.split(notes, values, seed)
    assert same(notes, before)
    assert len(prompt)
    assert len(target)
    assert same(quantise(prompt), prompt)
    assert same(quantise(target), target)
    assert prompt["start"].min() >= 0
    assert same(task.join(prompt, target), notes)
    if task.kind == "combine":
        assert same(join([prompt, target]), notes)
    else:
        assert same(target, notes)


@given(NOTES, asked(), SEEDS)
def test_a_split_is_a_function_of_its_arguments(
    notes: np.ndarray, what: tuple[Task, tuple[int, ...]], seed: int
) -> None:
    task, values = what
    first, again = task.split(notes, values, seed), task.split(notes.copy(), values, seed)
    assert same(first.prompt, again.prompt)
    assert same(first.target, again.target)
    first.target["velocity"] = 0  # what is given away is the caller's own
    first.prompt["velocity"] = 0
    assert same(task.split(notes, values, seed).target, again.target)
    assert notes["velocity"].all()


@given(NOTES, asked(), SEEDS)
def test_fitting_values_are_in_range_and_change_nothing(
    notes: np.ndarray, what: tuple[Task, tuple[int, ...]], seed: int
) -> None:
    task, values = what
    fit = task.fitting(notes, values)
    assert all(p.low <= value <= p.high for p, value in zip(task.parameters, fit, strict=True))
    assert task.fitting(notes, fit) == fit
    prompt, target = task.split(notes, fit, seed)
    assert same(prompt, task.split(notes, values, seed).prompt)
    assert 0 <= task.origin(prompt, fit) <= target["start"][0]  # what the answer is written from is not after it


@pytest.mark.parametrize("name", TASK_NAMES)
def test_nothing_and_one_note_are_no_error(name: str) -> None:
    task = TASKS[name]
    for notes in (np.empty(0, dtype=NOTE), make(0, 1, 60, 64)):
        prompt, target = task.split(notes, task.fitting(notes, task.values_of(())), 3)
        assert same(task.join(prompt, target), notes)
        assert task.origin(prompt, task.values_of(())) >= 0


SCALE = make(np.arange(10) * 0.5, np.arange(10) * 0.5 + 0.1 * np.arange(1, 11), 60 + np.arange(10), 64)  # up, longer


def test_percentages_take_the_notes_they_name() -> None:
    for name, kept in (
        ("high_notes", range(67, 70)), ("low_notes", range(60, 63)),
        ("short_notes", range(60, 63)), ("long_notes", range(67, 70)),
    ):  # fmt: skip
        assert TASKS[name].split(SCALE, (30,), 0).target["pitch"].tolist() == list(kept), name
        assert [len(TASKS[name].split(SCALE, (p,), 0).target) for p in (5, 14, 15, 99, 100)] == [1, 1, 2, 9, 9]
    assert TASKS["continuation"].split(SCALE, (30,), 0).prompt["pitch"].tolist() == [60, 61, 62]
    assert TASKS["continuation"].origin(SCALE[:3], (30,)) == 1.0  # where the last note of the prompt starts


@given(NOTES, st.integers(5, 100))
def test_no_note_of_the_prompt_is_higher_lower_shorter_or_longer(notes: np.ndarray, percent: int) -> None:
    for name, measure, sign in (
        ("high_notes", lambda n: n["pitch"].astype(int), 1), ("low_notes", lambda n: n["pitch"].astype(int), -1),
        ("long_notes", lambda n: units(n["end"] - n["start"]), 1),
        ("short_notes", lambda n: units(n["end"] - n["start"]), -1),
    ):  # fmt: skip
        prompt, target = TASKS[name].split(notes, (percent,), 0)
        assert (sign * measure(prompt)).max() <= (sign * measure(target)).min()
        assert abs(len(target) - len(notes) * percent / 100) <= 1


def test_the_first_of_equal_notes_is_the_answer() -> None:
    is_odd = np.arange(100) % 2
    notes = make(np.arange(100), np.arange(100) + 0.25 + 0.25 * is_odd, 60 + is_odd, 64)
    for name, first in (("high_notes", 1), ("low_notes", 0), ("short_notes", 0), ("long_notes", 1)):
        assert TASKS[name].split(notes, (25,), 0).target["start"].tolist() == list(range(first, 50, 2))


def test_infill_is_what_starts_in_the_span() -> None:
    infill, notes = TASKS["infill"], make(np.arange(20) / 4, np.arange(20) / 4 + 3, 60 + np.arange(20), 64)  # 0 .. 4.75
    prompt, target = infill.split(notes, (3, 2), 0)
    assert target["start"].tolist() == [1.5, 1.75, 2.0, 2.25]
    assert infill.origin(prompt, (3, 2)) == 1.5
    assert infill.split(notes, (0, 1), 0).prompt["start"][0] == 0  # the first note stays
    assert infill.fitting(notes, (10, 4)) == (0, 4)  # 5 s is past the last start; ten half seconds have notes
    sparse = make([0, 8, 9, 100], [1, 9, 10, 101], 60, 64)
    assert infill.fitting(sparse, (2, 3)) == (16, 3)  # moved on
    assert infill.fitting(sparse, (2, 15)) == (2, 15)  # reaches 8 s
    assert infill.fitting(sparse, (20, 3)) == (18, 3)  # what comes next is out of range: back
    assert infill.split(sparse, (20, 3), 0).target["start"].tolist() == [9]
    far = make([0, 100, 101], [1, 101, 102], 60, 64)
    assert infill.split(far, infill.fitting(far, (5, 2)), 0).target["start"].tolist() == [100, 101]


def test_infill_asks_for_every_part_of_a_piece() -> None:
    notes = make(np.arange(0, 20, 0.5), np.arange(0, 20, 0.5) + 0.5, 60, 64)
    begins = Counter(TASKS["infill"].fitting(notes, (begin, 4))[0] for begin in range(MOST_PARAMETER + 1))
    assert sorted(begins) == list(range(40))
    assert max(begins.values()) <= 4


@given(NOTES, st.integers(1, 127), SEEDS)
def test_noise_stays_within_its_amount(notes: np.ndarray, amount: int, seed: int) -> None:
    prompt, _ = TASKS["velocity_denoising"].split(notes, (amount,), seed)
    off = prompt["velocity"].astype(int) - notes["velocity"]
    assert np.abs(off).max() <= amount
    assert prompt["velocity"].min() >= 1
    assert prompt["velocity"].max() <= 127
    assert np.array_equal(prompt[["start", "end", "pitch"]], notes[["start", "end", "pitch"]])
    alone = notes[np.unique(notes["pitch"], return_index=True)[1]]  # one note per key: none can be struck twice
    alone = quantise(alone)
    moved, _ = TASKS["timing_denoising"].split(alone, (amount,), seed)
    one, other = np.sort(alone, order="pitch"), np.sort(moved, order="pitch")
    assert np.array_equal(one[["pitch", "velocity"]], other[["pitch", "velocity"]])
    assert np.abs(units(one["start"]) - units(other["start"])).max() <= amount
    ends_off = units(other["end"]) - units(one["end"])
    is_shortest = units(other["end"]) == units(other["start"]) + 1
    assert (ends_off >= -amount).all()
    assert (ends_off[~is_shortest] <= amount).all()


def test_noise_is_even_and_differs_by_seed() -> None:
    notes = make(np.arange(6000) * 1.0, np.arange(6000) + 0.5, 60, 64)
    velocity = TASKS["velocity_denoising"].split(notes, (2,), 0).prompt["velocity"].astype(int) - 64
    timing = TASKS["timing_denoising"].split(notes, (2,), 0).prompt
    for off in (velocity, units(timing["start"] - notes["start"])[1:], units(timing["end"] - notes["end"])):
        counts = np.array([np.sum(off == value) for value in range(-2, 3)])
        assert counts.sum() == len(off), counts
        assert np.abs(counts - 1200).max() < 150, counts
    assert not same(timing, TASKS["timing_denoising"].split(notes, (2,), 1).prompt)
    assert abs(np.corrcoef(timing["start"] - notes["start"], timing["end"] - notes["end"])[0, 1]) < 0.05


def test_noise_is_the_same_on_every_machine() -> None:
    notes = make(np.arange(5) * 1.0, np.arange(5) + 0.5, 60, 64)
    assert TASKS["velocity_denoising"].split(notes, (20,), 7).prompt["velocity"].tolist() == [69, 50, 68, 83, 76]
    assert units(TASKS["timing_denoising"].split(notes, (20,), 7).prompt["start"]).tolist() == [5, 104, 212, 301, 417]


def plain_line(notes: np.ndarray, sign: int) -> list[bool]:
    """The rule of the line, one pair at a time."""
    rows = [(round(n["start"] * 100), round(n["end"] * 100), sign * int(n["pitch"])) for n in notes]

    def is_hidden(start: int, end: int, height: int) -> bool:
        for its_start, its_end, its_height in rows:
            together = min(end, its_end) - max(start, its_start)
            is_chord = abs(start - its_start) < 20 and together > min(end - start, its_end - its_start) / 2
            is_held = its_start < start and its_end - start > 20
            if its_height > height and (is_chord or is_held):
                return True
        return False

    is_line = [not is_hidden(*row) for row in rows]
    if all(is_line):
        is_line[min(range(len(rows)), key=lambda i: (rows[i][2], i))] = False
    return is_line


@given(NOTES, st.sampled_from([1, -1]))
@example(from_units([(0, 90, 60, 64), (19, 90, 64, 64)]), 1)  # just close enough
@example(from_units([(0, 90, 60, 64), (20, 90, 64, 64), (50, 9, 40, 64)]), 1)  # just too far
@example(from_units([(0, 20, 60, 64), (10, 90, 64, 64), (50, 9, 40, 64)]), 1)  # together for just half of the shorter
@example(from_units([(0, 20, 60, 64), (9, 90, 64, 64), (50, 9, 40, 64)]), 1)
@example(from_units([(0, 60, 64, 64), (40, 90, 60, 64), (80, 9, 40, 64)]), 1)  # held for just 0.2 s
@example(from_units([(0, 61, 64, 64), (40, 90, 60, 64), (80, 9, 40, 64)]), 1)
def test_the_line_equals_its_rule_written_plainly(notes: np.ndarray, sign: int) -> None:
    assert line(notes, sign).tolist() == plain_line(notes, sign)


@given(NOTES)
def test_the_bottom_line_is_the_top_line_upside_down(notes: np.ndarray) -> None:
    mirrored = notes.copy()
    mirrored["pitch"] = 129 - notes["pitch"]
    top = {(n["start"], 129 - n["pitch"]) for n in TASKS["top_line"].split(mirrored, (), 0).target}
    bottom = {(n["start"], n["pitch"]) for n in TASKS["bottom_line"].split(notes, (), 0).target}
    one_each = len(np.unique(notes["pitch"])) == len(notes)  # else the one left out of a lone line is the earlier
    assert top == bottom or not one_each


def test_what_a_line_is() -> None:
    chord = from_units([(0, 100, 60, 64), (0, 100, 64, 64), (2, 100, 67, 64), (100, 50, 65, 64), (100, 50, 48, 64)])
    assert chord[line(chord, 1)]["pitch"].tolist() == [67, 65]
    assert chord[line(chord, -1)]["pitch"].tolist() == [60, 48]
    rolled = from_units([(0, 90, 60, 64), (8, 82, 64, 64), (16, 74, 67, 64)])
    assert rolled[line(rolled, 1)]["pitch"].tolist() == [67]
    run = from_units([(12 * i, 14, 60 + i, 64) for i in range(8)] + [(0, 100, 40, 64)])  # sixteenths, legato
    assert run[line(run, 1)]["pitch"].tolist() == list(range(60, 68))
    under = from_units([(0, 200, 72, 64), (50, 50, 60, 64), (100, 50, 64, 64), (190, 50, 65, 64)])
    assert under[line(under, 1)]["pitch"].tolist() == [72, 65]  # the last starts as the held note ends
    prompt, target = TASKS["harmonise"].split(under, (), 0)
    assert prompt["pitch"].tolist() == [72, 65]
    assert target["pitch"].tolist() == [60, 64]


def test_the_top_line_of_pop_songs_is_mostly_their_melody() -> None:
    import symusic

    found = num_melody = num_line = num_notes = 0
    for path in sorted(shared_data("piano_pop909").glob("midi/*.mid"))[:30]:
        score = symusic.Score.from_midi(path.read_bytes())
        in_seconds = score.to("second")
        tracks = {track.name: track.notes.numpy() for track in in_seconds.tracks}
        parts = {
            name: make(n["time"], n["time"] + n["duration"], n["pitch"], n["velocity"])
            for name, n in tracks.items()
            if name in ("MELODY", "PIANO")
        }
        notes = quantise(in_range(join(list(parts.values())))[0])
        tune = {(n["start"], n["pitch"]) for n in quantise(parts["MELODY"])}
        is_melody = np.array([(n["start"], n["pitch"]) in tune for n in notes])
        is_line = line(notes, 1)
        found += int((is_line & is_melody).sum())
        num_melody, num_line, num_notes = num_melody + is_melody.sum(), num_line + is_line.sum(), num_notes + len(notes)
    recall, precision = found / num_melody, found / num_line
    assert recall > 0.87, (recall, precision)
    assert precision > 0.5, (recall, precision)
    assert num_line / num_notes < 0.5


def test_all_and_undecided_are_every_task_with_its_usual_ranges() -> None:
    choices = parse("all")
    assert tuple(choice.task.name for choice in choices) == TASK_NAMES == tuple(TASKS)
    assert {choice.weight for choice in choices} == {1.0}
    for choice in choices:
        assert choice.ranges == tuple(p.usual for p in choice.task.parameters)
        for p in choice.task.parameters:
            assert 0 <= p.low <= p.usual[0] <= p.usual[1] <= p.high <= MOST_PARAMETER
    assert parse("TODO") == choices


def test_names_and_mappings_are_taken_as_they_are_meant() -> None:
    (one,) = parse("top_line")
    assert one == (TASKS["top_line"], 1.0, ())
    first, second, third = parse(
        ["infill", {"name": "infill", "weight": 2, "length": [4, 16]}, {"name": "high_notes", "percent": 30}]
    )
    assert first.ranges == tuple(p.usual for p in TASKS["infill"].parameters)
    assert second.weight == 2.0
    assert second.ranges == (first.ranges[0], (4, 16))
    assert third.ranges == ((30, 30),)
    assert parse({"name": "infill", "from": 0}) == parse([{"name": "infill", "from": [0, 0]}])


@pytest.mark.parametrize(
    ("tasks", "code", "named"),
    [
        ("top_lin", "no-task", "did you mean top_line?"),
        (["nonsense"], "no-task", "continuation, "),
        ("infill,top_line", "no-task", "[infill,top_line]"),
        (["\x1b[31mred"], "no-task", "\u241b[31mred"),
        (["all", "infill"], "no-task", "tasks=all"),
        ([], "bad-value", ""),
        (None, "bad-value", "None"),
        (3, "bad-value", "tasks is 3"),
        ([3], "bad-value", "tasks has 3"),
        ([{"weight": 2}], "bad-value", "{'weight': 2}"),
        ([{"name": 3}], "bad-value", "{'name': 3}"),
        ([{"name": "infill", "lenght": 3}], "no-key", "did you mean length? (it has from, length)"),
        ([{"name": "top_line", "percent": 3}], "no-key", "no parameters"),
        ([{"name": "infill", "weigth": 3}], "no-key", "did you mean weight?"),
        ([{"name": "infill", 5: 3}], "no-key", "5"),
        ([{"name": "infill", "length": [0, 16]}], "bad-range", "length of infill is [0, 16]; it can be 1 to 127"),
        ([{"name": "infill", "length": 128}], "bad-range", "1 to 127"),
        ([{"name": "infill", "length": [16, 4]}], "bad-range", "[4, 16]"),
        ([{"name": "infill", "length": [4]}], "bad-value", "[low, high]"),
        ([{"name": "infill", "length": 1.5}], "bad-value", "length of infill is 1.5"),
        ([{"name": "infill", "length": True}], "bad-value", "True"),
        ([{"name": "infill", "length": "long"}], "bad-value", "long"),
        ([{"name": "infill", "length": None}], "bad-value", "None"),
        ([{"name": "infill", "weight": 0}], "bad-range", "weight of infill is 0"),
        ([{"name": "infill", "weight": -1}], "bad-range", "-1"),
        ([{"name": "infill", "weight": float("nan")}], "bad-range", "nan"),
        ([{"name": "infill", "weight": float("inf")}], "bad-range", "inf"),
        ([{"name": "infill", "weight": "much"}], "bad-range", "much"),
        ([{"name": "infill", "weight": True}], "bad-range", "True"),
        (["infill", "infill"], "bad-value", "infill"),
        (["high_notes", {"name": "high_notes", "weight": 3, "percent": [5, 100]}], "bad-value", "high_notes"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(tasks: Any, code: str, named: str) -> None:
    with raises_code(code, ConfigError) as caught:
        parse(tasks)
    message = str(caught.value)
    assert named in message
    assert "\n" not in message
    assert message.startswith("tasks")


@given(st.integers(0, 127), st.integers(0, 127))
def test_a_draw_reaches_both_ends_evenly(one: int, other: int) -> None:
    low, high = min(one, other), max(one, other)
    (choice,) = parse({"name": "infill", "from": [low, high], "length": 5})
    width = high - low + 1
    drawn = [choice.draw(np.array([(i + 0.5) / (3 * width), 0.99])) for i in range(3 * width)]
    assert Counter(value for value, _ in drawn) == dict.fromkeys(range(low, high + 1), 3)
    assert {length for _, length in drawn} == {5}
    assert all(type(value) is int for value, _ in drawn)
    assert choice.draw(np.array([0.0, 0.0]))[0] == low
    assert choice.draw(np.array([np.nextafter(1, 0)] * 2))[0] == high
    assert parse("top_line")[0].draw(np.array([])) == ()


def test_values_of_a_user_are_checked() -> None:
    assert TASKS["infill"].values_of([4, 8]) == (4, 8)
    assert TASKS["infill"].values_of([]) == (63, 9)
    assert TASKS["top_line"].values_of(()) == ()
    for name, given_values, code, named in (
        ("infill", [4], "bad-value", "from, length"),
        ("top_line", [4], "bad-value", "no parameters"),
        ("high_notes", [4], "bad-range", "percent of high_notes is 4; it can be 5 to 100"),
    ):
        with raises_code(code, ConfigError) as caught:
            TASKS[name].values_of(given_values)
        assert named in str(caught.value)
        assert "sampling.parameters" in str(caught.value)


def test_captions_say_what_a_task_is() -> None:
    captions = {
        "high_notes": ((30,), "high_notes, 30 percent"), "top_line": ((), "top_line"),
        "infill": ((7, 4), "infill, from 3.5 s, 2 s long"), "continuation": ((25,), "continuation, after 25 percent"),
        "timing_denoising": ((7,), "timing_denoising, off by up to 0.07 s"),
        "velocity_denoising": ((20,), "velocity_denoising, off by up to 20"),
    }  # fmt: skip
    assert {name: TASKS[name].describe(values) for name, (values, _) in captions.items()} == {
        n: w for n, (_, w) in captions.items()
    }


def test_the_guide_has_every_task_with_its_parameters() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "piano.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for task in TASKS.values():
        row = next(row for row in rows if f"`{task.name}`" in row.split("|")[1])
        for parameter in task.parameters:
            assert f"`{parameter.name}` ({parameter.low} to {parameter.high})" in row, task.name


def test_listing_tasks_needs_no_torch() -> None:
    code = "import sys, rung.recipes.piano.tasks as t; t.parse('all'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# As tokens


def names(ids: np.ndarray) -> list[str]:
    return [TOKENIZER.names[int(i)] for i in ids]


@given(NOTES.map(to_midpoints), asked(), st.integers(0, 2**31))
@example(
    to_midpoints(from_units([(0, 7, 60, 64), (57, 3, 62, 64), (2999, 7, 64, 64)])), (TASKS["continuation"], (50,)), 0
)
def test_an_answer_is_read_as_it_was_written(notes: np.ndarray, what: tuple[Task, tuple[int, ...]], seed: int) -> None:
    task, values = what
    values = task.fitting(notes, values)
    prompt, target = task.split(notes, values, seed)
    origin_s = task.origin(prompt, values)
    asked_ids, answered = question(task, values, prompt), answer(target, origin_s)
    assert same(read_answer(answered, origin_s), target)
    whole = np.concatenate([asked_ids, answered, np.full(3, PAD, dtype=np.uint16)])
    assert same(read_answer(whole, origin_s), target)  # a whole row, as it is trained on
    assert same(task.join(prompt, read_answer(whole, origin_s)), notes)


@given(NOTES.map(to_midpoints), asked(), st.integers(0, 2**31))
def test_a_row_is_question_genai_answer_eogenai(
    notes: np.ndarray, what: tuple[Task, tuple[int, ...]], seed: int
) -> None:
    task, values = what
    values = task.fitting(notes, values)
    prompt, target = task.split(notes, values, seed)
    prefix = prefix_of("maestro-v3", "Johann Sebastian Bach")
    asked_ids, answered = question(task, values, prompt, prefix), answer(target, task.origin(prompt, values))
    assert asked_ids.dtype == answered.dtype == np.uint16
    head = ["<CLS>", "<DATASET_MAESTRO>", "<COMPOSER_BACH>", f"<TASK_{task.name.upper()}>"]
    head += [f"<PARAMETER_{value}>" for value in values]
    assert names(asked_ids[: len(head)]) == head
    special = CLASSES.index("special")
    inner = np.concatenate([asked_ids[len(head) : -1], answered[:-1]])
    assert (TOKENIZER.token_class(inner) != special).all()  # nothing but events between the marks
    assert asked_ids[-1] == GENAI
    assert answered[-1] == EOGENAI
    # The prompt is on the time of the piece, from 0; its velocities as far as bins go.
    assert same(TOKENIZER.decode(asked_ids), to_midpoints(prompt))
    assert np.array_equal(question(task, values, prompt), asked_ids[[0, *range(3, len(asked_ids))]])


@given(st.lists(st.tuples(NOTES.map(to_midpoints), asked(), st.integers(0, 2**31)), min_size=1, max_size=4))
def test_rows_made_together_are_each_its_question_and_answer(
    asked_for: list[tuple[np.ndarray, tuple[Task, tuple[int, ...]], int]],
) -> None:
    examples = []
    for notes, (task, values), seed in asked_for:
        values = task.fitting(notes, values)
        examples.append(Example(task, values, *task.split(notes, values, seed), prefix=prefix_of("asap", "Liszt")))
    for row, one in zip(sequences(examples), examples, strict=True):
        origin_s = one.task.origin(one.prompt, tuple(one.values))
        asked_ids = question(one.task, one.values, one.prompt, one.prefix)
        apart = np.concatenate([asked_ids, answer(one.target, origin_s)])
        assert row.dtype == np.uint16
        assert np.array_equal(row, apart)


def test_one_row_token_by_token() -> None:
    notes = make([0, 0.5, 1.25], [0.5, 1.0, 1.5], [60, 64, 67], 66)
    prompt, target = TASKS["infill"].split(notes, (2, 3), 0)
    assert names(question(TASKS["infill"], (2, 3), prompt)) == [
        "<CLS>", "<TASK_INFILL>", "<PARAMETER_2>", "<PARAMETER_3>",
        "VELOCITY_16", "NOTE_ON_60", "TIME_32", "TIME_16", "TIME_2", "NOTE_OFF_60",
        "VELOCITY_16", "NOTE_ON_64", "TIME_32", "TIME_16", "TIME_2", "NOTE_OFF_64", "<GENAI>",
    ]  # fmt: skip
    assert names(answer(target, 1.0)) == [
        "TIME_16", "TIME_8", "TIME_1", "VELOCITY_16", "NOTE_ON_67", "TIME_16", "TIME_8", "TIME_1", "NOTE_OFF_67",
        "<EOGENAI>",
    ]  # fmt: skip


def test_what_a_model_says_need_not_be_well_formed() -> None:
    target = make([1, 2], [2, 3], [60, 64], 66)
    answered = answer(target, 1.0)
    more = np.concatenate([answered, TOKENIZER.encode(make(0, 1, 70, 66)), [EOGENAI]])
    assert same(read_answer(more, 1.0), target)  # all after the first <EOGENAI> is passed over
    assert same(read_answer(answered[:-1], 1.0), target)  # cut off before it
    assert same(read_answer(answered[:-2], 1.0), target[:1])
    for ids in ([], [EOGENAI], [GENAI], [GENAI, EOGENAI], [CLS, PAD, GENAI, PAD]):
        assert len(read_answer(np.array(ids, dtype=np.uint16), 2.0)) == 0


@pytest.mark.parametrize(
    ("dataset", "composer", "tokens"),
    [
        ("maestro", "Frédéric Chopin", ["<DATASET_MAESTRO>", "<COMPOSER_CHOPIN>"]),
        ("my_GiantMIDI-part", "bach_js", ["<DATASET_GIANTMIDI>", "<COMPOSER_BACH>"]),
        ("tunes", "", ["<DATASET_OTHER>", "<COMPOSER_OTHER>"]),
        ("tunes", "Offenbach", ["<DATASET_OTHER>", "<COMPOSER_OTHER>"]),
        ("", "Mozart, W. A.", ["<DATASET_OTHER>", "<COMPOSER_MOZART>"]),
        ("ＡＳＡＰ \x1b[31m", "\u202eLiszt", ["<DATASET_OTHER>", "<COMPOSER_LISZT>"]),
    ],
)
def test_the_prefix_names_what_has_a_token(dataset: str, composer: str, tokens: list[str]) -> None:
    assert names(np.array(prefix_of(dataset, composer))) == tokens
