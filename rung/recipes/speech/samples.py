"""Utterances with what the model makes of them: a text, and a spectrogram with the answer over it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rung.data.audio import read_audio, spectrogram_png, wav_bytes
from rung.errors import DataError
from rung.recipe import Sample
from rung.recipes.speech import config as keys
from rung.recipes.speech.data import as_heard
from rung.recipes.speech.metrics import word_errors
from rung.recipes.speech.sources import SAMPLE_RATE
from rung.text import one_line


class Asked(NamedTuple):
    """A sound, what was asked about it, and the right answer where somebody knows it."""

    name: str
    sound: np.ndarray  # int16 (N,) as the encoders hear it
    task: str
    question: str
    reference: str | None


def asked_of_file(file: str, question: str, cfg: keys.Dataset, max_seconds: float) -> Asked:
    try:
        sound = read_audio(Path(file), SAMPLE_RATE).mean(axis=1, dtype=np.float32)
    except DataError as error:
        raise DataError(f"sampling.prompt: {one_line(error)}", code=error.code) from error
    heard, _ = as_heard(sound, cfg, max_seconds)
    return Asked(Path(file).name, heard, "qa" if question else "asr", question, None)


def samples_of(asked: Sequence[Asked], answers: Sequence[str]) -> list[Sample]:
    found = []
    for number, (one, answer) in enumerate(zip(asked, answers, strict=True)):
        said = one_line(answer) or "(nothing)"
        caption = f"{one_line(one.name)}: {said}"
        text = f"sound: {one.name}\n" + (f"question: {one.question}\n" if one.question else "") + f"answer: {answer}\n"
        if one.reference is not None:
            errors = word_errors([one.reference], [answer])
            caption += f' | said: "{one_line(one.reference)}", {errors.errors} of {errors.words} words wrong'
            text += f"right: {one.reference}\nwords wrong: {errors.errors} of {errors.words}\n"
        sound = one.sound.astype(np.float32) / 32767
        found.append(Sample(f"sample-{number}.txt", text.encode(), caption))
        found.append(Sample(f"sample-{number}.wav", wav_bytes(sound, SAMPLE_RATE), caption))
        found.append(Sample(f"sample-{number}.png", spectrogram_png(sound, SAMPLE_RATE, said), caption))
    return found
