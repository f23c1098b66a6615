"""If this fails, a process that a recipe or a script forks ends the run of its parent, which still trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rung
from rung.runs.query import open_run
from rung.runs.record import Record


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.create(
        tmp_path / "runs", "forks", recipe="own loop", preset=None, command=["train.py"], seed=None, config={},
        sources={}, derived={}, data={},
    )  # fmt: skip


def fork_and(act: object) -> None:
    """Does it in a child, and waits."""
    if (child := os.fork()) == 0:
        try:
            act()  # type: ignore[operator]
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_the_end_of_a_child_is_not_that_of_the_record(record: Record, tmp_path: Path) -> None:
    record.log(0, {"loss": 1.0})
    fork_and(lambda: record.finish("crashed", reason="SystemExit: 3"))
    assert open_run("forks/1", tmp_path / "runs").status == "running"
    record.log(1, {"loss": 1.0})
    record.finish("finished")
    run = open_run("forks/1", tmp_path / "runs")
    assert (run.status, run.document.get("reason")) == ("finished", None)
    assert [event["status"] for event in run.events("end")] == ["finished"]


def test_the_end_of_a_child_is_not_that_of_a_script(tmp_path: Path) -> None:
    run = rung.init(experiment="forks", code=False, runs=tmp_path / "runs")
    run.log({"loss": 1.0})
    fork_and(run.finish)
    assert open_run("forks/1", tmp_path / "runs").status == "running"
    run.log({"loss": 1.0})
    run.finish()
    assert [event["status"] for event in open_run("forks/1", tmp_path / "runs").events("end")] == ["finished"]
