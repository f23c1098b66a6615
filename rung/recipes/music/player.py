"""A music model that makes clips of a prompt, or goes on with a clip, for `rung play`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from rung.random import Draw
from rung.recipe import Sample
from rung.recipes.music.config import Sampling
from rung.recipes.music.samples import Heard

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_SOUND_BYTES = 16 << 20  # as it is sent: 16 bits a sample, one channel


class MusicRequest(msgspec.Struct, forbid_unknown_fields=True):
    prompt: Annotated[str, msgspec.Meta(max_length=10_000)] = ""
    sound: Annotated[bytes, msgspec.Meta(max_length=MOST_SOUND_BYTES)] = b""  # to continue: int16 at the codec's rate
    seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0  # 0 = as long as a row of training
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0 = all
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class MusicPlayer:
    kind = "music"
    Request = MusicRequest

    def __init__(
        self, make: Callable[[Sampling, Heard | None, Draw], Sample], sampling: Sampling, about: dict[str, Any]
    ) -> None:
        self.make, self.sampling, self._about = make, sampling, about

    def about(self) -> dict[str, Any]:
        """sample_rate, most_seconds, knows_texts, examples; and what is usual."""
        usual = self.sampling
        return {
            **self._about,
            "usual": {
                "seconds": usual.seconds, "temperature": usual.temperature, "top_k": usual.top_k, "top_p": usual.top_p,
                "guidance_scale": usual.guidance_scale,
            },
        }  # fmt: skip

    def answer(self, request: MusicRequest) -> Iterator[dict[str, Any]]:
        """One piece: a WAV file and what to know of it."""
        names = ("prompt", "seconds", "temperature", "top_k", "top_p", "guidance_scale")
        asked = {name: getattr(request, name) for name in names}
        cfg = Sampling(**(asdict(self.sampling) | asked | {"num_samples": 1, "audio": ""}))
        sound = np.frombuffer(request.sound[: len(request.sound) // 2 * 2], "<i2")
        num_heard = round(self._about["most_seconds"] * self._about["sample_rate"])  # only its end is continued
        sound = sound[-num_heard:].astype(np.float32) / 32768
        heard = Heard("your clip", sound[:, None]) if len(sound) else None
        made = self.make(cfg, heard, Draw(request.seed, -1, np.arange(1)))
        yield {"wav": made.data, "caption": made.caption}
