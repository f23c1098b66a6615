"""If this fails, a run that was moved is lost, or others still look for it where it was."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.runs.maintenance import moving, trash
from rung.runs.maintenance.cleaning import clean
from rung.runs.query import list_runs, open_run
from rung.runs.record import Record, amend, last_number, read_document
from tests.errors import raises_code
from tests.runs.maintenance.made import contents, refs, remove

Start = Callable[..., Record]
CHANGING = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "fcntl.flock")  # audit events of system calls


def test_an_experiment_gets_another_name(ended: Start, root: Path, repo: Path) -> None:
    ended(code_root=repo)
    Record.reopen(root / "piano/1", command=["rung"]).finish("finished")
    ended(parent="piano/1")
    ended("other", parent="piano/2")
    base = {"base": "piano/1", "base_uid": read_document(root / "piano/1")["uid"]}
    amend(root / "other/1", ab={"id": "x", "arm": "control", **base, "overrides": []})
    (root / "piano/report.md").write_text("a page")
    before, child = refs(repo), contents(root / "other")
    assert moving.move("piano", "bach", root) == {"piano/1": "bach/1", "piano/2": "bach/2"}
    assert [run.id for run in list_runs(root)] == ["bach/1", "bach/2", "other/1"]
    run = open_run("bach/1", root)
    assert (run.document["experiment"], run.document["number"], run.document["formerly"]) == ("bach", 1, ["piano/1"])
    assert open_run("bach/2", root).document["parent"] == "bach/1"
    assert contents(root / "other") == child, "nothing has to follow"
    for other in (open_run("other/1", root), *list_runs(root, "other")):
        assert (other.document["parent"], other.document["ab"]["base"]) == ("bach/2", "bach/1")
    assert (root / "bach/report.md").read_text() == "a page"
    assert refs(repo) == before
    assert ended().id == "piano/3", "an old id was given to another run"
    assert ended("bach").id == "bach/3"


def test_and_its_old_one_back(ended: Start, root: Path) -> None:
    ended(), ended()
    before = {p: read_document(root / p) for p in ("piano/1", "piano/2")}
    moving.move("piano", "bach", root)
    ended("bach")
    moving.move("bach", "piano", root)
    for name, document in before.items():
        now = read_document(root / name)
        assert now.pop("formerly") == [name.replace("piano", "bach")]
        assert now == document
    assert [run.id for run in list_runs(root)] == ["piano/1", "piano/2", "piano/3"]


def test_runs_move_to_the_next_numbers(ended: Start, root: Path) -> None:
    for name in ("piano", "piano", "piano", "bach"):
        ended(name)
    remove(root, "bach/1")
    moved = moving.move("piano/2..3", "bach", root)
    assert moved == {"piano/2": "bach/2", "piano/3": "bach/3"}
    trash.restore(root, ["bach/1"])
    assert [run.id for run in list_runs(root)] == ["bach/1", "bach/2", "bach/3", "piano/1"]
    moving.move("bach/3", "piano/3", root)
    assert open_run("piano/3", root).document["formerly"] == ["bach/3"], "it may have its own number again"


@pytest.mark.parametrize(
    ("source", "target", "code"),
    [
        ("piano", "bach", "experiment-exists"),
        ("piano", "piano", "experiment-exists"),
        ("piano", "a b", "bad-name"),
        ("piano", ".trash", "bad-name"),
        ("piano", "bach/3", "bad-name"),
        ("pianoo", "new", "no-run"),
        ("piano/9", "new", "no-run"),
        ("piano/1", "piano", "run-exists"),
        ("piano/1", "bach/1", "run-exists"),
        ("piano/1", "piano/2", "run-exists"),
        ("piano/1", "piano/3", "number-used"),
        ("piano/1", "bach/0", "bad-name"),
        ("piano/1", "bach/x", "bad-name"),
        ("piano/1..2", "bach/7", "too-many"),
    ],
)
def test_moves_that_cannot_be(ended: Start, root: Path, source: str, target: str, code: str) -> None:
    for name in ("piano", "piano", "piano", "bach"):
        ended(name)
    remove(root, "piano/3")
    before = contents(root)
    with raises_code(code):
        moving.move(source, target, root)
    assert contents(root) == before, "something was changed all the same"
    assert sorted(p.name for p in root.iterdir()) == [".trash", "bach", "piano"]


def test_a_repository_that_is_not_at_hand(
    ended: Start, root: Path, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = read_document(ended(code_root=repo).path)["code"]
    os.rename(repo, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    moving.move("piano", "bach", root)
    assert read_document(root / "bach/1")["code"] == code
    remove(root, "bach/1")
    assert clean(root, is_real=True).refs == []
    assert refs(tmp_path / "elsewhere") == {code["ref"]: code["commit"]}


def test_a_child_that_is_running_hears_of_it(ended: Start, start: Start, root: Path) -> None:
    ended()
    child = start("other", parent="piano/1")
    moving.move("piano", "bach", root)
    child.log(0, {"loss": 1.0})
    child.finish("finished")
    assert open_run("other/1", root).document["parent"] == "bach/1"


def test_what_is_in_the_trash_hears_of_it(ended: Start, root: Path) -> None:
    ended()
    ended(parent="piano/1")
    remove(root, "piano/2")
    moving.move("piano", "bach", root)
    trash.restore(root, [])
    assert open_run("piano/2", root).document["parent"] == "bach/1"


def test_a_run_that_was_moved_by_hand_is_called_by_its_new_place(ended: Start, root: Path) -> None:
    ended()
    ended(parent="piano/1")
    (root / "bach").mkdir()
    os.rename(root / "piano/1", root / "bach/4")
    run = open_run("bach/4", root)
    assert (run.id, run.document["experiment"], run.document["number"]) == ("bach/4", "bach", 4)
    assert run.document["formerly"] == ["piano/1"]
    assert open_run("piano/2", root).document["parent"] == "bach/4"
    with raises_code("run-moved") as caught:
        open_run("piano/1", root)
    assert "bach/4" in str(caught.value)
    amend(run.path, why="a word")
    assert read_document(run.path)["formerly"] == ["piano/1"]


def test_a_reference_is_not_taken_in_by_another_run_of_that_name(ended: Start, root: Path) -> None:
    ended()
    ended("other", parent="piano/1")
    moving.move("piano/1", "bach", root)
    shutil.rmtree(root / "piano")  # with its counter: the number is given again
    assert ended().id == "piano/1"
    assert [run.document["parent"] for run in list_runs(root, "other")] == ["bach/1"]
    assert open_run("other/1", root).document["parent"] == "bach/1"


def test_an_old_number_is_not_given_again_where_the_counter_was_lost(ended: Start, root: Path) -> None:
    ended(), ended()
    (root / "piano/.last").unlink()  # as in a folder that was copied without hidden files
    moving.move("piano/2", "bach", root)
    assert ended().id == "piano/3"
    assert ended("bach").id == "bach/2"


def test_a_parent_that_is_gone_keeps_the_name_it_had(ended: Start, root: Path) -> None:
    ended()
    ended("other", parent="piano/1")
    shutil.rmtree(root / "piano/1")
    assert open_run("other/1", root).document["parent"] == "piano/1"


def after(root: Path) -> dict[str, Any]:
    """All files but half-written ones, and the counters by what they are for."""
    files = {name: data for name, data in contents(root).items() if not name.endswith((".part", ".last"))}
    return {**files, "last": [last_number(root / name) for name in ("piano", "bach")]}


def killed(at: int, *args: Any) -> bool:
    """Moves in a process that is killed before its n-th call that opens, locks, makes, renames or removes a file."""
    pid = os.fork()
    if pid == 0:
        left = [at]

        def die(event: str, args: Any) -> None:
            if event in CHANGING:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        try:
            moving.move(*args)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("args", [("piano/1", "bach"), ("piano/1", "bach/7"), ("piano", "bach")], ids=" ".join)
def test_killed_before_any_system_call(ended: Start, root: Path, tmp_path: Path, args: tuple[str, str]) -> None:
    """Each run opens under exactly one name, its child finds it, and the same command again does the rest."""
    for parent in (None, None, "piano/1"):
        ended(parent=parent)
    (root / "piano/report.md").write_text("a page")
    shutil.copytree(root, tmp_path / "spare")
    uids = {run.document["uid"]: run.id for run in list_runs(root)}
    new = moving.move(*args, root)
    end = after(root)
    at, seen = 0, set()
    while True:
        at += 1
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "spare", root)
        if not killed(at, *args, root):
            break
        runs = list_runs(root)
        assert {run.document["uid"] for run in runs} == set(uids), at
        assert len(runs) == len(uids), at
        for run in runs:
            was = uids[run.document["uid"]]
            assert run.id in (was, new.get(was)), at
            assert open_run(run.id, root).path == run.path
            assert run.metrics(["loss"])["loss"] == [1.0]
            assert run.id not in run.document.get("formerly", []), at
        parent = next(run.document["parent"] for run in runs if run.document["parent"])
        assert open_run(parent, root).document["uid"] == next(uid for uid, name in uids.items() if name == "piano/1")
        moved = len([run for run in runs if run.id in new.values()])
        seen.add(moved)
        if moved < len(new):
            moving.move(*args, root)
        assert after(root) == end, at
    assert after(root) == end
    assert seen == set(range(len(new) + 1)), "no kill fell between two renames"
    assert at > 10
