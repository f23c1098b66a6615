"""If this fails, `rung sweep` trains what is trained already, starts with a mistake, loses a point when it is killed,
or hides that one failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rung.cli import cli
from rung.errors import UserError
from rung.runs.process import start_time
from rung.runs.query import list_runs
from rung.sweep import launch, state
from rung.sweep.launch import local
from rung.sweep.plan import find_sweep
from rung.sweep.space import Sweep
from rung.sweep.state import runs_of, states
from tests.sweep import made
from tests.sweep.made import TINY, made_run, made_sweep, sweep_file, wait_for

ROOT = Path(__file__).resolve().parents[2]
GRID = {
    "recipe": "tests.cases.tiny:Tiny",
    "set": {name: value for name, value in TINY.items() if name != "lr.learning_rate"},
    "grid": {"lr.learning_rate": [3e-2], "seed": [0, 1]},
}
# A user's own recipe. In its `gate` stands how many losses a process may compute.
MINE = """
import time
from pathlib import Path
from rung.recipe import Objective
from tests.cases import tiny

class Mine(tiny.Tiny):
    def objectives(self, model):
        (inner,) = super().objectives(model)
        num_calls = 0

        def loss(batch, draw):
            nonlocal num_calls
            num_calls += model.training
            while num_calls > float(Path("gate").read_text() or 0):
                time.sleep(0.01)
            return inner.loss(batch, draw)

        return [Objective(inner.name, inner.groups, loss)]
"""


def settle(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Where a user stands who has this repository on the path."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RUNG_RUNS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def started(folder: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rung", *map(str, words)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, text=True, **pipes)


def ask(*words: object) -> tuple[int, str]:
    """rung in this process; what is trained has processes of its own all the same."""
    done = CliRunner().invoke(cli, [*map(str, words)])
    if isinstance(done.exception, UserError):
        return 2, f"{done.exception} [{done.exception.code}]"
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a grid was trained by one command."""
    folder = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        settle(patch, folder)
        code, said = ask("sweep", sweep_file(folder, GRID))
    assert code == 0, said
    (folder / "said").write_text(said)
    return folder


@pytest.fixture
def there(swept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    settle(monkeypatch, swept)
    return swept


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    settle(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "gate").write_text("inf")
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_grid_is_trained_by_one_command(there: Path) -> None:
    runs = list_runs(there / "runs")
    assert [run.status for run in runs] == ["finished"] * 2
    varied = {(run.config()["lr"]["learning_rate"], run.config()["seed"]) for run in runs}
    assert varied == {(0.03, 0), (0.03, 1)}
    sweep = find_sweep("grid", there / "runs")
    for run in runs:
        of = run.document["sweep"]
        assert of["name"] == "grid"
        assert of["varies"] == {"lr.learning_rate": run.config()["lr"]["learning_rate"], "seed": run.config()["seed"]}
        assert sweep.point(of["point"]).varies == of["varies"]
        assert run.document["experiment"] == "grid"
    shown = (there / "said").read_text()
    assert "2/2" in shown
    assert " ± " in shown  # over seeds


def test_the_same_command_again_trains_nothing(there: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (there / "runs" / "grid").rglob("*") if path.is_file()}
    assert ask("sweep", "grid.yaml")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in (there / "runs" / "grid").rglob("*") if path.is_file()} == before


def test_a_dry_run_shows_what_is_new_and_writes_nothing(there: Path) -> None:
    more = sweep_file(there, {**GRID, "grid": {"seed": [1, 2], "lr.learning_rate": [3e-2]}}, "more.yaml")
    before = sorted((there / "runs").rglob("*"))
    assert ask("sweep", more, "--dry-run", "--name", "grid")[0] == 0
    said = ask("sweep", more, "--dry-run", "--name", "grid", "--json")[1]
    assert [(one["varies"]["seed"], one["state"]) for one in json.loads(said[said.index("{") :])["points"]] == [
        (1, "finished"),
        (2, "waiting"),
    ]
    assert sorted((there / "runs").rglob("*")) == before


def test_a_sweep_is_listed_shown_and_its_logs_are_read(there: Path) -> None:
    assert json.loads(ask("sweep", "ls", "--json")[1])[0]["states"] == {"finished": 2}
    assert "grid" in ask("sweep", "ls")[1]
    shown = json.loads(ask("sweep", "show", "grid", "--json")[1])
    losses = [one["best_loss"] for one in shown["points"]]
    assert all(isinstance(loss, float) for loss in losses)
    assert [group["n"] for group in shown["over_seeds"]] == [2]
    assert shown["over_seeds"][0]["mean"] == pytest.approx(sum(losses) / 2)
    table = ask("sweep", "show", "grid")[1]
    assert all(run.id in table for run in list_runs(there / "runs"))
    assert "20 steps" in ask("sweep", "log", "grid", "0")[1]
    logged = json.loads(ask("sweep", "log", "grid", shown["points"][1]["key"][:6], "--json")[1])
    assert logged["key"] == shown["points"][1]["key"]
    assert "seed=1" in logged["text"]
    assert "[no-sweep]" in ask("sweep", "show", "gird")[1]
    assert ask("sweep", "log", "grid", "17")[0] == 2
    assert ask("sweep", "stop", "grid")[0] == 0
    assert ask("sweep", "grid.yaml")[0] == 0  # which takes the wish to stop back


def test_help_has_examples() -> None:
    for words in (
        ["sweep", "--help"],
        *(["sweep", verb, "--help"] for verb in ("x.yaml", "ls", "show", "stop", "log", "report")),
    ):
        code, said = ask(*words)
        assert code == 0
        assert "Examples:" in said


WRONG = [
    ({"grid": {"lr.learning_rat": [1, 2]}}, "every point:\n    lr.learning_rat "),
    ({"grid": {"lr.learning_rate": [0.1, -1, "x"]}}, "lr.learning_rate=-1:\n    lr.learning_rate=-1 "),
    ({"grid": {"lr.learning_rate": [0.1, -1, "x"]}}, "lr.learning_rate=x:\n    lr.learning_rate=x "),
    ({"grid": {"lr.min_lr": [0, 1]}}, "lr.min_lr=1 "),
    ({"grid": {"seed": [0]}, "set": {"eval_only": True}}, "eval_only"),
    ({"grid": {"seed": [0]}, "set": {"data.batch_size": "${nothing}"}}, "nothing"),
    ({"grid": {"preset": ["none"]}}, "preset=none "),
    ({**GRID, "eval": "test"}, "[no-split]"),
    ({"grid": {"seed": [0]}, "recipe": "pianno"}, " piano?"),
    ({"grid": {"seed": [0]}, "launch": {"slots": -1}}, "launch: slots=-1"),
    ({"grid": {"seed": [0]}, "launch": {"on": "moon"}}, "[bad-launcher]"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "said"), WRONG, ids=[said[:20] for _, said in WRONG])
def test_a_mistake_in_any_point_is_told_before_anything_starts(folder: Path, tree: dict[str, Any], said: str) -> None:
    code, told = ask("sweep", sweep_file(folder, {"recipe": "piano", **tree}))
    assert (code, said in told) == (2, True), told
    assert not (folder / "runs").exists()


def test_what_cannot_be_done_is_one_sentence(folder: Path) -> None:
    for name in ("gone.yaml", "FILE"):
        assert "[no-file]" in ask("sweep", name)[1]
    file = sweep_file(folder, {"recipe": "piano", "grid": {"seed": [0]}})
    (folder / "plain").write_text("in the way")
    code, said = ask("sweep", file, "--runs", "plain/runs")
    assert code == 2
    assert "plain/runs" in said
    assert "[options-conflict]" in ask("sweep", file, "--out", "x")[1]
    made_sweep(folder / "runs")
    code, said = ask("sweep", file, "--name", "made", "--dry-run")
    assert (code, "[sweep-exists]" in said) == (2, True)


def test_a_file_for_a_cluster_is_written_with_the_plan_that_it_goes_by(folder: Path) -> None:
    tree: dict[str, Any] = {"recipe": "piano", "grid": {"seed": [0, 1]}}
    code, said = ask("sweep", sweep_file(folder, tree), "--emit", "kubernetes")
    assert (code, "[missing-option]" in said) == (2, True)
    assert not (folder / "runs").exists()  # nothing half-written
    file = sweep_file(folder, {**tree, "launch": {"image": "rung:1", "gpus": 1}})
    code, said = ask("sweep", file, "--emit", "kubernetes", "--out", "jobs.yaml")
    assert (code, said) == (0, "jobs.yaml\n")
    job = (folder / "jobs.yaml").read_text()
    assert all(point.key in job for point in find_sweep("grid", folder / "runs").points)
    state.ask_to_stop(find_sweep("grid", folder / "runs"))
    assert ask("sweep", file, "--emit", "kubernetes")[1] == job
    assert not state.is_asked_to_stop(find_sweep("grid", folder / "runs"))  # or its pods would stop for ever
    assert "[options-conflict]" in ask("sweep", file, "--emit", "kubernetes", "--dry-run")[1]
    search = {"recipe": "piano", "search": {"trials": 2, "metric": "loss", "space": {"seed": [0, 1]}}}
    code, said = ask("sweep", sweep_file(folder, search, "search.yaml"), "--emit", "kubernetes")
    assert (code, "[not-supported]" in said) == (2, True), said


def test_text_of_users_stays_text(folder: Path) -> None:
    sweep = made_sweep(folder / "runs")
    made_run(sweep, sweep.points[0])
    tree = json.loads((sweep.folder / "sweep.json").read_text())
    tree["points"][0]["varies"] = {"why\x1b[31m": "\x1b[2J<b>\n**x**"}
    (sweep.folder / "sweep.json").write_text(json.dumps(tree))
    code, said = ask("sweep", "show", "made")
    assert code == 0
    assert "\x1b" not in said


def segments(sweep: Sweep) -> list[int]:
    return sorted(len(run.document["segments"]) for runs in runs_of(sweep).values() for run in runs)


def let_go(folder: Path, until: Any) -> None:
    """Opens the gate loss by loss, so that a training that was told to stop does so before it comes to its end."""
    most = [30.0]

    def is_done() -> bool:
        most[0] += 0.5
        (folder / "gate").write_text(str(most[0]))
        return bool(until())

    wait_for(is_done)


def test_a_sweep_that_is_killed_goes_on_and_two_drivers_train_nothing_twice(folder: Path) -> None:
    slow = {**TINY, "optimizer.max_iters": 150, "eval_interval": 1000}
    tree = {"recipe": "mine:Mine", "set": slow, "grid": {"seed": [0]}}
    file = sweep_file(folder, tree, "slow.yaml")
    runs = folder / "runs"

    def are_saved() -> bool:
        found = list_runs(runs, None, []) if runs.exists() else []
        return bool(found) and all(one.checkpoints() for one in found)

    (folder / "gate").write_text("30")
    driver = started(folder, "sweep", file)
    wait_for(are_saved)
    pids = [run.document["process"]["pid"] for run in list_runs(runs)]
    driver.kill()
    driver.communicate()
    let_go(folder, lambda: all(start_time(pid) is None for pid in pids))
    sweep = find_sweep("slow", runs)
    assert segments(sweep) == [1]
    assert not any(run.status == "finished" for run in list_runs(runs))

    (folder / "gate").write_text("inf")
    drivers = [started(folder, "sweep", file) for _ in range(2)]
    said = "".join(one.communicate()[0] for one in drivers)
    assert [one.returncode for one in drivers] == [0, 0], said
    assert [run.status for run in list_runs(runs)] == ["finished"]
    assert segments(sweep) == [2]
    for run in list_runs(runs):
        rows = run.metrics(["loss"])
        assert [step for step, loss in zip(rows["step"], rows["loss"]) if loss is not None] == list(range(150))


class Listed:
    """A launcher that starts nothing."""

    def __init__(self) -> None:
        self.points: list[Any] = []

    def run(self, sweep: Sweep, points: Any, told: Any) -> None:
        self.points = [dict(one.varies) for one in points]


def test_a_crash_is_retried_and_one_that_always_fails_does_not_keep_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "command_of", made.command_of)
    (folder / "ends").write_text("crashed+save crashed crashed+save finished")  # the first point twice, then the second
    tree = {**GRID, "retries": 1, "launch": {"slots": 1}}
    code, said = ask("sweep", sweep_file(folder, tree, "odd.yaml"))
    assert code == 1, said
    assert "RuntimeError: broken" in said
    assert "\x1b" not in said
    assert "Traceback" not in said
    sweep = find_sweep("odd", folder / "runs")
    assert [one.word for one in states(sweep).values()] == ["failed", "finished"]
    assert segments(sweep) == [2, 2]

    listed = Listed()
    monkeypatch.setattr(launch, "launcher_of", lambda sweep, on: listed)
    code, said = ask("sweep", "odd.yaml")  # told and left
    assert (code, listed.points) == (1, [])
    assert "seed=0 failed" in said
    code, said = ask("sweep", "odd.yaml", "--retry-failed", "--json")
    assert (code, listed.points) == (3, [{"lr.learning_rate": 3e-2, "seed": 0}])
    assert [one["state"] for one in json.loads(said[said.index("{") :])["points"]] == ["stopped", "finished"]


class Leaving:
    """A launcher that is left by Ctrl-C, as that of SLURM, whose jobs stay."""

    def run(self, sweep: Sweep, points: Any, told: Any) -> None:
        raise KeyboardInterrupt(f"{len(points)} jobs stay")


def test_ctrl_c_is_no_mistake_and_says_what_becomes_of_the_points(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "launcher_of", lambda sweep, on: Leaving())
    code, said = ask("sweep", sweep_file(folder, GRID))
    assert code == 130
    assert said.endswith("2 jobs stay\n")


def test_a_loss_that_is_shown_is_that_of_the_run_itself(folder: Path) -> None:
    sweep = made_sweep(folder / "runs", seeds=[0], eval_split="test")
    run = made_run(sweep, sweep.points[0])
    (run.path / "evals").mkdir()
    for name, weights, step, loss in (("5", "checkpoint 5", 5, 2.5), ("pythia-70m", "folder pythia-70m", None, 1.25)):
        document = {"split": "test", "step": step, "weights": weights, "sets": {"test": {"loss": loss}}}
        (run.path / "evals" / f"test-{name}.json").write_text(json.dumps(document))
    assert json.loads(ask("sweep", "show", "made", "--json")[1])["points"][0]["eval_loss"] == 2.5


def test_a_damaged_sweep_does_not_hide_the_others(folder: Path) -> None:
    sweep = made_sweep(folder / "runs")
    (sweep.folder.parent / "broken").mkdir()
    (sweep.folder.parent / "broken" / "sweep.json").write_text("{")
    code, said = ask("sweep", "ls")
    assert code == 0
    assert "broken/sweep.json" in said
    assert "made" in said.splitlines()[-1]


def test_data_that_is_not_prepared_fails_its_point_with_the_sentence(folder: Path) -> None:
    file = sweep_file(folder, {"recipe": "piano", "grid": {"seed": [0]}})
    code, said = ask("sweep", file)
    assert code == 1
    assert "rung data piano" in said
    assert "Traceback" not in said
    assert json.loads(ask("sweep", file, "--dry-run", "--json")[1])["points"][0]["state"] == "failed"
