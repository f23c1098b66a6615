"""A run to test with; its code folder is a temporary one, so that no test snapshots this checkout."""

from __future__ import annotations

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
