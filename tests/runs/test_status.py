"""If this fails, a dead run is shown as running, or a living one can be resumed a second time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rung.runs.process import HEARTBEAT, this_process
from rung.runs.query import Run, open_run
from rung.runs.record import STATUSES, Record, amend, read_document
from tests.errors import raises_code

Start = Callable[..., Record]
CHILD = """
import sys
from pathlib import Path
from rung.runs.record import Record
record = Record.create(Path(sys.argv[1]), "piano", recipe="r", preset=None, command=[], seed=0, config={}, sources={},
                       derived={}, data={})
record.log(0, {"loss": 1.0})
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A real process with a run in progress."""
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def status(path: Path) -> str:
    return Run(path, read_document(path)).status


def test_a_real_process_runs_then_vanishes(child: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "piano/1"
    run = open_run("piano", tmp_path)
    assert run.status == "running"
    assert run.step == 0
    assert str(child.pid) in run.status_text
    with raises_code("wrong-state"):
        Record.reopen(path, command=[])
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead and not yet reaped: a zombie does not run
    assert status(path) == "vanished"
    child.wait()
    assert status(path) == "vanished"
    again = Record.reopen(path, command=[])
    assert status(path) == "running"
    again.finish("finished")
    assert status(path) == "finished"


@pytest.mark.parametrize("word", STATUSES)
def test_an_end_is_an_end(word: str, start: Start) -> None:
    record = start()
    record.finish(word)
    assert status(record.path) == word


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_recycled_pid_is_not_the_run(start: Start) -> None:
    record = start()
    assert status(record.path) == "running"
    process = this_process()
    amend(record.path, process={**process, "started": process["started"] - 1})
    assert status(record.path) == "vanished"


def elsewhere(record: Record, age_s: float, **fields: Any) -> Run:
    amend(record.path, process={**this_process(), **fields})
    record.close()  # or it would beat again
    os.utime(record.path / HEARTBEAT, (time.time() - age_s,) * 2)
    return Run(record.path, read_document(record.path))


def test_another_boot_of_this_machine(start: Start) -> None:
    run = elsewhere(start(), 10 * 365 * 86400, boot_id="another")
    assert (run.status, "restarted" in run.status_text) == ("vanished", True)
    # A sign of life since our own boot: it is another machine of the same name.
    assert elsewhere(start(), 0, boot_id="another").status == "running"


@pytest.mark.parametrize("fields", [{"host": "gpu7"}, {"namespace": "pid:[1]"}])
def test_other_machines_are_judged_by_their_heartbeat(fields: dict[str, str], start: Start) -> None:
    assert elsewhere(start(), 5, **fields).status == "running"
    with raises_code("wrong-state"):
        Record.reopen(elsewhere(start(), 5, **fields).path, command=[])
    run = elsewhere(start(), 3 * 3600 + 60, **fields)
    assert run.status == "silent"
    assert "silent for 3 h 01 m" in run.status_text
    Record.reopen(run.path, command=[]).finish("stopped")


def test_a_run_without_any_sign(start: Start) -> None:
    record = start()
    record.close()
    amend(record.path, process=None)
    os.remove(record.path / HEARTBEAT)
    assert status(record.path) == "silent"
