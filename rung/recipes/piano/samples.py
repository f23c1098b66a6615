"""Builds prompts, lets a model complete them, and turns the answers into files or into figures.

A prompt holds what the model is given and what is needed to place its answer in the time of the piece; all prompts are
completed in one batch. An answer to a task never outgrows the context, whatever `num_tokens` says, because the model
would forget the question; a continuation may. In an eval the answers, and those of two models that know little, are
compared with what was played, from where the answer begins up to the last note of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rung.errors import DataError, UserError
from rung.nn.generate import generate_steps
from rung.nn.transformer import Transformer
from rung.recipe import Part, Sample
from rung.recipes.piano.config import Sampling
from rung.recipes.piano.grammar import SILENT, Follower, Grammar, left_padded
from rung.recipes.piano.metrics import compare_notes, copy_last, note_f1
from rung.recipes.piano.midi import read_midi, write_midi
from rung.recipes.piano.model import KeysTransformer
from rung.recipes.piano.ngram import NGram
from rung.recipes.piano.notes import NOTE, UNIT_S, from_zero, in_range, join, moved, quantise, units
from rung.recipes.piano.plausibility import Copies, beside, cut, statistics
from rung.recipes.piano.render import Layout, to_roll, to_wav
from rung.recipes.piano.tasks import Task, question, read_answer, read_question
from rung.recipes.piano.tokenizer import (
    CLS,
    EOGENAI,
    GENAI,
    LOUD,
    NUM_PITCHES,
    ON,
    PAD,
    PLACE,
    TIME,
    TIME_STEPS,
    TOKENIZER,
    WAIT,
)
from rung.text import one_line

MINUTE_S = 60.0
SLACK = 32  # tokens that the second half of a window may be longer than the one that was played


@dataclass(frozen=True)
class Prompt:
    ids: np.ndarray  # what the model is given
    notes: np.ndarray  # the same as notes, in the time of the piece
    task: Task | None  # None: predict the next token
    values: tuple[int, ...]  # of the task's parameters
    origin_s: float  # where the clock of what is generated begins, in the time of the piece
    label: str  # where it comes from, for captions
    reference: np.ndarray | None = None  # what was really played, where that is known
    may_end: bool = False  # whether a piece that is continued may end before its budget: data.end_token
    sounding: np.ndarray | None = None  # (keys,) units that each key has sounded before the prompt; None: nothing does

    @property
    def is_continuation(self) -> bool:
        """Whether the answer follows the prompt, and does not lie among its notes or in their place."""
        return self.task is None or self.task.name == "continuation"

    def comparable(self, made: np.ndarray) -> np.ndarray:
        """What is to be compared with the reference: of a continuation, all up to the last note that was played.

        Nobody is asked to know where a piece is cut.
        """
        if self.reference is None or not self.is_continuation:
            return made
        last_s = float(self.reference["start"].max()) if len(self.reference) else self.origin_s
        return made[made["start"] < last_s + UNIT_S / 2]

    def whole(self, made: np.ndarray) -> np.ndarray:
        """Prompt and answer as one piece."""
        return join([self.notes, made]) if self.task is None else self.task.join(self.notes, made)

    def shown(self, made: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Notes of the model and of the prompt as they sound: a key that one strikes again ends the other's note."""
        if self.task is not None and self.task.kind == "replace":
            return made, self.notes
        whole = self.whole(made)
        strikes, given = (units(notes["start"]) * 128 + notes["pitch"] for notes in (whole, self.notes))
        is_given = np.isin(strikes, given)
        return whole[~is_given], whole[is_given]


class Completion(NamedTuple):
    notes: np.ndarray  # in the time of the piece, without those of the prompt
    cut_at: int | None = None  # the tokens after which an answer was cut off; None: it ended by itself


# Prompts


def from_nothing(prefix: Sequence[int] = (), may_end: bool = False) -> Prompt:
    ids = np.array([*prefix, CLS], dtype=np.uint16)
    return Prompt(ids, np.empty(0, dtype=NOTE), None, (), 0.0, "nothing", may_end=may_end)


def from_file(
    path: Path,
    task: Task | None,
    values: tuple[int, ...] = (),
    *,
    context_size: int,
    prefix: Sequence[int] = (),
    may_fit: bool = False,
    may_end: bool = False,
) -> Prompt:
    """The notes of a MIDI file, all of them the prompt; no more than fill half the context.

    With `may_fit` the values are a proposal, changed to suit the notes; else they are what the user wants.
    """
    try:
        notes, num_dropped = in_range(read_midi(path))
    except DataError as error:
        raise DataError(f"sampling.prompt: {one_line(error)}", code=error.code) from error
    if not len(notes):
        raise DataError(
            f"sampling.prompt: {one_line(path)} has no notes on the piano; give another file", code="file-empty"
        )
    return from_notes(
        notes, num_dropped, one_line(path.name), task, values, context_size=context_size, prefix=prefix,
        may_fit=may_fit, may_end=may_end,
    )  # fmt: skip


def from_notes(
    notes: np.ndarray,
    num_dropped: int,
    label: str,
    task: Task | None,
    values: tuple[int, ...] = (),
    *,
    context_size: int,
    prefix: Sequence[int] = (),
    may_fit: bool = False,
    may_end: bool = False,
) -> Prompt:
    """The same of notes that are here; `num_dropped` were left out before."""
    notes = quantise(from_zero(notes))
    keeps_last = task is None or task.name == "continuation"  # what comes next depends on what was last

    def last_or_first(num: int) -> np.ndarray:
        return from_zero(notes[len(notes) - num :] if keeps_last else notes[:num])

    def ask(some: np.ndarray) -> np.ndarray:
        if task is not None:
            return question(task, values, some, prefix)
        return np.concatenate([np.array([*prefix, CLS], dtype=np.uint16), TOKENIZER.encode(some)])

    # As many notes as fit: a search by halves, as more notes never take fewer tokens.
    num_tokens = context_size // 2
    fits, too_many = 0, min(len(notes), num_tokens) + 1
    while too_many - fits > 1:
        num = (fits + too_many) // 2
        fits, too_many = (num, too_many) if len(ask(last_or_first(num))) <= num_tokens else (fits, num)
    kept = quantise(last_or_first(fits))
    if not len(kept):
        raise DataError(
            f"no note of {label} fits half of data.context_size={context_size}; choose a run with a larger context",
            code="too-large",
        )
    if len(kept) < len(notes):
        label = f"the {'last' if keeps_last else 'first'} {len(kept)} of {len(notes)} notes of {label}"
    if num_dropped:
        label += f", without {num_dropped} outside the piano"
    end_s = float(kept["end"].max())
    if task is None:  # time continues from the last event, which is the end of a note
        return Prompt(ask(kept), kept, None, (), end_s, label, may_end=may_end)
    if may_fit:
        values = task.fitting(kept, values)
    origin_s = task.origin(kept, values)
    if origin_s > end_s:
        names = ", ".join(one.name for one in task.parameters)
        raise DataError(
            f"{task.describe(values)}, lies past the end of {label} ({end_s:.1f} s); "
            f"give sampling.parameters=[{names}] that lie in it, or sampling.task=continuation",
            code="bad-range",
        )
    reference = None
    if task.name == "infill" and task.fitting(kept, values) == values:  # the span has notes: it is emptied first
        kept, reference = task.split(kept, values, 0)
        label += f", {len(reference)} notes taken out"
    return Prompt(ask(kept), kept, task, values, origin_s, label, reference)


def from_row(row: np.ndarray, sounding: np.ndarray | None = None, may_end: bool = False) -> Prompt | None:
    """A row of an eval set as a prompt with what was played; None where the row was cut and does not hold both.

    A row of a task is to be completed after <GENAI>, a window of a performance after its first half.
    """
    ids = row[row != PAD]
    task, values = read_question(ids)
    if task is not None:
        if GENAI not in ids or EOGENAI not in ids:
            return None
        asked = ids[: int(np.flatnonzero(ids == GENAI)[0]) + 1]
        notes = TOKENIZER.decode(asked)
        origin_s = task.origin(notes, values)
        return Prompt(asked, notes, task, values, origin_s, "a held-out piece", read_answer(ids, origin_s))
    if len(ids) < 4:
        return None
    given, rest = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    played, origin_s = _notes_after(given, rest)
    notes = TOKENIZER.decode(given, keep_open=True)
    label = "a held-out piece"
    return Prompt(given, notes, None, (), origin_s, label, quantise(played), may_end=may_end, sounding=sounding)


def _notes_after(given: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """The notes that start in `ids`, and when these begin: after all the time steps of `given`.

    The first note's velocity may be the last that is given.
    """
    waits = given[TOKENIZER.token_class(given) == WAIT].astype(np.int64) - TIME
    origin_s = float(np.array(TIME_STEPS)[waits].sum()) * UNIT_S
    hanging = given[-1:][TOKENIZER.token_class(given[-1:]) == LOUD]
    return moved(TOKENIZER.decode(np.concatenate([hanging, ids]), keep_open=True), origin_s), origin_s


# Completions


def steps(
    model: Transformer,
    prompts: Sequence[Prompt],
    params: Sampling,
    generator: torch.Generator | None,
    num_tokens: int | None = None,
    grammar: Grammar | None = None,
) -> Iterator[Tensor]:
    """The ids (B,) that the model adds to all prompts, one step at a time; <EOGENAI> from where a row has ended.

    The `grammar` is that of `grammar_of`, for a caller who looks into it afterwards.
    """
    device = model.norm.weight.device
    budgets = budgets_of(model, prompts, params, num_tokens)
    if grammar is None:
        grammar = grammar_of(model, prompts, params, num_tokens)
    embed = partial(_embed, model, grammar.follower) if isinstance(model, KeysTransformer) else None
    made = generate_steps(
        model,
        torch.from_numpy(left_padded([prompt.ids for prompt in prompts])).to(device),
        max(budgets),
        lengths=[len(prompt.ids) for prompt in prompts],
        temperature=params.temperature,
        top_k=params.top_k or None,
        top_p=params.top_p if params.top_p < 1 else None,
        generator=generator,
        stop_id=EOGENAI,
        allowed=grammar if params.grammar else None,
        embed=embed,
    )
    for step in made:
        yield step.ids_B


def budgets_of(
    model: Transformer, prompts: Sequence[Prompt], params: Sampling, num_tokens: int | None = None
) -> list[int]:
    """How many tokens each prompt may be given."""
    num_tokens, limit = params.num_tokens if num_tokens is None else num_tokens, model.shape.context_size
    return [num_tokens if p.task is None else max(0, min(num_tokens, limit + 1 - len(p.ids))) for p in prompts]


def grammar_of(
    model: Transformer, prompts: Sequence[Prompt], params: Sampling, num_tokens: int | None = None
) -> Grammar:
    device, ids = model.norm.weight.device, [prompt.ids for prompt in prompts]
    silent = np.full(NUM_PITCHES, SILENT)
    sounding = np.stack([silent if prompt.sounding is None else prompt.sounding for prompt in prompts])
    follower = Follower(ids, device, torch.from_numpy(sounding.astype(np.int64)).to(device))
    may_end = [prompt.task is not None or prompt.may_end for prompt in prompts]
    return Grammar(ids, budgets_of(model, prompts, params, num_tokens), may_end, device, follower)


def _embed(model: KeysTransformer, follower: Follower, ids_BT: Tensor, num: int) -> Tensor:
    follower.update(ids_BT)
    return model.embed(ids_BT[:, -num:], follower.ages(num))


def complete(
    model: Transformer,
    prompts: Sequence[Prompt],
    params: Sampling,
    generator: torch.Generator | None,
    num_tokens: int | None = None,
) -> list[Completion]:
    """What the model adds or answers to each prompt; `num_tokens` in place of what `params` says."""
    if not prompts:
        return []
    grammar = grammar_of(model, prompts, params, num_tokens)
    new = [ids_B[:, None] for ids_B in steps(model, prompts, params, generator, num_tokens, grammar)]
    new_BT = torch.cat(new, dim=1).cpu().numpy() if new else np.empty((len(prompts), 0), dtype=np.int64)
    was_cut = grammar.is_cut_B.tolist() if params.grammar else [False] * len(prompts)
    made = []
    for prompt, ids, budget, is_cut in zip(prompts, new_BT, budgets_of(model, prompts, params, num_tokens), was_cut):
        ids = ids[:budget]
        is_cut = prompt.task is not None and (is_cut or EOGENAI not in ids)
        if len(prompt.ids) and TOKENIZER.token_class(prompt.ids[-1:])[0] == LOUD:
            ids = np.concatenate([prompt.ids[-1:], ids])  # the prompt ends between a velocity and its note
        notes = read_answer(ids[ids != GENAI], prompt.origin_s)  # without a grammar a model may ask in its answer
        made.append(Completion(notes, budget if is_cut else None))
    return made


def measure_completions(
    model: Transformer, prompts: Sequence[Prompt], params: Sampling, generator: torch.Generator, ngram: NGram | None
) -> dict[str, Part]:
    """Sums over these prompts of an eval set, and how many there were of each.

    Prompts and tokens do not depend on which rows are completed together; what is drawn does, unless the temperature
    is 0.
    """
    if not prompts:
        return {}
    context = model.shape.context_size
    room = context // 2 + SLACK if prompts[0].task is None else context  # an answer gets what is left of it
    found: dict[str, list[float]] = defaultdict(list)
    for prompt, made in zip(prompts, complete(model, prompts, params, generator, room)):
        assert prompt.reference is not None
        figures = compare_notes(prompt.reference, prompt.comparable(made.notes))
        for name, value in figures.items():
            found[name].append(value)
        if prompt.task is not None:
            found[f"{prompt.task.name}_f1"].append(figures["f1"])
        if not prompt.is_continuation:
            continue
        # The last bars of the prompt once more: as long a time as the answer takes.
        span_s = float(prompt.reference["end"].max(initial=prompt.origin_s)) - prompt.origin_s
        rivals = {"copy": copy_last(prompt.notes, prompt.origin_s, span_s)}
        if ngram is not None:
            left = room if prompt.task is None else context + 1 - len(prompt.ids)
            rivals["ngram"] = by_ngram(ngram, prompt, left)
        for rival, notes in rivals.items():
            for name, value in compare_notes(prompt.reference, prompt.comparable(notes)).items():
                if name.startswith("f1"):
                    found[f"{rival}_{name}"].append(value)
    return {name: (torch.tensor(sum(values)), torch.tensor(float(len(values)))) for name, values in found.items()}


def measure_plausibility(
    model: Transformer,
    prompts: Sequence[Prompt],
    params: Sampling,
    generator: torch.Generator,
    held_out: Sequence[np.ndarray],
    copies: Copies,
) -> dict[str, Part]:
    """Medians over these pieces, and the middle nine tenths of held-out ones, all of at most a minute."""
    made = [cut(one.notes, MINUTE_S) for one in complete(model, prompts, params, generator)]
    ours, theirs = (
        [statistics(notes) | copies.statistics(notes) for notes in some]
        for some in (made, [cut(notes, MINUTE_S) for notes in held_out])
    )
    return {
        f"{name}{'' if what == 'median' else f'_{what}'}": (torch.tensor(value), torch.tensor(1.0))
        for name, figures in beside(ours, theirs).items()
        for what, value in figures.items()
    }


def by_ngram(ngram: NGram, prompt: Prompt, num_tokens: int) -> np.ndarray:
    played = prompt.ids[prompt.ids < PLACE]  # it has never seen a special token
    if prompt.task is not None:  # the answer begins with the last note of the prompt, whose end comes after that
        played = played[: np.flatnonzero(TOKENIZER.token_class(played) == ON)[-1] + 1]
    made = ngram.complete(played, num_tokens, np.random.default_rng(prompt.ids.tolist()))  # the same in every run
    return _notes_after(played, made)[0]


# Files


def artifacts(number: int, prompt: Prompt, made: Completion, params: Sampling) -> Iterator[Sample]:
    """sample-N.mid, .png and .wav; where there can be no picture or no sound, a text that says why."""
    whole = prompt.whole(made.notes)
    caption = caption_of(prompt, made, params)
    yield Sample(f"sample-{number}.mid", write_midi(whole), caption)
    by_model, given = prompt.shown(made.notes)
    layout: Layout = "before" if prompt.is_continuation else "among"
    if prompt.task is not None and prompt.task.kind == "replace":
        layout = "replaced"
    # More than an hour of music, or no sound font on a machine without network: the notes are still worth having.
    try:
        picture = to_roll(by_model, prompt_notes=given, layout=layout, title=caption)
        yield Sample(f"sample-{number}.png", picture, caption)
    except UserError as error:
        yield Sample(f"sample-{number}.no-picture.txt", f"{error}\n".encode(), "why there is no .png")
    try:
        sound = to_wav(whole)
        yield Sample(f"sample-{number}.wav", sound.data, f"{caption}; played by {sound.engine}")
    except UserError as error:
        yield Sample(f"sample-{number}.no-sound.txt", f"{error}\n".encode(), "why there is no .wav")


def caption_of(prompt: Prompt, made: Completion, params: Sampling) -> str:
    if not len(made.notes) and not len(prompt.notes):
        return f"no notes in {params.num_tokens} tokens: allow more of them, or train longer"
    whole = prompt.whole(made.notes)
    seconds = float(whole["end"].max()) if len(whole) else 0.0
    if not len(prompt.notes):
        voices = statistics(made.notes)["voices"]
        return (
            f"{len(made.notes)} notes, {seconds:.1f} s, {voices:.1f} voices, from {prompt.label}, "
            f"temperature {params.temperature:g}"
        )
    what = "continuation" if prompt.task is None else prompt.task.describe(prompt.values)
    parts = [f"{what}: {len(prompt.notes)} notes given, {len(made.notes)} made", f"{seconds:.1f} s"]
    parts.append(f"temperature {params.temperature:g}")
    if made.cut_at is not None:
        parts.append(f"cut after {made.cut_at} tokens")
    if prompt.reference is not None:
        f1 = note_f1(prompt.reference, prompt.comparable(made.notes)).f1
        parts.append(f"note F1 {f1:.2f} against what was played")
    return f"{', '.join(parts)}; prompt: {prompt.label}"
