"""If this fails, a kill, a full or failing disk, a pause or a clock loses what a user had: a row, a save, data, a run.

`make test-faults` kills at every line of the operations and at random moments, more than 500 times; `make test` kills
a few times. What was done is counted and printed at the end.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rung.engine import capture
from rung.remote.bucket import Bucket
from rung.remote.pull import pull_run
from rung.runs.query import Run, list_runs, open_run
from rung.runs.record import append_event

from .jobs import unpacked
from .lives import Lives, ends_in_a_sentence, losses, saves_of
from .machine import ARGS, COUNTS, DIVERGES, OPERATIONS, RESUME, RUN, Watched, points_of, the_run

KILLED = -signal.SIGKILL
NUM_KILLS = int(os.environ.get("RUNG_KILLS", "500"))
SEED = int(os.environ.get("RUNG_SEED", "0"))
Make = Callable[[], Watched]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where there is such a disk: no kill of a process can tell, and it syncs at once."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path_factory.mktemp("machine")
        return
    folder = memory / f"rung-faults-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def warm(lives: Lives, place: Path) -> Lives:
    """The fork server, after it has learned what such a life imports."""
    (place / "lesson").mkdir()
    for words in (ARGS, ["push", RUN, "./bucket"], ["pull", RUN, "./bucket", "--as", "back"], ["mv", RUN, "b"]):
        life = lives.rung(*words, cwd=place / "lesson", is_lesson=True)
    assert life.code != 0, "it was moved in the lesson already"
    return lives


@pytest.fixture(scope="module")
def toy(warm: Lives, place: Path) -> Run:
    """The run that nobody disturbed, and how often it visits each line."""
    (place / "whole").mkdir()
    life = warm.rung(*ARGS, cwd=place / "whole")
    assert life.code == 0, life.err
    return open_run(RUN, place / "whole/runs")


@pytest.fixture
def make(place: Path, toy: Run) -> Make:
    """New empty folders that are looked at."""
    numbers = itertools.count()
    folder = place / f"test{len(list(place.iterdir()))}"
    folder.mkdir()
    return lambda: Watched(folder / str(next(numbers)), toy)


def visits(lives: Lives, folder: Path, operation: str, *args: str, **job: Any) -> dict[str, int]:
    """Line -> how often a life that nobody disturbs comes there."""
    life = lives.rung(*args, cwd=folder, points={"of": OPERATIONS[operation]}, **job)
    assert life.code in (0, 1), life.err
    assert len(life.counted) > 5
    return dict(life.counted)


def kill(lives: Lives, folder: Path, operation: str, point: list[Any], *args: str, **job: Any) -> bool:
    """Whether it was killed there; lines in threads are not visited equally often each time."""
    life = lives.rung(*args, cwd=folder, points={"of": OPERATIONS[operation], "kill": point}, **job)
    assert life.code in (KILLED, 0, 1), life.err
    COUNTS[f"kills at a point of {operation}"] += life.code == KILLED
    return life.code == KILLED


MOST_IN_A_ROW = 6  # kills of one run


def go_on(lives: Lives, watched: Watched) -> None:
    is_resumed = watched.go_on(lives)
    COUNTS["went on to the end of the undisturbed run, bit for bit" if is_resumed else "killed before any save"] += 1
    shutil.rmtree(watched.folder)


def killed_in_a_row(lives: Lives, make: Make, deaths: Iterator[Callable[[Path, list[str]], bool]]) -> None:
    """Each run is killed in its training, then in one resume after the other, and then goes on to the end."""
    watched, num = make(), 0
    for death in deaths:
        num += death(watched.folder, RESUME if num else ARGS)
        run = watched.look()
        if run is None or run.status == "finished" or not saves_of(run).steps() or num == MOST_IN_A_ROW:
            go_on(lives, watched)
            watched, num = make(), 0
    if num:
        go_on(lives, watched)


def deaths_at_points(lives: Lives, operation: str, points: Iterator[list[Any]]) -> Iterator[Any]:
    for name, visit in points:

        def death(folder: Path, words: list[str], point: list[Any] = [name, visit]) -> bool:  # noqa: B006
            at = point if words is ARGS else [point[0], 1 + point[1] // 4]  # a resume has less to do
            return kill(lives, folder, operation, at, *words)

        yield death


@pytest.mark.parametrize("operation", ["save", "rotate", "append"])
@pytest.mark.parametrize("num", [pytest.param(0, marks=pytest.mark.faults), 1], ids=["all", "some"])
def test_killed_at_lines_that_write(warm: Lives, make: Make, operation: str, num: int) -> None:
    counted = visits(warm, make().folder, operation, *ARGS)
    points = points_of(counted, random.Random(f"{SEED} {operation}"), num or max(len(counted), NUM_KILLS // 10))
    killed_in_a_row(warm, make, deaths_at_points(warm, operation, points))


@pytest.mark.faults
def test_killed_at_random_moments(warm: Lives, make: Make) -> None:
    rng = random.Random(SEED)
    count = warm.rung(*ARGS, cwd=make().folder, die={"files": [""], "at": None}).counted

    def death(folder: Path, words: list[str]) -> bool:
        at = rng.randrange(count // (4 if words is ARGS else 8), count // (1 if words is ARGS else 2))
        life = warm.rung(*words, cwd=folder, die={"files": [""], "at": at})
        assert life.code in (KILLED, 0), life.err
        COUNTS["kills at a random moment"] += life.code == KILLED
        return life.code == KILLED

    killed_in_a_row(warm, make, itertools.repeat(death, max(1, NUM_KILLS // 10)))


@pytest.mark.faults
def test_killed_at_every_line_that_captures(warm: Lives, make: Make) -> None:
    """A capture is whole or absent, and the run diverges again at the same step."""
    whole = make()
    counted = visits(warm, whole.folder, "capture", *DIVERGES)
    whole.whole = open_run(RUN, whole.folder / "runs")
    assert whole.whole.status == "diverged"
    (step,) = capture.steps(whole.whole.path / "captures")
    for point in points_of(counted, random.Random(SEED), len(counted)):
        watched = Watched(make().folder / "x", whole.whole)
        if not kill(warm, watched.folder, "capture", point, *DIVERGES):
            continue
        run = watched.look()
        assert run is not None
        if saves_of(run).steps() and run.status != "diverged":
            assert warm.rung(*RESUME, cwd=watched.folder).code == 1
            run = watched.look()
            assert run is not None
            assert run.status == "diverged"
            assert capture.steps(run.path / "captures") == [step]
            assert capture.read(run.path / f"captures/{step:08d}").facts[0]["step"] == step
            COUNTS["diverged again at the same step, and captured"] += 1


@pytest.mark.parametrize("num", [pytest.param(0, marks=pytest.mark.faults), 2], ids=["all", "some"])
def test_killed_while_data_is_packed(warm: Lives, place: Path, make: Make, num: int) -> None:
    """What is there is what was there, or the new data, and the next preparation succeeds."""
    old, folder = list(range(10)), make().folder

    def job(rows: int) -> dict[str, Any]:
        return {"call": "tests.faults.jobs:pack", "given": {"out": str(folder / "data"), "rows": rows}}

    assert warm.rung(cwd=folder, **job(10)).code == 0
    counted = visits(warm, folder, "pack", **job(20))
    for point in points_of(counted, random.Random(SEED), num or len(counted)):
        shutil.rmtree(folder / "data")
        assert warm.rung(cwd=folder, **job(10)).code == 0
        assert kill(warm, folder, "pack", point, **job(20))
        assert unpacked(folder / "data") in (old, list(range(20))), point
        assert warm.rung(cwd=folder, **job(20)).code == 0
        assert unpacked(folder / "data") == list(range(20))
    shutil.rmtree(folder)


def lines_of(run: Run) -> list[bytes]:
    return [path.read_bytes() for path in sorted(run.path.rglob("*.ndjson"))]


@pytest.mark.parametrize("num", [pytest.param(0, marks=pytest.mark.faults), 2], ids=["all", "some"])
def test_killed_while_pushing(warm: Lives, toy: Run, make: Make, num: int) -> None:
    """The place has the earlier state or the later one, whole; pushing again completes it."""
    folder = make().folder
    shutil.copytree(toy.path.parents[1], folder / "runs")
    words = ("push", RUN, "./bucket")
    assert warm.rung(*words, cwd=folder).code == 0
    states = [lines_of(open_run(RUN, folder / "runs"))]
    shutil.copytree(folder / "bucket", folder / "first")
    append_event(folder / "runs" / RUN, "note", text="more")
    states.append(lines_of(open_run(RUN, folder / "runs")))
    counted = visits(warm, folder, "push", *words)
    for point in points_of(counted, random.Random(SEED), num or len(counted)):
        shutil.rmtree(folder / "bucket")
        shutil.copytree(folder / "first", folder / "bucket")
        is_killed = kill(warm, folder, "push", point, *words)
        for attempt in range(2):
            pull_run(Bucket(str(folder / "bucket")), RUN, folder / "back")
            found = lines_of(open_run(RUN, folder / "back"))
            assert found in (states if is_killed and not attempt else states[1:]), point
            shutil.rmtree(folder / "back")
            assert warm.rung(*words, cwd=folder).code == 0
        assert lines_of(open_run(RUN, folder / "runs")) == states[1]
        assert not list((folder / "bucket").rglob(".push*")), "what a killed push left was sent"
    shutil.rmtree(folder)


@pytest.mark.parametrize("num", [pytest.param(0, marks=pytest.mark.faults), 2], ids=["all", "some"])
def test_killed_while_pulling(warm: Lives, toy: Run, make: Make, num: int) -> None:
    """The run here is as it was, or as it is there; pulling again completes it. Half of them update an older state."""
    folder, rng = make().folder, random.Random(SEED)
    shutil.copytree(toy.path.parents[1], folder / "there")
    assert warm.rung("push", RUN, "./bucket", "--runs", "there", cwd=folder).code == 0
    words = ("pull", RUN, "./bucket")
    old = lines_of(toy)
    assert warm.rung(*words, cwd=folder).code == 0
    shutil.copytree(folder / "runs", folder / "old")
    append_event(folder / "there" / RUN, "note", text="more")
    new = lines_of(open_run(RUN, folder / "there"))
    assert warm.rung("push", RUN, "./bucket", "--runs", "there", cwd=folder).code == 0
    counted = visits(warm, folder, "pull", *words)
    shutil.rmtree(folder / "runs")
    counted |= visits(warm, folder, "pull", *words)
    for point in points_of(counted, rng, num or len(counted)):
        is_update = rng.random() < 0.7
        shutil.rmtree(folder / "runs")
        if is_update:
            shutil.copytree(folder / "old", folder / "runs")
        kill(warm, folder, "pull", point, *words)
        assert warm.rung("ls", cwd=folder).code in (0, 2), point
        runs = list_runs(folder / "runs", problems=[]) if (folder / "runs").exists() else []
        assert [lines_of(run) for run in runs] in ([old], [new]) if runs else not is_update, point
        life = warm.rung(*words, cwd=folder)
        assert life.code == 0, (point, life.err)
        (run,) = list_runs(folder / "runs")
        assert lines_of(run) == new
        assert saves_of(run).steps() == saves_of(toy).steps()[-1:], "what is kept is the best and the last"
        left = [path.name for path in run.path.parent.iterdir() if path.name.endswith(".part")]
        assert not left, (point, left)
    shutil.rmtree(folder)


@pytest.mark.parametrize("num", [pytest.param(0, marks=pytest.mark.faults), 2], ids=["all", "some"])
def test_killed_while_moving(warm: Lives, toy: Run, make: Make, num: int) -> None:
    """The run is there under its old name or its new one; the same command moves it in the end."""
    folder = make().folder
    words = ("mv", RUN, "other")

    def fill() -> None:
        shutil.rmtree(folder / "runs", ignore_errors=True)
        shutil.copytree(toy.path.parents[1], folder / "runs")

    fill()
    counted = visits(warm, folder, "mv", *words)
    for point in points_of(counted, random.Random(SEED), num or len(counted)):
        fill()
        kill(warm, folder, "mv", point, *words)
        (run,) = list_runs(folder / "runs")
        assert run.id in (RUN, "other/1")
        assert lines_of(run) == lines_of(toy)
        if run.id == RUN:
            assert warm.rung(*words, cwd=folder).code == 0
        assert [run.id for run in list_runs(folder / "runs")] == ["other/1"]
    shutil.rmtree(folder)


def disk_breaks(lives: Lives, watched: Watched, how: str, at: int) -> None:
    life = lives.rung(*ARGS, cwd=watched.folder, disk={"how": how, "at": at})
    COUNTS[f"disks: {how}"] += 1
    assert life.code == 0 or ends_in_a_sentence(life), (at, life.err)
    assert how != "short" or life.code == 0, (at, life.err)
    run = watched.look()
    if life.code == 0:
        assert run is not None
        assert [step for step, _ in losses(run)] == list(range(12)), at
    if run is not None and (run.status == "finished" or saves_of(run).steps()):
        assert run.status in ("finished", "stopped", "vanished", "crashed"), run.status
        go_on(lives, watched)
    else:
        shutil.rmtree(watched.folder)


@pytest.mark.faults
@pytest.mark.parametrize("how", ["full", "error", "short"])
def test_the_disk_breaks_at_every_call(warm: Lives, make: Make, how: str) -> None:
    """It is full from the n-th call that writes on; the n-th call fails; every n-th write takes half of its bytes."""
    count = warm.rung(*ARGS, cwd=make().folder, disk={"how": "count", "at": 0}).counted
    assert count > 100
    for at in range(1, 8) if how == "short" else range(1, count + 1, max(1, 500 // NUM_KILLS) * 2):
        disk_breaks(warm, make(), how, at)


@pytest.mark.parametrize(("how", "at"), [("error", 100), ("short", 2)])
def test_the_disk_breaks(warm: Lives, make: Make, how: str, at: int) -> None:
    disk_breaks(warm, make(), how, at)


@pytest.mark.parametrize("num", [pytest.param(20, marks=pytest.mark.faults), 1])
def test_suspended_and_woken(warm: Lives, make: Make, num: int) -> None:
    """A process that stands still is running, nobody else may resume its run, and it goes on as if nothing had been."""
    rng = random.Random(SEED)
    for _ in range(num):
        watched, num_rows = make(), rng.randrange(1, 11)
        pid, out = warm.begin(*ARGS, cwd=watched.folder)
        file = watched.folder / "runs" / RUN / "metrics/000.ndjson"
        while not file.exists() or file.read_bytes().count(b"\n") < num_rows:
            time.sleep(0.002)
        os.kill(pid, signal.SIGSTOP)
        try:
            run = watched.look()
            assert run is not None
            assert run.status in ("running", "finished")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert warm.end(out).code == 0
        COUNTS["processes suspended and woken"] += 1
        run = watched.look()
        assert run is not None
        watched.assert_same_end(run)


@pytest.mark.parametrize("num", [pytest.param(20, marks=pytest.mark.faults), 1])
def test_the_clock_is_set_back(warm: Lives, make: Make, num: int) -> None:
    """By an hour or by ten years, while it trains, and again before it is resumed."""
    rng = random.Random(SEED)
    for _ in range(num):
        watched, by_s = make(), rng.choice([-3600.0, -86400.0 * 3650])
        clock = {"after": rng.randrange(1, 60), "by_s": by_s}
        counted = {"files": [""], "at": 120_000}
        life = warm.rung(*ARGS, cwd=watched.folder, clock=clock, die=counted)
        assert life.code in (0, KILLED), life.err
        assert watched.go_on(warm) or life.code == KILLED
        COUNTS["clocks set back"] += 1
        for verb in (["ls"], ["show", RUN]):
            assert warm.rung(*verb, cwd=watched.folder).code == (0 if the_run(watched.folder) else 2)
