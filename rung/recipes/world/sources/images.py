"""Pictures of any size become frames of one size.

`fit` crops to the wanted shape, around the middle, and averages areas. Weights are whole numbers and all sums are below
2^53, so a frame is the same to the bit on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np

from rung.errors import DataError, UserError
from rung.recipes.world.sources.episode import Frame

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")


def fit(image: np.ndarray, width: int, height: int, where: str = "a picture") -> np.ndarray:
    """(H, W, 3) uint8 to (height, width, 3): the middle of the picture, areas averaged, halves rounded up."""
    top, left, rows, columns = crop(image.shape[1], image.shape[0], width, height, where)
    image = image[top : top + rows, left : left + columns]
    if (columns, rows) == (width, height):
        return image
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
            f"largest size that works is dataset.width={largest[0]} dataset.height={largest[1]}"
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


def read_image(path: Path) -> Frame:
    """RGB pixels, or None where the file does not hold a whole picture."""
    Image = pillow()
    try:
        with Image.open(path) as image:
            if image.mode in ("I", "F"):
                raise DataError(
                    f"{path} has 32-bit pixels (mode {image.mode}), whose black and white are not known; save it with "
                    "8 or 16 bits"
                )
            if image.mode.startswith("I;16"):  # Pillow's own conversion makes all above 255 white
                grey = ((np.asarray(image).astype(np.int64) + 128) // 257).astype(np.uint8)
                return np.stack([grey] * 3, axis=-1)
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # all of which Pillow raises on bad bytes
        return None


class ImageFiles(Sequence[Frame]):
    """The pictures of some files, each read when it is asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        pillow()  # say now that it is missing, not at the first frame
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Frame: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Frame]: ...
    def __getitem__(self, index: int | slice) -> Frame | Sequence[Frame]:
        return ImageFiles(self.paths[index]) if isinstance(index, slice) else read_image(self.paths[index])


def pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("reading pictures takes Pillow; install it with `pip install 'rung[video]'`") from error
    return Image
