"""New rows and changed runs, sent to the page as they come: server-sent events.

Of each run that a page watches only the bytes are read that were added since the last look, five times a second. Runs
that began, ended or were written to are told of within two seconds; all pages share that look.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rung import parse
from rung.errors import RunError, UserError
from rung.runs.files import named, to_json
from rung.runs.metrics import ROW, is_step, segments
from rung.runs.query import Run
from rung.web.book import Book

LOOK_S = 0.2  # between looks at the rows
RUNS_S = 1.5  # between looks at the runs
_ALIVE_S = 15.0  # without a word, after which a proxy might hang up
_MOST_BYTES = 1 << 20  # of one run at one look; the rest comes with the next
_MOST_RUNS = 64


class Tail:
    """The rows that a run adds from now on."""

    def __init__(self, run_id: str, folder: Path, metrics: Collection[str] = ()) -> None:
        self.run_id, self._folder, self._metrics = run_id, folder, frozenset(metrics)
        self._number, self._path, self._offset = -1, folder, 0
        for number, path in segments(folder):
            self._number, self._path, self._offset = number, path, path.stat().st_size
        if self._offset:  # a line that is being written is read when it is whole
            with parse.open_file(self._path) as file:
                back = min(self._offset, _MOST_BYTES)
                file.seek(self._offset - back)
                self._offset += file.read(back).rfind(b"\n") + 1 - back

    def read(self) -> dict[str, Any] | None:
        """The rows since the last call; None where there are none. `restarted`: they replace those from there on."""
        restarted = False
        data = self._new_bytes()
        if not data:
            # A resume writes a segment of its own.
            later = [(number, path) for number, path in segments(self._folder) if number > self._number]
            if not later:
                return None
            restarted = self._number >= 0
            self._number, self._path = later[0]
            self._offset = 0
            data = self._new_bytes()
        rows = []
        for line in data.splitlines():
            with contextlib.suppress(*parse.BROKEN):
                row = ROW.decode(line)
                if is_step(row.get("step")):
                    rows.append(self._wanted(row))
        rows = [row for row in rows if len(row) > 2 or not self._metrics]
        if not rows and not restarted:
            return None
        return {"run": self.run_id, "rows": rows, **({"restarted": True} if restarted else {})}

    def _wanted(self, row: dict[str, Any]) -> dict[str, Any]:
        if not self._metrics:
            return row
        return {name: row[name] for name in ("step", "unix_s", *self._metrics) if name in row}

    def _new_bytes(self) -> bytes:
        if self._number < 0:
            return b""
        try:
            if self._path.stat().st_size <= self._offset:
                return b""
            with parse.open_file(self._path) as file:
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except OSError:
            return b""
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole


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
