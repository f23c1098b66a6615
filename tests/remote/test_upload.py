"""If this fails, a training waits for object storage, ends because of it, or ends without saying that it is not all
there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rung.errors import UserError
from rung.remote import bucket as module
from rung.remote import upload
from rung.remote.bucket import Bucket
from rung.remote.manifest import read_manifest
from rung.remote.pull import pull_run
from rung.remote.upload import Uploader, require
from rung.runs.query import open_run
from rung.runs.record import Record
from tests.remote.items import save, start, steps
from tests.remote.servers import Asked, Proxy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_REST_S", 0.0)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def following(root: Path, place: str) -> tuple[Record, Uploader]:
    record = start(root)
    uploader = Uploader(record.path, place)
    record.follow(uploader)
    return record, uploader


def steps_there(place: str) -> list[int]:
    found = read_manifest(Bucket(place), "run", "piano/1")
    return [] if found is None else list(found[0].document["checkpoints"]["steps"])


def test_saves_go_there_and_at_the_end_all_of_it(place: str, tmp_path: Path) -> None:
    record, uploader = following(tmp_path / "runs", place)
    assert "after each save" in uploader.summary_line()
    for step in (10, 20):
        steps(record, step - 10, step)
        save(record.path, step, is_best=step == 10)
        record.event("save", step=step)
        until(lambda step=step: step in steps_there(place))  # type: ignore[misc]
    steps(record, 20, 25)
    record.finish("finished")
    uploader.close(60)
    assert "all of it" in uploader.summary_line()
    assert uploader.problem is None
    pull_run(Bucket(place), "piano/1", tmp_path / "back")
    back = open_run("piano/1", tmp_path / "back")
    assert (back.status, back.step, back.checkpoints()) == ("finished", 24, ["00000010", "00000020"])


def test_a_step_does_not_wait_and_the_newest_save_wins(between: Proxy, s3: str, tmp_path: Path) -> None:
    """The server stands still while three saves are made and the first two are rotated away."""
    may_go, is_held = threading.Event(), threading.Event()

    def before(asked: Asked) -> None:
        if asked.method == "PUT":
            is_held.set()
            may_go.wait(60)

    between.before = before
    record, uploader = following(tmp_path / "runs", s3)
    for step in (10, 20, 30):
        save(record.path, step)
        record.event("save", step=step)
        if step == 10:
            assert is_held.wait(60)
        else:
            shutil.rmtree(record.path / f"checkpoints/{step - 10:08d}")
    assert uploader.num_pushes == 0
    may_go.set()
    record.finish("finished")
    uploader.close(60)
    assert uploader.problem is None
    assert uploader.num_pushes <= 3
    assert steps_there(s3) == [30]
    pull_run(Bucket(s3), "piano/1", tmp_path / "back")
    assert open_run("piano/1", tmp_path / "back").checkpoints() == ["00000030"]


def test_a_failure_is_an_event_and_the_next_save_tries_again(
    between: Proxy, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda s: None)
    record, uploader = following(tmp_path / "runs", s3)
    between.fault = lambda asked: "403"
    save(record.path, 10)
    record.event("save", step=10)
    until(lambda: uploader.problem is not None)
    steps(record, 0, 3)  # goes on
    events = list(open_run("piano/1", tmp_path / "runs").events("remote"))
    assert len(events) == 1
    assert "AWS_ACCESS_KEY_ID" in events[0]["text"]
    assert "rung push" in uploader.summary_line()
    between.fault = lambda asked: None
    save(record.path, 20)
    record.event("save", step=20)
    until(lambda: uploader.num_pushes == 1)
    record.finish("finished")
    uploader.close(60)
    assert uploader.problem is None
    assert "all of it" in uploader.summary_line()


def test_the_end_waits_only_so_long_and_says_what_completes_it(
    between: Proxy, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_LET_GO_S", 0.1)
    may_go = threading.Event()
    between.before = lambda asked: may_go.wait(60) and None  # type: ignore[assignment]
    record, uploader = following(tmp_path / "runs", s3)
    save(record.path, 10)
    record.event("save", step=10)
    record.finish("finished")
    uploader.close(0.3)
    may_go.set()
    line = uploader.summary_line()
    assert "not all of it was sent" in line
    assert f"rung push {record.path} {s3}" in line
    assert any("not all of it" in event["text"] for event in open_run("piano/1", tmp_path / "runs").events("remote"))


def test_saves_that_come_fast_are_sent_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pushes there is a rest, which the end of the run cuts short."""
    monkeypatch.setattr(upload, "_REST_S", 3600.0)
    record, uploader = following(tmp_path / "runs", str(tmp_path / "there"))
    save(record.path, 1)
    record.event("save", step=1)
    until(lambda: uploader.num_pushes == 1)
    for step in range(2, 12):
        save(record.path, step)
        record.event("save", step=step)
    record.finish("finished")
    uploader.close(60)
    assert uploader.num_pushes == 2
    assert steps_there(str(tmp_path / "there")) == [11]


def test_a_wrong_place_is_told_before_a_run_begins(tmp_path: Path, s3: str) -> None:
    require(str(tmp_path / "there"))
    require(s3)
    for url in ("ftp://x/y", "s3://no-such-bucket/lab"):
        with pytest.raises(UserError):
            require(url)


def test_another_run_of_this_name_there_is_told_at_the_start(place: str, tmp_path: Path) -> None:
    first, sender = following(tmp_path / "theirs", place)
    sender.ask()
    assert sender.problem is None
    first.finish("finished")
    sender.close(60)
    record, uploader = following(tmp_path / "runs", place)
    uploader.ask()
    assert "is another run" in uploader.summary_line()
    record.finish("finished")
    uploader.close(60)
    assert "is another run" in uploader.summary_line()


def test_a_process_ends_well_while_a_server_stands_still(between: Proxy, s3: str, tmp_path: Path) -> None:
    """Threads that wait for an answer must neither hold the process back nor spoil its exit code."""
    may_go = threading.Event()
    between.before = lambda asked: may_go.wait(90) and None  # type: ignore[assignment]
    code = f"""
from pathlib import Path
from rung.remote.upload import Uploader
from tests.remote.items import save, start
record = start(Path({str(tmp_path / "runs")!r}))
uploader = Uploader(record.path, {s3!r})
record.follow(uploader)
save(record.path, 10)
record.event("save", step=10)
record.finish("finished")
uploader.close(0.5)
print(uploader.summary_line())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        may_go.set()
    assert (process.returncode, err) == (0, "")
    assert "rung push" in out
