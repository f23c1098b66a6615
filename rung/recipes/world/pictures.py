"""Pictures for people: what the model remembers, what came, what it made; and a film of its dream.

All of them are made of uint8 frames, so that what is shown is what the model got and what it would remember. The bytes
depend on the frames alone: the same run draws the same file. How frames are made is left to others.

The one surprising thing is the enlargement. Pixels are repeated, never smoothed, so that a memory of 4x3 pixels looks
as poor as it is.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rung.errors import UserError

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageFont import FreeTypeFont, ImageFont

GAP, MARGIN, LINE = 2, 8, 15  # pixels; LINE is the height of a line of text
INK, PAPER = (32, 32, 32), (255, 255, 255)
LEAST_HEIGHT = 96  # of a full frame on a sheet
FILM_WIDTH = 320  # about, of each half of a film
CODECS = ("libx264", "libopenh264", "mpeg4")  # by how many players know the result
AMPLIFY = 4  # of differences


class Moment(NamedTuple):
    """One prediction and all that it was made of."""

    memory: Sequence[np.ndarray]  # per scale (n, h, w, 3) uint8, the finest first, the newest frame last
    last: np.ndarray  # (H, W, 3): the newest frame, which copying would repeat
    real: np.ndarray
    made: np.ndarray
    caption: str = ""


def l1(one: np.ndarray, other: np.ndarray) -> float:
    """The mean distance of two frames in [-1, 1], as in the loss."""
    return float(np.abs(one.astype(np.int16) - other.astype(np.int16)).mean() / 127.5)


def contact_sheet(rows: Sequence[Moment]) -> bytes:
    """A PNG with a strip per moment: the memory at each scale, then real, made and the difference, four times."""
    return _png(_stack([_strip(moment) for moment in rows], is_down=True, gap=MARGIN))


def rollout_sheet(real: np.ndarray, made: np.ndarray, horizons: Sequence[int], last: np.ndarray | None = None) -> bytes:
    """A PNG: real frames above dreamed ones after so many steps, with the distance of the dream.

    Frame h - 1 is h steps after `last`, the newest real frame the dream began with; with it, the distance of copying it
    is given as well.
    """
    _check_films(real, made)
    shown = [horizon for horizon in horizons if 1 <= horizon <= len(real)]
    if not shown:
        raise ValueError(f"no horizon of {list(horizons)} is within the {len(real)} frames")
    columns = []
    for horizon in shown:
        now, dream = real[horizon - 1], made[horizon - 1]
        below = [f"L1 = {l1(now, dream):.3f}"] + ([] if last is None else [f"copy = {l1(now, last):.3f}"])
        frames = [_zoomed(frame, _zoom_of(frame)) for frame in (now, dream)]
        parts = [_text(f"{horizon} step{'s' if horizon > 1 else ''}"), *frames, *map(_text, below)]
        columns.append(_stack(parts, is_down=True))
    height = _zoomed(real[0], _zoom_of(real[0])).shape[0]
    side = [_text(""), _padded(_text("real"), height), _padded(_text("dreamed"), height)]
    return _png(_stack([_stack(side, is_down=True), *columns], gap=MARGIN))


def film(real: np.ndarray, made: np.ndarray, rate_hz: float) -> tuple[str, bytes]:
    """The suffix and the bytes of a film, real left, dreamed right: .mp4 with PyAV, else an animated .webp or .gif."""
    _check_films(real, made)
    zoom = int(np.clip(round(FILM_WIDTH / real.shape[2]), 1, 4))
    pages = [_side_by_side(_zoomed(now, zoom), _zoomed(dream, zoom)) for now, dream in zip(real, made)]
    rate_hz = float(np.clip(rate_hz, 1, 60))
    found = _encode(pages, rate_hz)
    return (".mp4", found) if found is not None else _animate(pages, rate_hz)


def _strip(moment: Moment) -> np.ndarray:
    zoom = _zoom_of(moment.real)
    height = moment.real.shape[0] * zoom
    blocks = [_labelled(_scale(frames, height), _scale_label(frames)) for frames in moment.memory]
    away = np.abs(moment.real.astype(np.int16) - moment.made.astype(np.int16)).mean(-1, keepdims=True)
    difference = np.broadcast_to(np.clip(np.rint(away * AMPLIFY), 0, 255), moment.real.shape).astype(np.uint8)
    copied = f"copy L1 = {l1(moment.real, moment.last):.3f}"
    for frame, label in (
        (moment.real, f"real, {copied}"),
        (moment.made, f"made, L1 = {l1(moment.real, moment.made):.3f}"),
        (difference, f"difference x {AMPLIFY}"),
    ):
        blocks.append(_labelled(_zoomed(frame, zoom), label))
    strip = _stack(blocks, gap=MARGIN)
    return _stack([_text(moment.caption), strip], is_down=True) if moment.caption else strip


def _scale(frames: np.ndarray, height: int) -> np.ndarray:
    """All frames of a scale in reading order, on as many rows (four at most) as the height of a full frame allows."""
    num_rows = max(1, min(4, height // frames.shape[1], len(frames)))
    zoom = max(1, height // num_rows // frames.shape[1])
    num_columns = -(-len(frames) // num_rows)
    rows = [frames[at : at + num_columns] for at in range(0, len(frames), num_columns)]
    return _stack([_stack([_zoomed(frame, zoom) for frame in row]) for row in rows], is_down=True)


def _scale_label(frames: np.ndarray) -> str:
    return f"{len(frames)}@{frames.shape[2]}x{frames.shape[1]}"


def _labelled(picture: np.ndarray, label: str) -> np.ndarray:
    return _stack([_text(label), picture], is_down=True)


def _stack(parts: Sequence[np.ndarray], is_down: bool = False, gap: int = GAP) -> np.ndarray:
    """Pictures beside or below each other, at their own size, on paper."""
    along, across = (0, 1) if is_down else (1, 0)
    size = [0, 0]
    size[along] = sum(part.shape[along] for part in parts) + gap * (len(parts) - 1)
    size[across] = max(part.shape[across] for part in parts)
    page = np.full((*size, 3), PAPER, np.uint8)
    at = 0
    for part in parts:
        height, width = part.shape[:2]
        where = (slice(at, at + height), slice(width)) if is_down else (slice(height), slice(at, at + width))
        page[where] = part
        at += part.shape[along] + gap
    return page


def _padded(picture: np.ndarray, height: int) -> np.ndarray:
    below = np.full((max(0, height - len(picture)), picture.shape[1], 3), PAPER, np.uint8)
    return np.concatenate([picture, below])


def _zoom_of(frame: np.ndarray) -> int:
    return -(-LEAST_HEIGHT // frame.shape[0])


def _zoomed(frame: np.ndarray, zoom: int) -> np.ndarray:
    return frame.repeat(zoom, 0).repeat(zoom, 1)


def _text(words: str, width: int = 0) -> np.ndarray:
    """A line of text, as wide as it is, or as asked for."""
    pillow, font = _pillow()
    wide = width or max(1, int(font.getlength(words)) + 4)
    page = pillow.Image.new("RGB", (wide, LINE), PAPER)
    pillow.ImageDraw.Draw(page).text((1, 0), words, fill=INK, font=font)
    return np.asarray(page)


def _pillow() -> tuple[Any, FreeTypeFont | ImageFont]:
    try:
        import PIL
        from PIL import Image, ImageDraw, ImageFont  # noqa: F401 - reached through PIL
    except ImportError as error:
        raise UserError("drawing pictures takes Pillow; install it with `pip install 'rung[video]'`") from error
    return PIL, ImageFont.load_default(11)


def _png(page: np.ndarray) -> bytes:
    edge = ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0))
    out = io.BytesIO()
    _image(np.pad(page, edge, constant_values=255)).save(out, "PNG", optimize=False, compress_level=6)
    return out.getvalue()


def _image(page: np.ndarray) -> Image.Image:
    image: Image.Image = _pillow()[0].Image.fromarray(np.ascontiguousarray(page))
    return image


def _side_by_side(real: np.ndarray, made: np.ndarray) -> np.ndarray:
    """One page of a film. Both sides are even, as the usual kind of video wants."""
    halves = [
        _stack([_text(words, frame.shape[1]), frame], True, 1) for words, frame in (("real", real), ("dreamed", made))
    ]
    page = _stack(halves, gap=2 * GAP)
    return np.pad(page, ((0, page.shape[0] % 2), (0, page.shape[1] % 2), (0, 0)), constant_values=255)


def _encode(pages: Sequence[np.ndarray], rate_hz: float) -> bytes | None:
    """An .mp4, or None where there is nothing to make one with."""
    try:
        import av
    except ImportError:
        return None
    codec = next((name for name in CODECS if _can_encode(av, name)), None)
    if codec is None:
        return None
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options={"fflags": "+bitexact"}) as container:  # no versions, no dates
        stream: Any = container.add_stream(codec, rate=Fraction(rate_hz).limit_denominator(1000))
        stream.height, stream.width = pages[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1  # the cut into slices must not depend on the machine
        stream.options = {"crf": "22"} if codec == "libx264" else {}
        if codec != "libx264":
            stream.bit_rate = 4_000_000
        for page in pages:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(page), format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


def _can_encode(av: Any, name: str) -> bool:
    try:
        av.codec.Codec(name, "w")
    except ValueError:  # av raises a kind of its own, which is one
        return False
    return True


def _animate(pages: Sequence[np.ndarray], rate_hz: float) -> tuple[str, bytes]:
    from PIL import features

    suffix, options = (".webp", {"quality": 85, "method": 4}) if features.check("webp") else (".gif", {})
    images = [_image(page) for page in pages]
    out = io.BytesIO()
    images[0].save(
        out,
        suffix[1:].upper(),
        save_all=True,
        append_images=images[1:],
        duration=max(20, round(1000 / rate_hz)),
        loop=0,
        **options,
    )
    return suffix, out.getvalue()


def _check_films(real: np.ndarray, made: np.ndarray) -> None:
    if real.shape != made.shape or not len(real) or real.dtype != np.uint8 or made.dtype != np.uint8:
        raise ValueError(f"a film needs as many dreamed as real uint8 frames, got {real.shape} and {made.shape}")
