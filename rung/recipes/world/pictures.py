"""The pictures of a run: what the model remembers, what came and what it made, and a film of its rollout.

They are made of uint8 frames, so they show what the model got and would remember, and their bytes depend on the frames
alone. Enlarging repeats pixels and never smooths them: a memory of 4x3 pixels should look as coarse as it is.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch

from rung.data.store import Store
from rung.random import Draw
from rung.recipe import Sample
from rung.recipes.world.config import Scale
from rung.recipes.world.dream import Dreamer, memory_of
from rung.recipes.world.memory import to_frame
from rung.recipes.world.sources.frames import pillow
from rung.recipes.world.stream import Moments

HORIZONS = (1, 2, 4, 8, 16, 32, 64)
GAP, MARGIN, LINE = 2, 8, 15  # pixels; LINE is the height of a line of text
INK, PAPER = (32, 32, 32), (255, 255, 255)
LEAST_HEIGHT = 96  # of a full frame on a sheet
FILM_WIDTH = 320  # about, of each half of a film
CODECS = ("libx264", "libopenh264", "mpeg4")  # by how many players know the result
AMPLIFY = 4  # of differences


def samples(
    dreamer: Dreamer, store: Store, scales: Sequence[Scale], num_rows: int, num_frames: int, draw: Draw
) -> list[Sample]:
    """Held-out moments, the same ones every time; the noise is that of an eval, so that pictures can be compared."""
    split = "validation" if "validation" in store.splits else "train"
    stream = Moments(store, split, scales, lambda step: num_frames)
    places = np.linspace(0, stream.num_rows - 1, num_rows + 2).astype(int)[1:-1]
    device = next(dreamer.world.parameters()).device
    moments = []
    for number, place in enumerate(places):
        shown = Draw(draw.seed, -1, np.array([number]))
        batch = {k: torch.from_numpy(v).to(device) for k, v in stream.gather(np.array([place]), shown).items()}
        memory, num_valid = memory_of(batch), int(batch["valid"].sum())
        levels = [level[0].cpu().numpy() for level in memory]
        if number == 0:  # the one film begins where the sheet does
            made = [to_frame(m)[0] for _, m in dreamer.roll(memory, batch["controls"][:, :num_valid], shown)]
            dreamed, real = torch.stack(made).cpu().numpy(), batch["frames"][0, :num_valid].cpu().numpy()
            last = levels[0][-1]
        made_now = to_frame(dreamer.make(memory, batch["controls"][:, 0], shown, 0))[0].cpu().numpy()
        moments.append(Moment(levels, levels[0][-1], batch["frames"][0, 0].cpu().numpy(), made_now, f"row {place}"))
    rate_hz = float(store.info["rate_hz"])
    suffix, video = film(real, dreamed, rate_hz)
    sheet, rollout = contact_sheet(moments), rollout_sheet(real, dreamed, HORIZONS, last)
    seconds = len(real) / rate_hz
    return [
        Sample("contact-sheet.png", sheet, f"{num_rows} held-out moments: memory, real, made, difference"),
        Sample("rollout.png", rollout, "real above, dreamed below, and how far apart"),
        Sample(f"rollout{suffix}", video, f"{seconds:.1f} s: real left, dreamed from its own frames right"),
    ]


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
    strips = []
    for moment in rows:
        zoom = _zoom_of(moment.real)
        height = moment.real.shape[0] * zoom
        away = np.abs(moment.real.astype(np.int16) - moment.made.astype(np.int16)).mean(-1, keepdims=True)
        difference = np.broadcast_to(np.clip(np.rint(away * AMPLIFY), 0, 255), moment.real.shape).astype(np.uint8)
        blocks = [
            *((f"{len(level)}@{level.shape[2]}x{level.shape[1]}", _tiled(level, height)) for level in moment.memory),
            (f"real, copy L1 = {l1(moment.real, moment.last):.3f}", _zoomed(moment.real, zoom)),
            (f"made, L1 = {l1(moment.real, moment.made):.3f}", _zoomed(moment.made, zoom)),
            (f"difference x {AMPLIFY}", _zoomed(difference, zoom)),
        ]
        strip = _stack([_stack([_text(label), picture], is_down=True) for label, picture in blocks], gap=MARGIN)
        strips.append(_stack([_text(moment.caption), strip], is_down=True) if moment.caption else strip)
    return _png(_stack(strips, is_down=True, gap=MARGIN))


def rollout_sheet(real: np.ndarray, made: np.ndarray, horizons: Sequence[int], last: np.ndarray | None = None) -> bytes:
    """A PNG: real frames above dreamed ones after so many steps, with the distance of the dream.

    Frame h - 1 is h steps after `last`, the newest real frame the dream began with; with it, the distance of copying it
    is given as well. Horizons beyond the frames are left out.
    """
    zoom = _zoom_of(real[0])
    side = [_text("")]
    for name in ("real", "dreamed"):
        below = max(0, real.shape[1] * zoom - LINE)
        side.append(np.pad(_text(name), ((0, below), (0, 0), (0, 0)), constant_values=255))
    columns = [_stack(side, is_down=True)]
    for horizon in (h for h in horizons if h <= len(real)):
        now, dream = real[horizon - 1], made[horizon - 1]
        below = [f"L1 = {l1(now, dream):.3f}"] + ([] if last is None else [f"copy = {l1(now, last):.3f}"])
        frames = [_zoomed(frame, zoom) for frame in (now, dream)]
        parts = [_text(f"{horizon} step{'s' if horizon > 1 else ''}"), *frames, *map(_text, below)]
        columns.append(_stack(parts, is_down=True))
    return _png(_stack(columns, gap=MARGIN))


def film(real: np.ndarray, made: np.ndarray, rate_hz: float) -> tuple[str, bytes]:
    """The suffix and the bytes of a film, real left, dreamed right: .mp4 with PyAV, else an animated .webp or .gif."""
    zoom = int(np.clip(round(FILM_WIDTH / real.shape[2]), 1, 4))
    pages = []
    for pair in zip(real, made, strict=True):
        halves = []
        for name, frame in zip(("real", "dreamed"), pair):
            wide = _zoomed(frame, zoom)
            halves.append(_stack([_text(name, wide.shape[1]), wide], is_down=True, gap=1))
        page = _stack(halves, gap=2 * GAP)
        odd = page.shape[0] % 2, page.shape[1] % 2  # the usual kind of video wants even sides
        pages.append(np.pad(page, ((0, odd[0]), (0, odd[1]), (0, 0)), constant_values=255))
    rate_hz = float(np.clip(rate_hz, 1, 60))
    video = _encode(pages, rate_hz)
    if video is not None:
        return ".mp4", video

    from PIL import features

    options: dict[str, Any] = {"quality": 85, "method": 4}
    suffix, options = (".webp", options) if features.check("webp") else (".gif", {})
    first, *others = [pillow().Image.fromarray(page) for page in pages]
    out, duration_ms = io.BytesIO(), max(20, round(1000 / rate_hz))
    first.save(out, suffix[1:].upper(), save_all=True, append_images=others, duration=duration_ms, loop=0, **options)
    return suffix, out.getvalue()


def _encode(pages: Sequence[np.ndarray], rate_hz: float) -> bytes | None:
    """An .mp4, or None where there is nothing to make one with."""
    try:
        import av
    except ImportError:
        return None
    for codec in CODECS:
        try:
            av.codec.Codec(codec, "w")
        except ValueError:  # av raises a kind of its own, which is one
            continue
        break
    else:
        return None
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options={"fflags": "+bitexact"}) as container:  # no versions, no dates
        stream: Any = container.add_stream(codec, rate=Fraction(rate_hz).limit_denominator(1000))
        stream.height, stream.width = pages[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1  # the cut into slices must not depend on the machine
        if codec == "libx264":
            stream.options = {"crf": "22", "mbtree": "0"}  # with mbtree the same frames gave several files (av 18.1)
        else:
            stream.bit_rate = 4_000_000
        for page in pages:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(page), format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


def _zoom_of(frame: np.ndarray) -> int:
    return -(-LEAST_HEIGHT // frame.shape[0])


def _zoomed(frame: np.ndarray, zoom: int) -> np.ndarray:
    return frame.repeat(zoom, 0).repeat(zoom, 1)


def _tiled(frames: np.ndarray, height: int) -> np.ndarray:
    """All frames of a scale in reading order, on as many rows (four at most) as the height of a full frame allows."""
    num_rows = max(1, min(4, height // frames.shape[1], len(frames)))
    zoom = max(1, height // num_rows // frames.shape[1])
    num_columns = -(-len(frames) // num_rows)
    rows = [frames[at : at + num_columns] for at in range(0, len(frames), num_columns)]
    return _stack([_stack([_zoomed(frame, zoom) for frame in row]) for row in rows], is_down=True)


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


def _text(text: str, width: int = 0) -> np.ndarray:
    """A line of text, as wide as it is, or as asked for."""
    pil = pillow()
    font = pil.ImageFont.load_default(11)
    page = pil.Image.new("RGB", (width or max(1, int(font.getlength(text)) + 4), LINE), PAPER)
    pil.ImageDraw.Draw(page).text((1, 0), text, fill=INK, font=font)
    return np.asarray(page)


def _png(page: np.ndarray) -> bytes:
    padded = np.pad(page, ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)
    out = io.BytesIO()
    pillow().Image.fromarray(padded).save(out, "PNG", optimize=False, compress_level=6)
    return out.getvalue()
