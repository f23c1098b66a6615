"""Where music comes from: tracks that can be read one by one, with a text each.

A source lists its tracks without reading them all into memory. What cannot be used is never trained on: a track that is
damaged raises DataError when it is read, and what is known to be unusable before that is listed as quarantined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Track:
    """One recording or rendered piece."""

    name: str  # unique in its source, and how a person finds it again: freedoom2/D_RUNNIN, album/song.ogg
    piece: str  # tracks of one piece go to one split
    text: str  # what it sounds like, in words; empty where nobody said
    read: Callable[[int], np.ndarray]  # sample rate -> float32 (samples, 1 or 2 channels), peaks within 1; DataError
    split: str | None = None  # of the publisher, where there is one


@dataclass
class Source:
    name: str
    tracks: list[Track]
    quarantined: list[dict[str, str]] = field(default_factory=list)  # file, reason
