"""If this fails, "to do it again" on a page does not do it again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rung.runs.query import Run, list_runs, open_run
from tests.compare.made import make_repo

SCRIPT = """
import sys
import rung
from scale import SCALE

run = rung.init(experiment="mine", config={"rate": float(sys.argv[1])})
for step in range(5):
    run.log({"loss": SCALE * float(sys.argv[1]) ** step}, step=step)
run.finish()
"""


@pytest.fixture
def at(tmp_path: Path) -> Callable[..., str]:
    """Runs a command in a folder of its own, as a person would, with nothing of ours in the environment."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RUNG_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}

    def call(folder: Path, *words: str) -> str:
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return call


def losses(run: Run) -> list[float | None]:
    return run.metrics()["loss"]


def again(at: Callable[..., str], repo: Path, run: Run) -> Run:
    """Copies the lines of the run's page into a fresh clone."""
    at(repo, "rung", "report", run.id)
    page = (run.path / "report.md").read_text()
    lines = re.search(r"## to do it again.*?```bash\n(.*?)```", page, re.S)
    assert lines is not None
    clone = repo.parent / "elsewhere/clone"
    clone.parent.mkdir()
    at(repo.parent, "git", "clone", "-q", str(repo), str(clone))
    at(clone, "bash", "-euc", lines[1])
    [found] = list_runs(clone.parent / run.id.replace("/", "-") / "runs", None, [])
    return found


def test_a_recipe_whose_config_came_from_a_parent_and_whose_data_is_not_in_git(
    tmp_path: Path, at: Callable[..., str]
) -> None:
    letters = {f"letters/{i}.txt": f"{'the quick brown fox ' * (20 + i)}jumps {i} times." for i in range(40)}
    repo = make_repo(tmp_path / "repo", {".gitignore": "data/\nruns/\n", **letters})
    at(repo, "rung", "data", "text", "--from", "letters", "--name", "mail")
    keys = ["optimizer.max_iters=6", "lr.warmup_iters=1", "model.n_layer=1", "data.batch_size=4", "eval_interval=3"]
    at(repo, "rung", "train", "text", "dataset.base_dataset_name=mail", *keys, "--no-check")
    at(repo, "rung", "train", "--parent", "text/1", "lr.learning_rate=2e-3", "--why", "faster?", "--no-check")
    first = open_run("text/2", repo / "runs")
    second = again(at, repo, first)
    assert losses(second) == losses(first)
    assert second.data() == first.data()
    assert second.config() == first.config()


def test_a_script_with_an_edit_that_nobody_committed(tmp_path: Path, at: Callable[..., str]) -> None:
    repo = make_repo(
        tmp_path / "repo", {".gitignore": "runs/\n", "src/train.py": SCRIPT, "src/scale.py": "SCALE = 1\n"}
    )
    (repo / "src/scale.py").write_text("SCALE = 3\n")
    at(repo, "python", "src/train.py", "0.5")
    first = open_run("mine/1", repo / "runs")
    assert losses(again(at, repo, first)) == losses(first) == [3.0, 1.5, 0.75, 0.375, 0.1875]
