"""A piano model that plays on after a visitor, or does a task with what they played, for `rung play`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import numpy as np

from rung.errors import UserError
from rung.nn.pack import packed
from rung.nn.transformer import Transformer
from rung.random import Draw
from rung.recipes.piano.config import Sampling
from rung.recipes.piano.midi import write_midi
from rung.recipes.piano.notes import HIGHEST, LOWEST, in_range, make
from rung.recipes.piano.samples import caption_of, complete, from_notes, from_nothing
from rung.recipes.piano.tasks import Choice, prefix_of
from rung.recipes.piano.tokenizer import COMPOSERS

MOST_NOTES = 5000  # of a phrase
MOST_SECONDS = 3600.0
MOST_TOKENS = 4096

Time = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
Seven = Annotated[int, msgspec.Meta(ge=0, le=127)]


class PianoRequest(msgspec.Struct, forbid_unknown_fields=True):
    notes: Annotated[list[tuple[Time, Time, Seven, Seven]], msgspec.Meta(max_length=MOST_NOTES)] = []
    task: str = ""  # of a run that has learned tasks; empty: continue
    parameters: list[int] = []  # of the task; empty: the middle of each range
    composer: str = ""  # of a run that was told composers
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0 = all
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class PianoPlayer:
    kind = "piano"
    Request = PianoRequest

    def __init__(
        self, model: Transformer, sampling: Sampling, choices: Sequence[Choice], trained_on: str | None, may_end: bool
    ) -> None:
        """`choices` are the tasks it has learned; `trained_on` is the data that rows were told to be from, if any;
        `may_end` says whether it has learned where pieces end."""
        self.model = packed(model, 1, MOST_TOKENS)  # once, for all answers
        self.sampling, self.trained_on, self.may_end = sampling, trained_on, may_end
        self.choices = {choice.task.name: choice for choice in choices}

    def about(self) -> dict[str, Any]:
        usual = self.sampling
        return {
            "low": LOWEST,
            "high": HIGHEST,
            "most_tokens": MOST_TOKENS,
            "tasks": [
                {
                    "name": name,
                    "parameters": [
                        {"name": one.name, "low": one.low, "high": one.high, "usual": (low + high) // 2}
                        for one, (low, high) in zip(choice.task.parameters, choice.ranges)
                    ],
                }
                for name, choice in self.choices.items()
            ],
            "composers": list(COMPOSERS) if self.trained_on is not None else [],
            "usual": {
                "temperature": usual.temperature, "top_k": usual.top_k, "top_p": usual.top_p,
                "num_tokens": min(usual.num_tokens, 256),  # some fifty notes: as long as one waits for
            },
        }  # fmt: skip

    def answer(self, request: PianoRequest) -> Iterator[dict[str, Any]]:
        """One piece: the notes the model was given and those it made, on one clock, and both as a MIDI file."""
        asked = {name: getattr(request, name) for name in ("num_tokens", "temperature", "top_k", "top_p")}
        params = Sampling(**(asdict(self.sampling) | asked))
        task, values = None, tuple(request.parameters)
        if self.choices:
            choice = self.choices.get(request.task or "continuation") or next(iter(self.choices.values()))
            if request.task not in ("", choice.task.name):
                raise UserError(
                    f"this run has not learned the task {request.task}; it knows {', '.join(self.choices)}",
                    code="no-task",
                )
            task = choice.task
            values = task.values_of(values) if values else tuple((low + high) // 2 for low, high in choice.ranges)
        elif request.task or request.parameters:
            raise UserError("this run has learned no tasks; it continues what is played", code="not-supported")
        if request.composer and self.trained_on is None:
            raise UserError("this run has learned no composers", code="not-supported")
        prefix = [] if self.trained_on is None else prefix_of(self.trained_on, request.composer)
        rows = [(start, max(end, start), pitch, max(1, velocity)) for start, end, pitch, velocity in request.notes]
        notes, num_dropped = in_range(make(*zip(*rows))) if rows else (make([], [], [], []), 0)
        if not len(notes) and task is not None:
            raise UserError("play something first: this run needs notes to answer", code="prompt-empty")
        prompt = from_nothing(prefix, self.may_end)
        if len(notes):
            prompt = from_notes(
                notes, num_dropped, "what you played", task, values, context_size=self.model.shape.context_size,
                prefix=prefix, may_fit=not request.parameters, may_end=self.may_end,
            )  # fmt: skip
        device = self.model.norm.weight.device
        generator = Draw(request.seed, -1, np.arange(1)).generator("play", device)
        (made,) = complete(self.model, [prompt], params, generator)
        by_model, given = prompt.shown(made.notes)
        whole = prompt.whole(made.notes)
        yield {
            "given": [note.tolist() for note in given],
            "made": [note.tolist() for note in by_model],
            "caption": caption_of(prompt, made, params),
            "midi": write_midi(whole) if len(whole) else b"",
        }
