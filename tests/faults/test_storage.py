"""If this fails, a storage that stumbles shows half of an item, gives wrong bytes for right ones, or loses an item.

A real S3 server behind a proxy that answers some requests with an error, throttles, hangs, drops the connection before
or after it obeyed, breaks off, or changes a byte.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path

import pytest

from rung.errors import UserError
from rung.remote import bucket as module
from rung.remote.bucket import Bucket
from rung.remote.pull import PullOptions, pull_data
from rung.remote.push import PushOptions, push
from tests.remote.conftest import between, s3, server
from tests.remote.items import contents, tree
from tests.remote.servers import Asked, Proxy

from .machine import COUNTS

__all__ = ["between", "s3", "server"]  # fixtures
FAULTS = ["500", "503", "cut", "lost", "half", "hang", "rot"]
FORCED = PushOptions(is_forced=True)


@pytest.mark.parametrize("num", [pytest.param(60, marks=pytest.mark.faults), 2], ids=["many", "some"])
def test_a_bad_server(between: Proxy, s3: str, tmp_path: Path, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item that changes many times, each time sent and fetched while a quarter of the requests fail."""
    monkeypatch.setattr(module.time, "sleep", lambda s: None)
    monkeypatch.setattr(module, "ANSWER", "1s")
    monkeypatch.setattr(module, "FIRST_ANSWER", "1s")
    rng = random.Random(int(os.environ.get("RUNG_SEED", "0")))
    files = {f"{i}.bin": rng.randbytes(500 + i) for i in range(5)} | {"manifest.json": b"{}"}
    push(Bucket(s3), tree(tmp_path / "0", files))
    here = tmp_path / "here"
    pull_data(Bucket(s3), "tunes", here)
    for number in range(1, num + 1):
        kinds = rng.sample(FAULTS, rng.randint(1, 3))

        def fault(asked: Asked, kinds: list[str] = kinds) -> str | None:
            kind = rng.choice(kinds) if rng.random() < 0.25 else None
            return None if kind == "rot" and asked.method != "GET" else kind

        old, held = dict(files), contents(here)
        new = {**files, f"{rng.randrange(5)}.bin": rng.randbytes(700), f"new{number}.bin": b"new"}
        new.pop(f"new{number - 3}.bin", None)
        between.fault = fault
        is_sent = is_fetched = False
        with contextlib.suppress(UserError):  # a sentence, and never another error
            push(Bucket(s3), tree(tmp_path / str(number), new), FORCED)
            is_sent = True
        with contextlib.suppress(UserError):
            pull_data(Bucket(s3), "tunes", here, PullOptions(is_forced=True))
            is_fetched = True
        between.fault = lambda asked: None
        COUNTS["items sent through a bad server"] += is_sent
        COUNTS["items fetched through a bad server"] += is_fetched
        COUNTS["items refused by a bad server, with a sentence"] += 2 - is_sent - is_fetched

        # What is there is whole: the earlier state or the later one; and so is what is here.
        pull_data(Bucket(s3), "tunes", tmp_path / "back")
        there = contents(tmp_path / "back")
        assert there == new if is_sent else there in (old, new)
        assert contents(here) == there if is_fetched else contents(here) in (held, there)
        push(Bucket(s3), tree(tmp_path / str(number), new), FORCED)
        pull_data(Bucket(s3), "tunes", here, PullOptions(is_forced=True))
        assert contents(here) == new
        files = new
        shutil.rmtree(tmp_path / "back")
    for kind in between.faults:
        COUNTS[f"requests that a bad server answered with {kind}"] += 1
