"""A run to mirror, and trackers that neither reach the network nor the user's own settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.runs.record import Record


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Record]:
    def start(experiment: str = "piano", root: Path | None = None, **fields: Any) -> Record:
        given: dict[str, Any] = {
            "recipe": "piano",
            "preset": "tiny",
            "command": ["rung", "train", "piano"],
            "seed": 7,
            "config": {"lr": {"learning_rate": 1e-4, "schedule": "cosine"}, "stage": "train"},
            "sources": {"lr.learning_rate": "command line", "lr.schedule": "default", "stage": "default"},
            "derived": {"targets_per_step": 4096},
            "data": {"train": {"fingerprint": "7c1e"}},
        }
        return Record.create(root or tmp_path / "runs", experiment, **{**given, **fields})

    return start


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name.lower()))
    monkeypatch.delenv("RUNG_RUNS", raising=False)
