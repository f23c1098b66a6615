"""A visitor's walk, and the messages about it.

A page asks for one view at a time, and each wish says all of it: which walk it belongs to, where that walk begins, and
what to do next. A walk's number that was not seen yet begins it. So a wish can be lost and sent again, a visitor whose
walk was forgotten gets a new one from the same place, and there is no other state to agree on.

An answer is one binary message: the length of a JSON head (four bytes, little-endian), the head, then the pictures.
"""

from __future__ import annotations

import io
import math
import struct
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from rung.errors import UserError
from rung.recipe import Player, View, Walk

# Below this, RGB as it is costs no more to send, encode and decode together than JPEG does (docs/play.md has the
# figures), and what one sees is exactly what the model made.
MOST_RAW_BYTES = 256 * 1024


class Wish(msgspec.Struct, forbid_unknown_fields=True):
    """What the page asks for: the next view of a walk."""

    walk: int  # the page counts its walks
    place: int
    offset: int = 0  # where the walk begins: recorded steps after the beginning of the place
    mode: Literal["walk", "follow"] = "walk"
    intent: dict[str, float] = {}
    coding: Literal["auto", "jpeg"] = "auto"  # jpeg for a slow line


class Head(msgspec.Struct, omit_defaults=True):
    """What goes before the pictures. Numbers that are not finite arrive as null."""

    walk: int
    step: int  # steps made in this walk
    place: int
    offset: int  # where on the recorded path the walk is, or left it
    model_ms: float
    wanted: Sequence[float] = ()
    given: Sequence[float] = ()
    clamped: Sequence[bool] = ()
    coding: str = "rgb"
    pictures: Sequence[tuple[str, int]] = ()  # name and bytes: dream, and on the recorded path real
    is_end: bool = False  # of the recording


def parse(text: str | bytes, about: dict[str, Any]) -> Wish:
    """A wish that the player can be asked for, or the sentence that says why not."""
    try:
        wish = msgspec.json.decode(text, type=Wish)
    except msgspec.DecodeError as error:
        raise UserError(f"this is not a wish: {error}") from error
    places = about["places"]
    if not 0 <= wish.place < len(places):
        raise UserError(f"there is no place {wish.place}; there are {len(places)}, from 0")
    last = last_offset(places[wish.place])
    if not 0 <= wish.offset <= last:
        raise UserError(f"place {wish.place} has no offset {wish.offset}; its last one is {last}")
    unknown = sorted(wish.intent.keys() - set(about["intents"]))
    if unknown:
        raise UserError(f"{unknown[0]} is not an intent here; {', '.join(about['intents'])} are")
    if not all(map(math.isfinite, wish.intent.values())):
        raise UserError("an intent must be a finite number")
    return wish


def last_offset(place: dict[str, Any]) -> int:
    """The last point of a place from which there is something to follow."""
    return max(int(place["length"]) - 1, 0)


class Visit:
    """One visitor's walk and where it is. `answer` enters the model: never from two threads at once."""

    def __init__(self, player: Player, about: dict[str, Any]) -> None:
        self.player, self.about = player, about
        self.walk: Walk | None = None
        self.number = -1

    def answer(self, wish: Wish) -> bytes:
        started = time.perf_counter()
        if self.walk is None or wish.walk != self.number:
            self._begin(wish.place, wish.offset)
            self.number = wish.walk
        view: View | None
        if wish.mode == "walk":
            self.is_on_path = False
            view = self._walk().step(wish.intent)
        else:
            if not self.is_on_path:  # to follow after a walk of one's own is to go back to where the path was left
                self._begin(self.place, self.offset)
            view = self._walk().follow()
            self.offset += view is not None
        self.step += view is not None
        model_ms = 1e3 * (time.perf_counter() - started)
        head = Head(self.number, self.step, self.place, self.offset, model_ms)
        if view is None:
            return pack(msgspec.structs.replace(head, is_end=True), [])
        return self._answer(head, view, wish.coding)

    def _begin(self, place: int, offset: int) -> None:
        offset = min(offset, last_offset(self.about["places"][place]))
        self.walk = self.player.walk(place, offset)
        self.place, self.offset, self.step = place, offset, 0
        self.is_on_path = True

    def _walk(self) -> Walk:
        assert self.walk is not None
        return self.walk

    def _answer(self, head: Head, view: View, coding: str) -> bytes:
        wanted, given = [float(value) for value in view.wanted], [float(value) for value in view.given]
        frames = {"dream": view.frame} if view.real is None else {"dream": view.frame, "real": view.real}
        as_jpeg = coding == "jpeg" or view.frame.size > MOST_RAW_BYTES
        pictures = [jpeg(frame) if as_jpeg else frame.tobytes() for frame in frames.values()]
        full = msgspec.structs.replace(
            head,
            wanted=wanted,
            given=given,
            clamped=[not math.isclose(w, g, rel_tol=1e-4, abs_tol=1e-9) for w, g in zip(wanted, given, strict=True)],
            coding="jpeg" if as_jpeg else "rgb",
            pictures=[(name, len(data)) for name, data in zip(frames, pictures)],
        )
        return pack(full, pictures)


def pack(head: Head, pictures: Sequence[bytes]) -> bytes:
    text = msgspec.json.encode(head)
    return b"".join([struct.pack("<I", len(text)), text, *pictures])


def jpeg(frame: np.ndarray) -> bytes:
    """Full colour resolution: at the size of these frames, halved chroma is what one sees first."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(frame).save(out, "JPEG", quality=92, subsampling=0)
    return out.getvalue()
