"""New rows and changed runs, sent to the page as they come: server-sent events.

Of each run that a page watches only the bytes are read that were added since the last look, five times a second. Runs
that began, ended or were written to are told of within two seconds; all pages share that look.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rung.errors import RunError, UserError
from rung.runs.files import named, to_json
from rung.runs.query import Run
from rung.runs.tail import Tail
from rung.web.book import Book

LOOK_S = 0.2  # between looks at the rows
RUNS_S = 1.5  # between looks at the runs
_ALIVE_S = 15.0  # without a word, after which a proxy might hang up
_MOST_RUNS = 64


class Live:
    def __init__(self, book: Book) -> None:
        self._book = book
        self._looked_s = -RUNS_S
        self._runs: dict[str, tuple[Any, ...]] = {}
        self._rows: dict[str, Run] = {}

    def statuses(self) -> dict[str, tuple[Any, ...]]:
        """What of each run a table shows that may change. The look is shared by all pages."""
        if time.monotonic() - self._looked_s >= RUNS_S:
            self._rows = {run.id: run for run in self._book.runs()}
            self._runs = {
                run.id: (
                    run.status, str(run.best), str(run.document.get("verdict")), str(run.document.get("tags")),
                    run.document.get("why"), self._book.last_note(run),
                )
                for run in self._rows.values()
            }  # fmt: skip
            self._looked_s = time.monotonic()
        return self._runs

    async def respond(self, request: Request) -> Response:
        names = [name for name in request.query_params.get("runs", "").split(",") if name][:_MOST_RUNS]
        metrics = [name for name in request.query_params.get("metrics", "").split(",") if name]
        try:
            runs = [await asyncio.to_thread(self._book.run, name) for name in dict.fromkeys(names)]
            tails = [Tail(run.id, run.path / "metrics", metrics) for run in runs]
        except (UserError, OSError) as error:
            code = error.code if isinstance(error, UserError) else "cannot-read"
            return Response(to_json({"error": str(error), "code": code}), 404, media_type="application/json")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(request, tails), media_type="text/event-stream", headers=headers)

    async def _events(self, request: Request, tails: list[Tail]) -> AsyncIterator[bytes]:
        before = dict(await asyncio.to_thread(self.statuses))
        yield _event("hello", {"runs": [tail.run_id for tail in tails]})
        spoke_s = asked_s = time.monotonic()
        while not getattr(request.app.state, "is_ending", False):
            for found in await asyncio.to_thread(_read_all, tails):
                yield _event("rows", found)
                spoke_s = time.monotonic()
            if time.monotonic() - asked_s >= RUNS_S:
                asked_s = time.monotonic()
                now = dict(await asyncio.to_thread(self.statuses))
                if now != before:
                    yield _event("runs", await asyncio.to_thread(self._changes, before, now))
                    before, spoke_s = now, time.monotonic()
            if time.monotonic() - spoke_s >= _ALIVE_S:
                yield b": still here\n\n"
                spoke_s = time.monotonic()
            await asyncio.sleep(LOOK_S)

    def _changes(self, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        rows = self._rows
        changed = [name for name in now if now[name] != before.get(name) and name in rows]
        return {
            "changed": [self._book.row(rows[name], rows) for name in changed],
            "gone": [name for name in before if name not in now],
        }


def _read_all(tails: list[Tail]) -> list[dict[str, Any]]:
    found = []
    for tail in tails:
        with contextlib.suppress(OSError, RunError):
            if (rows := tail.read()) is not None:
                found.append(rows)
    return found


def _event(kind: str, value: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + to_json(named(value)) + b"\n\n"
