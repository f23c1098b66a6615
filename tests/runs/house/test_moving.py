"""If this fails, a run that was moved is lost, or others still look for it where it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.errors import RunError
from rung.runs.house import journal, moving, trash
from rung.runs.house.clearing import clear
from rung.runs.query import list_runs, open_run
from rung.runs.record import Record, amend, read_document
from tests.runs.house.made import contents, git, refs, remove

Start = Callable[..., Record]


def test_an_experiment_gets_another_name(ended: Start, root: Path, repo: Path) -> None:
    ended(code_root=repo)
    Record.reopen(root / "piano/1", command=["rung"]).finish("finished")
    ended(parent="piano/1")
    ended("other", parent="piano/2")
    amend(root / "other/1", ab={"id": "x", "arm": "control", "base": "piano/1", "overrides": []})
    (root / "piano/report.md").write_text("a page")
    before = refs(repo)
    _, moved = moving.move("piano", "bach", root)
    assert moved is not None
    assert moved.ids == {"piano/1": "bach/1", "piano/2": "bach/2"}
    assert sorted(moved.followed) == ["bach/2", "other/1"]
    assert [run.id for run in list_runs(root)] == ["bach/1", "bach/2", "other/1"]
    run = open_run("bach/1", root)
    assert (run.document["experiment"], run.document["number"], run.document["formerly"]) == ("bach", 1, ["piano/1"])
    assert open_run("bach/2", root).document["parent"] == "bach/1"
    other = open_run("other/1", root).document
    assert (other["parent"], other["ab"]["base"]) == ("bach/2", "bach/1")
    assert (root / "bach/report.md").read_text() == "a page"
    assert refs(repo) == {name.replace("piano", "bach"): commit for name, commit in before.items()}
    code = [run.document["code"], run.document["segments"][-1]["code"]]
    assert [part["ref"] for part in code] == ["refs/rung/bach/1", "refs/rung/bach/1.1"]
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
    _, moved = moving.move("piano/2..3", "bach", root)
    assert moved is not None
    assert moved.ids == {"piano/2": "bach/2", "piano/3": "bach/3"}
    trash.bring_back(root, ["bach/1"])
    assert [run.id for run in list_runs(root)] == ["bach/1", "bach/2", "bach/3", "piano/1"]
    _, moved = moving.move("bach/3", "piano/3", root)
    assert moved is not None
    assert open_run("piano/3", root).document["formerly"] == ["bach/3"], "it may have its own number again"


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("piano", "bach", "there is an experiment bach already"),
        ("piano", "piano", "already"),
        ("piano", "a b", "cannot name an experiment"),
        ("piano", ".trash", "cannot name an experiment"),
        ("piano", "bach/3", "is an experiment"),
        ("pianoo", "new", "did you mean piano"),
        ("piano/9", "new", "no piano/9"),
        ("piano/1", "piano", "in piano already"),
        ("piano/1", "bach/1", "there is a run bach/1 already"),
        ("piano/1", "piano/2", "there is a run piano/2 already"),
        ("piano/1", "piano/3", "not given again"),
        ("piano/1", "bach/0", "neither an experiment nor a run"),
        ("piano/1", "bach/x", "neither an experiment nor a run"),
        ("piano/1..2", "bach/7", "2 runs cannot all become"),
    ],
)
def test_moves_that_cannot_be(ended: Start, root: Path, source: str, target: str, said: str) -> None:
    for name in ("piano", "piano", "piano", "bach"):
        ended(name)
    remove(root, "piano/3")
    before = contents(root)
    with pytest.raises(RunError, match=said):
        moving.move(source, target, root)
    assert contents(root) == before, "something was changed all the same"
    assert sorted(p.name for p in root.iterdir()) == [".trash", "bach", "piano"]


def test_a_repository_that_is_not_at_hand(ended: Start, root: Path, repo: Path, tmp_path: Path) -> None:
    ended(code_root=repo)
    os.rename(repo, tmp_path / "elsewhere")
    _, moved = moving.move("piano", "bach", root)
    assert moved is not None
    assert moved.moves[0].stay == ["refs/rung/piano/1"]
    assert read_document(root / "bach/1")["code"]["ref"] == "refs/rung/piano/1"
    remove(root, "bach/1")
    assert clear(root, is_real=True).refs == []


def test_a_missing_ref_is_made_again_where_its_commit_is_there(ended: Start, root: Path, repo: Path) -> None:
    code = read_document(ended(code_root=repo).path)["code"]
    git(repo, "update-ref", "-d", code["ref"])
    moving.move("piano", "bach", root)
    assert refs(repo) == {"refs/rung/bach/1": code["commit"]}


def test_a_name_that_another_runs_folder_uses(ended: Start, tmp_path: Path, repo: Path) -> None:
    ended("bach", root=tmp_path / "theirs", code_root=repo)
    ended(root=tmp_path / "ours", code_root=repo)
    before = refs(repo)
    moving.move("piano", "bach", tmp_path / "ours")
    code = read_document(tmp_path / "ours/bach/1")["code"]
    assert code["ref"] != "refs/rung/bach/1"
    assert refs(repo) == {"refs/rung/bach/1": before["refs/rung/bach/1"], code["ref"]: code["commit"]}


def test_a_child_that_is_running_hears_of_it(ended: Start, start: Start, root: Path) -> None:
    ended()
    child = start("other", parent="piano/1")
    moving.move("piano", "bach", root)
    child.log(0, {"loss": 1.0})
    child.finish("finished")
    assert read_document(child.path)["parent"] == "bach/1"


def test_what_is_in_the_trash_hears_of_it(ended: Start, root: Path) -> None:
    ended()
    ended(parent="piano/1")
    remove(root, "piano/2")
    _, moved = moving.move("piano", "bach", root)
    assert moved is not None
    assert moved.followed == ["piano/2"]
    trash.bring_back(root, [])
    assert open_run("piano/2", root).document["parent"] == "bach/1"


def test_a_run_that_was_deleted_by_hand_does_not_hold_up_a_move(ended: Start, root: Path) -> None:
    ended(), ended()
    moves = [{"old": f"piano/{n}", "new": f"bach/{n}", "refs": []} for n in (1, 2)]
    (root / journal.JOURNAL).write_text(json.dumps({"words": ["piano", "bach"], "moves": moves, "others": []}))
    shutil.rmtree(root / "piano/1")
    moving.move("piano", "bach", root)
    assert [run.id for run in list_runs(root)] == ["bach/2"]


@pytest.mark.parametrize("moves", [[], [{"old": "../x/1", "new": "bach/1", "refs": []}], [{"old": 1, "new": 2}]])
def test_a_journal_cannot_lead_out_of_the_runs_folder(ended: Start, root: Path, moves: list[Any]) -> None:
    ended()
    (root / journal.JOURNAL).write_text(json.dumps({"words": ["piano", "bach"], "moves": moves, "others": []}))
    with pytest.raises(RunError, match="is damaged"):
        moving.move("piano", "bach", root)


def test_others_wait_for_a_move_that_was_not_finished(ended: Start, root: Path) -> None:
    ended()
    moves = [{"old": "piano/1", "new": "bach/1", "refs": []}]
    (root / journal.JOURNAL).write_text(json.dumps({"words": ["piano", "bach"], "moves": moves, "others": []}))
    (root / "bach").mkdir()
    for wait in (lambda: clear(root), lambda: remove(root, "piano/1"), lambda: trash.bring_back(root, [])):
        with pytest.raises(RunError, match="rung mv piano bach"):
            wait()
    left, moved = moving.move("piano", "bach", root)
    assert (left is not None, moved) == (True, None)
    assert [run.id for run in list_runs(root)] == ["bach/1"]
    (root / journal.JOURNAL).write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        moving.move("bach", "new", root)
