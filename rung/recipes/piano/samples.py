"""Prompts, what a model makes of them, and that as files to hear and to see.

A prompt holds what the model is given and all that is needed to put its answer back into the time of the piece. All
prompts are completed in one batch. Which task is asked, and with which parameters, is the recipe's business; what the
notes are worth is for metrics.py to say.

The one surprising thing: an answer to a task never outgrows the context, whatever `num_tokens` says, as the model would
forget what it was asked; a continuation goes on as long as it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from rung.errors import DataError, UserError
from rung.nn import generate as plain
from rung.nn.generate import generate
from rung.nn.transformer import Transformer
from rung.recipe import Sample
from rung.recipes.piano.grammar import Grammar
from rung.recipes.piano.metrics import note_f1
from rung.recipes.piano.notes import NOTE, from_zero, in_range, join, quantise, units
from rung.recipes.piano.sequence import TOKENIZER, question, read_answer
from rung.recipes.piano.tasks import Task
from rung.recipes.piano.tokenizer import CLS, EOGENAI, GENAI, LOUD, PAD
from rung.text import one_line


@dataclass(frozen=True)
class Prompt:
    ids: np.ndarray  # what the model is given
    notes: np.ndarray  # the same as notes, in the time of the piece
    task: Task | None  # None: go on with the next token
    values: tuple[int, ...]  # of the task's parameters
    origin_s: float  # where the clock of what is generated begins, in the time of the piece
    words: str  # what it is
    reference: np.ndarray | None = None  # what was really played, where that is known

    @property
    def is_continuation(self) -> bool:
        return _goes_on(self.task)

    def comparable(self, made: np.ndarray) -> np.ndarray:
        """What is to be compared with the reference: of a continuation, all up to the last note that was played.

        Nobody is asked to know where a piece is cut.
        """
        if self.reference is None or not self.is_continuation:
            return made
        last_s = float(self.reference["start"].max()) if len(self.reference) else self.origin_s
        return made[made["start"] < last_s + TOKENIZER.unit_s / 2]

    def whole(self, made: np.ndarray) -> np.ndarray:
        """Prompt and answer as one piece."""
        return join([self.notes, made]) if self.task is None else self.task.join(self.notes, made)

    def shown(self, made: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Notes of the model and of the prompt as they sound: a key that one strikes again ends the other's note."""
        if self.task is not None and self.task.kind == "replace":
            return made, self.notes
        whole = self.whole(made)
        is_given = np.isin(_strikes(whole), _strikes(self.notes))
        return whole[~is_given], whole[is_given]


def _goes_on(task: Task | None) -> bool:
    """Whether the answer follows the prompt, and does not lie among its notes or in their place."""
    return task is None or task.name == "continuation"


def _strikes(notes: np.ndarray) -> np.ndarray:
    """When and which key, as one number."""
    return units(notes["start"]) * 128 + notes["pitch"]


@dataclass(frozen=True)
class How(plain.How):
    grammar: bool = True  # whether only what the tokenizer could have written is allowed


class Made(NamedTuple):
    notes: np.ndarray  # in the time of the piece, without those of the prompt
    cut_at: int | None = None  # the tokens after which an answer was brought to its end; None: it ended by itself


def from_nothing(prefix: Sequence[int] = ()) -> Prompt:
    ids = np.array([*prefix, CLS], dtype=np.uint16)
    return Prompt(ids, np.empty(0, dtype=NOTE), None, (), 0.0, "nothing")


def from_file(
    path: Path,
    task: Task | None,
    values: tuple[int, ...] = (),
    *,
    context_size: int,
    prefix: Sequence[int] = (),
    may_fit: bool = False,
) -> Prompt:
    """The notes of a MIDI file, all of them the prompt; no more than fill half the context.

    With `may_fit` the values are a proposal, changed to suit the notes; else they are what somebody wants.
    """
    notes, num_dropped = _opened(path)

    def ask(some: np.ndarray) -> np.ndarray:
        if task is not None:
            return question(task, values, some, prefix)
        return np.concatenate([np.array([*prefix, CLS], dtype=np.uint16), TOKENIZER.encode(some)])

    keeps_last = _goes_on(task)  # what comes next hangs on what was last
    kept = _that_fit(notes, keeps_last, ask, context_size // 2)
    if not len(kept):
        raise DataError(
            f"sampling.prompt: not one note of {one_line(path)} fits half of data.context_size={context_size}; "
            "choose a run with a larger context"
        )
    if task is not None and may_fit:
        values = task.fitting(kept, values)
    words = one_line(path.name)
    if len(kept) < len(notes):
        words = f"the {'last' if keeps_last else 'first'} {len(kept)} of {len(notes)} notes of {words}"
    if num_dropped:
        words += f", without {num_dropped} outside the piano"
    if task is None:  # time goes on from the last event, which is the end of a note
        return Prompt(ask(kept), kept, None, (), float(kept["end"].max()), words)
    origin_s, end_s = task.origin(kept, values), float(kept["end"].max())
    if origin_s > end_s:
        names = ", ".join(one.name for one in task.parameters)
        raise DataError(
            f"{task.describe(values)}, lies past the end of {words} ({end_s:.1f} s); "
            f"give sampling.parameters=[{names}] that lie in it, or sampling.task=continuation"
        )
    reference = None
    if task.name == "infill" and task.fitting(kept, values) == values:  # the span has notes: it is emptied first
        kept, reference = task.split(kept, values, 0)
        words += f", {len(reference)} notes taken out"
    return Prompt(ask(kept), kept, task, values, origin_s, words, reference)


def _opened(path: Path) -> tuple[np.ndarray, int]:
    """The notes of a file, and how many it has that a piano has not."""
    from rung.recipes.piano.midi import read_midi

    try:
        notes, num_dropped = in_range(read_midi(path))
    except DataError as error:
        raise DataError(f"sampling.prompt: {one_line(error)}") from error
    if not len(notes):
        raise DataError(f"sampling.prompt: {one_line(path)} has no notes that a piano could play; give another file")
    return quantise(from_zero(notes)), num_dropped


def _that_fit(
    notes: np.ndarray, keeps_last: bool, ask: Callable[[np.ndarray], np.ndarray], num_tokens: int
) -> np.ndarray:
    """As many notes as these tokens hold, from 0 on: a search by halves, as more notes never take fewer tokens."""

    def first(num: int) -> np.ndarray:
        return from_zero(notes[len(notes) - num :] if keeps_last else notes[:num])

    fits, too_many = 0, min(len(notes), num_tokens) + 1
    while too_many - fits > 1:
        num = (fits + too_many) // 2
        fits, too_many = (num, too_many) if len(ask(first(num))) <= num_tokens else (fits, num)
    return quantise(first(fits))


def complete(
    model: Transformer, prompts: Sequence[Prompt], how: How, generator: torch.Generator | None
) -> list[np.ndarray]:
    """What the model adds or answers to each, in the time of the piece, without the prompt's notes."""
    return [made.notes for made in make_all(model, prompts, how, generator)]


def make_all(model: Transformer, prompts: Sequence[Prompt], how: How, generator: torch.Generator | None) -> list[Made]:
    """As `complete`, and whether an answer was cut."""
    if not prompts:
        return []
    device, limit = model.norm.weight.device, model.shape.context_size
    lengths = [len(prompt.ids) for prompt in prompts]
    budgets = [
        how.num_tokens if p.task is None else max(0, min(how.num_tokens, limit + 1 - len(p.ids))) for p in prompts
    ]
    ids_BT = np.full((len(prompts), max(lengths)), PAD, dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids_BT[row, max(lengths) - lengths[row] :] = prompt.ids
    may_end = [prompt.task is not None for prompt in prompts]
    grammar = Grammar([prompt.ids for prompt in prompts], budgets, may_end, device) if how.grammar else None
    done_BT = generate(
        model,
        torch.from_numpy(ids_BT).to(device),
        max(budgets),
        lengths=lengths,
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        generator=generator,
        stop_id=EOGENAI,
        allowed=grammar,
    )
    is_cut = [False] * len(prompts) if grammar is None else grammar.is_cut_B.tolist()
    rows = done_BT[:, max(lengths) :].cpu().numpy()
    return [_read(*each) for each in zip(prompts, rows, budgets, is_cut, strict=True)]


def _read(prompt: Prompt, ids: np.ndarray, budget: int, is_cut: bool) -> Made:
    ids = ids[:budget]
    is_cut = is_cut or EOGENAI not in ids
    if len(prompt.ids) and TOKENIZER.token_class(prompt.ids[-1:])[0] == LOUD:
        ids = np.concatenate([prompt.ids[-1:], ids])  # the prompt ends between a velocity and its note
    notes = read_answer(ids[ids != GENAI], prompt.origin_s)  # a model without a grammar may ask again in its answer
    return Made(notes, budget if is_cut and prompt.task is not None else None)


def artifacts(number: int, prompt: Prompt, made: np.ndarray, how: How, cut_at: int | None = None) -> Iterator[Sample]:
    """sample-N.mid, .png and .wav; where there can be no picture or no sound, a text that says why."""
    from rung.recipes.piano.midi import write_midi
    from rung.recipes.piano.render import Layout, to_roll, to_wav

    whole = prompt.whole(made)
    caption = caption_of(prompt, made, how, cut_at)
    yield Sample(f"sample-{number}.mid", write_midi(whole), caption)
    by_model, given = prompt.shown(made)
    layout: Layout = "before" if prompt.is_continuation else "among"
    if prompt.task is not None and prompt.task.kind == "replace":
        layout = "replaced"
    # More than an hour of music, or no sound font on a machine without network: the notes are still worth having.
    try:
        picture = Sample(
            f"sample-{number}.png", to_roll(by_model, prompt_notes=given, layout=layout, title=caption), caption
        )
    except UserError as error:
        picture = Sample(f"sample-{number}.no-picture.txt", f"{error}\n".encode(), "why there is no .png")
    yield picture
    try:
        heard = to_wav(whole)
        sound = Sample(f"sample-{number}.wav", heard.data, f"{caption}; played by {heard.engine}")
    except UserError as error:
        sound = Sample(f"sample-{number}.no-sound.txt", f"{error}\n".encode(), "why there is no .wav")
    yield sound


def caption_of(prompt: Prompt, made: np.ndarray, how: How, cut_at: int | None = None) -> str:
    if not len(made) and not len(prompt.notes):
        return f"no notes in {how.num_tokens} tokens: allow more of them, or train longer"
    whole = prompt.whole(made)
    seconds = float(whole["end"].max()) if len(whole) else 0.0
    if not len(prompt.notes):
        return f"{len(made)} notes, {seconds:.1f} s, from {prompt.words}, temperature {how.temperature:g}"
    what = "continuation" if prompt.task is None else prompt.task.describe(prompt.values)
    parts = [f"{what}: {len(prompt.notes)} notes given, {len(made)} made", f"{seconds:.1f} s"]
    parts.append(f"temperature {how.temperature:g}")
    if cut_at is not None:
        parts.append(f"cut after {cut_at} tokens")
    if prompt.reference is not None:
        f1 = note_f1(prompt.reference, prompt.comparable(made)).f1
        parts.append(f"note F1 {f1:.2f} against what was played")
    return f"{', '.join(parts)}; prompt: {prompt.words}"
