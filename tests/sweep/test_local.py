"""If this fails, more points go on at once than there is room for, a GPU gets two, or Ctrl-C leaves one behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rung.runs.process import start_time
from rung.sweep import state
from rung.sweep.launch import launcher_of, local
from rung.sweep.launch.local import LocalLauncher
from rung.sweep.plan import load
from rung.sweep.space import Point, Sweep
from tests.errors import raises_code
from tests.sweep.made import made_sweep, wait_for

ROOT = Path(__file__).resolve().parents[2]
# In place of a point's process: notes that it is there, and ends as the file `codes` says, with the first for its seed.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
from rung.sweep import state
from rung.sweep.plan import load
seed, folder = sys.argv[1], Path(sys.argv[2])
sweep = load(folder)
claim = state.take(sweep, sys.argv[3])
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
log = lambda **what: os.write(fd, (json.dumps({"seed": int(seed), "pid": os.getpid(), **what}) + "\\n").encode())
fd = os.open("seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
signal.signal(signal.SIGTERM, lambda *_: (log(end="told"), claim.release("stopped"), os._exit(3)))
log(begin=True, env={name: os.environ.get(name) for name in names})
code = json.loads(Path("codes").read_text()).get(seed, [0])
done = len([line for line in open("seen") if json.loads(line).get("begin") and json.loads(line)["seed"] == int(seed)])
code = code[min(done, len(code)) - 1]
if code == "wait":
    while True:
        signal.pause()
log(end=code)
if code < 0:
    os.kill(os.getpid(), -code)
claim.release({0: "finished", 3: "stopped"}.get(code, "failed"), "as told")
sys.exit(code)
"""
DRIVER = """
import sys
from pathlib import Path
from rung.sweep.plan import load
from tests.sweep import test_local
test_local.local.command_of = test_local.stand_in
sweep = load(Path(sys.argv[1]))
try:
    test_local.LocalLauncher.of(sweep).run(sweep, sweep.points, lambda *told: print(*told, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


def stand_in(sweep: Sweep, point: Point) -> list[str]:
    return [sys.executable, "-c", STAND_IN, str(point.varies["seed"]), str(sweep.folder), point.key]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(local, "command_of", stand_in)
    (tmp_path / "codes").write_text("{}")
    return tmp_path


def seen() -> list[dict[str, Any]]:
    file = Path("seen")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def begun() -> list[int]:
    return [one["seed"] for one in seen() if one.get("begin")]


def run(sweep: Sweep) -> list[tuple[int, str]]:
    """Seed and state of all that was told, in order."""
    told: list[tuple[int, str]] = []
    seeds = {one.key: one.varies["seed"] for one in sweep.points}
    LocalLauncher.of(sweep).run(sweep, sweep.points, lambda key, word, where: told.append((seeds[key], word)))
    return told


def test_points_go_in_order_and_no_more_at_once_than_there_are_slots(folder: Path) -> None:
    sweep = made_sweep(folder / "runs", seeds=range(5), launch={"slots": 2, "threads": 3})
    told = run(sweep)
    assert begun()[:2] in ([0, 1], [1, 0])
    assert [seed for seed, word in told if word == "running"] == [0, 1, 2, 3, 4]
    assert sorted(seed for seed, word in told if word == "finished") == [0, 1, 2, 3, 4]
    going = most = 0
    for _, word in told:
        going += {"running": 1}.get(word, -1)
        most = max(most, going)
    assert most == 2
    assert {one["env"]["OMP_NUM_THREADS"] for one in seen() if one.get("begin")} == {"3"}


def test_each_gpu_has_one_point_at_a_time(folder: Path) -> None:
    sweep = made_sweep(folder / "runs", seeds=range(3), launch={"gpus": [0, 3]})
    run(sweep)
    used = [one["env"]["CUDA_VISIBLE_DEVICES"] for one in seen() if one.get("begin")]
    assert set(used) == {"0", "3"}
    assert [slot.env["CUDA_VISIBLE_DEVICES"] for slot in LocalLauncher.of(sweep).slots] == ["0", "3"]
    pairs = made_sweep(folder / "more", ranks=2, launch={"gpus": [0, 1, 2, 3, 4]})
    assert [slot.env["CUDA_VISIBLE_DEVICES"] for slot in LocalLauncher.of(pairs).slots] == ["0,1", "2,3"]


def test_slots_are_as_many_as_the_machine_has_room_for(tmp_path: Path) -> None:
    num_cores = len(os.sched_getaffinity(0))
    for launch, ranks, expected in (({}, 1, num_cores), ({"threads": num_cores}, 1, 1), ({"threads": 4096}, 1, 1),
                                    ({"slots": "auto"}, num_cores, 1), ({"slots": 7}, 1, 7)):  # fmt: skip
        sweep = made_sweep(tmp_path / "runs", launch=launch, ranks=ranks)
        assert len(LocalLauncher.of(sweep).slots) == expected


@pytest.mark.parametrize("launch", [{"slots": 0}, {"slots": "many"}, {"threads": True}, {"gpus": 2}, {"gpus": [0, 0]},
                                    {"gpus": [[]]}])  # fmt: skip
def test_options_that_make_no_sense_are_refused(tmp_path: Path, launch: dict[str, Any]) -> None:
    with raises_code("bad-value"):
        LocalLauncher.of(made_sweep(tmp_path / "runs", launch=launch))
    with raises_code("too-few"):
        LocalLauncher.of(made_sweep(tmp_path / "runs", launch={"gpus": [0, 1]}, ranks=3))


def test_an_unknown_place_is_refused(tmp_path: Path) -> None:
    sweep = made_sweep(tmp_path / "runs")
    assert isinstance(launcher_of(sweep, None), LocalLauncher)
    with raises_code("bad-launcher"):
        launcher_of(sweep, "the moon")


def test_what_was_stopped_or_lost_is_started_again_and_what_failed_is_not(folder: Path) -> None:
    Path("codes").write_text(json.dumps({"0": [3, 0], "1": [-9, -9, 0], "2": [1], "3": [2]}))
    sweep = made_sweep(folder / "runs", seeds=range(5), launch={"slots": 5})
    told = run(sweep)
    assert sorted(begun()) == [0, 0, 1, 1, 1, 2, 3, 4]
    last = dict(told)
    assert last == {0: "finished", 1: "finished", 2: "failed", 3: "failed", 4: "finished"}
    assert (0, "stopped") in told
    assert (1, "lost") in told


def test_what_is_lost_every_time_is_given_up(folder: Path) -> None:
    Path("codes").write_text(json.dumps({"0": [-9]}))
    told = run(made_sweep(folder / "runs", seeds=[0]))
    assert told[-1] == (0, "failed")
    assert len(begun()) == local.MOST_LOST + 1


def drive(sweep: Sweep) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(sweep.folder)], stdout=subprocess.PIPE, text=True)


def test_an_interrupt_tells_each_point_once_and_waits(folder: Path) -> None:
    Path("codes").write_text(json.dumps({"0": ["wait"], "1": ["wait"]}))
    sweep = made_sweep(folder / "runs", seeds=range(3), launch={"slots": 2})
    driver = drive(sweep)
    wait_for(lambda: len(begun()) == 2)
    driver.send_signal(signal.SIGINT)
    assert driver.wait() == 130
    assert [one["end"] for one in seen() if "end" in one] == ["told", "told"]
    assert sorted(begun()) == [0, 1]  # nothing new was started
    assert all(start_time(one["pid"]) is None for one in seen())


class Listening:
    """In place of a child: keeps the signals that it gets."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_only_a_second_ctrl_c_keeps_trainings_from_saving(tmp_path: Path) -> None:
    """A terminal that closes says so more than once, and cannot be written to any more."""
    sweep, child = made_sweep(tmp_path / "runs"), Listening()
    work = local._Scheduler(sweep, lambda *told: None, [], [])
    work.going.append(local.RunningPoint(sweep.points[0], local.Slot("slot 0", {}), child))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.os, "write", lambda fd, data: os.close(-1))
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            work.on_signal(number, None)
    assert child.signals == [signal.SIGTERM]
    work.on_signal(signal.SIGINT, None)
    assert child.signals == [signal.SIGTERM, signal.SIGINT]


def test_the_points_of_a_driver_that_is_killed_stop_too(folder: Path) -> None:
    Path("codes").write_text(json.dumps({"0": ["wait", 0], "1": ["wait", 0]}))
    sweep = made_sweep(folder / "runs", launch={"slots": 2})
    driver = drive(sweep)
    wait_for(lambda: len(begun()) == 2)
    driver.kill()
    driver.wait()
    wait_for(lambda: all(start_time(one["pid"]) is None for one in seen()))
    assert [one["end"] for one in seen() if "end" in one] == ["told", "told"]
    assert dict(run(sweep)) == {0: "finished", 1: "finished"}


def test_a_wish_to_stop_ends_the_driver(folder: Path) -> None:
    Path("codes").write_text(json.dumps({"0": ["wait"]}))
    sweep = made_sweep(folder / "runs", launch={"slots": 1})
    driver = drive(sweep)
    wait_for(begun)
    claim = wait_for(lambda: state.last_claim(sweep, sweep.points[0].key))
    state.ask_to_stop(sweep)
    state.signal_here(claim)
    assert driver.wait() == 0
    assert begun() == [0]


def test_a_point_that_another_process_works_on_is_left_to_it(folder: Path) -> None:
    Path("codes").write_text(json.dumps({"0": ["wait", 0]}))
    sweep = made_sweep(folder / "runs", launch={"slots": 2})
    other = subprocess.Popen(stand_in(sweep, sweep.points[0]))
    wait_for(begun)
    told: list[tuple[str, str]] = []

    def hear(key: str, word: str, where: str) -> None:
        told.append((key, word))
        if (key, word) == (sweep.points[1].key, "finished"):
            other.terminate()  # then what it left is gone on with

    LocalLauncher.of(sweep).run(load(sweep.folder), sweep.points, hear)
    other.wait()
    assert begun() == [0, 1, 0]
    assert told[0] == (sweep.points[0].key, "running")
    assert dict(told) == {one.key: "finished" for one in sweep.points}
