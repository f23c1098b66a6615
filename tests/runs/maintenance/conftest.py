"""Ended runs, and a repository whose code they keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.runs.record import Record
from tests.runs.maintenance.made import git

Start = Callable[..., Record]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def ended(start: Start) -> Callable[..., Record]:
    """A run that is over."""

    def make(experiment: str = "piano", status: str = "finished", **fields: Any) -> Record:
        record = start(experiment, **fields)
        record.log(0, {"loss": 1.0})
        record.finish(status)
        return record

    return make


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user is: git is asked in no folder that a run names."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "a.py").write_text("a = 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.chdir(folder)
    return folder
