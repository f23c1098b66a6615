"""Where speech comes from: utterances that can be read one by one, with what is said in them.

A source lists its utterances without reading them all into memory. What cannot be used is never trained on: an
utterance that is damaged raises DataError when it is read, and what is known to be unusable before that is listed as
quarantined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

SAMPLE_RATE = 16_000  # of every encoder that this recipe knows
TRANSCRIBE = "asr"  # the task of an utterance that names none


@dataclass(frozen=True)
class Utterance:
    """A sound and what a model should answer when it hears it."""

    name: str  # unique in its source, and how a person finds it again: clips/0007.flac
    text: str  # the answer: a transcript, or whatever the task asks for
    read: Callable[[], np.ndarray]  # float32 (samples,) at 16 kHz, peaks within 1; raises DataError
    task: str = TRANSCRIBE
    question: str = ""  # asked about the sound, where the task is to answer one
    speaker: str = ""  # empty where nobody knows; all utterances of one go to one split
    split: str | None = None  # of the publisher, where there is one


@dataclass
class Source:
    name: str
    utterances: list[Utterance]
    quarantined: list[dict[str, str]] = field(default_factory=list)  # file, reason
