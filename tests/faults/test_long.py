"""If this fails, a long run eats memory or disk without end, or of many that start at once two share a number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rung.runs.query import list_runs, open_run

from .machine import COUNTS

ROOT = Path(__file__).resolve().parents[2]
MOST_GROWTH = 24 << 20  # bytes of memory from a tenth of the run to its end


def in_a_process(folder: Path, what: str, number: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.wide", what, str(number)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def bytes_of(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", ["record_for_long", "log_for_long"])
@pytest.mark.parametrize("num_steps", [pytest.param(1_000_000, marks=pytest.mark.faults), 20_000])
def test_a_long_run_stays_small(tmp_path: Path, what: str, num_steps: int) -> None:
    found = in_a_process(tmp_path, what, num_steps)
    grown = found["at_end"] - found["after_a_tenth"]
    COUNTS[f"{what}: kB that memory grew by from a tenth of {num_steps} steps to their end"] += grown >> 10
    assert grown < MOST_GROWTH
    run = open_run("long/1", tmp_path / "runs")
    assert run.status == "finished"
    assert len(run.metrics(["loss"])["step"]) >= num_steps
    sizes = bytes_of(run.path)
    assert len(sizes) < 40 + 10
    rest = sum(size for name, size in sizes.items() if not name.startswith(("metrics/", "tables/", "events")))
    assert rest < 1 << 20, "the documents of a run do not grow with its steps"
    assert sizes["metrics/000.ndjson"] < 200 * num_steps
    COUNTS[f"{what}: bytes of rows per step"] += sizes["metrics/000.ndjson"] // num_steps


@pytest.mark.parametrize("num_runs", [pytest.param(200, marks=pytest.mark.faults), 12])
def test_many_runs_start_at_once(tmp_path: Path, num_runs: int) -> None:
    """Each has a number of its own, and none is lost."""
    found = in_a_process(tmp_path, "start_at_once", num_runs)
    assert found["codes"] == [0] * num_runs
    runs = list_runs(tmp_path / "runs")
    assert sorted(run.document["number"] for run in runs) == list(range(1, num_runs + 1))
    assert sorted(run.document["seed"] for run in runs) == list(range(num_runs))
    for run in runs:
        assert run.status == "finished"
        assert run.metrics(["loss"])["loss"] == [float(run.document["seed"])] * 5
    COUNTS["runs started at once, each with its own number"] += num_runs
