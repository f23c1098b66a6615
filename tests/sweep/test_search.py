"""If this fails, a search repeats itself after a kill, forgets what diverged, or suggests what is not allowed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.errors import RunError
from rung.runs.record import Record
from rung.sweep import plan, state
from rung.sweep.launch import ReportState
from rung.sweep.search import JOURNAL, Range, Search, best_value, drive, outcome, read_settings
from rung.sweep.space import Point, Sweep
from tests.errors import raises_code

pytest.importorskip("optuna", reason="pip install 'rung[search]'")
ROOT = Path(__file__).resolve().parents[2]
SPACE: dict[str, Any] = {
    "lr.learning_rate": {"low": "1e-4", "high": 1e-1, "log": True},
    "model.n_layer": {"low": 2, "high": 6, "step": 2},
    "lr.schedule": ["cosine", "wsd"],
}


def make(tmp_path: Path, name: str = "find", **given: Any) -> Sweep:
    asked = {"trials": 8, "metric": "val/loss", "space": SPACE, **given}
    root = tmp_path / "runs"
    return plan.keep(Sweep(name, root / ".sweeps" / name, root, "case", name, (), metric="val/loss", search=asked))


def loss_of(varies: Mapping[str, Any]) -> float:
    """Lowest at a rate of 1e-2, four layers, and cosine."""
    rate = math.log10(varies["lr.learning_rate"] / 1e-2) ** 2
    return 1 + rate + abs(varies["model.n_layer"] - 4) / 10 + (varies["lr.schedule"] == "wsd") * 0.2


def told(key: str, word: str, where: str) -> None:
    pass


class Pretend:
    """A launcher that leaves run folders in place of training: `ends` says how each comes out."""

    def __init__(self, ends: Sequence[str] = ()) -> None:
        self.ends, self.seen = list(ends), list[Point]()

    def run(self, sweep: Sweep, points: Sequence[Point], told: ReportState) -> None:
        for point in points:
            assert sweep.point(point.key) == point  # it is in the plan: another process could find it there
            self.seen.append(point)
            end = self.ends.pop(0) if self.ends else "finished"
            claim = state.take(sweep, point.key)
            assert claim is not None
            if end in ("failed", "stopped"):
                claim.release(end, "no data" if end == "failed" else "")
                continue
            record = Record.create(
                sweep.runs, sweep.experiment, recipe="case", preset=None, command=[], seed=0, config={}, sources={},
                derived={}, data={}, sweep={"name": sweep.name, "point": point.key, "varies": dict(point.varies)},
            )  # fmt: skip
            for step, more in ((10, 0.5), (20, 0.0), (30, 0.1)):
                record.event("eval", step=step, results={"val": {"loss": loss_of(point.varies) + more}})
            record.finish(end, last_step=30)
            claim.release("finished" if end == "finished" else "failed")


def num_trials(search: Search) -> dict[str, int]:
    names = {"COMPLETE": "finished", "PRUNED": "diverged", "FAIL": "failed", "RUNNING": "running"}
    return {name: len(search._trials(state)) for state, name in names.items()}


def varies_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [dict(point.varies) for point in points]


def test_a_search_uses_up_its_trials_and_finds_the_valley(tmp_path: Path) -> None:
    search, launcher = Search(make(tmp_path, trials=25)), Pretend()
    assert drive(search, launcher, told)
    assert num_trials(search) == {"finished": 25, "diverged": 0, "failed": 0, "running": 0}
    found = search.best()
    assert found is not None
    point, value = found
    assert value == min(loss_of(one.varies) for one in launcher.seen)
    assert value == pytest.approx(loss_of(point.varies))
    assert value < 1.15
    assert {type(one.varies["model.n_layer"]) for one in launcher.seen} == {int}
    assert {one.varies["model.n_layer"] for one in launcher.seen} <= {2, 4, 6}
    assert all(1e-4 <= one.varies["lr.learning_rate"] <= 1e-1 for one in launcher.seen)
    assert search.ask() == []


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_same_seed_gives_the_same_suggestions(tmp_path: Path, sampler: str) -> None:
    launchers = [Pretend() for _ in range(3)]
    for number, (launcher, seed) in enumerate(zip(launchers, (0, 0, 1), strict=True)):
        drive(Search(make(tmp_path, f"s{number}", trials=14, sampler=sampler, seed=seed)), launcher, told)
    assert varies_of(launchers[0].seen) == varies_of(launchers[1].seen)
    assert varies_of(launchers[0].seen) != varies_of(launchers[2].seen)


def test_a_search_that_is_opened_anew_for_each_trial_suggests_the_same(tmp_path: Path) -> None:
    """What was drawn depends on what lies in the folder, not on the process that asks."""
    whole, parts = Pretend(), Pretend()
    drive(Search(make(tmp_path, "whole", trials=14)), whole, told)
    sweep = make(tmp_path, "parts", trials=14)
    for _ in range(14):
        search = Search(plan.load(sweep.folder))
        points = search.ask()
        parts.run(search.sweep, points, told)
        search.tell(points[0], outcome(search, points[0]).value)
    assert varies_of(whole.seen) == varies_of(parts.seen)


def test_what_was_running_is_asked_again(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    lost = Search(sweep).ask(3)
    search = Search(plan.load(sweep.folder))
    assert varies_of(search.ask(2)) == varies_of(lost[:2])
    again = search.ask(2)
    assert again[0] == lost[2]
    assert again[1] not in lost
    assert {point.key for point in lost} <= {point.key for point in plan.load(sweep.folder).points}


def test_a_stopped_search_goes_on_with_the_same_point(tmp_path: Path) -> None:
    sweep, first = make(tmp_path, trials=4), Pretend(["finished", "stopped"])
    assert not drive(Search(sweep), first, told)
    second = Pretend()
    assert drive(Search(plan.load(sweep.folder)), second, told)
    assert second.seen[0] == first.seen[1]
    assert len(first.seen) + len(second.seen) == 5


def test_a_run_that_diverged_is_worse_than_all_and_one_that_failed_says_nothing(tmp_path: Path) -> None:
    search = Search(make(tmp_path, trials=3))
    assert drive(search, Pretend(["diverged", "failed", "finished"]), told)
    assert num_trials(search) == {"finished": 1, "diverged": 1, "failed": 1, "running": 0}
    assert search.best() is not None


def test_values_that_are_not_finite_count_as_diverged(tmp_path: Path) -> None:
    search = Search(make(tmp_path, trials=2))
    for value in (math.nan, math.inf):
        search.tell(search.ask()[0], value)
    assert num_trials(search)["diverged"] == 2
    assert search.best() is None


def test_diverged_places_are_kept_away_from(tmp_path: Path) -> None:
    """Half of the space diverges: later suggestions lie there less often than chance would have it."""
    space = {"lr.learning_rate": {"low": 0.0, "high": 1.0}}
    search, seen = Search(make(tmp_path, trials=60, space=space)), list[float]()
    while points := search.ask():
        value = points[0].varies["lr.learning_rate"]
        seen.append(value)
        search.tell(points[0], None if value > 0.5 else value, "diverged")
    assert sum(value > 0.5 for value in seen[20:]) < 8


def test_when_all_fail_the_search_stops_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"3 points of find .* no data"):
        drive(Search(make(tmp_path)), Pretend(["failed"] * 8), told)


def test_a_grid_is_walked_in_order_and_once(tmp_path: Path) -> None:
    space = {"model.n_layer": {"low": 2, "high": 6, "step": 2}, "lr.schedule": ["cosine", [1, "wsd"]]}
    search = Search(make(tmp_path, trials=100, sampler="grid", space=space))
    points = search.ask(2)
    search = Search(plan.load(search.sweep.folder))  # as after a kill
    points = [*search.ask(10)]
    assert [tuple(point.varies.values()) for point in points] == [
        (2, "cosine"), (2, [1, "wsd"]), (4, "cosine"), (4, [1, "wsd"]), (6, "cosine"), (6, [1, "wsd"]),
    ]  # fmt: skip
    assert search.ask() == []


def test_a_grid_of_any_size_is_begun_at_once() -> None:
    given = {"space": {name: {"low": 0, "high": 10**9} for name in "abc"}, "sampler": "grid", "metric": "val/loss"}
    found = read_settings(given)
    assert found.num_trials == found.trials < (10**9 + 1) ** 3
    assert found.combination(1) == {"a": 0, "b": 0, "c": 1}
    assert found.combination(10**9 + 1) == {"a": 0, "b": 1, "c": 0}


def test_a_point_that_comes_up_again_is_not_trained_again(tmp_path: Path) -> None:
    search, seen = Search(make(tmp_path, trials=20, space={"model.n_layer": [2, 4]})), list[int]()
    while points := search.ask(3):
        for point in points:
            seen.append(point.varies["model.n_layer"])
            search.tell(point, float(seen[-1]))
    assert sorted(seen) == [2, 4]
    assert num_trials(search)["finished"] == 20


def test_higher_may_be_better(tmp_path: Path) -> None:
    search = Search(make(tmp_path, direction="higher", trials=5))
    values: list[float] = []
    while points := search.ask():
        values.append(float(len(values)))
        search.tell(points[0], values[-1])
    found = search.best()
    assert found is not None
    assert found[1] == 4.0


def test_a_line_that_was_cut_by_a_kill_is_taken_off(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    first = Search(sweep).ask()
    journal = sweep.folder / JOURNAL
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "study')
    search = Search(plan.load(sweep.folder))
    assert search.ask() == first
    search.tell(first[0], 2.0)
    assert Search(plan.load(sweep.folder)).best() == (first[0], 2.0)


def test_a_process_that_was_killed_holds_nobody_up(tmp_path: Path) -> None:
    """Killed with the journal in its hands; Optuna's own lock would stay, and be waited for."""
    sweep = make(tmp_path)
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom rung.sweep import plan\nfrom rung.sweep.search import Search\n"
        "search = Search(plan.load(Path(sys.argv[1])))\n"
        "search._study._storage._backend._lock.acquire()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code, str(sweep.folder)], env=env, check=False).returncode == -9
    assert [path.name for path in sweep.folder.glob(f"{JOURNAL}*")] == [JOURNAL]
    assert len(Search(plan.load(sweep.folder)).ask()) == 1


def test_a_kill_at_any_moment_loses_no_trial(tmp_path: Path) -> None:
    """A driver is killed while its trials go on; what it had asked is asked again, and what it had told is kept."""
    sweep = make(tmp_path, trials=30)
    code = (
        "import sys\nfrom pathlib import Path\nfrom rung.sweep import plan\nfrom rung.sweep.search import Search\n"
        "search = Search(plan.load(Path(sys.argv[1])))\n"
        "while points := search.ask():\n"
        "    print(points[0].key, flush=True)\n"
        "    search.tell(points[0], 1.0 + len(search._trials()))\n"
    )
    command = [sys.executable, "-c", code, str(sweep.folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    asked: list[str] = []
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            asked += [process.stdout.readline().strip() for _ in range(4)]
            process.send_signal(signal.SIGKILL)
            asked += process.stdout.read().split()
    search = Search(plan.load(sweep.folder))
    assert set(asked) <= {point.key for point in plan.load(sweep.folder).points}
    assert sum(num_trials(search).values()) == len(dict.fromkeys(asked)) or num_trials(search)["running"] <= 1
    while points := search.ask():
        search.tell(points[0], 2.0)
    assert num_trials(search) == {"finished": 30, "diverged": 0, "failed": 0, "running": 0}


def test_another_space_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    Search(make(tmp_path)).ask()
    grown = make(tmp_path, trials=50)
    assert len(Search(grown).ask()) == 1  # more trials are welcome
    with raises_code("sweep-mismatch"):
        Search(make(tmp_path, space={"model.n_layer": [1, 2]}))


def test_without_optuna_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with raises_code("not-installed"):
        Search(make(tmp_path))


def test_it_says_nothing_on_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drive(Search(make(tmp_path, trials=12)), Pretend(["diverged", "failed"]), told)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"trails": 3}, "trials"),
        ({"metric": "loss"}, "search: metric"),
        ({"trials": 0}, "trials=0 "),
        ({"trials": True}, "trials=True "),
        ({"seed": -1}, "seed=-1 "),
        ({"direction": "down"}, "direction=down "),
        ({"sampler": "best"}, "sampler=best "),
        ({"space": {}}, "search: space"),
        ({"space": {"a": []}}, "search: a "),
        ({"space": {"a": 3}}, "search: a "),
        ({"space": {"a": {"low": 2, "high": 1}}}, "search: a "),
        ({"space": {"a": {"low": 2, "hgih": 3}}}, "high"),
        ({"space": {"a": {"low": 0, "high": 1, "log": True}}}, "search: a: log"),
        ({"space": {"a": {"low": "x", "high": 1}}}, "low=x "),
        ({"space": {"a": {"low": 0, "high": 1, "step": 0}}}, "step=0 "),
        ({"space": {"a": {"low": 0.0, "high": 1}}, "sampler": "grid"}, "search: a "),
    ],
)
def test_mistakes_are_reported(given: dict[str, Any], value: str) -> None:
    with raises_code("bad-sweep") as caught:
        read_settings({"metric": "val/loss", "space": SPACE, **given})
    assert value in str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    with raises_code("bad-sweep") as caught:
        read_settings({"metric": 3, "trials": "many", "space": {"a": [], "b": 1}})
    assert len(str(caught.value).splitlines()) == 4


@given(st.integers(-50, 50), st.integers(1, 50), st.integers(1, 7))
@settings(deadline=None)
def test_steps_stay_inside(low: int, span: int, step: int) -> None:
    found = Range(low, low + span, step, False)
    space = {"a": {"low": low, "high": low + span, "step": step}}
    grid = read_settings({"metric": "val/loss", "sampler": "grid", "space": space})
    values = [grid.combination(number)["a"] for number in range(found.num_values)]
    assert values[0] == low
    assert low + span - step < values[-1] <= low + span
    assert all(isinstance(value, int) for value in values)


def test_the_value_of_a_run_is_its_best_finite_eval(tmp_path: Path) -> None:
    search = Search(make(tmp_path, trials=1))
    drive(search, launcher := Pretend(), told)
    run = state.runs_of(search.sweep)[launcher.seen[0].key][0]
    assert best_value(run, "val/loss", True) == pytest.approx(loss_of(launcher.seen[0].varies))
    assert best_value(run, "eval/val/loss", False) == pytest.approx(loss_of(launcher.seen[0].varies) + 0.5)
    with raises_code("no-metric"):
        best_value(run, "val/los", True)
