"""What a model makes of rows whose end is known: notes beside notes.

A row of a task is completed after <GENAI>, with as many tokens as the context has left; a window of a performance after
its first half, with half a context of tokens and some more. Continuations are also left to two models that know little:
one repeats the last bars of the prompt, one is a 3-gram model with as many tokens. What each makes is compared with
what was played, from where the answer begins up to the last note of that.

Prompts and tokens do not hang on which rows are completed together; what is drawn does, unless the temperature is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from rung.nn.transformer import Transformer
from rung.recipe import Part
from rung.recipes.piano.metrics import compare_notes, copy_last
from rung.recipes.piano.ngram import NGram
from rung.recipes.piano.notes import quantise
from rung.recipes.piano.samples import How, Prompt, complete
from rung.recipes.piano.sequence import TOKENIZER, moved, read_answer
from rung.recipes.piano.tasks import TASKS
from rung.recipes.piano.tokenizer import EOGENAI, GENAI, LOUD, MOST_PARAMETER, ON, PAD, PLACE, TIME, TIME_STEPS, WAIT

SLACK = 32  # tokens that the second half of a window may be longer than the one that was played
TASK_OF_ID = {TOKENIZER.id_of(f"<TASK_{name.upper()}>"): task for name, task in TASKS.items()}
VALUE_OF_ID = {TOKENIZER.id_of(f"<PARAMETER_{value}>"): value for value in range(MOST_PARAMETER + 1)}

Measured = dict[str, Part]


def prompt_of(row: np.ndarray) -> Prompt | None:
    """A row of an eval set as a prompt with what was played; None where the row was cut and does not hold both."""
    ids = row[row != PAD]
    return _of_task(ids) if np.isin(ids, list(TASK_OF_ID)).any() else _of_window(ids)


def _of_task(ids: np.ndarray) -> Prompt | None:
    if GENAI not in ids or EOGENAI not in ids:
        return None
    asked = ids[: int(np.flatnonzero(ids == GENAI)[0]) + 1]
    task = next(TASK_OF_ID[id] for id in asked.tolist() if id in TASK_OF_ID)
    values = tuple(VALUE_OF_ID[id] for id in asked.tolist() if id in VALUE_OF_ID)
    notes = TOKENIZER.decode(asked)
    origin_s = task.origin(notes, values)
    return Prompt(asked, notes, task, values, origin_s, "a held-out piece", read_answer(ids, origin_s))


def _of_window(ids: np.ndarray) -> Prompt | None:
    if len(ids) < 4:
        return None
    given, rest = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    origin_s = _clock_s(given)
    played = quantise(_notes_after(given, rest, origin_s))
    return Prompt(given, TOKENIZER.decode(given, keep_open=True), None, (), origin_s, "a held-out piece", played)


def _notes_after(given: np.ndarray, ids: np.ndarray, origin_s: float) -> np.ndarray:
    """The notes that start in `ids`, whose clock begins at `origin_s`; the first one's velocity may be given before."""
    hanging = given[-1:][TOKENIZER.token_class(given[-1:]) == LOUD]
    return moved(TOKENIZER.decode(np.concatenate([hanging, ids]), keep_open=True), origin_s)


def _clock_s(ids: np.ndarray) -> float:
    waits = ids[TOKENIZER.token_class(ids) == WAIT].astype(np.int64) - TIME
    return float(np.array(TIME_STEPS)[waits].sum()) * TOKENIZER.unit_s


def measure_completions(
    model: Transformer, rows: np.ndarray, how: How, generator: torch.Generator, ngram: NGram | None
) -> Measured:
    """Sums over these rows, and how many there were of each."""
    prompts = [prompt for row in rows if (prompt := prompt_of(row)) is not None]
    if not prompts:
        return {}
    context, tally = model.shape.context_size, Tally()
    room = context // 2 + SLACK if prompts[0].task is None else context  # an answer gets what is left of it
    for prompt, made in zip(prompts, complete(model, prompts, replace(how, num_tokens=room), generator)):
        tally.add("", prompt, made)
        if prompt.is_continuation:
            tally.add("copy_", prompt, copied(prompt))
            if ngram is not None:
                left = room if prompt.task is None else context + 1 - len(prompt.ids)
                tally.add("ngram_", prompt, by_ngram(ngram, prompt, left))
    return tally.parts()


def copied(prompt: Prompt) -> np.ndarray:
    """The last bars of the prompt once more: as long a time as the answer takes, or again and again what there is."""
    assert prompt.reference is not None
    span_s = float(prompt.reference["end"].max()) - prompt.origin_s if len(prompt.reference) else 0.0
    return copy_last(prompt.notes, prompt.origin_s, max(span_s, 0.0))


def by_ngram(ngram: NGram, prompt: Prompt, num_tokens: int) -> np.ndarray:
    played = prompt.ids[prompt.ids < PLACE]  # it has never seen a special token
    if prompt.task is not None:  # the answer begins with the last note of the prompt, whose end comes after that
        played = played[: np.flatnonzero(TOKENIZER.token_class(played) == ON)[-1] + 1]
    made = ngram.complete(played, num_tokens, np.random.default_rng(prompt.ids.tolist()))  # the same in every run
    return _notes_after(played, made, _clock_s(played))


class Tally:
    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, whose: str, prompt: Prompt, made: np.ndarray) -> None:
        assert prompt.reference is not None
        figures: Mapping[str, float] = compare_notes(prompt.reference, prompt.comparable(made))
        for name, value in figures.items():
            if not whose or name.startswith("f1"):
                self._add(f"{whose}{name}", value)
        if not whose and prompt.task is not None:
            self._add(f"{prompt.task.name}_f1", figures["f1"])

    def _add(self, name: str, value: float) -> None:
        pair = self._sums.setdefault(name, [0.0, 0.0])
        pair[0] += value
        pair[1] += 1

    def parts(self) -> Measured:
        return {name: (torch.tensor(total), torch.tensor(count)) for name, (total, count) in self._sums.items()}
