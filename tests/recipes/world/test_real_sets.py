"""If this fails, real recordings of a car and of a walker no longer go through the whole pipeline."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import shared_data

Rung = Callable[..., subprocess.CompletedProcess[str]]
SMALL = [
    "model.memory=[2@32x24,4@16x12,8@4x3]",
    "model.width=8",
    "data.batch_size=8",
    "optimizer.max_iters=150",
    "lr.warmup_iters=10",
    "lr.learning_rate=3e-3",
    "eval_interval=0",
    "evaluation.horizon=8",
    "evaluation.num_rollouts=12",
    "eval_iters=12",
    "sampling.num_frames=4",
    "sampling.num_rows=2",
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_frames"), [("world_donkeycar", 1956), ("world_vizdoom", 1600)])
def test_a_real_set_is_prepared_looked_at_trained_on_and_sampled(
    rung: Rung, tmp_path: Path, name: str, num_frames: int
) -> None:
    args = ["--from", shared_data(name), "--name", "place", "dataset.width=64", "dataset.height=48"]
    rung("data", "world", *args)
    assert json.loads(rung("data", "show", "place", "--json").stdout)["arrays"]["frames"]["rows"] == num_frames
    rung("data", "world", "--report", "--name", "place")
    assert (tmp_path / "data" / "place-report" / "report.md").is_file()
    rung("train", "world", "preset=tiny", "dataset.base_dataset_name=place", *SMALL)
    shown = {path.name for path in (tmp_path / "runs/world/1/samples").rglob("*.*")}
    assert {"contact-sheet.png", "rollout.png"} <= shown
    found = json.loads(rung("eval", "world/1", "--json").stdout)
    if (
        name == "world_vizdoom"
    ):  # a car that hardly turns is nearly a copy of its last frame: no promise for so few steps
        assert found["validation"]["loss"] < found["validation"]["persistence"]
        assert found["rollout"]["controls_other"] > found["rollout"]["controls_own"]
