"""If this fails, a data set out of a wheel is not what was pinned, or an offline machine cannot use its cache."""

import hashlib
import io
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.data import wheel as wheels
from rung.data.wheel import Wheel, cache_folder
from tests.errors import raises_code


def packed(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


CONTENT = packed(b=b"second", a=b"first")
TOY = Wheel("toy", "1.0", "toy-1.0-py3-none-any.whl", hashlib.sha256(CONTENT).hexdigest())


class Pip:
    """Stands in for the pip process: puts `content` where a download would go."""

    def __init__(self, content: bytes | None, filename: str = TOY.filename) -> None:
        self.content, self.filename, self.commands = content, filename, list[list[str]]()

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found\n")
        (Path(command[command.index("--dest") + 1]) / self.filename).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Pip]:
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path / "cache"))

    def use(content: bytes | None, **options: str) -> Pip:
        stand_in = Pip(content, **options)
        monkeypatch.setattr(wheels.subprocess, "run", stand_in)
        return stand_in

    return use


def leftovers() -> list[str]:
    return sorted(p.name for p in TOY.path.parent.iterdir())


def test_is_fetched_once_and_read_without_pip_afterwards(pip: Callable[..., Pip]) -> None:
    process = pip(CONTENT)
    told: list[tuple[str, int, int]] = []
    assert TOY.fetch(lambda *what: told.append(what)) == TOY.path
    assert [t[1:] for t in told] == [(0, 1), (1, 1)]
    assert "toy==1.0" in process.commands[0]
    assert "--no-deps" in process.commands[0]
    assert "--only-binary=:all:" in process.commands[0]
    pip(None)  # from here on there is no network
    assert TOY.names() == ["b", "a"]
    assert TOY.open("a") == b"first"
    assert list(TOY.read(lambda name: True)) == [("a", b"first"), ("b", b"second")]
    assert leftovers() == [TOY.filename]


def test_another_hash_is_refused_and_not_kept(pip: Callable[..., Pip]) -> None:
    pip(packed(a=b"somebody else's"))
    with raises_code("wheel-mismatch") as caught:
        TOY.fetch()
    assert str(TOY.path) in str(caught.value)
    assert leftovers() == []


@pytest.mark.parametrize("damage", [b"", CONTENT[:-7], CONTENT + b"x"])
def test_a_damaged_cache_is_fetched_again(pip: Callable[..., Pip], damage: bytes) -> None:
    TOY.path.parent.mkdir(parents=True)
    TOY.path.write_bytes(damage)
    process = pip(CONTENT)
    assert TOY.open("b") == b"second"
    assert len(process.commands) == 1
    assert leftovers() == [TOY.filename]


def test_no_network_is_one_sentence_with_a_remedy(pip: Callable[..., Pip]) -> None:
    pip(None)
    with raises_code("network") as caught:
        TOY.fetch()
    assert "No matching distribution found" in str(caught.value)
    assert str(TOY.path) in str(caught.value)
    assert "\n" not in str(caught.value)
    TOY.path.write_bytes(b"torn")
    with raises_code("network") as caught:
        TOY.fetch()
    assert "damaged" in str(caught.value)
    TOY.path.write_bytes(CONTENT)  # the remedy works
    assert TOY.open("a") == b"first"


def test_no_pip_at_all(pip: Callable[..., Pip], monkeypatch: pytest.MonkeyPatch) -> None:
    pip(CONTENT)
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    with raises_code("not-installed"):
        TOY.fetch()


def test_another_file_than_the_pinned_one(pip: Callable[..., Pip]) -> None:
    pip(CONTENT, filename="toy-1.0-cp311-cp311-linux_x86_64.whl")
    with raises_code("wheel-mismatch") as caught:
        TOY.fetch()
    assert "toy-1.0-cp311" in str(caught.value)


def test_a_cache_that_cannot_be_written(
    pip: Callable[..., Pip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(CONTENT)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RUNG_CACHE", str(tmp_path / "file"))
    with raises_code("cannot-write") as caught:
        TOY.fetch()
    assert "RUNG_CACHE" in str(caught.value)


def test_a_missing_member(pip: Callable[..., Pip]) -> None:
    pip(CONTENT)
    with raises_code("no-file"):
        TOY.open("c")


def test_is_unpacked_once_with_its_programs(pip: Callable[..., Pip]) -> None:
    program = zipfile.ZipInfo("bin/run")
    program.external_attr = 0o100755 << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(program, b"#!/bin/sh\n")
        archive.writestr(zipfile.ZipInfo("data"), b"of any mode")
    native = Wheel("toy", "1.0", TOY.filename, hashlib.sha256(buffer.getvalue()).hexdigest())
    pip(buffer.getvalue())
    folder = native.unpack()
    assert os.access(folder / "bin/run", os.X_OK)
    assert (folder / "data").read_bytes() == b"of any mode"
    native.path.unlink()
    pip(None)  # the wheel itself is needed no more
    assert native.unpack() == folder
    assert leftovers() == [folder.name]


def test_a_damaged_wheel_is_not_unpacked(pip: Callable[..., Pip]) -> None:
    pip(packed(a=b"somebody else's"))
    with raises_code("wheel-mismatch"):
        TOY.unpack()
    assert leftovers() == []


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("RUNG_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/h/.cache/rung")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/rung")
    monkeypatch.setenv("RUNG_CACHE", "/r")
    assert cache_folder() == Path("/r")


def test_the_pinned_wheels_name_their_own_files() -> None:
    for pinned in (wheels.MUSIC21, wheels.PRETTY_MIDI):
        assert pinned.filename == f"{pinned.name}-{pinned.version}-py3-none-any.whl"
        assert len(pinned.sha256) == 64
    for tag, pinned in wheels.VIZDOOM.items():
        assert pinned.filename.startswith(f"{pinned.name}-{pinned.version}-{tag}-{tag}-")
        assert len(pinned.sha256) == 64
