"""If this fails, a kill -9 while runs are moved, removed or deleted loses one, or leaves a state nobody can fix.

Each moment is the one before the n-th line that the process executes in the code that moves, removes or deletes.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from rung.runs.maintenance.cleaning import refs_of
from rung.runs.maintenance.trash import trashed
from rung.runs.query import Run, list_runs, open_run
from rung.runs.record import Record
from tests.runs.maintenance.made import git, refs

from .lives import Lives, is_one_sentence

KILLED = -signal.SIGKILL
MOVING = ["runs/maintenance/moving.py", "files.py"]
REMOVING = ["runs/maintenance/trash.py", "runs/maintenance/cleaning.py", "files.py"]
NUM_MOMENTS = int(os.environ.get("RUNG_KILLS", "12"))  # of each verb, spread evenly; more take half a second each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with three runs, the second and third from the first; to be filled anew for each kill."""
    repo = tmp_path_factory.mktemp("repo")
    git(repo, "init", "-q", "--template=")
    (repo / "a.py").write_text("a = 1\n")
    (repo / ".gitignore").write_text("spare\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "first")
    for experiment, parent in (("piano", None), ("piano", "piano/1"), ("other", "piano/1")):
        record = Record.create(
            repo / "runs", experiment, recipe="piano", preset=None, command=["rung"], seed=1, config={}, sources={},
            derived={}, data={}, parent=parent, code_root=repo,
        )  # fmt: skip
        record.log(0, {"loss": 1.0})
        record.finish("finished")
    (repo / "runs/piano/report.md").write_text("a page")
    shutil.copytree(repo / "runs", repo / "spare/runs")
    shutil.copytree(repo / ".git", repo / "spare/git")
    return repo


def as_it_was(folder: Path) -> Path:
    shutil.rmtree(folder / "runs")
    shutil.rmtree(folder / ".git")
    shutil.copytree(folder / "spare/runs", folder / "runs")
    shutil.copytree(folder / "spare/git", folder / ".git")
    return folder / "runs"


def uids(runs: list[Run]) -> list[str]:
    return sorted(run.document["uid"] for run in runs)


def assert_has_its_code(run: Run, repo: Path) -> None:
    there = refs(repo)
    for ref in refs_of(run.document):
        assert there.get(ref.ref) == ref.commit, f"{run.id} names a snapshot that is gone"


def num_lines(lives: Lives, folder: Path, files: list[str], *args: str) -> int:
    as_it_was(folder)
    life = lives.rung(*args, cwd=folder, die={"files": files, "at": None})
    assert life.code == 0, life.err
    assert life.counted is not None
    return life.counted


def moments(total: int) -> list[int]:
    return sorted({1 + round(i * (total - 1) / NUM_MOMENTS) for i in range(NUM_MOMENTS)})


@pytest.mark.parametrize("args", [("mv", "piano", "bach"), ("mv", "piano/1", "bach")], ids=" ".join)
def test_killed_while_moving(lives: Lives, folder: Path, args: tuple[str, ...]) -> None:
    total = num_lines(lives, folder, MOVING, *args)
    assert total > 50
    end = seen(folder)
    root = as_it_was(folder)
    before = uids(list_runs(root))
    for at in moments(total):
        as_it_was(folder)
        assert lives.rung(*args, cwd=folder, die={"files": MOVING, "at": at}).code == KILLED, at
        runs = list_runs(root)  # raises where one cannot be read
        assert uids(runs) == before, at
        for run in runs:
            assert_has_its_code(run, folder)
            assert run.metrics(["loss"])["loss"] == [1.0]
        was_done = seen(folder) == end
        life = lives.rung(*args, cwd=folder)
        assert is_one_sentence(life) if was_done else life.code == 0, (at, life.err)
        assert seen(folder) == end, at


def seen(folder: Path) -> dict[str, Any]:
    """What a user sees of a checkout: what is called what, who comes from whom, and which code is kept."""
    runs = {}
    for run in list_runs(folder / "runs"):
        doc = run.document
        parent = open_run(doc["parent"], folder / "runs").document["uid"] if doc["parent"] else None
        runs[doc["uid"]] = (run.id, doc.get("formerly", []), parent)
    return {"runs": runs, "refs": refs(folder)}


def test_killed_while_removing(lives: Lives, folder: Path) -> None:
    args = ("rm", "piano/1..2", "--force")
    total = num_lines(lives, folder, REMOVING, *args)
    assert total > 50
    root = as_it_was(folder)
    before = uids(list_runs(root))
    for at in moments(total):
        as_it_was(folder)
        assert lives.rung(*args, cwd=folder, die={"files": REMOVING, "at": at}).code == KILLED, at
        there = list_runs(root)
        life = lives.rung("rm", "--undo", cwd=folder)
        assert life.code == 0 or (is_one_sentence(life) and len(there) == len(before)), (at, life.err)
        assert uids(list_runs(root)) == before, at
        assert lives.rung("rm", *args[1:], cwd=folder).code == 0


def test_killed_while_deleting(lives: Lives, folder: Path) -> None:
    """A run in the trash is whole with its code, or on its way out; the next gc ends as an undisturbed one."""

    def fill() -> Path:
        root = as_it_was(folder)
        assert lives.rung("rm", "piano/1..2", "--force", cwd=folder).code == 0
        return root

    root = fill()
    total = lives.rung("gc", "--yes", cwd=folder, die={"files": REMOVING, "at": None}).counted
    assert total is not None
    assert total > 50
    end = refs(folder)
    uid = open_run("other/1", root).document["uid"]
    assert sorted(end) == [f"refs/rung/{uid}"]
    for at in moments(total):
        fill()
        assert lives.rung("gc", "--yes", cwd=folder, die={"files": REMOVING, "at": at}).code == KILLED, at
        for one in trashed(root):
            assert_has_its_code(open_run(one.run, root), folder)
        life = lives.rung("gc", "--yes", cwd=folder)
        assert life.code == 0, (at, life.err)
        assert refs(folder) == end, at
        assert not (root / ".trash").exists(), at
        assert [run.id for run in list_runs(root)] == ["other/1"]
