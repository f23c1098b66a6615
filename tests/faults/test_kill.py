"""If this fails, a kill -9 costs a user rows that were logged, a save, or the exactness of what comes after a resume.

The moments are random, seeded, and told by what the process does: before the n-th line of code that it executes in some
files, with a file of a save half written, or from outside when something has appeared on the disk.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rung.engine import checkpoint
from rung.errors import RunError
from rung.runs.metrics import Faults, read_rows
from rung.runs.query import Run

from .lives import SAVING, Lives, assert_same_end, but, is_one_sentence, losses, saves_of, the_run

SAVES = 12  # of the undisturbed run: at least that many
KILLED = -signal.SIGKILL


def assert_readable(run: Run, whole: Run) -> None:
    """What a user can still see of a run that was killed."""
    assert run.status == "vanished", run.status_text
    faults = Faults()
    rows = list(read_rows(run.path / "metrics", faults))
    assert faults.broken == 0
    expected = dict(losses(whole))
    for row in rows:
        assert "loss" not in row or row["loss"] == expected[row["step"]]
    steps = [step for step, _ in losses(run)]
    assert steps == list(range(len(steps))), "a logged step is missing"
    saves = saves_of(run)
    for step in saves.steps():
        checkpoint.load(saves.at(step)).tensors()
        assert step <= len(steps), "a save knows more than the record"
    if saves.best is not None:
        assert saves.best in saves.steps()


def assert_shown(lives: Lives, folder: Path) -> None:
    for verb in (["ls"], ["show", "piano/1"]):
        life = lives.rung(*verb, cwd=folder)
        assert life.code == 0, life.err
        assert "vanished" in life.out


def go_on(lives: Lives, folder: Path, whole: Run) -> None:
    """Resumes to the end, or sees that there was nothing to resume."""
    try:
        run = the_run(folder)
    except RunError:
        life = lives.rung("resume", "piano/1", cwd=folder)  # killed before there was a run
        assert is_one_sentence(life)
        return
    assert_readable(run, whole)
    life = lives.rung("resume", "piano/1", cwd=folder)
    if not saves_of(run).steps():
        assert is_one_sentence(life)
        assert "no save to resume from" in life.err
        return
    assert life.code == 0, life.err + life.out
    assert_same_end(the_run(folder), whole)


@pytest.fixture(scope="module")
def num_lines(lives: Lives, args: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many lines an undisturbed run executes: of all, and of those that save."""
    found = {}
    for name, files in {"all": [""], "saving": SAVING}.items():
        life = lives.rung(*args, cwd=tmp_path_factory.mktemp("count"), die={"files": files, "at": None})
        assert life.code == 0
        assert life.counted is not None
        found[name] = life.counted
    return found


@pytest.mark.parametrize("number", range(5))
def test_killed_anywhere(
    lives: Lives, args: list[str], whole: Run, num_lines: Any, number: int, tmp_path: Path
) -> None:
    """Each in its own fifth of the run, so that start, middle and end are all met."""
    fifth = num_lines["all"] // 5
    at = random.Random(number).randrange(number * fifth, (number + 1) * fifth)
    life = lives.rung(*args, cwd=tmp_path, die={"files": [""], "at": at})
    assert life.code == KILLED, at
    go_on(lives, tmp_path, whole)


@pytest.mark.parametrize("number", range(4))
def test_killed_while_saving(
    lives: Lives, args: list[str], whole: Run, num_lines: Any, number: int, tmp_path: Path
) -> None:
    """Between any two lines of a save: before and after the rename, half-way through the rotation, at the mark."""
    at = random.Random(100 + number).randrange(num_lines["saving"] // 4, num_lines["saving"])
    life = lives.rung(*args, cwd=tmp_path, die={"files": SAVING, "at": at})
    assert life.code == KILLED, at
    assert saves_of(the_run(tmp_path)).steps(), "this moment should come after the first save"
    go_on(lives, tmp_path, whole)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_killed_with_half_a_file(lives: Lives, args: list[str], whole: Run, name: str, tmp_path: Path) -> None:
    at = random.Random(name).randrange(2, SAVES)
    life = lives.rung(*args, cwd=tmp_path, tear={"name": name, "at": at})
    assert life.code == KILLED
    run = the_run(tmp_path)
    assert list(saves_of(run).folder.glob(".*.tmp")), "the half-written save should be there, and not count"
    assert_shown(lives, tmp_path)
    go_on(lives, tmp_path, whole)


def half_saves(folder: Path) -> Iterator[int]:
    """Steps that are being saved at this moment."""
    try:
        with os.scandir(folder) as entries:
            yield from (int(entry.name.split(".")[1]) for entry in entries if entry.name.endswith(".tmp"))
    except FileNotFoundError:
        return


@pytest.mark.parametrize("step", [6, 15])
def test_killed_from_outside_during_a_save(
    lives: Lives, args: list[str], whole: Run, step: int, tmp_path: Path
) -> None:
    """In the first save from this step on that can be seen from here."""
    pid, out = lives.begin(*args, cwd=tmp_path)
    while max(half_saves(tmp_path / "runs/piano/1/checkpoints"), default=0) < step:
        os.kill(pid, 0)  # raises when it is gone
    os.kill(pid, signal.SIGKILL)
    assert lives.end(out).code == KILLED
    assert_shown(lives, tmp_path)
    go_on(lives, tmp_path, whole)


def test_killed_from_outside_at_a_row(lives: Lives, args: list[str], whole: Run, tmp_path: Path) -> None:
    num_rows = 11
    pid, out = lives.begin(*args, cwd=tmp_path)
    file = tmp_path / "runs/piano/1/metrics/000.ndjson"
    while not file.exists() or file.read_bytes().count(b"\n") < num_rows:
        os.kill(pid, 0)
    os.kill(pid, signal.SIGKILL)
    assert lives.end(out).code == KILLED
    assert len(losses(the_run(tmp_path))) >= num_rows - 2, "a row that was on the disk is gone"  # two may be evals
    go_on(lives, tmp_path, whole)


def test_killed_again_and_again(lives: Lives, args: list[str], whole: Run, num_lines: Any, tmp_path: Path) -> None:
    """One run, six kills: while it starts again, a little after the last save, and in the middle of the next."""
    rng = random.Random(0)
    life = lives.rung(*args, cwd=tmp_path, die={"files": SAVING, "at": num_lines["saving"] // 5})
    assert life.code == KILLED
    moments = ([""], 8000, 16000), (SAVING, 400, 800), ([""], 4000, 9000), (SAVING, 400, 800), (SAVING, 1, 99)
    for files, low, high in moments:
        life = lives.rung("resume", "piano/1", cwd=tmp_path, die={"files": files, "at": rng.randrange(low, high)})
        assert life.code == KILLED, life.out + life.err
        assert_readable(the_run(tmp_path), whole)
    go_on(lives, tmp_path, whole)
    assert len(the_run(tmp_path).document["segments"]) >= 4


def test_killed_between_the_best_save_and_its_mark(lives: Lives, args: list[str], tmp_path: Path) -> None:
    """The save of a new best is whole, and nothing says yet that it is the best; at a rate of 0 it stays that."""
    still = but(args, "checkpoint.every=0", "checkpoint.keep=1", "lr.learning_rate=0", "lr.min_lr=0")
    steady, broken = tmp_path / "steady", tmp_path / "broken"
    for folder in (steady, broken):
        folder.mkdir()
    assert lives.rung(*still, cwd=steady).code == 0
    whole = the_run(steady)
    assert (saves_of(whole).best, saves_of(whole).steps()) == (7, [7, 30])
    assert lives.rung(*still, cwd=broken, tear={"name": "best", "at": 1}).code == KILLED
    saves = saves_of(the_run(broken))
    assert (saves.best, saves.steps()) == (None, [7])
    assert lives.rung("resume", "piano/1", cwd=broken).code == 0
    assert_same_end(the_run(broken), whole)
    assert saves.steps() == [7, 30]


def test_killed_between_the_last_save_and_the_end(lives: Lives, args: list[str], whole: Run, tmp_path: Path) -> None:
    """All steps are done and saved, but the last eval and the samples are still to come."""
    rarely = but(args, "checkpoint.every=0", "eval_interval=0")
    assert lives.rung(*rarely, cwd=tmp_path, tear={"name": "best", "at": 1}).code == KILLED
    assert saves_of(the_run(tmp_path)).steps() == [30]
    life = lives.rung("resume", "piano/1", cwd=tmp_path)
    assert life.code == 0, life.err
    run = the_run(tmp_path)
    assert (run.status, saves_of(run).best) == ("finished", 30)
    assert run.best == whole.best
    assert (run.path / "samples" / "00000030").is_dir(), "the end of the run was not made up for"
