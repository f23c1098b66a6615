"""Walks in a learned world, over a WebSocket.

Each visitor has a WebSocket and a walk. The page asks for one view at a time, so a slow visitor asks for less and
nothing piles up. Each request is complete (which walk, where it begins, what to do next) and can be sent again; an
unknown walk number begins a new walk. A walk is kept for a minute after its visitor is lost.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import secrets
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from rung.errors import UserError
from rung.recipe import View, Walk, Walkable
from rung.text import error_text

MOST_VISITS = 64  # each holds what the model remembers of a walk
FULL, FAILED = 1013, 1011  # close codes of the WebSocket protocol: try again later, internal error
# Below this, RGB as it is costs no more to send, encode and decode together than JPEG does (docs/play.md has the
# figures), and what one sees is exactly what the model made.
MOST_RAW_BYTES = 256 * 1024

log = logging.getLogger(__name__)


class ViewRequest(msgspec.Struct, forbid_unknown_fields=True):
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


def parse(text: str | bytes, about: dict[str, Any]) -> ViewRequest:
    """A request that the player can answer."""
    try:
        request = msgspec.json.decode(text, type=ViewRequest)
    except msgspec.DecodeError as error:
        raise UserError(f"this is not a request: {error}", code="bad-request") from error
    places = about["places"]
    if not 0 <= request.place < len(places):
        raise UserError(f"there is no place {request.place}; there are {len(places)}, from 0", code="no-place")
    last = last_offset(places[request.place])
    if not 0 <= request.offset <= last:
        raise UserError(
            f"place {request.place} has no offset {request.offset}; its last one is {last}", code="bad-range"
        )
    unknown = sorted(request.intent.keys() - set(about["intents"]))
    if unknown:
        raise UserError(f"{unknown[0]} is not an intent here; {', '.join(about['intents'])} are", code="no-intent")
    if not all(map(math.isfinite, request.intent.values())):
        raise UserError("an intent must be a finite number", code="bad-value")
    return request


def last_offset(place: dict[str, Any]) -> int:
    """The last point of a place from which there is something to follow."""
    return max(int(place["length"]) - 1, 0)


class Visit:
    """One visitor's walk and where it is. `answer` enters the model: never from two threads at once."""

    walk: Walk

    def __init__(self, player: Walkable, about: dict[str, Any]) -> None:
        self.player, self.about = player, about
        self.number: int | None = None  # of the walk; None before the first request

    def answer(self, request: ViewRequest) -> bytes:
        started = time.perf_counter()
        if request.walk != self.number:
            self._begin(request.place, request.offset)
            self.number = request.walk
        view: View | None
        if request.mode == "walk":
            self.is_on_path = False
            view = self.walk.step(request.intent)
        else:
            if not self.is_on_path:  # following after a free walk returns to where the path was left
                self._begin(self.place, self.offset)
            view = self.walk.follow()
            self.offset += view is not None
        self.step += view is not None
        head = Head(self.number, self.step, self.place, self.offset, 1e3 * (time.perf_counter() - started))
        pictures = []
        if view is None:
            head.is_end = True
        else:
            frames = {"dream": view.frame} if view.real is None else {"dream": view.frame, "real": view.real}
            head.coding = "jpeg" if request.coding == "jpeg" or view.frame.size > MOST_RAW_BYTES else "rgb"
            pictures = [jpeg(frame) if head.coding == "jpeg" else frame.tobytes() for frame in frames.values()]
            head.pictures = [(name, len(data)) for name, data in zip(frames, pictures)]
            head.wanted, head.given = list(map(float, view.wanted)), list(map(float, view.given))
            head.clamped = [
                not math.isclose(wanted, given, rel_tol=1e-4, abs_tol=1e-9)
                for wanted, given in zip(head.wanted, head.given, strict=True)
            ]
        text = msgspec.json.encode(head)
        return b"".join([struct.pack("<I", len(text)), text, *pictures])

    def _begin(self, place: int, offset: int) -> None:
        offset = min(offset, last_offset(self.about["places"][place]))
        self.walk = self.player.walk(place, offset)
        self.place, self.offset, self.step = place, offset, 0
        self.is_on_path = True


def jpeg(frame: np.ndarray) -> bytes:
    """Full colour resolution: at the size of these frames, halved chroma is what one sees first."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(frame).save(out, "JPEG", quality=92, subsampling=0)
    return out.getvalue()


class Visits:
    """Who is here, and who was a moment ago, by random names that nobody can guess."""

    def __init__(self, player: Walkable, about: dict[str, Any], keep_s: float) -> None:
        self.player, self.about, self.keep_s = player, about, keep_s
        self.known: dict[str, Visit] = {}
        self.sockets: dict[str, WebSocket] = {}
        self.leaving: dict[str, asyncio.TimerHandle] = {}

    def enter(self, name: str, socket: WebSocket) -> str | None:
        """Continues the visit of that name or begins one, and returns its name; None when all places are taken."""
        if name in self.known:
            if name in self.leaving:
                self.leaving.pop(name).cancel()
        else:
            while len(self.known) >= MOST_VISITS and self.leaving:
                self.forget(next(iter(self.leaving)))  # the one who left first
            if len(self.known) >= MOST_VISITS:
                return None
            name = secrets.token_urlsafe(16)
            self.known[name] = Visit(self.player, self.about)
        self.sockets[name] = socket
        return name

    def leave(self, name: str, socket: WebSocket) -> None:
        if self.sockets.get(name) is socket:  # else the visitor came back before this socket was seen to be dead
            del self.sockets[name]
            self.leaving[name] = asyncio.get_running_loop().call_later(self.keep_s, self.forget, name)

    def forget(self, name: str) -> None:
        self.leaving.pop(name).cancel()
        del self.known[name]


def walk_routes(
    player: Walkable, title: str, model: ThreadPoolExecutor, keep_s: float
) -> tuple[list[BaseRoute], Visits]:
    about = {"kind": player.kind, **player.about()}
    visits = Visits(player, about, keep_s)

    async def walk(socket: WebSocket) -> None:
        await socket.accept()
        asked = socket.query_params.get("visit", "")
        name = visits.enter(asked, socket)
        if name is None:
            await socket.close(FULL, f"{MOST_VISITS} visitors are here already")
            return
        visit = visits.known[name]  # held here: another socket of the same visit may end and be forgotten before this
        try:
            await socket.send_json({"visit": name, "is_known": name == asked, "title": title, "about": about})
            while (message := await socket.receive())["type"] == "websocket.receive":
                await reply(socket, visit, message.get("text") or message.get("bytes") or b"")
        except WebSocketDisconnect:
            pass
        finally:
            visits.leave(name, socket)

    async def reply(socket: WebSocket, visit: Visit, text: str | bytes) -> None:
        try:
            request = parse(text, about)
            answer = await asyncio.get_running_loop().run_in_executor(model, visit.answer, request)
        except UserError as error:
            await socket.send_json({"error": str(error), "code": error.code})
        except Exception as error:
            log.exception("the model failed")
            await socket.send_json({"error": f"the model failed: {error_text(error)}", "is_fatal": True})
            await socket.close(FAILED)
        else:
            await socket.send_bytes(answer)

    return [WebSocketRoute("/walk", walk)], visits
