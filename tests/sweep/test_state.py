"""If this fails, two processes train one point, a dead one holds it for ever, or a table says what is not so."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rung.errors import RunError
from rung.runs.process import SILENT_S, this_process
from rung.runs.record import amend
from rung.sweep import state
from rung.sweep.plan import keep
from rung.sweep.space import Sweep
from tests.sweep.made import made_run, made_sweep, save

ROOT = Path(__file__).resolve().parents[2]
# Takes the point when told to, says whether it has it, and holds it until its input ends.
CLAIMER = """
import sys
from pathlib import Path
from rung.sweep import state
from rung.sweep.plan import load
sweep = load(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
claim = state.take(sweep, sweep.points[0].key)
print("taken" if claim else "held", flush=True)
sys.stdin.read()
"""


def claimer(sweep: Sweep) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CLAIMER, str(sweep.folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)  # type: ignore[call-overload]
    assert child.stdout.readline() == "ready\n"
    return child  # type: ignore[no-any-return]


def answers(children: list[subprocess.Popen[str]]) -> list[str]:
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    return [child.stdout.readline().strip() for child in children if child.stdout is not None]


def end(children: list[subprocess.Popen[str]]) -> None:
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return made_sweep(tmp_path / "runs")


def test_of_many_processes_one_gets_the_point_also_when_its_holder_was_killed(sweep: Sweep) -> None:
    children = [claimer(sweep) for _ in range(5)]
    try:
        assert sorted(answers(children[:1])) == ["taken"]
        children[0].kill()
        children[0].communicate()
        told = answers(children[1:])
        assert sorted(told) == ["held", "held", "held", "taken"]
        last = state.last_claim(sweep, sweep.points[0].key)
        assert last is not None
        assert last.document["process"]["pid"] == children[1 + told.index("taken")].pid
        assert last.number == 2
    finally:
        end(children)


def test_a_point_is_held_until_it_is_released(sweep: Sweep) -> None:
    key = sweep.points[0].key
    first = state.take(sweep, key)
    assert first is not None
    assert state.take(sweep, key) is None
    assert first.beat()
    first.release("stopped", "as asked", "made/1")
    second = state.take(sweep, key)
    assert second is not None
    assert second.after == {"outcome": "stopped", "text": "as asked"}
    assert not first.beat()  # somebody who wakes up late learns that the point is no longer theirs
    assert state.take(sweep, sweep.points[1].key) is not None  # another point is another claim


def test_a_process_that_cannot_be_seen_holds_a_point_as_long_as_it_gives_signs_of_life(sweep: Sweep) -> None:
    key = sweep.points[0].key
    claim = state.take(sweep, key)
    assert claim is not None
    elsewhere = {**claim.document, "process": {**this_process(), "host": "another"}}
    claim.path.write_text(json.dumps(elsewhere))
    assert state.take(sweep, key) is None
    silent = claim.path.stat().st_mtime - SILENT_S - 1
    os.utime(claim.path, (silent, silent))
    assert state.states(sweep)[key].word == "lost"
    assert state.take(sweep, key) is not None


def test_a_machine_whose_clock_is_ahead_takes_nothing_from_those_who_are_there(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = sweep.points[0].key
    claim = state.take(sweep, key)
    assert claim is not None
    claim.path.write_text(json.dumps({**claim.document, "process": {**this_process(), "host": "another"}}))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 2 * SILENT_S)
    assert state.states(sweep)[key].word == "lost"  # by this clock
    assert state.take(sweep, key) is None


def test_a_damaged_claim_counts_until_it_has_gone_silent(sweep: Sweep) -> None:
    """As a power cut leaves one: nobody can say whose it was, and no person has to clear it away."""
    key = sweep.points[0].key
    claim = state.take(sweep, key)
    assert claim is not None
    for text in ("", "{", "[]"):
        claim.path.write_text(text)
        assert state.take(sweep, key) is None
        assert state.states(sweep)[key].word == "running"
    silent = claim.path.stat().st_mtime - SILENT_S - 1
    os.utime(claim.path, (silent, silent))
    again = state.take(sweep, key)
    assert again is not None
    assert again.number == 2


def test_those_who_work_on_a_sweep_are_found_also_on_points_that_the_file_left_out(sweep: Sweep) -> None:
    first, second = (state.take(sweep, point.key) for point in sweep.points)
    assert first is not None
    assert second is not None
    assert {claim.path for claim in state.held_claims(dataclasses.replace(sweep, points=()))} == {
        first.path,
        second.path,
    }
    first.release("finished")
    assert [claim.path for claim in state.held_claims(sweep)] == [second.path]


def test_a_folder_that_cannot_be_written_is_told(sweep: Sweep) -> None:
    (sweep.folder / "claims").write_text("in the way")
    with pytest.raises(RunError, match="claims"):
        state.take(sweep, sweep.points[0].key)


def test_states_follow_claims_and_runs(sweep: Sweep) -> None:
    point = sweep.points[0]

    def word() -> str:
        return state.states(sweep)[point.key].word

    assert word() == "waiting"
    claim = state.take(sweep, point.key)
    assert claim is not None
    assert word() == "running"
    run = made_run(sweep, point, "stopped", saved=5)
    claim.release("stopped")
    assert word() == "stopped"
    assert "made/1" in state.states(sweep)[point.key].text
    claim = state.take(sweep, point.key)
    assert claim is not None
    claim.release("refused", "no data")
    now = state.states(sweep)[point.key]
    assert (now.word, now.text, now.is_final) == ("failed", "no data", False)
    amend(run.path, status="finished")
    assert word() == "finished"
    assert state.states(sweep)[sweep.points[1].key].word == "waiting"


def test_a_point_that_failed_is_left_until_somebody_asks_for_another_try(sweep: Sweep) -> None:
    point = sweep.points[0]
    made_run(sweep, point, "diverged", saved=5)
    now = state.states(sweep)[point.key]
    assert (now.word, now.is_final) == ("failed", True)
    state.try_again(sweep, point.key)
    assert state.states(sweep)[point.key].word == "waiting"
    lost = state.take(sweep, point.key)  # and a process that dies before it began leaves it to be tried again
    assert lost is not None
    lost.path.write_text(json.dumps({**lost.document, "process": {**this_process(), "started": 1}}))
    assert state.states(sweep)[point.key].word == "lost"
    made_run(sweep, point, "diverged")
    claim = state.take(sweep, point.key)
    assert claim is not None
    claim.release("stopped")
    assert state.states(sweep)[point.key].word == "failed"


def test_a_run_that_is_trained_and_not_evaluated_is_not_finished(tmp_path: Path) -> None:
    sweep = made_sweep(tmp_path / "runs", eval_split="test")
    run = made_run(sweep, sweep.points[0])
    assert state.states(sweep)[sweep.points[0].key].word == "stopped"
    (run.path / "evals").mkdir()
    (run.path / "evals" / "validation-5.json").write_text("{}")
    assert state.states(sweep)[sweep.points[0].key].word == "stopped"
    (run.path / "evals" / "test-pythia-v.json").write_text("{}")  # a model of others, on the same rows
    assert state.states(sweep)[sweep.points[0].key].word == "stopped"
    (run.path / "evals" / "test-5.json").write_text("{}")
    assert state.states(sweep)[sweep.points[0].key].word == "finished"
    for step in (5, 10):
        save(run.path, step)
    assert state.states(sweep)[sweep.points[0].key].word == "stopped"  # 5 was a look in the middle of the training
    (run.path / "checkpoints" / "best").write_text("5\n")
    assert state.states(sweep)[sweep.points[0].key].word == "finished"


def test_the_run_that_counts_is_the_one_that_came_furthest(sweep: Sweep) -> None:
    point = sweep.points[0]
    assert state.best_of([]) is None
    made_run(sweep, point, "crashed")
    saved = made_run(sweep, point, "crashed", saved=5)
    made_run(sweep, point, "diverged", saved=5)

    def best() -> str:
        found = state.best_of(state.runs_of(sweep)[point.key])
        assert found is not None
        return found.id

    assert best() == saved.id
    finished = made_run(sweep, point, "finished")
    made_run(sweep, point, "crashed", saved=5)
    assert best() == finished.id


def test_runs_that_were_moved_are_found(sweep: Sweep) -> None:
    run = made_run(sweep, sweep.points[0])
    (sweep.runs / "other").mkdir()
    run.path.rename(sweep.runs / "other" / "1")
    amend(sweep.runs / "other" / "1", id="other/1", experiment="other")
    assert state.states(sweep)[sweep.points[0].key].word == "finished"
    save(sweep.runs / "other" / "1", 3)


def test_a_wish_to_stop_reaches_processes_here_and_is_taken_back(sweep: Sweep) -> None:
    child = claimer(sweep)
    try:
        assert answers([child]) == ["taken"]
        claim = state.last_claim(sweep, sweep.points[0].key)
        assert claim is not None
        state.ask_to_stop(sweep)
        assert state.is_asked_to_stop(sweep)
        assert state.signal_here(claim)
        assert child.wait() == -signal.SIGTERM
        assert not state.signal_here(claim)
        state.allow_again(sweep)
        state.allow_again(sweep)
        assert not state.is_asked_to_stop(sweep)
    finally:
        end([child])


def test_a_run_that_was_made_elsewhere_serves_a_point(tmp_path: Path) -> None:
    """It is kept with the plan, counts as the point's run, and is forgotten once it is removed."""
    sweep = made_sweep(tmp_path / "runs", seeds=(0, 1))
    other = dataclasses.replace(sweep, name="other", folder=sweep.folder.parent / "other")
    run = made_run(keep(other), sweep.points[0])
    serves = str(run.path.relative_to(sweep.runs))
    points = (dataclasses.replace(sweep.points[0], run=serves), sweep.points[1])
    sweep = keep(dataclasses.replace(sweep, points=points))
    assert [one.run for one in sweep.points] == [serves, None]
    assert [one.word for one in state.states(sweep).values()] == ["finished", "waiting"]
    shutil.rmtree(run.path)
    assert [one.word for one in state.states(sweep).values()] == ["waiting", "waiting"]
