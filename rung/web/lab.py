"""The page of the whole lab: runs, curves, comparisons, findings and samples, and what people write beside them.

Everything it answers comes from the readers that the verbs use. What takes long (the first reading of a run of many
rows) is done in a thread of its own, and the page is told how far it is. Nothing here imports torch.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rung import __version__
from rung.compare.as_json import run_json
from rung.errors import RunError, UserError
from rung.runs.files import to_json
from rung.runs.query import Run
from rung.web import curves
from rung.web.book import Book
from rung.web.serve import OwnPagesOnly

STATIC = Path(__file__).parent / "static"
CSRF = "x-rung-csrf"
_MOST_RUNS = 64  # of one request
_NOT_THERE = {"no-run", "run-moved", "no-metric", "no-file"}

log = logging.getLogger(__name__)
Answer = Callable[[Request], Any]


class FirstReading:
    """Reads long runs into their copies by column, one at a time, and knows how far it is."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "reading")
        self._lock = threading.Lock()
        self._progress: dict[str, tuple[int, int]] = {}
        self._failed: dict[str, str] = {}

    def progress(self, run: Run) -> tuple[int, int] | None:
        """Bytes read and in all; None for a run whose curves can be drawn at once. Begins to read one that cannot."""
        key = str(run.path)
        with self._lock:
            if key in self._progress:
                return self._progress[key]
            if key in self._failed or not run.has_unread_rows:
                return None
            self._progress[key] = (0, 0)
        self._pool.submit(self._read, run, key)
        return 0, 0

    def _read(self, run: Run, key: str) -> None:
        def report(done: int, total: int) -> None:
            self._progress[key] = (done, total)

        try:
            run.summary(report)
            if run.has_unread_rows:  # the folder cannot be written: each look reads it again
                self._failed[key] = "no copy"
        except Exception as error:
            log.exception("reading %s failed", run.id)
            self._failed[key] = str(error)
        finally:
            with self._lock:
                del self._progress[key]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Lab:
    """What the routes share. Each method answers one of them: plain values, or a response."""

    def __init__(self, root: Path, is_read_only: bool = False) -> None:
        self.book, self.curves, self.reading = Book(root), curves.Curves(), FirstReading()
        self.is_read_only = is_read_only
        self.csrf = secrets.token_urlsafe(24)

    def about(self, request: Request) -> Any:
        can_write = not self.is_read_only
        head = {"version": __version__, "can_write": can_write, "csrf": self.csrf if can_write else None}
        return {**head, **self.book.summary()}

    def runs(self, request: Request) -> Any:
        asked = request.query_params
        columns = [name for name in asked.get("columns", "").split(",") if name]
        is_grouped = asked.get("group", "") not in ("", "0", "false")
        return self.book.rows(
            asked.get("query", ""), asked.get("sort", ""), columns, asked.get("experiment", ""), is_grouped
        )

    def run(self, request: Request) -> Any:
        run = self._run(request)
        known = run_json(run, has_summary=not run.has_unread_rows)
        return {**known, "metrics": self.book.metric_names(run), "summary": known["metrics"]}

    def curve(self, request: Request) -> Any:
        asked = request.query_params
        axis, metric = asked.get("x", "step"), asked.get("metric", "")
        num_points, smooth = _number(asked, "points", 1000), _number(asked, "smooth", 0.0)
        first, last = _number(asked, "from", None), _number(asked, "to", None)
        assert num_points is not None
        assert smooth is not None
        curves.check(axis, int(num_points), smooth)
        if not metric:
            raise UserError("which metric? Add metric=loss to the address.", code="missing-metric")
        found, problems, reading = [], [], []
        for run in self._runs(request):
            if (progress := self.reading.progress(run)) is not None:
                reading.append({"run": run.id, "done_bytes": progress[0], "total_bytes": progress[1]})
                continue
            try:
                found.append(self.curves.series(run, metric, axis, first, last, int(num_points), smooth))
            except RunError as error:
                problems.append({"run": run.id, "message": str(error), "code": error.code})
        body = {"x": axis, "metric": metric, "series": found, "errors": problems}
        return json_response({**body, "reading": reading}, 202 if reading else 200)

    def _run(self, request: Request) -> Run:
        return self.book.run(f"{request.path_params['experiment']}/{request.path_params['number']}")

    def _runs(self, request: Request) -> list[Run]:
        names = [name for name in request.query_params.get("runs", "").split(",") if name]
        if not names:
            raise UserError("which runs? Add runs=piano/7,piano/8 to the address.", code="missing-run")
        if len(names) > _MOST_RUNS:
            raise UserError(f"{len(names)} runs are too many for one answer; {_MOST_RUNS} fit.", code="too-many")
        return [self.book.run(name) for name in dict.fromkeys(names)]


def json_response(value: Any, status: int = 200) -> Response:
    """JSON; parts that are JSON already (msgspec.Raw) are put in as they are."""
    try:
        body = msgspec.json.encode(value) if _has_raw(value) else to_json(value)
    except (TypeError, ValueError) as error:
        raise RunError(f"the record holds a value that cannot be sent: {error}.", code="run-damaged") from error
    return Response(body, status, media_type="application/json")


def _has_raw(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(one, msgspec.Raw) for one in value.get("series") or [])


def _number(asked: Mapping[str, str], name: str, default: float | None) -> float | None:
    text = asked.get(name, "")
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name}={text[:100]} is not a number.", code="bad-value") from None


def answering(answer: Answer) -> Callable[[Request], Response]:
    """A route: a user's mistake is a sentence with 4xx, and only a mistake of ours is a 500."""

    def endpoint(request: Request) -> Response:
        try:
            found = answer(request)
            return found if isinstance(found, Response) else json_response(found)
        except UserError as error:
            return json_response({"error": str(error), "code": error.code}, 404 if error.code in _NOT_THERE else 400)
        except Exception as error:
            log.exception("%s failed", request.url.path)
            return json_response({"error": f"{type(error).__name__}: {error}", "code": "internal"}, 500)

    return endpoint


def page(request: Request) -> Response:
    if not (STATIC / "lab.html").exists():
        return PlainTextResponse("the page is not built; `make page` in the checkout builds it\n", 503)
    return FileResponse(STATIC / "lab.html")


def lab_app(root: Path, hosts: Collection[str] = (), is_read_only: bool = False) -> Starlette:
    """The page and its answers. `hosts` are the names, besides localhost, under which this machine may be asked."""
    lab = Lab(root, is_read_only)
    of_run = "{experiment}/{number}"
    routes = [
        Route("/", page),
        Route("/api/lab", answering(lab.about)),
        Route("/api/runs", answering(lab.runs)),
        Route(f"/api/run/{of_run}", answering(lab.run)),
        Route("/api/curve", answering(lab.curve)),
        Mount("/assets", StaticFiles(directory=STATIC / "assets", check_dir=False)),
    ]
    app = Starlette(routes=routes, middleware=[Middleware(OwnPagesOnly, hosts=hosts)])
    app.state.lab = lab
    return app


def is_token(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
