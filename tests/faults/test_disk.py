"""If this fails, a full disk or a folder that cannot be written costs a user more than one sentence and some time."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rung.data.store import Store, StoreWriter
from rung.engine import checkpoint
from rung.errors import CheckpointError, DataError
from rung.runs.query import Run

from .lives import Lives, assert_same_end, is_one_sentence, losses, saves_of, the_run


def digests(run: Run) -> dict[str, bytes]:
    folder = saves_of(run).folder
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# The weights take 94 kB, the optimizer 190 kB; rows and documents stay far below either.
@pytest.mark.parametrize(("limit_bytes", "file"), [(50_000, "model.safetensors"), (150_000, "optimizer.pt")])
def test_no_room_for_a_save(lives: Lives, half: Path, whole: Run, limit_bytes: int, file: str) -> None:
    before, saves = digests(the_run(half)), saves_of(the_run(half))
    kept = {saves.best, max(saves.steps())}
    life = lives.rung("resume", "piano/1", cwd=half, limit_bytes=limit_bytes)
    assert is_one_sentence(life), life.err
    assert "could not be saved" in life.err
    assert "earlier saves are untouched" in life.err
    run = the_run(half)
    # Where the kill came between a save and its rotation, the resume has rotated first.
    assert digests(run).items() <= before.items(), "nothing may change, and nothing half-written be left"
    assert kept <= set(saves_of(run).steps()), "nothing may be lost"
    for step in saves_of(run).steps():
        checkpoint.load(saves_of(run).at(step))
    assert run.status == "stopped"
    assert not [path for path in saves_of(run).folder.iterdir() if path.name.startswith(".")]
    assert lives.rung("resume", "piano/1", cwd=half).code == 0
    assert_same_end(the_run(half), whole)


def test_no_room_for_the_mark_of_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = checkpoint.Checkpoints(tmp_path)
    saves.mark_best(3)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_whole", full)
    for mark in (saves.mark_best, saves.pin):
        with pytest.raises(CheckpointError, match="No space left on device"):
            mark(6)
    assert (saves.best, saves.pinned) == (3, [])


@pytest.mark.parametrize("num_writes", [5, 14, 60])
def test_no_room_for_anything(lives: Lives, args: list[str], num_writes: int, whole: Run, tmp_path: Path) -> None:
    """From some write on nothing fits: neither the next row nor the word about the end."""
    life = lives.rung(*args, cwd=tmp_path, full_after=num_writes)
    assert is_one_sentence(life), life.err
    assert "o space left on device" in life.err
    if not (tmp_path / "runs").exists():
        return  # the run had not begun, and nothing is left of it
    run = the_run(tmp_path)
    assert run.status in ("stopped", "vanished"), "a run that could not say how it ended is not running"
    rows = losses(run)
    assert rows == losses(whole)[: len(rows)]
    life = lives.rung("resume", "piano/1", cwd=tmp_path)
    if saves_of(run).steps():
        assert life.code == 0, life.err
        assert_same_end(the_run(tmp_path), whole)
    else:
        assert is_one_sentence(life)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 600 kB, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(lives: Lives, args: list[str], whole: Run, small_disk: Path) -> None:
    """The first save fits, a later one does not; with more room the run goes on as if nothing had been."""
    life = lives.rung(*args, cwd=small_disk)
    assert is_one_sentence(life), life.err
    run = the_run(small_disk)
    saves = saves_of(run)
    assert saves.steps()
    for step in saves.steps():
        checkpoint.load(saves.at(step))
    assert not list(saves.folder.glob(".*.tmp"))
    assert run.status == "stopped"
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert lives.rung("resume", "piano/1", cwd=small_disk).code == 0
    assert_same_end(the_run(small_disk), whole)


@pytest.mark.parametrize("place", ["a_file", "a_file/runs", "/dev/null/runs", "/proc/runs"])
def test_runs_folder_that_cannot_be_written(lives: Lives, args: list[str], place: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("mine")
    life = lives.rung(*args, "--runs", place, cwd=tmp_path)
    assert is_one_sentence(life), life.err
    assert place in life.err
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]
    assert (tmp_path / "a_file").read_text() == "mine"


@pytest.mark.parametrize("place", ["a_file", "a_file/data", "/dev/null/data", "/proc/data"])
def test_data_folder_that_cannot_be_written(lives: Lives, piano_data: Path, place: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("mine")
    tunes = tmp_path / "tunes"
    tunes.mkdir()
    (tunes / "a.mid").write_bytes(b"MThd")
    life = lives.rung("data", "piano", "--from", tunes, "--name", tmp_path / place, cwd=tmp_path)
    assert is_one_sentence(life), life.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_file", "tunes"]


def test_no_room_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that was there stays as it was; data that was not there is not there."""
    import numpy as np

    def write(rows: int) -> None:
        with StoreWriter(tmp_path / "data" / "toy", kind="toy", replace=True) as writer:
            writer.array("ids", np.int32)
            writer.record("train", writer.append("ids", np.arange(rows, dtype=np.int32)), rows)

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full)
        with pytest.raises(DataError, match="No space left on device"):
            write(3)
    assert not list(tmp_path.iterdir())
    write(5)
    fingerprint = Store.open(tmp_path / "data" / "toy").fingerprint
    with monkeypatch.context() as patched:
        patched.setattr("rung.data.store.exchange", lambda a, b: False)  # as on a disk that cannot
        patched.setattr(Path, "rename", full)
        with pytest.raises(DataError, match="No space left on device"):
            write(7)
    assert Store.open(tmp_path / "data" / "toy").fingerprint == fingerprint
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["toy"]
