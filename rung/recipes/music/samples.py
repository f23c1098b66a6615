"""Clips to listen to: a sound file and a picture of it each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from rung.data.audio import read_audio, spectrogram_png, wav_bytes
from rung.errors import ConfigError, DataError, UserError
from rung.random import Draw
from rung.recipe import Sample
from rung.recipes.music.delay import Specials
from rung.recipes.music.generate import SamplingParams, generate
from rung.recipes.music.model import MusicModel
from rung.recipes.music.stream import encode_text
from rung.text import one_line

if TYPE_CHECKING:
    from rung.recipes.music.codec import Codec


@dataclass(frozen=True)
class Sound:
    """How codes become sound: each side has the first `num_codebooks` of the codec's."""

    codec: Codec
    num_codebooks: int
    num_sides: int

    def decode(self, codes_TC: np.ndarray) -> np.ndarray:
        """(samples, sides) float32."""
        if not len(codes_TC):
            return np.zeros((1, self.num_sides), np.float32)
        sides = np.split(codes_TC, self.num_sides, axis=1)
        return np.stack([self.codec.decode(side) for side in sides], axis=1)

    def encode(self, sound: np.ndarray) -> np.ndarray:
        """(T, C) of a sound of one or two sides."""
        sides = [sound.mean(axis=1)] if self.num_sides == 1 else [sound[:, 0], sound[:, -1]]
        codes = [self.codec.encode(np.ascontiguousarray(side, np.float32))[:, : self.num_codebooks] for side in sides]
        return np.concatenate(codes, axis=1)


class Heard(NamedTuple):
    """A sound to continue, (samples, channels) at the codec's rate."""

    name: str
    sound: np.ndarray


def heard_in(file: str, sample_rate: int) -> Heard:
    """The sound file that sampling.audio names."""
    try:
        return Heard(one_line(Path(file).name), read_audio(Path(file), sample_rate))
    except DataError as error:
        raise DataError(f"sampling.audio: {one_line(error)}", code=error.code) from error


def samples(
    model: MusicModel, sound: Sound, texts: Sequence[str], heard: Heard | None, params: SamplingParams,
    delays: Sequence[int], specials: Specials, draw: Draw, *, knows_texts: bool = True, has_pictures: bool = True,
) -> list[Sample]:  # fmt: skip
    """One clip per text, all at once; with `heard` they continue that sound.

    A caption says what a listener would not guess: that a text was cut, or means nothing to a model that has seen none.
    """
    device, text_length = model.offsets_C.device, model.encoder.shape.context_size
    rows = [encode_text(text, text_length) for text in texts]
    text_BL = torch.zeros(len(texts), text_length, dtype=torch.long)
    for number, row in enumerate(rows):
        text_BL[number, : len(row)] = torch.from_numpy(row.astype(np.int64))
    lengths_B = torch.tensor([len(row) for row in rows])
    prompt, given = None, "no real audio in it"
    if heard is not None:
        num_kept = params.num_frames // 2
        if not num_kept:
            problem = f"{1 / sound.codec.frames_per_s:.3g} s is one frame, which leaves nothing to continue"
            remedy = f"set sampling.seconds to {2 / sound.codec.frames_per_s:.3g} or more"
            raise ConfigError(f"{problem}; {remedy}, or leave sampling.audio out", code="too-small")
        prompt = sound.encode(heard.sound)[-num_kept:]  # what comes next depends on what was last
        given = f"begins with {len(prompt) / sound.codec.frames_per_s:.3g} s of {heard.name}"
    generator = draw.generator("sample", device)
    made = generate(
        model, text_BL.to(device), lengths_B.to(device), params, delays, specials, generator, prompt_TC=prompt
    )
    found: list[Sample] = []
    for number, (text, codes) in enumerate(zip(texts, made, strict=True)):
        wave, rate = sound.decode(codes), sound.codec.sample_rate
        seconds = len(codes) / sound.codec.frames_per_s
        ending = ", ended by the model" if len(codes) < params.num_frames else ""
        asked = f'"{one_line(text)}"' if text else "no text"
        if text and not knows_texts:
            asked += " (the model has not learned from texts)"
        elif len(text.encode("utf-8", "replace")) > text_length:
            asked += f" (cut to its first {len(rows[number])} bytes: data.text_length={text_length})"
        heat = f"temperature {params.temperature:g}, {params.guidance} guidance {params.guidance_scale:g}"
        caption = f"{asked}: {seconds:.3g} s{ending}, {given}, {heat}"
        picture = None
        try:
            picture = spectrogram_png(wave, rate, asked) if has_pictures else None
        except UserError as error:
            if error.code != "not-installed":
                raise
            has_pictures = False
            caption += f"; no picture: {one_line(error)}"
        found.append(Sample(f"sample-{number}.wav", wav_bytes(wave, rate), caption))
        if picture is not None:
            found.append(Sample(f"sample-{number}.png", picture, caption))
    return found
