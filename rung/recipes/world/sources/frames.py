"""Reads frames from image files and films, and scales them to one size.

`fit` crops to the wanted shape, around the middle, and averages areas with whole numbers, so a frame is the same to the
bit on every machine. A film's times are its container's timestamps, in presentation order, read before anything is
decoded. A film is never rotated, even where a phone asks for upright display: poses refer to the camera's own pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rung import parse
from rung.errors import DataError, UserError
from rung.recipes.world.sources.episode import Frame

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
FILMS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")


def fit(image: np.ndarray, width: int, height: int, where: str = "a picture") -> np.ndarray:
    """(H, W, 3) uint8 to (height, width, 3): the middle of the picture, areas averaged, halves rounded up."""
    top, left, rows, columns = crop(image.shape[1], image.shape[0], width, height, where)
    image = image[top : top + rows, left : left + columns]
    if (columns, rows) == (width, height):
        return image
    # float64 holds these sums exactly: all are below 2^53
    tall = _weights(rows, height) @ image.reshape(rows, -1).astype(np.float64)
    total = _weights(columns, width) @ tall.reshape(height, columns, 3)
    area = rows * columns
    return ((2 * total.astype(np.int64) + area) // (2 * area)).astype(np.uint8)


def crop(
    source_width: int, source_height: int, width: int, height: int, where: str = "a picture"
) -> tuple[int, int, int, int]:
    """Top, left, height and width of the largest middle part with the wanted shape; refuses to enlarge."""
    if source_width < width or source_height < height:
        shape = math.gcd(width, height)
        times = min(source_width * shape // width, source_height * shape // height)
        largest = (width * times // shape, height * times // shape) if times else (source_width, source_height)
        raise DataError(
            f"{where} has {source_width}x{source_height} pixels and cannot be enlarged to {width}x{height}; the "
            f"largest size that works is dataset.width={largest[0]} dataset.height={largest[1]}",
            code="too-large",
        )
    rows, columns = source_height, source_width
    if columns * height > rows * width:
        columns = max(width, (2 * rows * width + height) // (2 * height))
    else:
        rows = max(height, (2 * columns * height + width) // (2 * width))
    return (source_height - rows) // 2, (source_width - columns) // 2, rows, columns


@lru_cache(maxsize=16)
def _weights(source: int, wanted: int) -> np.ndarray:
    """(wanted, source): how much of each source pixel lies in each wanted one, in parts of 1 / wanted of a pixel."""
    first, start = np.arange(source) * wanted, np.arange(wanted)[:, None] * source
    overlap = np.minimum(first + wanted, start + source) - np.maximum(first, start)
    return np.maximum(overlap, 0).astype(np.float64)


class ImageFiles:
    """The pictures of some files, each read when it is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        pillow()  # report now that it is missing, not at the first frame
        self.paths = paths

    def __iter__(self) -> Iterator[Frame]:
        return map(read_image, self.paths)


def read_image(path: Path) -> Frame:
    """RGB pixels, or None where the file does not hold a whole picture."""
    Image = pillow().Image
    try:
        with parse.open_file(path) as file, Image.open(file) as image:
            if image.mode in ("I", "F"):
                raise DataError(
                    f"{path} has 32-bit pixels (mode {image.mode}), whose black and white are unknown; save it with 8 "
                    "or 16 bits",
                    code="not-supported",
                )
            if image.mode.startswith("I;16"):  # Pillow's own conversion makes all above 255 white
                grey = ((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8)
                return np.stack([grey] * 3, axis=-1)
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # all of which Pillow raises on bad bytes
        return None


class Film:
    """The frames of a video file, decoded as they are asked for, each time from the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        av = _pyav()
        try:
            parse.open_file(path).close()  # raises for a pipe, which would keep FFmpeg waiting
            with av.open(str(path)) as container:
                if not container.streams.video:
                    raise DataError(f"{path} has no pictures; pass --from a film", code="video-empty")
                stream = container.streams.video[0]
                # Packets at an end of a trimmed film are there only to decode others with: they are not shown.
                stamps = {
                    packet.pts
                    for packet in container.demux(stream)
                    if packet.pts is not None and packet.size > 0 and not packet.is_discard
                }
                unit = Fraction(stream.time_base)
        except (av.FFmpegError, OSError) as error:
            raise DataError(
                f"cannot read {path}: {error}; pass --from a film that plays", code="file-damaged"
            ) from error
        if not stamps:
            raise DataError(
                f"{path} has no frames with a time; record it again in a container that keeps times, such as mp4",
                code="video-empty",
            )
        self._stamps = sorted(stamps)
        self.times = np.array([float(stamp * unit) for stamp in self._stamps])  # exact fractions until here

    def __iter__(self) -> Iterator[Frame]:
        """One for each of `times`: a stamp that the decoder leaves out is None."""
        place, av = 0, _pyav()
        with av.open(str(self.path)) as container:
            container.streams.video[0].thread_type = "AUTO"
            for packet in container.demux(video=0):
                try:
                    frames = packet.decode()
                except av.FFmpegError:  # damaged here; what follows may be whole
                    continue
                for frame in frames:
                    if frame.pts is None or frame.is_corrupt:
                        continue
                    while place < len(self._stamps) and self._stamps[place] < frame.pts:
                        yield None
                        place += 1
                    if place < len(self._stamps) and self._stamps[place] == frame.pts:
                        yield frame.to_ndarray(format="rgb24")
                        place += 1
        yield from [None] * (len(self._stamps) - place)


def pillow() -> Any:
    """PIL with the modules that the recipe draws with."""
    try:
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageFont
    except ImportError as error:
        message = "reading and drawing pictures takes Pillow; install it with `pip install 'rung[video]'`"
        raise UserError(message, code="not-installed") from error
    return PIL


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        message = "reading films takes PyAV; install it with `pip install 'rung[video]'`"
        raise UserError(message, code="not-installed") from error
    return av
