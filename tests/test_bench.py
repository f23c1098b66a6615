"""If this fails, a benchmark no longer runs, or no longer ends with the ratio that its readers look for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"RATIO [a-z-]+ \d+\.\d+ \[\d+\.\d+ \d+\.\d+\] bar(>=|<=)[\d.]+ (ok|below|above)")


def run(name: str, *words: str) -> str:
    command = [sys.executable, "-m", f"bench.{name}", "--quick", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("machine  ")
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "name",
    [
        "throughput", "loader", "generation", "world_loader", "play", "logging", "overhead", "reading", "verdicts",
        "script", "tokenising", "codec",
    ],
)  # fmt: skip
def test_a_benchmark_ends_with_its_ratio(name: str) -> None:
    assert LINE.fullmatch(run(name))


def test_a_world_is_trained_twice_and_its_dreams_are_measured(world_data: Path, tmp_path: Path) -> None:
    words = [f"--data={world_data}", f"--runs={tmp_path}", "--preset=tiny", "model.memory=[2@16x12,4@8x6]"]
    assert LINE.fullmatch(run("world_dream", *words, "model.width=8", "evaluation.horizon=4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dream-closed", "dream-last", "dream-open"]


def test_shakespeare_is_prepared_trained_and_read_back(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question\n" * 200, "utf-8")
    assert LINE.fullmatch(run("shakespeare", "--text", str(text)))
