"""A speech model that writes down what it hears, and answers questions about it, for `rung play`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from rung.data.audio import check_sound
from rung.errors import UserError
from rung.recipes.speech import config as keys
from rung.recipes.speech.data import as_heard
from rung.recipes.speech.samples import Asked
from rung.recipes.speech.sources import SAMPLE_RATE

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_SOUND_BYTES = 16 << 20
LEAST_S = 0.1


class SpeechRequest(msgspec.Struct, forbid_unknown_fields=True):
    sound: Annotated[bytes, msgspec.Meta(max_length=MOST_SOUND_BYTES)]  # int16, one channel, at the sample rate
    question: Annotated[str, msgspec.Meta(max_length=10_000)] = ""  # empty: only a transcript
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 200
    beams: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1


class SpeechPlayer:
    kind = "speech"
    Request = SpeechRequest

    def __init__(self, answer: Callable[[Asked, int, int], str], cfg: keys.Config) -> None:
        """`answer` is given a sound with a question, how many tokens at most, and beams."""
        self.transcribe, self.cfg = answer, cfg

    def about(self) -> dict[str, Any]:
        usual = self.cfg.sampling
        return {
            "sample_rate": SAMPLE_RATE,
            "most_seconds": self.cfg.data.max_seconds,
            "can_ask": "qa" in self.cfg.prompts,
            "usual": {"num_tokens": min(usual.num_tokens, 2000), "beams": min(usual.beams, 16)},
        }

    def answer(self, request: SpeechRequest) -> Iterator[dict[str, Any]]:
        """The transcript, then the answer to the question, if there is one."""
        sound = np.frombuffer(request.sound[: len(request.sound) // 2 * 2], "<i2").astype(np.float32) / 32768
        if len(sound) < LEAST_S * SAMPLE_RATE:
            raise UserError(f"the recording is shorter than {LEAST_S:g} s; record again", code="too-short")
        if request.question and "qa" not in self.cfg.prompts:
            raise UserError("this run has learned no questions (prompts.qa); leave it empty", code="not-supported")
        check_sound(sound[:, None], SAMPLE_RATE, "the recording", is_float=False)
        heard, is_cut = as_heard(sound, self.cfg.dataset, self.cfg.data.max_seconds)
        for task, question in [("asr", ""), *([("qa", request.question)] if request.question else [])]:
            said = self.transcribe(Asked("recording", heard, task, question, None), request.num_tokens, request.beams)
            yield {"task": task, "text": said, "is_cut": is_cut}
