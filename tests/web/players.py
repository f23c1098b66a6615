"""Players without models for the tests of the pages: what they answer can be foretold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rung.data.audio import wav_bytes
from rung.recipes.music.player import MusicRequest
from rung.recipes.piano.midi import write_midi
from rung.recipes.piano.notes import make
from rung.recipes.piano.player import PianoRequest
from rung.recipes.speech.player import SpeechRequest

RATE = 16000
# (start, end, key, velocity) after the beginning of what was given
ANSWER = [(2.0, 2.3, 60, 100), (2.5, 2.8, 64, 90), (3.1, 3.5, 67, 110)]


class FakePiano:
    """Answers every phrase with the same three notes, the first one as many keys higher as the seed says."""

    kind, Request = "piano", PianoRequest

    def __init__(self, tasks: bool = False) -> None:
        self.asked: list[PianoRequest] = []
        self.tasks = tasks

    def about(self) -> dict[str, Any]:
        parameter = {"name": "percent", "low": 5, "high": 100, "usual": 50}
        tasks = [{"name": "continuation", "parameters": [parameter]}, {"name": "top_line", "parameters": []}]
        usual = {"temperature": 1.0, "top_k": 0, "top_p": 0.98, "num_tokens": 64}
        return {
            "low": 21, "high": 108, "most_tokens": 100, "tasks": tasks if self.tasks else [], "composers": [],
            "usual": usual,
        }  # fmt: skip

    def answer(self, request: PianoRequest) -> Iterator[dict[str, Any]]:
        self.asked.append(request)
        midi = write_midi(make(*zip(*ANSWER)))
        yield {"given": request.notes, "made": ANSWER, "caption": f"{len(request.notes)} notes given", "midi": midi}


class FakeMusic:
    """A tone whose pitch is the length of the prompt, 100 Hz a letter; after a clip, that clip first."""

    kind, Request = "music", MusicRequest

    def __init__(self) -> None:
        self.asked: list[MusicRequest] = []

    def about(self) -> dict[str, Any]:
        usual = {"seconds": 0.0, "temperature": 1.0, "top_k": 64, "top_p": 1.0, "guidance_scale": 3.0}
        return {
            "sample_rate": RATE, "most_seconds": 5.0, "knows_texts": True, "examples": ["a slow waltz"],
            "usual": usual,
        }  # fmt: skip

    def answer(self, request: MusicRequest) -> Iterator[dict[str, Any]]:
        self.asked.append(request)
        time = np.arange(RATE) / RATE
        tone = 0.5 * np.sin(2 * np.pi * 100 * max(1, len(request.prompt)) * time)
        given = np.frombuffer(request.sound, "<i2").astype(np.float32) / 32768
        sound = np.concatenate([given, tone.astype(np.float32)])
        yield {"wav": wav_bytes(sound, RATE), "caption": f'"{request.prompt}": <b>{len(sound) / RATE:g} s</b>'}


class FakeSpeech:
    """Says how loud and how long the sound is that it was given."""

    kind, Request = "speech", SpeechRequest

    def __init__(self) -> None:
        self.heard: list[np.ndarray] = []

    def about(self) -> dict[str, Any]:
        usual = {"num_tokens": 20, "beams": 1}
        return {"sample_rate": RATE, "most_seconds": 10.0, "can_ask": True, "usual": usual}

    def answer(self, request: SpeechRequest) -> Iterator[dict[str, Any]]:
        self.heard.append(np.frombuffer(request.sound, "<i2").astype(np.float32) / 32768)
        yield {"task": "asr", "text": f"{len(self.heard[-1]) / RATE:.1f} seconds", "is_cut": False}
        if request.question:
            yield {"task": "qa", "text": f"<i>{request.question}</i>", "is_cut": False}
