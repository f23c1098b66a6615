"""Where music comes from: tracks that can be read one by one, with a text each.

A source lists its tracks without reading them all into memory. What cannot be used is never trained on: a track that is
damaged raises DataError when it is read, and what is known to be unusable before that is listed as quarantined. Remarks
are about anything else: texts that cannot be read, files that are no sound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rung.data.audio import Recording

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Track:
    """One recording or rendered piece."""

    name: str  # unique in its source, and how a person finds it again: freedoom2/D_RUNNIN, album/song.ogg
    piece: str  # tracks of one piece go to one split
    text: str  # what it sounds like, in words; empty where nobody said
    read: Callable[[int], Recording]  # of a sample rate; raises DataError
    split: str | None = None  # of the publisher, where there is one
    seconds: float | None = None  # None: nobody knows before it was read, nor whether it can be


@dataclass
class Source:
    name: str
    tracks: list[Track]
    quarantined: list[dict[str, str]] = field(default_factory=list)  # sound: file, reason
    remarks: list[dict[str, str]] = field(default_factory=list)  # likewise
