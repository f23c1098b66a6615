"""Processes that cost a fork, and the run that nobody disturbed, to compare with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rung.runs.query import Run

from .lives import ARGS, SAVING, Lives, saves_of, the_run
from .machine import COUNTS


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    made = Lives(tmp_path_factory.mktemp("lives"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def args(piano_data: Path) -> list[str]:
    """What comes after `rung` to train the small run."""
    return ["train", "piano", f"dataset.base_dataset_name={piano_data}", *ARGS]


@pytest.fixture(scope="session")
def whole(lives: Lives, args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    life = lives.rung(*args, cwd=folder)
    assert life.code == 0, life.err + life.out
    return the_run(folder)


@pytest.fixture(scope="session")
def killed(lives: Lives, args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was killed half-way and has saves; to be copied."""
    folder = tmp_path_factory.mktemp("killed")
    lives.rung(*args, cwd=folder, die={"files": SAVING, "at": 1300})
    saves = saves_of(the_run(folder))
    saves.sweep()
    assert len(saves.steps()) >= 2
    return folder


@pytest.fixture
def half(killed: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    shutil.copytree(killed, tmp_path / "half")
    return tmp_path / "half"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        num_kills = sum(num for what, num in COUNTS.items() if what.startswith("kills"))
        terminalreporter.section(f"what the fault machine did, {num_kills} kills among it")
        for what, num in sorted(COUNTS.items()):
            terminalreporter.line(f"{num:6}  {what}")
