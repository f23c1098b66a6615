"""Films: frames and their times, as the file itself has them.

Times come from the container's own stamps, in presentation order, before anything is decoded; what then fails to decode
is a None in its place. The surprising thing is that a film is never turned: a phone that asks for its film to be shown
upright still holds the camera's own pixels, and those are what poses speak of.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from rung.errors import DataError, UserError
from rung.recipes.world.sources.episode import Frame

SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")


class Film:
    """The frames of a video file, decoded as they are asked for, each time from the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamps, unit = _stamps(path)
        self.times = np.array([float(stamp * unit) for stamp in self._stamps])  # exact fractions until here

    def __len__(self) -> int:
        return len(self._stamps)

    def __iter__(self) -> Iterator[Frame]:
        """One for each of `times`: a stamp that the decoder leaves out is None."""
        place = 0
        for stamp, pixels in self._decode():
            while place < len(self._stamps) and self._stamps[place] < stamp:
                yield None
                place += 1
            if place < len(self._stamps) and self._stamps[place] == stamp:
                yield pixels
                place += 1
        yield from [None] * (len(self._stamps) - place)

    def _decode(self) -> Iterator[tuple[int, np.ndarray]]:
        av = pyav()
        with av.open(str(self.path)) as container:
            container.streams.video[0].thread_type = "AUTO"
            for packet in container.demux(video=0):
                try:
                    frames = packet.decode()
                except av.FFmpegError:  # damaged here; what follows may be whole
                    continue
                for frame in frames:
                    if frame.pts is not None and not frame.is_corrupt:
                        yield frame.pts, frame.to_ndarray(format="rgb24")


def _stamps(path: Path) -> tuple[list[int], Fraction]:
    av = pyav()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise DataError(f"{path} holds no pictures; pass --from a film")
            stream = container.streams.video[0]
            stamps = {packet.pts for packet in container.demux(stream) if _is_shown(packet)}
            unit = Fraction(stream.time_base)
    except (av.FFmpegError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}; pass --from a film that plays") from error
    if not stamps:
        raise DataError(
            f"{path} has no frames with a time; record it again in a container that keeps times, such as mp4"
        )
    return sorted(stamps), unit


def _is_shown(packet: Any) -> bool:
    """Not those at an end of a trimmed film, which are there only to decode others with."""
    return packet.pts is not None and packet.size > 0 and not packet.is_discard


def pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise UserError("reading films takes PyAV; install it with `pip install 'rung[video]'`") from error
    return av
