"""If this fails, `rung play RUN` does not serve, does not end at Ctrl-C, or answers a mistake with a traceback."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

import rung.web.play
from rung.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: playable/1 can be played, toy/1 cannot."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for recipe, name in (("tests.web.playable:Playable", "playable"), ("tests.contract.toy:Toy", "toy")):
            args = ["--experiment", name, "optimizer.max_iters=2", "lr.warmup_iters=1", "data.batch_size=4"]
            patch.setattr(sys, "argv", ["rung", "train", recipe, *args, "system.device=cpu", "checkpoint.every=2"])
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == 0
    return folder


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb only looks whether there is a page; the real one has tests of its own."""
    (tmp_path / "world.html").write_text("<!doctype html><title>page</title>")
    monkeypatch.setattr(rung.web.play, "STATIC", tmp_path)


@pytest.fixture
def refused(
    place: Path, built: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    monkeypatch.chdir(place)

    def call(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["rung", "play", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert end.value.code == 2, printed.out + printed.err
        assert printed.err.count("\n") == 1, printed.err
        return printed.err

    return call


def test_it_serves_until_ctrl_c(place: Path) -> None:
    if not (rung.web.play.STATIC / "world.html").exists():
        pytest.skip("the page is not built; `make page` builds it")
    process = subprocess.Popen(
        [sys.executable, "-m", "rung", "play", "playable", "--port", "0", "--no-open"],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"playable/1 at step 2: (http://127\.0\.0\.1:\d+/) .*\n", line)
    assert found, line + (process.communicate()[1] if process.poll() is not None else "")
    with urllib.request.urlopen(found[1]) as answer:
        assert b"<canvas" in answer.read()
    with connect(found[1].replace("http", "ws") + "walk") as line:
        assert '"visit"' in str(line.recv())
        line.send('{"walk": 0, "place": 0}')
        assert b'"pictures"' in bytes(line.recv())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, ""), out + err


def test_a_port_in_use_is_reported_before_anything_is_loaded(refused: Callable[..., str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = refused("no-such-run", "--port", port)
        assert str(port) in text
        assert "[in-use]" in text


MISTAKES = [
    (["nothing", "--port", "0"], "nothing"),
    (["playable", "--port", "0", "--at", "7"], "7"),
    (["playable", "--port", "70000"], "70000"),
    (["playable", "--port", "0", "--host", "203.0.113.9"], "[bad-host]"),
    (["playable", "--port", "0", "--host", "no.such.host.invalid"], "[bad-host]"),
    (["toy", "--port", "0"], "Toy"),
]


@pytest.mark.parametrize(("args", "expected"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_mistakes_are_answered_with_one_sentence(refused: Callable[..., str], args: list[str], expected: str) -> None:
    assert expected in refused(*args)


def test_an_unbuilt_page_says_how_to_build_it(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rung.web.play, "STATIC", tmp_path / "none")
    assert "make page" in refused("playable", "--port", "0")


@pytest.mark.parametrize("name", ["starlette.applications", "uvicorn"])
def test_a_missing_extra_is_named(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [module for module in sys.modules if module.startswith("rung.web.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'rung[web]'" in refused("playable", "--port", "0")
