"""The page of the whole lab: runs, curves, comparisons, findings and samples, and what people write beside them.

Everything it answers comes from the readers that the verbs use. What takes long (the first reading of a run of many
rows) is done in a thread of its own, and the page is told how far it is. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rung import __version__
from rung.compare.align import outcome
from rung.compare.as_json import diff_json, run_json
from rung.compare.factors import compare, strictness
from rung.compare.judge import judge, planned_seeds
from rung.compare.looks import judge_and_count
from rung.errors import RunError, UserError
from rung.runs import annotate
from rung.runs.columns import stamp
from rung.runs.files import from_json, to_json
from rung.runs.maintenance.moving import move
from rung.runs.maintenance.selection import RunFolder, folder_at
from rung.runs.maintenance.tags import check_tag, retag, tags_of
from rung.runs.maintenance.trash import check_removal, remove, restore
from rung.runs.query import Run
from rung.web import curves, files, health
from rung.web.book import Book
from rung.web.live import Live
from rung.web.serve import guarded

STATIC = Path(__file__).parent / "static"
CSRF = "x-rung-csrf"
_MOST_RUNS = 64  # of one request
_MOST_BODY_BYTES = 1 << 20
_NOT_THERE = {"no-run", "run-moved", "no-metric", "no-file"}
_REFUSED = {"read-only", "csrf"}

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
        self.live = Live(self.book)
        self.is_read_only = is_read_only
        self._kept = curves.Cache(32 << 20)  # answers that take long
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

    def doctor(self, request: Request) -> Any:
        return self._keep("doctor", self._run(request), health.doctor)

    def clock(self, request: Request) -> Any:
        return self._keep("clock", self._run(request), health.clock)

    def layers(self, request: Request) -> Any:
        asked = request.query_params
        return health.layers(self._run(request), asked.get("kind", ""), asked.get("metric", ""))

    def tables(self, request: Request) -> Any:
        return list(files.tables(self._run(request)))

    def samples(self, request: Request) -> Any:
        return {"samples": [sample for run in self._runs(request) for sample in files.samples(run)]}

    def file(self, request: Request) -> Any:
        return files.respond(self._run(request), request.path_params["path"])

    def diff(self, request: Request) -> Any:
        """As `rung diff --json`; `metric`, `allow` and `declare` as there."""
        asked = request.query_params
        comparison = compare(*self._pair(request))
        strict = strictness(comparison, tuple(asked.getlist("allow")), asked.get("declare") or None)
        return diff_json(comparison, strict, outcome(comparison.a, comparison.b, asked.get("metric") or None))

    def ab(self, request: Request) -> Any:
        """As `rung ab --judge A... -- B... --json`: each side may be several runs, with commas."""
        asked = request.query_params
        a, b = self._runs(request, "a"), self._runs(request, "b")
        metrics = asked.getlist("metric")
        judged = functools.partial(judge, allowed=tuple(asked.getlist("allow")), declared=asked.get("declare") or None)
        planned = planned_seeds([*a, *b])
        found = judge_and_count(a, b, judged, metrics, planned, 1, may_write=not self.is_read_only)
        names = {"a_runs": [run.id for run in a], "b_runs": [run.id for run in b]}
        if len(found) == 1:
            return {**found[0].to_dict(), **names}
        return {**names, "variants": [one.to_dict() for one in found]}

    def _pair(self, request: Request) -> tuple[Run, Run]:
        a, b = (request.query_params.get(side, "") for side in ("a", "b"))
        if not a or not b:
            raise UserError("which two runs? Add a=piano/6&b=piano/7 to the address.", code="missing-run")
        return self.book.run(a), self.book.run(b)

    def _keep(self, what: str, run: Run, make: Callable[[Run], Any]) -> Any:
        """An answer that stays as long as the record does, as JSON."""
        parts = [stamp(run.path / "metrics"), stamp(run.path / "tables")]
        for file in (run.path / "run.json", run.path / "events.ndjson"):
            with contextlib.suppress(OSError):
                stat = file.stat()
                parts.append(((0, stat.st_size, stat.st_mtime_ns),))
        body = self._kept.get((what, str(run.path), *parts, run.status), lambda: to_json(make(run)), len)
        return Response(body, media_type="application/json")

    # What people write. Each returns the row of the run as it is now.

    def note(self, run: Run, given: Mapping[str, Any]) -> Any:
        annotate.undo_note(run) if given.get("undo") else annotate.note(run, _text(given))
        return self.book.row_of(run.id)

    def hypothesis(self, run: Run, given: Mapping[str, Any]) -> Any:
        annotate.hypothesis(run, _text(given))
        return self.book.row_of(run.id)

    def verdict(self, run: Run, given: Mapping[str, Any]) -> Any:
        word = given.get("verdict")
        annotate.verdict(run, None if word in (None, "") else str(word), _text(given) if given.get("text") else "")
        return self.book.row_of(run.id)

    def tags(self, run: Run, given: Mapping[str, Any]) -> Any:
        """All tags that the run is to have."""
        wanted = given.get("tags")
        if not isinstance(wanted, list) or not all(isinstance(tag, str) for tag in wanted):
            raise UserError("tags must be a list of words.", code="bad-value")
        on = [check_tag(tag) for tag in wanted]
        retag(run.path, on, [tag for tag in tags_of(run.document) if tag not in on])
        return self.book.row_of(run.id)

    def rename(self, run: Run, given: Mapping[str, Any]) -> Any:
        """As `rung mv`: `name` is another experiment, or another experiment and number."""
        target = given.get("name")
        if not isinstance(target, str) or not target:
            raise UserError("rename needs a name, such as bach or bach/12.", code="bad-name")
        return self.book.row_of(move(run.id, target, self.book.root)[run.id])

    def trash(self, run: Run, given: Mapping[str, Any]) -> Any:
        """As `rung rm`: with `force` also a run that others need."""
        is_forced = given.get("force") is True
        folder = folder_at(run.path)
        folder = RunFolder(self.book.root, folder.experiment, folder.number)
        reasons = check_removal([folder], is_forced)
        remove([folder], is_forced)
        return {"run": run.id, "is_trashed": True, "notes": reasons}

    def restore(self, given: Mapping[str, Any]) -> Any:
        """As `rung rm --undo`: takes a run out of the trash."""
        name = given.get("run")
        if not isinstance(name, str):
            raise UserError("which run? Name it as piano/7.", code="missing-run")
        return self.book.row_of(restore(self.book.root, [name])[0].id)

    def _run(self, request: Request) -> Run:
        return self.book.run(f"{request.path_params['experiment']}/{request.path_params['number']}")

    def _runs(self, request: Request, key: str = "runs") -> list[Run]:
        names = [name for name in request.query_params.get(key, "").split(",") if name]
        if not names:
            raise UserError(f"which runs? Add {key}=piano/7,piano/8 to the address.", code="missing-run")
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


def _text(given: Mapping[str, Any]) -> str:
    text = given.get("text")
    if not isinstance(text, str):
        raise UserError("text must be a text.", code="bad-value")
    return text


def answering(answer: Answer) -> Callable[[Request], Response]:
    """A route: a user's mistake is a sentence with 4xx, and only a mistake of ours is a 500."""

    def endpoint(request: Request) -> Response:
        try:
            found = answer(request)
            return found if isinstance(found, Response) else json_response(found)
        except UserError as error:
            return _problem(error)
        except Exception as error:
            log.exception("%s failed", request.url.path)
            return json_response({"error": f"{type(error).__name__}: {error}", "code": "internal"}, 500)

    return endpoint


def writing(lab: Lab, write: Callable[[Request, Mapping[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
    """A route that changes a run: asks for the header that no foreign page can send, and for a small JSON object."""

    async def endpoint(request: Request) -> Response:
        def answer(request: Request) -> Any:
            try:
                given = from_json(body or b"{}")
            except ValueError as error:
                raise UserError(f"the body is not JSON: {error}.", code="bad-request") from error
            if not isinstance(given, dict):
                raise UserError("the body must be a JSON object.", code="bad-request")
            return write(request, given)

        body = b""
        try:
            if lab.is_read_only:
                raise UserError("this page was started with --read-only; nothing can be written.", code="read-only")
            if not hmac.compare_digest(request.headers.get(CSRF, "").encode(), lab.csrf.encode()):
                raise UserError("the header X-Rung-CSRF is missing or old; load the page again.", code="csrf")
            kind = request.headers.get("content-type", "").partition(";")[0].strip()
            if kind != "application/json":
                raise UserError(f"the body must be application/json, not {kind[:100]!r}.", code="bad-request")
            async for part in request.stream():
                body += part
                if len(body) > _MOST_BODY_BYTES:
                    raise UserError(f"more than {_MOST_BODY_BYTES} bytes are too many.", code="too-large")
        except UserError as error:
            return _problem(error)
        return await run_in_threadpool(answering(answer), request)

    return endpoint


def _problem(error: UserError) -> Response:
    status = 404 if error.code in _NOT_THERE else 403 if error.code in _REFUSED else 400
    return json_response({"error": str(error), "code": error.code}, status)


def page(request: Request) -> Response:
    if not (STATIC / "lab.html").exists():
        return PlainTextResponse("the page is not built; `make page` in the checkout builds it\n", 503)
    return FileResponse(STATIC / "lab.html")


def lab_app(root: Path, hosts: Collection[str] = (), is_read_only: bool = False, token: str | None = None) -> Starlette:
    """The page and its answers.

    `hosts` are the names, besides localhost, under which this machine may be asked; with a `token`, only who gives it
    comes in.
    """
    lab = Lab(root, is_read_only)
    of_run = "{experiment}/{number}"
    reads = {
        "/api/lab": lab.about, "/api/runs": lab.runs, "/api/curve": lab.curve, "/api/samples": lab.samples,
        "/api/diff": lab.diff, "/api/ab": lab.ab,
        f"/api/run/{of_run}": lab.run, f"/api/doctor/{of_run}": lab.doctor, f"/api/clock/{of_run}": lab.clock,
        f"/api/layers/{of_run}": lab.layers, f"/api/tables/{of_run}": lab.tables,
        f"/files/{of_run}/{{path:path}}": lab.file,
    }  # fmt: skip
    routes: list[Route | Mount] = [Route("/", page)]
    routes += [Route(path, answering(answer)) for path, answer in reads.items()]
    routes.append(Route("/api/live", lab.live.respond))

    def of(write: Callable[[Run, Mapping[str, Any]], Any]) -> Callable[[Request, Mapping[str, Any]], Any]:
        return lambda request, given: write(lab._run(request), given)

    for write in (lab.note, lab.hypothesis, lab.verdict, lab.tags, lab.rename, lab.trash):
        path = f"/api/run/{of_run}/{write.__name__}"
        routes.append(Route(path, writing(lab, of(write)), methods=["POST"]))
    routes.append(Route("/api/restore", writing(lab, lambda _, given: lab.restore(given)), methods=["POST"]))
    routes.append(Mount("/assets", StaticFiles(directory=STATIC / "assets", check_dir=False)))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        lab.reading.close()

    app = Starlette(routes=routes, middleware=guarded(hosts, token), lifespan=lifespan)
    app.state.lab = lab
    return app
