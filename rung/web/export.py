"""A static copy of the page of the lab: the same page, with every answer as a file, for any web server or a share.

    index.html, assets/, export.js       the page; export.js tells it that it is a copy
    api/lab.json, api/runs.json
    api/<what>/<experiment>/<n>.json     run, doctor, clock, layers, tables and samples of each run
    api/curve/<experiment>/<n>/<i>.json  one for each metric, as `curves` in api/run/... names them
    api/{diff,ab}/<a>/<b>.json           of each run and its parent
    files/<experiment>/<n>/...           samples

Where the copy was made is left out of it: no path of this machine, no host, no process.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rung import __version__
from rung.compare.align import outcome
from rung.compare.as_json import diff_json, run_json
from rung.compare.factors import compare, strictness
from rung.compare.judge import judge
from rung.compare.looks import judge_and_count
from rung.compare.reading import UNREADABLE
from rung.errors import RunError, UserError
from rung.runs.fields import changed_keys
from rung.runs.files import to_json, writing
from rung.runs.query import Run
from rung.text import error_text
from rung.web import curves, files, health
from rung.web.book import Book
from rung.web.serve import POLICY

POINTS = 2000  # of a curve
_MARK = "export.js"
_PRIVATE = ("path", "process", "command", "segments", "code", "prepared")  # of a run: they hold names of this machine
_POLICY = "; ".join(part for part in POLICY.split("; ") if not part.startswith("frame-ancestors"))  # not for a <meta>


def export(root: Path, out: Path, static: Path, report: Callable[[int, int, str], None]) -> int:
    """Writes the copy and returns the number of runs; `report` hears how many of them are done."""
    if out.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{out} lies in the runs folder; name a folder outside of {root}.", code="bad-folder")
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / _MARK).exists())):
        raise UserError(f"{out} is there already and no earlier copy; name a new or an empty folder.", code="not-empty")
    book = Book(root)
    runs = book.runs()
    with writing(str(out)):
        if (out / _MARK).exists():
            for name in ("api", "files", "assets"):
                shutil.rmtree(out / name, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARK).write_text(f'window.RUNG_EXPORT = {{ "made": {int(time.time())} }};\n')
        shutil.copytree(static / "assets", out / "assets")
        page = (static / "lab.html").read_text("utf-8")
        head = (
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}" />\n    <script src="./{_MARK}"></script>'
        )
        (out / "index.html").write_text(page.replace("<head>", f"<head>\n    {head}", 1), "utf-8")
        copy = _Copy(book, out, {run.id: run for run in runs})
        for number, run in enumerate(runs):
            report(number, len(runs), run.id)
            copy.add(run)
        copy.write("api/lab.json", {"version": __version__, "can_write": False, "csrf": None, **book.summary()})
        copy.write("api/runs.json", copy.table(runs))
    report(len(runs), len(runs), "")
    return len(runs)


class _Copy:
    def __init__(self, book: Book, out: Path, runs: dict[str, Run]) -> None:
        self._book, self._out, self._runs = book, out, runs
        root = book.root.resolve()
        self._here = sorted({f"{place}/".encode() for place in (root, book.root, root.parent) if str(place) != "."})

    def write(self, name: str, value: Any) -> None:
        body = to_json(value)
        for place in reversed(self._here):  # the longest first
            body = body.replace(place, b"")
        path = self._out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)

    def table(self, runs: list[Run]) -> dict[str, Any]:
        """All rows, with the columns that one is likely to ask for: keys that differ, losses and evals."""
        metrics = [name for name in self._book.summary()["columns"]["metrics"] if name in ("loss", "norm")
                   or name.startswith("eval/")]  # fmt: skip
        columns = [*changed_keys(runs), *(f"{what}:{name}" for name in metrics for what in ("last", "min", "max"))]
        return self._book.rows(columns=columns, is_grouped=True)

    def add(self, run: Run) -> None:
        names: list[str] = []
        with contextlib.suppress(RunError):
            names = run.names()
        found: dict[str, str] = {}
        for number, metric in enumerate(names):
            found[metric] = f"api/curve/{run.id}/{number}.json"
            self._answer(found[metric], functools.partial(curves.whole_curve, run, metric, POINTS))
        self._answer(f"api/run/{run.id}.json", lambda: self._run(run, names, found))
        for what, answer in (("doctor", health.doctor), ("clock", health.clock)):
            self._answer(f"api/{what}/{run.id}.json", functools.partial(answer, run))
        self._answer(f"api/layers/{run.id}.json", lambda: _layers(run))
        self._answer(f"api/tables/{run.id}.json", lambda: list(files.tables(run)))
        self._answer(f"api/samples/{run.id}.json", lambda: {"samples": list(files.samples(run))})
        for path in run.samples():
            name = path.relative_to(run.path).as_posix()
            if files.is_given_out(name):
                target = self._out / "files" / run.id / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        parent = self._runs.get(str(run.document.get("parent")))
        if parent is not None:
            pair = f"{parent.id}/{run.id}.json"
            self._answer(f"api/diff/{pair}", lambda: self._diff(parent, run))
            self._answer(f"api/ab/{pair}", lambda: self._ab(parent, run))

    def _answer(self, name: str, make: Callable[[], Any]) -> None:
        """What cannot be read is said in its place, and the copy goes on."""
        try:
            value = make()
        except UserError as error:
            value = {"error": str(error), "code": error.code}
        except UNREADABLE as error:
            value = {"error": error_text(error), "code": "run-damaged"}
        self.write(name, value)

    def _run(self, run: Run, names: list[str], found: dict[str, str]) -> dict[str, Any]:
        known = {name: value for name, value in run_json(run).items() if name not in _PRIVATE}
        known["environment"] = {name: value for name, value in known["environment"].items() if name != "host"}
        return {**known, "metrics": names, "summary": known["metrics"], "curves": found}

    def _diff(self, a: Run, b: Run) -> dict[str, Any]:
        comparison = compare(a, b)
        found = diff_json(comparison, strictness(comparison), outcome(comparison.a, comparison.b))
        for side in ("a", "b"):
            found[side].pop("path")
        return found

    def _ab(self, a: Run, b: Run) -> dict[str, Any]:
        (found,) = judge_and_count([a], [b], judge, (), None, 1, may_write=False)
        return {**found.to_dict(), "a_runs": [a.id], "b_runs": [b.id]}


def _layers(run: Run) -> dict[str, Any]:
    """The first heat map, and all of them under `maps` by kind and metric."""
    first = health.layers(run)
    return {**first, "maps": {f"{kind}/{metric}": one for kind, metric, one in _maps(run, first["kinds"])}}


def _maps(run: Run, kinds: dict[str, list[str]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for kind, metrics in kinds.items():
        for metric in metrics:
            yield kind, metric, health.layers(run, kind, metric)
