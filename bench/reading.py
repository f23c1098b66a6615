"""Seconds and memory of the reading verbs: `rung ls` over 1,000 runs, `rung show` of 1,000,000 steps of 30 metrics.

    python -m bench.reading [--quick]

Each figure is a process of its own, from its start to its end, as a person waits for it; memory is its peak. What was
read before is in the page cache. `first` makes the derived files, once per run and after it has grown; all other
figures find them. At the end the same curve out of the long run: by `run.series`, and by a loop over its JSON lines,
the peer. The bars are what a person at a terminal should not notice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rung.bench.report import facts, in_turns, pairwise, spread, verdict
from rung.runs.query import open_run
from rung.runs.record import Record

NUM_METRICS = 30
BAR_S = 1.0
BAR_MB = 200.0
BAR_RATIO = 10.0


class Cost(NamedTuple):
    seconds: float
    peak_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few runs and steps: does it work at all?")
    args = parser.parse_args()
    num_rounds, num_runs, num_steps = (2, 20, 2000) if args.quick else (7, 1000, 1_000_000)
    print(facts("msgspec", "pyyaml", runs=num_runs, steps=num_steps, metrics=NUM_METRICS, rounds=num_rounds))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_many(root / "many", num_runs)
        write_long(root / "long", num_steps)
        bench(root, num_rounds)


def bench(root: Path, num_rounds: int) -> None:
    listings = {
        "ls": ["ls"],
        "ls --sort best": ["ls", "--sort", "best"],
        "ls --where lr.learning_rate>1e-4": ["ls", "--where", "lr.learning_rate>1e-4"],
        "ls --sort min:loss": ["ls", "--sort", "min:loss"],
        "ls --group": ["ls", "--group"],
    }
    slowest = [0.0]
    for name, words in listings.items():
        first, later = measured([*words, "--runs", str(root / "many")], num_rounds)
        tell(name, first, later)
        slowest = max(slowest, [cost.seconds for cost in later], key=statistics.median)
    first, later = measured(["show", "long/1", "--runs", str(root / "long")], num_rounds)
    tell("show", first, later)
    peaks = [cost.peak_mb for cost in (first, *later)]

    run = open_run("long/1", root / "long")
    lines = run.path / "metrics" / "000.ndjson"
    parties = {"series": lambda: timed(lambda: run.series("loss")), "lines": lambda: timed(lambda: by_lines(lines))}
    found = in_turns(min(num_rounds, 3), parties)
    for name, seconds in found.items():
        print(f"one curve, {name:<8} {spread(seconds)} s")
    print(verdict("curve-lines-over-series", pairwise(found["lines"], found["series"]), BAR_RATIO))
    print(verdict("peak-mb-of-show", peaks, BAR_MB, is_least=False, form=".1f"))
    print(verdict("seconds-of-slowest-ls", slowest, BAR_S, is_least=False))
    print(verdict("seconds-of-show", [cost.seconds for cost in later], BAR_S, is_least=False))


def tell(name: str, first: Cost, later: list[Cost]) -> None:
    seconds, peaks = spread([cost.seconds for cost in later]), spread([cost.peak_mb for cost in later], ".0f")
    print(f"{name:<34} {seconds} s  peak {peaks} MB  first {first.seconds:.2f} s, {first.peak_mb:.0f} MB")


def measured(words: list[str], num_rounds: int) -> tuple[Cost, list[Cost]]:
    costs = [cost_of(words) for _ in range(num_rounds + 1)]
    return costs[0], costs[1:]


def cost_of(words: list[str]) -> Cost:
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "rung", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, words
    return Cost(time.perf_counter() - start, usage.ru_maxrss / 1024)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def by_lines(path: Path) -> list[float]:
    with path.open() as file:
        return [row["loss"] for row in map(json.loads, file) if "loss" in row]


def write_many(root: Path, num_runs: int) -> None:
    """Runs of 40 steps with a config of 60 keys, as the piano recipe leaves them."""
    draw = random.Random(0)
    for number in range(num_runs):
        config = {
            "seed": number % 5,
            "lr": {"learning_rate": 10 ** -(3 + number % 7 / 3), "schedule": "cosine"},
            **{f"section_{i}": {f"key_{j}": i * j for j in range(10)} for i in range(6)},
        }
        record = start(root, "many", config, number % 5)
        for step in range(40):
            record.log(step, {f"metric_{i}": draw.random() for i in range(NUM_METRICS - 1)} | {"loss": draw.random()})
        record.update(best={"step": 39, "set": "val", "loss": draw.random()})
        record.finish("finished")


def write_long(root: Path, num_steps: int) -> None:
    draw = random.Random(0)
    record = start(root, "long", {"seed": 1}, 1)
    for step in range(num_steps):
        noise = draw.random()
        record.log(step, {f"metric_{i}": noise * (i + 1) for i in range(NUM_METRICS - 1)} | {"loss": 5 / (1 + noise)})
        if step % 1000 == 999:
            record.log(step, {"eval/val/loss": noise})
    record.finish("finished")


def start(root: Path, experiment: str, config: dict[str, object], seed: int) -> Record:
    return Record.create(
        root, experiment, recipe="own", preset=None, command=["bench"], seed=seed, config=config, sources={},
        derived={}, data={},
    )  # fmt: skip


if __name__ == "__main__":
    main()
