"""If this fails, a server that stumbles, a connection that breaks or a kill loses bytes, or shows half of an item."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rung.remote import bucket as module
from rung.remote.bucket import Bucket, RemoteError
from rung.remote.manifest import read_manifest
from rung.remote.pull import pull_data, pull_run
from rung.remote.push import push, push_run
from tests.remote.items import contents, finished, save, tree
from tests.remote.servers import Asked, Proxy

FILES = {f"{i}.bin": bytes([i]) * (3000 + i) for i in range(7)} | {"large.bin": os.urandom(9_000_000)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda s: None)


@pytest.mark.parametrize(
    ("fault", "every"),
    [("500", 2), ("500", 5), ("cut", 2), ("cut", 5), ("lost", 2), ("lost", 5), ("half", 7), ("half", 9)],
)
def test_a_push_and_a_pull_get_through(between: Proxy, s3: str, tmp_path: Path, fault: str, every: int) -> None:
    """Every n-th request fails, also the one that makes the item visible."""
    between.fault = lambda asked: fault if asked.number % every == 0 else None
    push(Bucket(s3), tree(tmp_path / "here", FILES))
    pull_data(Bucket(s3), "tunes", tmp_path / "back")
    assert contents(tmp_path / "back") == FILES
    assert between.faults


@pytest.mark.parametrize("fault", ["lost", "500", "cut"])
def test_an_answer_that_is_lost_after_the_manifest_was_written_is_no_defeat(
    between: Proxy, s3: str, tmp_path: Path, fault: str
) -> None:
    seen: list[str] = []

    def once(asked: Asked) -> str | None:
        if asked.method == "PUT" and "manifest.json" in asked.path and not seen:
            seen.append(asked.path)
            return fault
        return None

    between.fault = once
    push(Bucket(s3), tree(tmp_path / "here", {"a.bin": b"a"}))
    assert seen
    assert read_manifest(Bucket(s3), "data", "tunes") is not None


def test_a_body_that_breaks_off_goes_on_where_it_was(between: Proxy, s3: str, tmp_path: Path) -> None:
    bucket, data = Bucket(s3), os.urandom(6_000_000)
    bucket.send("x", lambda: iter([data]), len(data))
    seen: list[int] = []

    def once(asked: Asked) -> str | None:
        if asked.method == "GET":
            seen.append(asked.number)
        return "half" if len(seen) == 1 else None

    between.fault = once
    assert b"".join(bucket.receive("x")) == data
    assert len(seen) >= 2


@pytest.mark.parametrize("at", range(1, 14, 2))
def test_a_server_that_goes_away_leaves_the_old_item_whole(
    between: Proxy, server: str, s3: str, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the n-th request on nothing gets through any more."""
    from rung.remote.push import PushOptions

    push(Bucket(s3), tree(tmp_path / "old", {"a.bin": b"old", "b.bin": b"both"}))
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    first = len(between.asked)
    between.fault = lambda asked: "403" if asked.number >= first + at else None
    new = {"a.bin": b"new", "b.bin": b"both", "c.bin": b"c"}
    is_done = False
    with contextlib.suppress(RemoteError):
        push(Bucket(s3), tree(tmp_path / "new", new), PushOptions(is_forced=True))
        is_done = True
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    pull_data(Bucket(s3), "tunes", tmp_path / "back")
    found = contents(tmp_path / "back")
    assert found in ({"a.bin": b"old", "b.bin": b"both"}, new)
    assert found == new or not is_done


def push_command(place: str, root: Path) -> list[str]:
    return [sys.executable, "-m", "rung", "push", "piano/1", place, "--runs", str(root)]


@pytest.mark.parametrize("after", [4, 9])
def test_a_push_that_was_killed_goes_on(between: Proxy, s3: str, tmp_path: Path, after: int) -> None:
    """kill -9 after some files; the second push sends the rest."""
    run = finished(tmp_path / "runs", saves=())
    save(run.path, 10, num_bytes=1_000_000)
    save(run.path, 20, num_bytes=1_000_000, is_best=True)
    is_reached, may_go, num_puts = threading.Event(), threading.Event(), [0]

    def before(asked: Asked) -> None:
        if asked.method == "PUT":
            with between.lock:
                num_puts[0] += 1
            if num_puts[0] > after:
                is_reached.set()
                may_go.wait(60)

    between.before = before
    between.fault = lambda asked: "cut" if is_reached.is_set() and not may_go.is_set() else None
    process = subprocess.Popen(push_command(s3, tmp_path / "runs"), stderr=subprocess.PIPE)
    try:
        assert is_reached.wait(60), process.stderr
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finally:
        process.kill()
        between.fault = lambda asked: "cut" if asked.number in held else None
        held = {asked.number for asked in between.asked}
        between.before = lambda asked: None
        may_go.set()
    bucket = Bucket(s3)
    assert read_manifest(bucket, "run", "piano/1") is None
    assert list(run.path.glob(".push*")), "the kill came too late to be one"
    first = sum(bucket.sizes("runs").values())
    between.asked.clear()
    between.fault = lambda asked: None
    done = push_run(bucket, run.path)
    assert done.sent_bytes <= done.bytes - first
    assert 0 < between.sent_bytes() < done.bytes
    pull_run(bucket, "piano/1", tmp_path / "back")
    assert (tmp_path / "back/piano/1/run.json").read_bytes() == (run.path / "run.json").read_bytes()
    assert not list((tmp_path / "back/piano/1").glob(".push*"))
