"""A run to mirror, and trackers that neither reach the network nor the user's own settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.runs.conftest import start as start


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name.lower()))
    monkeypatch.delenv("RUNG_RUNS", raising=False)
