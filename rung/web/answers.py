"""Requests to a model and its answers, for every kind of page but the world's.

    GET  /about      what is played: the kind, and for each run its name and what its player says of itself
    POST /answer/N   a request to the Nth run, as JSON; the answer is one JSON object per line, as it is made

The model works in one thread. Several answers are made in turns, a piece of each, and further requests wait in line. A
visitor who goes away ends their answer at its next piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from rung import parse
from rung.errors import UserError
from rung.recipe import Answers
from rung.text import error_text, one_line

MOST_REQUEST_BYTES = 24 << 20  # three minutes of sound as a page sends it
MOST_AT_ONCE = 4  # answers that are made in turns: each holds a cache of its own
MOST_WAITING = 64

log = logging.getLogger(__name__)


class Played(NamedTuple):
    """A model that is served."""

    player: Any  # a Player of rung.recipe
    name: str  # text/3, or text/3@200 where two saves of it are played
    title: str  # for people: text/3 at step 200


class BusyError(UserError):
    """More wait already than will be answered soon."""

    def __init__(self) -> None:
        super().__init__(f"{MOST_WAITING} requests are waiting already; try again later", code="busy")


class Turns:
    """Takes the answers of all visitors out of one thread, a piece of each in turn."""

    def __init__(self, model: ThreadPoolExecutor) -> None:
        self.model = model
        self.num_asked = 0
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    def check_room(self) -> None:
        """BusyError where too many requests wait already."""
        if self.num_asked >= MOST_AT_ONCE + MOST_WAITING:
            raise BusyError

    @contextlib.contextmanager
    def in_line(self) -> Iterator[None]:
        """Counts one request, however many answers it asks for: once it is let in, all of them are made."""
        self.check_room()
        self.num_asked += 1
        try:
            yield
        finally:
            self.num_asked -= 1

    async def pieces(self, player: Answers, request: Any) -> AsyncGenerator[dict[str, Any], None]:
        """One answer to a request that is in line."""
        async with self._places:
            steps = player.answer(request)
            try:
                loop = asyncio.get_running_loop()
                while (piece := await loop.run_in_executor(self.model, next, steps, None)) is not None:
                    yield piece
            finally:
                # After the step that may be under way. At the end of the server the thread takes no more.
                with contextlib.suppress(RuntimeError, AttributeError):
                    self.model.submit(steps.close)  # type: ignore[attr-defined]


async def body_of(request: Request) -> bytes:
    """The body of a request, refused where it is too large, before it is all here."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_REQUEST_BYTES:
            raise UserError(
                f"the request is larger than {MOST_REQUEST_BYTES >> 20} MiB, the limit; send less", code="too-large"
            )
    return bytes(body)


def answer_routes(played: Sequence[Played], turns: Turns) -> list[BaseRoute]:
    said = msgspec.json.encode(
        {
            "kind": played[0].player.kind,
            "runs": [{"name": one.name, "title": one.title, "about": one.player.about()} for one in played],
        }
    )

    numbers = {str(number): number for number in range(len(played))}

    async def about(request: Request) -> Response:
        return Response(said, media_type="application/json")

    async def answer(request: Request) -> Response:
        number = request.path_params["number"]
        if number not in numbers:
            what = f"there is no run {one_line(number)} here; there are {len(played)}, counted from 0"
            return problem(UserError(what, code="no-run"), 404)
        player = played[numbers[number]].player
        try:
            turns.check_room()  # before a large body is read in vain
            asked = parse.typed_json(await body_of(request), player.Request)
        except ClientDisconnect:
            return Response(status_code=499)  # to nobody
        except BusyError as error:
            return problem(error, 429)
        except UserError as error:
            return problem(error, 413)
        except parse.ParseError as error:
            return problem(UserError(f"this is not a request: {error}", code="bad-request"), 400)
        return StreamingResponse(lines(player, asked), media_type="application/x-ndjson")

    async def lines(player: Answers, asked: Any) -> AsyncIterator[bytes]:
        try:
            with turns.in_line():
                async with contextlib.aclosing(turns.pieces(player, asked)) as pieces:
                    async for piece in pieces:
                        yield msgspec.json.encode(piece) + b"\n"
        except UserError as error:
            yield msgspec.json.encode({"error": str(error), "code": error.code}) + b"\n"
        except Exception as error:
            log.exception("the model failed")
            yield msgspec.json.encode({"error": f"the model failed: {error_text(error)}", "code": "failed"}) + b"\n"

    return [Route("/about", about), Route("/answer/{number}", answer, methods=["POST"])]


def problem(error: UserError, status: int) -> JSONResponse:
    return JSONResponse({"error": str(error), "code": error.code}, status)
