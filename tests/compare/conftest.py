"""Runs to compare; see made.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rung.runs.query import Run
from rung.runs.record import Record
from tests.compare import made


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Record]:
    return partial(made.start_run, tmp_path / "runs")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Run]:
    return partial(made.make_run, tmp_path / "runs")


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user is: git is asked in no folder that a run names."""
    folder = made.make_repo(tmp_path / "repo")
    monkeypatch.chdir(folder)
    return folder
