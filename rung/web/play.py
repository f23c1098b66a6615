"""The pages of `rung play`: one for each kind of player, and behind it the way to the model that this kind needs.

A world is walked in over a WebSocket (walk.py); every other player answers requests (answers.py). A text model can also
be called by programs (endpoint.py). The model works in one thread, which is passed in; nothing here imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from rung.errors import UserError
from rung.web.answers import Played, Turns, answer_routes
from rung.web.endpoint import endpoint_routes
from rung.web.serve import guarded
from rung.web.walk import Visits, walk_routes

STATIC = Path(__file__).parent / "static"
KINDS = ("text", "piano", "music", "speech", "world")  # each has a page: <kind>.html

Mode = Callable[[], contextlib.AbstractContextManager[Any]]


def play_app(
    played: Sequence[Played],
    hosts: Collection[str] = (),
    mode: Mode = contextlib.nullcontext,
    keep_s: float = 60,
    model: ThreadPoolExecutor | None = None,
    token: str | None = None,
) -> Starlette:
    """The page for these models, which are of one kind, and what it needs.

    `hosts` are the names, besides localhost, under which this machine may be asked; with a `token`, only who gives it
    comes in. `model` is the one thread in which the models work, since torch must not be entered by two; it should also
    be the one in which they were made, as torch has a pool of workers for each thread, and with two pools it is half as
    fast. `mode` is entered once, in that thread: without gradients, say, which torch decides for each thread. A
    visitor's walk is kept for `keep_s`.
    """
    check_kinds(played)
    kind = played[0].player.kind
    modes = contextlib.ExitStack()  # never left: the thread ends with the server
    model = model or ThreadPoolExecutor(1, "model")
    model.submit(lambda: modes.enter_context(mode())).result()
    routes: list[BaseRoute] = []
    visits: Visits | None = None
    if kind == "world":
        routes, visits = walk_routes(played[0].player, played[0].title, model, keep_s)
    else:
        turns = Turns(model)
        routes = answer_routes(played, turns)
        if kind == "text":
            routes += endpoint_routes(played, turns)

    async def page(request: Request) -> FileResponse:
        return FileResponse(STATIC / f"{kind}.html")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        model.shutdown(wait=False, cancel_futures=True)

    files = StaticFiles(directory=STATIC, check_dir=False)
    app = Starlette(
        routes=[*routes, Route("/", page), Mount("/", files)], middleware=guarded(hosts, token), lifespan=lifespan
    )
    app.state.visits = visits
    return app


def check_kinds(played: Sequence[Played]) -> None:
    """UserError where these models cannot be shown on one page."""
    kinds = [one.player.kind for one in played]
    if kinds[0] not in KINDS:
        raise UserError(
            f"there is no page for the kind {kinds[0]!r} of {played[0].name}; there are pages for {', '.join(KINDS)}",
            code="not-supported",
        )
    if len(set(kinds)) > 1:
        named = ", ".join(f"{one.name} ({one.player.kind})" for one in played)
        raise UserError(f"{named} need different pages; only one kind can be played at a time", code="options-conflict")
    if kinds[0] == "world" and len(played) > 1:
        raise UserError(
            f"only one world can be played at a time: play {played[0].name} or {played[1].name}",
            code="options-conflict",
        )
