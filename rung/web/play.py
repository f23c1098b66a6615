"""The play page: a learned world that one can walk in.

One WebSocket per visitor, each with a walk of its own. The page asks, the server answers, one view per wish: a visitor
who is slow, or looks elsewhere, asks for less, and nothing piles up. The model works in one thread, for one wish at a
time and for each visitor in turn; it is given from outside, and nothing here knows torch.

A walk is kept for a minute after its visitor was lost, so that a broken connection costs nothing but a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket, WebSocketDisconnect

from rung.errors import UserError
from rung.recipe import Player
from rung.web.guard import OwnPagesOnly
from rung.web.walks import Visit, parse

STATIC = Path(__file__).parent / "static"
MOST_VISITS = 64  # each holds what the model remembers of a walk
FULL, FAILED = 1013, 1011  # close codes of the WebSocket protocol: try again later, internal error

Mode = Callable[[], contextlib.AbstractContextManager[Any]]

log = logging.getLogger(__name__)


class Visits:
    """Who is here, and who was a moment ago, by random names that nobody can guess."""

    def __init__(self, player: Player, about: dict[str, Any], keep_s: float) -> None:
        self.player, self.about, self.keep_s = player, about, keep_s
        self.known: dict[str, Visit] = {}
        self.sockets: dict[str, WebSocket] = {}
        self.leaving: dict[str, asyncio.TimerHandle] = {}

    def enter(self, name: str, socket: WebSocket) -> str | None:
        """Goes on with the visit of that name or begins one, and returns its name; None when all places are taken."""
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


def play_app(
    player: Player,
    title: str,
    hosts: Collection[str] = (),
    mode: Mode = contextlib.nullcontext,
    keep_s: float = 60,
    model: ThreadPoolExecutor | None = None,
) -> Starlette:
    """The page and its WebSocket.

    `hosts` are the names, besides localhost, under which this machine may be asked. `model` is the one thread in which
    the model works, since torch is not to be entered by two; it should also be the one in which it was made, as torch
    has a pool of workers for each thread, and with two pools it is half as fast. `mode` is entered once, in that
    thread: without gradients, say, which torch decides for each thread.
    """
    about = player.about()
    visits = Visits(player, about, keep_s)
    modes = contextlib.ExitStack()  # never left: the thread ends with the server
    model = model or ThreadPoolExecutor(1, "model")
    model.submit(lambda: modes.enter_context(mode())).result()

    async def walk(socket: WebSocket) -> None:
        await socket.accept()
        asked = socket.query_params.get("visit", "")
        name = visits.enter(asked, socket)
        if name is None:
            await socket.close(FULL, f"{MOST_VISITS} visitors are here already")
            return
        visit = visits.known[
            name
        ]  # kept here: another line of the same visit may end, and be forgotten, before this one
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
            wish = parse(text, about)
            answer = await asyncio.get_running_loop().run_in_executor(model, visit.answer, wish)
        except UserError as error:
            await socket.send_json({"error": str(error)})
        except Exception as error:
            log.exception("the model failed")
            await socket.send_json({"error": f"the model failed: {type(error).__name__}: {error}", "is_fatal": True})
            await socket.close(FAILED)
        else:
            await socket.send_bytes(answer)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        model.shutdown(wait=False, cancel_futures=True)

    app = Starlette(
        routes=[WebSocketRoute("/walk", walk), Mount("/", StaticFiles(directory=STATIC, html=True, check_dir=False))],
        middleware=[Middleware(OwnPagesOnly, hosts=hosts)],
        lifespan=lifespan,
    )
    app.state.visits = visits
    return app
