"""A task as one sequence of tokens, and the answer out of one.

    <CLS> [data set, composer] task, its parameters, prompt <GENAI> answer <EOGENAI>

The clock of the prompt begins at 0; that of the answer where the task says, which the prompt and the parameters decide,
so that a reader of the answer can put it back in its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rung.recipes.piano.notes import quantise
from rung.recipes.piano.tasks import Task
from rung.recipes.piano.tokenizer import CLS, COMPOSERS, DATASETS, EOGENAI, GENAI, Tokenizer

TOKENIZER = Tokenizer()
_GENAI, _EOGENAI = np.array([GENAI], dtype=np.uint16), np.array([EOGENAI], dtype=np.uint16)


class Example(NamedTuple):
    """A task with its answer; notes are quantised."""

    task: Task
    values: Sequence[int]
    prompt: np.ndarray
    target: np.ndarray
    prefix: Sequence[int] = ()


def sequences(examples: Sequence[Example]) -> list[np.ndarray]:
    """The whole of each example, question and answer, all at once."""
    answers = [moved(one.target, -one.task.origin(one.prompt, tuple(one.values))) for one in examples]
    ids = TOKENIZER.encode_all([*(one.prompt for one in examples), *answers])
    asked, said = ids[: len(examples)], ids[len(examples) :]
    made = zip(examples, asked, said)
    return [np.concatenate([_head(e.task, e.values, e.prefix), a, _GENAI, b, _EOGENAI]) for e, a, b in made]


def question(task: Task, values: Sequence[int], prompt: np.ndarray, prefix: Sequence[int] = ()) -> np.ndarray:
    """What the model is given: all up to <GENAI>."""
    return np.concatenate([_head(task, values, prefix), TOKENIZER.encode(prompt), _GENAI])


def _head(task: Task, values: Sequence[int], prefix: Sequence[int]) -> np.ndarray:
    what = [TOKENIZER.id_of(f"<TASK_{task.name.upper()}>"), *(TOKENIZER.id_of(f"<PARAMETER_{v}>") for v in values)]
    return np.array([CLS, *prefix, *what], dtype=np.uint16)


def answer(target: np.ndarray, origin_s: float) -> np.ndarray:
    """What it is to say: the target from `origin_s` on, and <EOGENAI>."""
    return np.concatenate([TOKENIZER.encode(moved(target, -origin_s)), _EOGENAI])


def read_answer(ids: np.ndarray, origin_s: float, keep_open: bool = False) -> np.ndarray:
    """The notes of an answer in the time of the piece. What comes before <GENAI> or after <EOGENAI> is passed over."""
    ids = np.asarray(ids)
    begins = np.flatnonzero(ids == GENAI)
    ids = ids[begins[0] + 1 :] if len(begins) else ids
    ends = np.flatnonzero(ids == EOGENAI)
    return quantise(moved(TOKENIZER.decode(ids[: ends[0]] if len(ends) else ids, keep_open), origin_s))


def prefix_of(dataset: str, composer: str) -> list[int]:
    """The two tokens that name where a row is from; what has no token of its own is `other`."""
    plain = "".join(letter for letter in dataset.lower() if letter.isalnum())
    known = next((name for name in DATASETS[:-1] if name in plain), DATASETS[-1])
    whom = next((name for name in COMPOSERS[:-1] if is_by(composer, name)), COMPOSERS[-1])
    return [TOKENIZER.id_of(f"<DATASET_{known.upper()}>"), TOKENIZER.id_of(f"<COMPOSER_{whom.upper()}>")]


def is_by(composer: str, name: str) -> bool:
    """Whether a composer as a data set writes him ("Johann Sebastian Bach", "bach_js") is the one of this surname."""
    return name.lower() in re.split(r"[\W_]+", composer.lower())


def moved(notes: np.ndarray, by_s: float) -> np.ndarray:
    notes = notes.copy()
    notes["start"] += by_s
    notes["end"] += by_s
    return notes
