"""A task as one sequence of tokens, and the answer out of one.

    <CLS> [data set, composer] task, its parameters, prompt <GENAI> answer <EOGENAI>

The clock of the prompt begins at 0; that of the answer where the task says, which the prompt and the parameters decide,
so that a reader of the answer can put it back in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rung.recipes.piano.notes import in_order
from rung.recipes.piano.tasks import Task
from rung.recipes.piano.tokenizer import CLS, COMPOSERS, DATASETS, EOGENAI, GENAI, Tokenizer

TOKENIZER = Tokenizer()


def question(task: Task, values: Sequence[int], prompt: np.ndarray, prefix: Sequence[int] = ()) -> np.ndarray:
    """What the model is given: all up to <GENAI>."""
    what = [TOKENIZER.id_of(f"<TASK_{task.name.upper()}>"), *(TOKENIZER.id_of(f"<PARAMETER_{v}>") for v in values)]
    head = np.array([CLS, *prefix, *what], dtype=np.uint16)
    return np.concatenate([head, TOKENIZER.encode(prompt), np.array([GENAI], dtype=np.uint16)])


def answer(target: np.ndarray, origin_s: float) -> np.ndarray:
    """What it is to say: the target from `origin_s` on, and <EOGENAI>."""
    return np.concatenate([TOKENIZER.encode(moved(target, -origin_s)), np.array([EOGENAI], dtype=np.uint16)])


def read_answer(ids: np.ndarray, origin_s: float, keep_open: bool = False) -> np.ndarray:
    """The notes of an answer in the time of the piece. What comes before <GENAI> or after <EOGENAI> is passed over."""
    ids = np.asarray(ids)
    begins = np.flatnonzero(ids == GENAI)
    ids = ids[begins[0] + 1 :] if len(begins) else ids
    ends = np.flatnonzero(ids == EOGENAI)
    return moved(TOKENIZER.decode(ids[: ends[0]] if len(ends) else ids, keep_open), origin_s)


def prefix_of(dataset: str, composer: str) -> list[int]:
    """The two tokens that name where a row is from; what has no token of its own is `other`."""
    plain = "".join(letter for letter in dataset.lower() if letter.isalnum())
    known = next((name for name in DATASETS[:-1] if name in plain), DATASETS[-1])
    words = {word.strip(",.") for word in composer.lower().replace("_", " ").split()}
    whom = next((name for name in COMPOSERS[:-1] if name.lower() in words), COMPOSERS[-1])
    return [TOKENIZER.id_of(f"<DATASET_{known.upper()}>"), TOKENIZER.id_of(f"<COMPOSER_{whom.upper()}>")]


def moved(notes: np.ndarray, by_s: float) -> np.ndarray:
    notes = in_order(notes)
    notes["start"] += by_s
    notes["end"] += by_s
    return notes
