"""A run of one's own loop to test with, in an empty folder of its own, so that no test snapshots this checkout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rung
from rung.script import current
from rung.script.run import OwnRun


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OwnRun]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(current, "_code_root", lambda: tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    for name in ("RUNG_RUNS", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def start(experiment: str = "mine", **how: Any) -> OwnRun:
        return rung.init(experiment, **how)

    yield start
    rung.finish()
