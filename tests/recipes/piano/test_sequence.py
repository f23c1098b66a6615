"""If this fails, a model learns another answer than the task's, or its answer is played at another place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rung.recipes.piano.notes import NOTE, make, quantise
from rung.recipes.piano.sequence import TOKENIZER, Example, answer, prefix_of, question, read_answer, sequences
from rung.recipes.piano.tasks import TASKS, Task
from rung.recipes.piano.tokenizer import CLASSES, CLS, EOGENAI, GENAI, PAD, TASK_NAMES, to_midpoints


def from_units(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    """start and length in units, pitch, velocity; as a store gives them back"""
    start, length, pitch, velocity = np.array(rows).T
    return to_midpoints(quantise(make(start * 0.01, (start + length) * 0.01, pitch, velocity)))


ROWS = st.tuples(
    st.one_of(st.integers(0, 60), st.integers(0, 3000), st.integers(0, 30_000)),
    st.one_of(st.integers(1, 40), st.integers(1, 800)),
    st.one_of(st.integers(60, 66), st.integers(21, 108)),
    st.integers(1, 127),
)
NOTES = st.lists(ROWS, min_size=2, max_size=40).map(from_units).filter(lambda notes: len(notes) >= 2)


@st.composite
def asked(draw: st.DrawFn) -> tuple[Task, tuple[int, ...]]:
    task = TASKS[draw(st.sampled_from(TASK_NAMES))]
    return task, tuple(draw(st.integers(p.low, p.high)) for p in task.parameters)


def names(ids: np.ndarray) -> list[str]:
    return [TOKENIZER.name_of(int(i)) for i in ids]


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype == NOTE and np.array_equal(one, other)


@given(NOTES, asked(), st.integers(0, 2**31))
@example(from_units([(0, 7, 60, 64), (57, 3, 62, 64), (2999, 7, 64, 64)]), (TASKS["continuation"], (50,)), 0)
def test_an_answer_is_read_as_it_was_written(notes: np.ndarray, what: tuple[Task, tuple[int, ...]], seed: int) -> None:
    task, values = what
    values = task.fitting(notes, values)
    prompt, target = task.split(notes, values, seed)
    origin_s = task.origin(prompt, values)
    asked_ids, said = question(task, values, prompt), answer(target, origin_s)
    assert same(read_answer(said, origin_s), target)
    whole = np.concatenate([asked_ids, said, np.full(3, PAD, dtype=np.uint16)])
    assert same(read_answer(whole, origin_s), target)  # a whole row, as it is trained on
    assert same(task.join(prompt, read_answer(whole, origin_s)), notes)


@given(NOTES, asked(), st.integers(0, 2**31))
def test_a_row_is_question_genai_answer_eogenai(
    notes: np.ndarray, what: tuple[Task, tuple[int, ...]], seed: int
) -> None:
    task, values = what
    values = task.fitting(notes, values)
    prompt, target = task.split(notes, values, seed)
    prefix = prefix_of("maestro-v3", "Johann Sebastian Bach")
    asked_ids, said = question(task, values, prompt, prefix), answer(target, task.origin(prompt, values))
    assert asked_ids.dtype == said.dtype == np.uint16
    head = ["<CLS>", "<DATASET_MAESTRO>", "<COMPOSER_BACH>", f"<TASK_{task.name.upper()}>"]
    head += [f"<PARAMETER_{value}>" for value in values]
    assert names(asked_ids[: len(head)]) == head
    special = CLASSES.index("special")
    inner = np.concatenate([asked_ids[len(head) : -1], said[:-1]])
    assert (TOKENIZER.token_class(inner) != special).all()  # nothing but events between the marks
    assert asked_ids[-1] == GENAI
    assert said[-1] == EOGENAI
    # The prompt is told on the time of the piece, from 0; its velocities as far as bins go.
    assert same(TOKENIZER.decode(asked_ids), to_midpoints(prompt))
    assert np.array_equal(question(task, values, prompt), asked_ids[[0, *range(3, len(asked_ids))]])


@given(st.lists(st.tuples(NOTES, asked(), st.integers(0, 2**31)), min_size=1, max_size=4))
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
    said = answer(target, 1.0)
    more = np.concatenate([said, TOKENIZER.encode(make(0, 1, 70, 66)), [EOGENAI]])
    assert same(read_answer(more, 1.0), target)  # all after the first <EOGENAI> is passed over
    assert same(read_answer(said[:-1], 1.0), target)  # cut off before it
    assert same(read_answer(said[:-2], 1.0), target[:1])
    assert same(read_answer(said[:-2], 1.0, keep_open=True), target)  # sounds until the last moment told
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
