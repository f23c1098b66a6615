"""The lab book in a browser: seconds until one sees something, a curve, a step that was just logged; and memory.

    python -m bench.dashboard [--quick] [--runs N] [--steps N]

`rung serve` runs as a process of its own over 1,000 runs and one of 1,000,000 steps of 30 metrics; Debian's Chromium
opens it. `first read` is what it takes once per run, before the first curve of a long run can be drawn: for rung from
asking for the curve until it is answered, for the peers the reading of the same numbers by their own readers, each
without its page. TensorBoard gets one event per step, which reads faster than one per number, as its writer makes.
Memory is that of the tab's process (PSS). Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rung.bench.report import facts, pairwise, spread, verdict, version_of
from rung.runs.record import Record
from tests.web.labs import row, start, write_long, write_many

NUM_METRICS = 30
BAR_PAINT_S, BAR_CURVE_S, BAR_POINT_S, BAR_MB, BAR_READ = 1.0, 1.5, 1.0, 300.0, 1.0
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few runs and steps: does it work at all?")
    parser.add_argument("--runs", type=int, help="how many runs the table has; default 1,000")
    parser.add_argument("--steps", type=int, help="how many steps the long run has; default 1,000,000")
    args = parser.parse_args()
    num_rounds = 2 if args.quick else 5
    num_runs = args.runs or (20 if args.quick else 1000)
    num_steps = args.steps or (2000 if args.quick else 1_000_000)
    print(
        facts("starlette", "playwright", "trackio", "tensorboard", runs=num_runs, steps=num_steps, metrics=NUM_METRICS)
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        write_many(root, num_runs)
        write_long(root, num_steps, NUM_METRICS)
        bench(root, num_rounds)


def bench(root: Path, num_rounds: int) -> None:
    reads = {"rung": [first_read_s(root) for _ in range(2)]}
    for name, make in {"trackio": trackio_reader, "tensorboard": tensorboard_reader}.items():
        if version_of(name) == "absent":
            print(f"first read, {name:<12} left out: it is not installed")
            continue
        read = make(root)
        reads[name] = [timed(read) for _ in range(2)]
    for name, seconds in reads.items():
        print(f"first read, {name:<12} {spread(seconds)} s")

    live = start(root, "live")
    num_steps = 100
    for step in range(num_steps):
        live.log(step, row(step, _Random()))
    figures: dict[str, list[float]] = {
        "paint": [],
        "rows": [],
        "curve": [],
        "point": [],
        "table MB": [],
        "curves MB": [],
    }
    with serving(root) as url, browser() as launched:
        for step in range(num_steps, num_steps + num_rounds + 1):  # the first one warms up and is dropped
            for name, value in visit(launched, url, live, step).items():
                figures[name].append(value)
    live.finish("finished")
    figures = {name: values[1:] for name, values in figures.items()}
    for name, values in figures.items():
        print(f"{name:<12} {spread(values, '.1f' if name.endswith('MB') else '.3f')}")
    for name in ("trackio", "tensorboard"):
        if name in reads:
            print(verdict(f"first-read-over-{name}", pairwise(reads["rung"], reads[name]), BAR_READ, is_least=False))
    print(verdict("first-contentful-paint-s", figures["paint"], BAR_PAINT_S, is_least=False))
    print(verdict("first-curve-s", figures["curve"], BAR_CURVE_S, is_least=False))
    print(verdict("new-point-s", figures["point"], BAR_POINT_S, is_least=False))
    print(verdict("tab-mb", figures["curves MB"], BAR_MB, is_least=False, form=".1f"))


def visit(launched: Any, url: str, live: Record, step: int) -> dict[str, float]:
    """One visitor with nothing cached: the table, the curves of the long run, then `step`, logged under their eyes."""
    context = launched.new_context(bypass_csp=True, viewport={"width": 1280, "height": 800})
    page = context.new_page()
    found: dict[str, float] = {}
    begun = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.locator(".trow").first.wait_for(timeout=120_000)
    found["rows"] = time.perf_counter() - begun
    paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    found["paint"] = page.wait_for_function(paint).json_value() / 1000
    found["table MB"] = tab_mb(launched)

    begun = time.perf_counter()
    page.goto(f"{url}#/curves?runs=long/1&metrics=loss,norm,lr,step_s")
    page.reload(wait_until="commit")
    page.locator(".panel[data-metric=loss][data-points] canvas").wait_for(timeout=600_000)
    found["curve"] = time.perf_counter() - begun
    page.locator(".panel[data-points]").nth(3).wait_for(timeout=120_000)
    found["curves MB"] = tab_mb(launched)

    page.goto(f"{url}#/curves?runs={live.id}&metrics=loss")
    page.locator(f".panel[data-metric=loss][data-last='{step - 1}']").wait_for(timeout=120_000)
    page.locator("#line[data-state=live]").wait_for()
    time.sleep(1)  # the page has settled, as when somebody watches
    begun = time.perf_counter()
    live.log(step, row(step, _Random()))
    page.wait_for_function(f"document.querySelector('[data-metric=loss]').dataset.last === '{step}'")
    found["point"] = time.perf_counter() - begun
    context.close()
    return found


def tab_mb(launched: Any) -> float:
    """Of the largest renderer."""
    session = launched.new_browser_cdp_session()
    ids = [one["id"] for one in session.send("SystemInfo.getProcessInfo")["processInfo"] if one["type"] == "renderer"]
    session.detach()
    sizes = []
    for pid in ids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                sizes.append(int(line.split()[1]) / 1000)
    return max(sizes, default=float("nan"))


def first_read_s(root: Path) -> float:
    """Without what an earlier read has derived, until the curve is answered."""
    shutil.rmtree(root / "long" / "1" / "metrics" / "columns", ignore_errors=True)
    with serving(root) as url:
        begun = time.perf_counter()
        while True:
            with urllib.request.urlopen(f"{url}api/curve?runs=long/1&metric=loss") as answer:
                if answer.status == 200:
                    return time.perf_counter() - begun
            time.sleep(0.05)


def rows_of(root: Path) -> Iterator[dict[str, Any]]:
    with (root / "long" / "1" / "metrics" / "000.ndjson").open("rb") as file:
        for line in file:
            yield msgspec.json.decode(line)


def trackio_reader(root: Path) -> Callable[[], object]:
    os.environ["TRACKIO_DIR"] = str(root.parent / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    batch: list[dict[str, Any]] = []
    steps: list[int] = []

    def write() -> None:
        SQLiteStorage.bulk_log("bench", "long", batch, steps)
        batch.clear()
        steps.clear()

    for values in rows_of(root):
        steps.append(values.pop("step"))
        values.pop("unix_s")
        batch.append({name: value for name, value in values.items() if value != "NaN"})
        if len(batch) == 20_000:
            write()
    write()
    return lambda: SQLiteStorage.get_logs("bench", "long")


def tensorboard_reader(root: Path) -> Callable[[], object]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = str(root.parent / "tensorboard")
    writer = EventFileWriter(folder)
    for values in rows_of(root):
        step, seconds = values.pop("step"), values.pop("unix_s")
        parts = [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        writer.add_event(Event(step=step, wall_time=seconds, summary=Summary(value=parts)))
    writer.close()
    return lambda: EventAccumulator(folder, size_guidance={"scalars": 1000}).Reload()  # as its page keeps


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@contextmanager
def serving(root: Path) -> Iterator[str]:
    words = [sys.executable, "-m", "rung", "serve", "--no-open", "--port", "0", "--runs", str(root)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "http://" in line:
                yield next(word for word in line.split() if word.startswith("http://"))
                return
        raise SystemExit("rung serve did not start")
    finally:
        process.terminate()
        process.wait()


@contextmanager
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None or version_of("playwright") == "absent":
        raise SystemExit("bench.dashboard needs Chromium and playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as control:
        launched = control.chromium.launch(executable_path=chromium, args=FLAGS)
        yield launched
        launched.close()


class _Random:
    """Of what `row` asks of a random generator, the middle."""

    def gauss(self, mean: float, _: float) -> float:
        return mean

    def random(self) -> float:
        return 0.5


if __name__ == "__main__":
    main()
