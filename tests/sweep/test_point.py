"""If this fails, a point is trained again that is finished, not gone on with, retried in vain, or told to be what it is
not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rung.runs.process import start_time
from rung.runs.query import Run
from rung.sweep import point as point_module
from rung.sweep import state
from rung.sweep.point import FAILED, FINISHED, STOPPED, PointResult, Step, command_of, log_of, next_step, run_point
from rung.sweep.space import Sweep
from tests.sweep import made
from tests.sweep.made import made_run, made_sweep, wait_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where stand-ins take the place of trainings."""

    def command(sweep: Sweep, step: Step) -> list[str]:
        return [sys.executable, "-m", "tests.sweep.made", *step.words]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(point_module, "_command", command)
    return tmp_path


def carried_out(sweep: Sweep, *ends: str) -> PointResult:
    Path("ends").write_text(" ".join(ends))
    return run_point(sweep.folder, "0")


def runs(sweep: Sweep) -> list[Run]:
    return state.runs_of(sweep).get(sweep.points[0].key, [])


def segments(sweep: Sweep) -> list[int]:
    return [len(run.document["segments"]) for run in runs(sweep)]


def test_a_point_is_trained_evaluated_and_then_left_alone(folder: Path) -> None:
    sweep = made_sweep(folder / "runs", eval_split="test")
    assert carried_out(sweep, "finished").code == FINISHED
    assert (runs(sweep)[0].path / "evals" / "test-5.json").exists()
    log = log_of(sweep, sweep.points[0].key).read_text()
    assert log.count("\n--- ") + log.startswith("--- ") == 2
    assert carried_out(sweep, "crashed").code == FINISHED
    assert segments(sweep) == [1]
    assert log_of(sweep, sweep.points[0].key).read_text() == log
    assert runs(sweep)[0].document["sweep"]["point"] == sweep.points[0].key


@pytest.mark.parametrize(
    ("ends", "outcome", "expected"),
    [
        (["crashed+save", "finished"], "finished", [2]),  # goes on from its checkpoint
        (["crashed", "finished"], "finished", [1, 1]),  # nothing to go on from
        (["vanishes+save", "finished"], "finished", [2]),
        (["crashed+save", "crashed", "finished"], "failed", [2]),  # one retry is one retry
        (["diverged+save", "finished"], "failed", [1]),  # would diverge again
        (["crashed+save", "diverged", "finished"], "failed", [2]),
        (["refused", "finished"], "refused", []),  # would be refused again
        (["stopped+save", "finished"], "stopped", [1]),  # somebody stopped it; the launcher starts it again
    ],
)
def test_a_crash_is_retried_and_nothing_else_is(
    folder: Path, ends: Sequence[str], outcome: str, expected: list[int]
) -> None:
    sweep = made_sweep(folder / "runs", retries=1)
    ended = carried_out(sweep, *ends)
    assert ended.outcome == outcome
    assert ended.code == {"finished": FINISHED, "stopped": STOPPED}.get(outcome, FAILED)
    assert segments(sweep) == expected
    claim = state.last_claim(sweep, sweep.points[0].key)
    assert claim is not None
    assert (claim.outcome, claim.text) == (ended.outcome, ended.text)


def test_what_is_told_of_a_failure_says_what_happened(folder: Path) -> None:
    sweep = made_sweep(folder / "runs", seeds=(0,), retries=2)
    told = carried_out(sweep, "refused")
    assert told.text == "no data at data/toy; prepare it: `rung data toy`"
    told = carried_out(sweep, "crashed")  # what was refused is tried again: it may have been mended
    assert "crashed 3 times" in told.text
    assert f"rung sweep log made {sweep.points[0].key}" in told.text


def test_what_failed_for_good_is_left_until_somebody_asks_for_another_try(folder: Path) -> None:
    sweep = made_sweep(folder / "runs", retries=0)
    first = carried_out(sweep, "diverged+save")
    again = carried_out(sweep, "finished")
    assert (again.code, again.text) == (FAILED, first.text)
    assert segments(sweep) == [1]
    state.try_again(sweep, sweep.points[0].key)
    assert carried_out(sweep, "finished").code == FINISHED
    assert segments(sweep) == [1, 1]  # a new run: from its checkpoint it would diverge again


def test_an_eval_that_fails_is_told_and_the_training_is_kept(folder: Path) -> None:
    sweep = made_sweep(folder / "runs", eval_split="test", retries=0)
    made_run(sweep, sweep.points[0])
    ended = carried_out(sweep, "crashed")
    assert (ended.code, ended.outcome) == (FAILED, "failed")
    assert state.states(sweep)[sweep.points[0].key].is_final
    state.try_again(sweep, sweep.points[0].key)
    assert carried_out(sweep, "finished").code == FINISHED
    assert segments(sweep) == [1]


def test_a_training_that_leaves_nothing_does_not_go_round_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point_module, "_command", lambda sweep, step: [sys.executable, "-c", ""])
    ended = carried_out(made_sweep(folder / "runs"), "finished")
    assert ended.outcome == "failed"
    assert "left nothing" in ended.text


def test_the_words_are_what_a_person_would_type(tmp_path: Path) -> None:
    sweep = made_sweep(tmp_path / "runs", why="a 'b'", eval_split="test", ranks=2)
    point = sweep.points[1]
    where = ("--runs", str(sweep.runs))
    of = ("--experiment", "made", "--sweep", f"made:{point.key}")
    words = ("train", "toy", "model.width=8", "seed=1", "--why", "a 'b'", *of, *where)
    assert next_step(sweep, point, None) == Step("train", words)
    run = made_run(sweep, point, "stopped", saved=5)
    assert next_step(sweep, point, run) == Step("resume", ("resume", str(run.path), *where))
    command = point_module._command(sweep, Step("resume", ("resume", "x")))
    assert command[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rung", "resume", "x",
    ]  # fmt: skip
    finished = made_run(sweep, point)
    step = next_step(sweep, point, finished)
    assert step == Step("eval", ("eval", str(finished.path), "--split", "test", *where))
    assert point_module._command(sweep, step)[1:4] == ["-m", "rung", "eval"]
    assert command_of(sweep, point)[1:] == ["-m", "rung", "sweep", "point", str(sweep.folder), point.key]


def start(sweep: Sweep, *ends: str) -> subprocess.Popen[bytes]:
    Path("ends").write_text(" ".join(ends))
    return subprocess.Popen(made.command_of(sweep, sweep.points[0]))


def is_waiting(sweep: Sweep, times: int = 1) -> bool:
    log = log_of(sweep, sweep.points[0].key)
    return log.exists() and log.read_text().count("waiting\n") == times


def test_told_to_stop_the_training_saves_and_the_same_command_goes_on(folder: Path) -> None:
    sweep = made_sweep(folder / "runs")
    process = start(sweep, "waits", "waits", "finished")
    wait_for(lambda: is_waiting(sweep))
    process.terminate()
    assert process.wait() == STOPPED
    assert runs(sweep)[0].status == "stopped"
    process = start(sweep, "waits", "finished")
    wait_for(lambda: is_waiting(sweep, 2))
    state.ask_to_stop(sweep)  # the other way, which also reaches other machines
    assert process.wait() == STOPPED
    assert run_point(sweep.folder, "0").code == STOPPED  # and nothing new is started
    state.allow_again(sweep)
    assert carried_out(sweep, "finished").code == FINISHED
    assert segments(sweep) == [3]


def test_a_training_dies_with_its_point_and_another_process_goes_on(folder: Path) -> None:
    sweep = made_sweep(folder / "runs")
    process = start(sweep, "waits", "finished")
    wait_for(lambda: is_waiting(sweep))
    training = runs(sweep)[0].document["process"]["pid"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert carried_out(sweep, "finished").code == FINISHED  # waits until what was left has saved and ended
    assert start_time(training) is None
    assert segments(sweep) == [2]
    assert runs(sweep)[0].document["status"] == "finished"


def test_a_second_process_waits_for_the_first(folder: Path) -> None:
    sweep = made_sweep(folder / "runs")
    first = start(sweep, "waits", "finished")
    wait_for(lambda: is_waiting(sweep))
    second = start(sweep, "finished")
    first.terminate()
    assert first.wait() == STOPPED
    assert second.wait() == FINISHED
    assert segments(sweep) == [2]


def test_one_that_lost_its_claim_lets_go(folder: Path) -> None:
    """As after a sleep of the machine so long that another one took the point over."""
    sweep = made_sweep(folder / "runs")
    process = start(sweep, "waits", "finished")
    wait_for(lambda: is_waiting(sweep))
    claim = state.last_claim(sweep, sweep.points[0].key)
    assert claim is not None
    claim.path.with_name(f"{sweep.points[0].key}.2.json").write_bytes(claim.path.read_bytes())
    assert process.wait() == STOPPED
    assert runs(sweep)[0].status == "vanished"  # killed at once: what it would save is another's to write


# As torchrun does: its rank has a session of its own, and would not end with it.
RANKS = """
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
open("beside", "w").write(str(rank.pid))
os.rename("beside", "rank")
rank.wait()
"""


def test_one_that_lost_its_claim_leaves_no_rank_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = made_sweep(folder / "runs")
    claim = state.take(sweep, sweep.points[0].key)
    assert claim is not None
    monkeypatch.setattr(point_module, "BEAT_S", 0.0)
    monkeypatch.setattr(state.Claim, "beat", lambda self: not Path("rank").exists())
    command = [sys.executable, "-c", RANKS]
    assert point_module.follow(command, folder / "log", point_module.StopRequest(sweep), claim) == point_module.LOST
    wait_for(lambda: start_time(int(Path("rank").read_text())) is None)


def test_a_disk_that_says_no_is_one_sentence(folder: Path) -> None:
    sweep = made_sweep(folder / "runs")
    (sweep.folder / "logs").write_text("in the way")
    ended = carried_out(sweep, "finished")
    assert ended.outcome == "refused"
    assert "cannot write" in ended.text


def test_signals_are_as_they_were_afterwards(folder: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    carried_out(made_sweep(folder / "runs"), "finished")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before
