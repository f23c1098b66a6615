"""If this fails, keeping house loses a run, takes what another one needs, or gives a number twice."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.engine.checkpoint import Checkpoints
from rung.errors import CheckpointError, RunError
from rung.runs.house import journal, moving, needs, trash
from rung.runs.house.clearing import clear
from rung.runs.house.disk import bytes_below, freed_bytes, sum_once, usage
from rung.runs.house.needs import needed_by
from rung.runs.house.places import choose, standing
from rung.runs.house.refs import refs_of
from rung.runs.house.tags import check_tag, retag
from rung.runs.marks import find_step, saves, set_pin
from rung.runs.query import list_runs, open_run
from rung.runs.record import Record, amend, append_event, read_document

Start = Callable[..., Record]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def ended(start: Start) -> Callable[..., Record]:
    """A run that is over."""

    def make(experiment: str = "piano", status: str = "finished", **fields: Any) -> Record:
        record = start(experiment, **fields)
        record.log(0, {"loss": 1.0})
        record.finish(status)
        return record

    return make


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "a.py").write_text("a = 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def git(folder: Path, *args: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    words = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", *args]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout


def refs(repo: Path) -> dict[str, str]:
    lines = git(repo, "for-each-ref", "--format=%(refname) %(objectname)", "refs/rung").splitlines()
    return dict(line.split() for line in lines)


def remove(root: Path, *words: str, force: bool = False) -> list[trash.Removed]:
    return trash.remove(choose(words, root), force)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def make_saves(run: Path, *steps: int, num_bytes: int = 100) -> Path:
    folder = run / "checkpoints"
    for step in steps:
        (folder / f"{step:08d}").mkdir(parents=True)
        (folder / f"{step:08d}" / "model.safetensors").write_bytes(b"x" * num_bytes)
        (folder / f"{step:08d}" / "manifest.json").write_text(json.dumps({"step": step}))
    return folder


def age(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    for place in [*path.rglob("*"), path]:
        os.utime(place, (then, then), follow_symlinks=False)


# choosing


def test_names_of_runs(ended: Start, root: Path) -> None:
    for _ in range(5):
        ended()
    assert [p.id for p in choose(["piano/2..4", "piano/4", "piano/last"], root)] == [f"piano/{n}" for n in (2, 3, 4, 5)]
    assert [p.id for p in choose(["piano/4.."], root)] == ["piano/4", "piano/5"]
    assert [p.id for p in choose(["piano/..2"], root)] == ["piano/1", "piano/2"]
    assert [p.number for p in choose([str(root / "piano/3")], root)] == [3]
    for word, said in {"piano/7..9": "no run in piano/7..9", "piano/9": "no piano/9", "bach/1..2": "bach"}.items():
        with pytest.raises(RunError, match=said):
            choose([word], root)


def test_a_folder_outside_of_a_runs_folder_is_left_to_its_owner(ended: Start, root: Path, tmp_path: Path) -> None:
    os.rename(ended().path, tmp_path / "copy")
    with pytest.raises(RunError, match="by hand"):
        choose([str(tmp_path / "copy")], root)


# the trash


def test_there_and_back(ended: Start, root: Path) -> None:
    record = ended()
    before = contents(record.path)
    gone = remove(root, "piano/1")
    assert list_runs(root) == []
    assert contents(gone[0].run) == before
    assert [one.id for one in trash.removed(root)] == ["piano/1"]
    assert ended().id == "piano/2", "a number was given twice"
    assert [one.id for one in trash.bring_back(root, ["piano/1"])] == ["piano/1"]
    assert contents(root / "piano/1") == before
    assert trash.removed(root) == []


def test_a_number_is_not_given_again_where_the_counter_was_lost(ended: Start, root: Path) -> None:
    ended(), ended()
    (root / "piano/.last").unlink()  # as in a folder that was copied without hidden files
    remove(root, "piano/2")
    assert ended().id == "piano/3"
    (root / "piano/.last").unlink()
    remove(root, "piano/3")
    trash.bring_back(root, [])
    assert ended().id == "piano/4"


def test_the_last_removal_comes_back_together(ended: Start, root: Path) -> None:
    for _ in range(4):
        ended()
    remove(root, "piano/1")
    remove(root, "piano/2..3")
    assert sorted(one.id for one in trash.bring_back(root, [])) == ["piano/2", "piano/3"]
    assert [one.id for one in trash.bring_back(root, [])] == ["piano/1"]
    with pytest.raises(RunError, match="empty"):
        trash.bring_back(root, [])


def test_coming_back_to_a_place_that_is_taken(ended: Start, root: Path) -> None:
    ended(), ended()
    remove(root, "piano/1..2")
    (root / "piano/2").mkdir()
    with pytest.raises(RunError, match="another piano/2"):
        trash.bring_back(root, [])
    assert len(trash.removed(root)) == 2, "one came back although both could not"
    with pytest.raises(RunError, match="piano/7 is not in the trash"):
        trash.bring_back(root, ["piano/7"])


def test_a_running_run_stays(start: Start, root: Path) -> None:
    start()
    with pytest.raises(RunError, match="piano/1 is running"):
        remove(root, "piano/1", force=True)
    with pytest.raises(RunError, match="piano/1 is running"):
        moving.move("piano", "bach", root, is_forced=True)
    assert [run.id for run in list_runs(root)] == ["piano/1"]
    assert not (root / "bach").exists()
    assert trash.entries(root) == []


def test_where_it_cannot_be_known_the_user_says_so(start: Start, root: Path) -> None:
    record = start()
    record.close()
    amend(record.path, process={**read_document(record.path)["process"], "host": "elsewhere"})
    age(record.path / "heartbeat", 1)
    with pytest.raises(RunError, match=r"may be running on host elsewhere.*--force"):
        remove(root, "piano/1")
    remove(root, "piano/1", force=True)
    assert list_runs(root) == []


def test_who_needs_a_run(ended: Start, root: Path) -> None:
    ended()
    ended(parent="piano/1")
    ended(config={"init_from": "piano/1"})
    ended(config={"init_from": "runs/piano/1/checkpoints/00000030"})
    folder = make_saves(root / "piano/1", 30)
    manifest = hashlib.sha256((folder / "00000030/manifest.json").read_bytes()).hexdigest()
    ended(config={"init_from": "piano/best"}, derived={"weights_from": {"step": 30, "manifest": manifest}})
    amend(ended().path, ab={"id": "x", "arm": "variant", "base": "piano/1", "overrides": []})
    ended(config={"init_from": "scratch"}, parent="piano/11")
    told = list(needed_by([standing(p) for p in choose(["piano/1"], root)]))
    assert [text.split()[0] for text in told] == [f"piano/{n}" for n in (2, 3, 4, 5, 6)], told
    assert list(needed_by([standing(p) for p in choose(["piano/1..6"], root)])) == [], "they go together"
    set_pin(folder, 30, True, "piano/1")
    assert "pinned" in "".join(needed_by([standing(p) for p in choose(["piano/1..6"], root)]))


def test_who_needs_a_run_that_rotated_its_save_away_or_is_of_a_newer_rung(ended: Start, root: Path) -> None:
    ended()
    ended(config={"init_from": "piano/1"}, derived={"weights_from": {"step": 30, "manifest": "0" * 64}})
    child = ended(parent="piano/1")
    (child.path / "run.json").write_text(json.dumps({**read_document(child.path), "schema": 99}))
    told = list(needed_by([standing(p) for p in choose(["piano/1"], root)]))
    assert told == ["piano/2 started with the weights of piano/1", "piano/3 comes from piano/1"]


def test_asking_who_needs_many_runs_reads_each_other_once(
    ended: Start, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        ended()
    read: list[Path] = []

    def beginning(path: Path, document: Any) -> needs.Beginning:
        read.append(path)
        return needs.Beginning("", None)

    monkeypatch.setattr(needs, "beginning", beginning)
    assert list(needed_by([standing(p) for p in choose(["piano/1..3"], root)])) == []
    assert [path.name for path in read] == ["4", "5", "6"]


@pytest.mark.parametrize("text", [b"{", b"[]", b"null", b'{"schema": 99, "status": "finished"}'])
def test_a_run_that_cannot_be_read_can_go_and_come_back(ended: Start, root: Path, text: bytes) -> None:
    record = ended()
    (record.path / "run.json").write_bytes(text)
    age(record.path / "heartbeat", 1)
    place = choose(["piano/1"], root)[0]
    assert standing(place).problem is not None
    with pytest.raises(RunError, match="cannot be moved"):
        moving.move("piano/1", "bach", root)
    assert not (root / "bach").exists()
    remove(root, "piano/1", force=True)
    trash.bring_back(root, [])
    assert (root / "piano/1/run.json").read_bytes() == text


@pytest.mark.parametrize("note", [b"{", b"[]", b'{"id": "../../etc", "unix_s": "x"}'])
def test_a_damaged_note_does_not_lose_the_run(ended: Start, root: Path, note: bytes) -> None:
    ended("a.b-c")
    gone = remove(root, "a.b-c/1")
    (gone[0].folder / "note.json").write_bytes(note)
    assert [one.id for one in trash.removed(root)] == ["a.b-c/1"]
    trash.bring_back(root, ["a.b-c/1"])
    assert [run.id for run in list_runs(root)] == ["a.b-c/1"]


def test_what_somebody_put_into_the_trash_by_hand_goes_nowhere_else(root: Path) -> None:
    for name in ("odd", ".odd", "a b.1"):
        (root / ".trash" / name / "run").mkdir(parents=True)
    names = [one.id for one in trash.removed(root)]
    assert len(names) == 3
    for ids in ([], *([name] for name in names)):
        with pytest.raises(RunError, match=r"where .* was is not known"):
            trash.bring_back(root, ids)
    assert len(clear(root, is_real=True).items) == 3


# clearing


def test_only_what_was_agreed_to_is_deleted(ended: Start, root: Path) -> None:
    ended(), ended()
    remove(root, "piano/1")
    plan = clear(root)
    assert [item.name for item in plan.items] == ["piano/1"]
    assert plan.bytes_by_kind()["trash"] == bytes_below(plan.items[0].path) > 0
    assert len(trash.removed(root)) == 1, "looking deletes nothing"
    assert clear(root, days=1, is_real=True).items == []
    done = clear(root, is_real=True)
    assert done.bytes_by_kind() == plan.bytes_by_kind()
    assert not (root / ".trash").exists()
    assert [run.id for run in list_runs(root)] == ["piano/2"]
    assert ended().id == "piano/3"


def test_a_snapshot_goes_with_its_run_and_no_other(ended: Start, start: Start, repo: Path, tmp_path: Path) -> None:
    """Another runs folder of the same checkout has used the same names, and the same commit."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ended(root=ours, code_root=repo)
    ended(root=theirs, code_root=repo)
    (repo / "a.py").write_text("a = 2\n")
    ended(root=theirs, code_root=repo)
    ended(root=ours, code_root=repo)
    path = ours / "piano/2"
    Record.reopen(path, command=["rung"]).finish("finished")
    before = refs(repo)
    assert {"refs/rung/piano/1", "refs/rung/piano/2", "refs/rung/piano/2.1"} < set(before)
    kept = {ref.ref for run in list_runs(theirs) for ref in refs_of(run.document)}
    remove(ours, "piano/2")
    assert refs(repo) == before, "what can be brought back keeps its code"
    done = clear(ours, is_real=True)
    assert len(done.refs) == 2
    assert set(before) - set(refs(repo)) == {ref.ref for ref in done.refs}
    assert kept <= set(refs(repo))
    code = open_run("piano/1", ours).document["code"]
    assert refs(repo)[code["ref"]] == code["commit"]


def test_a_ref_that_has_become_something_else_stays(ended: Start, root: Path, repo: Path) -> None:
    record = ended(code_root=repo)
    name = read_document(record.path)["code"]["ref"]
    (repo / "a.py").write_text("a = 3\n")
    git(repo, "commit", "-q", "-a", "-m", "second")
    git(repo, "update-ref", name, "HEAD")
    remove(root, "piano/1")
    assert clear(root, is_real=True).refs == []
    assert name in refs(repo)


def test_a_run_json_cannot_have_a_branch_deleted(ended: Start, root: Path, repo: Path) -> None:
    record = ended(code_root=repo)
    code = read_document(record.path)["code"]
    for ref in ("refs/heads/main", "refs/rung/x/1\ndelete refs/heads/main"):
        amend(record.path, code={**code, "ref": ref})
        remove(root, "piano/1")
        assert clear(root).refs == []
        trash.bring_back(root, [])


def test_starts_that_were_killed(start: Start, ended: Start, root: Path) -> None:
    ended()
    for number in (2, 3, 4):
        (root / f"piano/{number}").mkdir()
        (root / f"piano/{number}/config.yaml").write_text("a: 1\n")
    make_saves(root / "piano/4", 10)  # this was a run: somebody has lost its run.json
    for number in (2, 4):
        age(root / f"piano/{number}", 2)
    done = clear(root, is_real=True)
    assert [(item.kind, item.name) for item in done.items] == [("starts", "piano/2")], "3 may be starting right now"
    assert (root / "piano/4/checkpoints/00000010").is_dir()
    assert any("piano/4" in text for text in done.kept)
    assert ended().id == "piano/5"


def test_what_killed_writers_left(ended: Start, start: Start, root: Path) -> None:
    over, going = ended(), start()
    made = []
    for folder in (over.path, over.path / "checkpoints", going.path, root / "piano"):
        folder.mkdir(exist_ok=True)
        (folder / ".run.json.123.part").write_bytes(b"12345")
        made.append(folder / ".run.json.123.part")
    (over.path / "checkpoints/.00000030.77.tmp").mkdir()
    (over.path / "checkpoints/.00000030.77.tmp/model.safetensors").write_bytes(b"1234567890")
    for path in [*made, over.path / "checkpoints/.00000030.77.tmp"]:
        age(path, 2)
    (over.path / ".config.yaml.9.part").write_bytes(b"new")
    done = clear(root, is_real=True)
    assert done.bytes_by_kind()["parts"] == 25
    assert made[2].exists(), "the folder of a running run was touched"
    assert (over.path / ".config.yaml.9.part").exists(), "somebody may be writing it"
    assert not made[0].exists()
    assert not made[3].exists()
    assert any("piano/2" in text for text in done.kept)


def test_saves_set_aside_and_copies_only_when_asked_for(ended: Start, root: Path) -> None:
    record = ended()
    for name in ("aside-1", "aside-2"):
        (record.path / "checkpoints" / name / "00000009").mkdir(parents=True)
        (record.path / "checkpoints" / name / "00000009/manifest.json").write_text("{}")
    (record.path / "metrics/columns").mkdir()
    (record.path / "metrics/columns/index.json").write_text("{}")
    ended(config={"init_from": str(record.path / "checkpoints/aside-2/00000009")})
    assert clear(root, is_real=True).items == []
    assert clear(root, days=1, aside=True).items == []
    done = clear(root, aside=True, copies=True, is_real=True)
    assert [item.name for item in done.items] == ["piano/1 aside-1", "piano/1 columns"], "piano/2 began with aside-2"
    assert (record.path / "metrics/000.ndjson").exists()


def test_a_save_set_aside_stays_for_who_loaded_it_by_the_name_of_the_run(ended: Start, root: Path) -> None:
    folder = make_saves(ended().path, 30)
    manifest = hashlib.sha256((folder / "00000030/manifest.json").read_bytes()).hexdigest()
    ended(config={"init_from": "piano/1"}, derived={"weights_from": {"step": 30, "manifest": manifest}})
    (folder / "aside-1").mkdir()
    os.rename(folder / "00000030", folder / "aside-1/00000030")  # as a resume from before step 30 does
    assert clear(root, aside=True, is_real=True).items == []
    age(folder, 10)
    remove(root, "piano/2")
    assert clear(root, days=5, aside=True, is_real=True).items == [], "whoever loaded it may come back"
    assert [item.kind for item in clear(root, aside=True, is_real=True).items] == ["trash", "aside"]


def test_a_run_of_a_newer_rung_keeps_its_snapshot(ended: Start, root: Path, repo: Path) -> None:
    code = read_document(ended(code_root=repo).path)["code"]
    newer = ended()
    amend(newer.path, code=code, schema=99)
    remove(root, "piano/1")
    assert clear(root, is_real=True).refs == []
    assert refs(repo) == {code["ref"]: code["commit"]}


def test_a_gc_that_was_killed_is_gone_on_with(ended: Start, root: Path, repo: Path) -> None:
    ended(code_root=repo)
    remove(root, "piano/1")
    os.rename(root / ".trash/piano.1", root / ".trash/.gone-piano.1.5")
    assert trash.removed(root) == []
    assert len(clear(root, is_real=True).refs) == 1
    assert not (root / ".trash").exists()
    assert refs(repo) == {}


# moving


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


# tags, pins, sizes


def test_tags(ended: Start, root: Path) -> None:
    record = ended(tags=["old", "x"])
    place = choose(["piano"], root)[0]
    assert retag(place, ["baseline", "x"], ["old", "none"]) == (["old", "x"], ["x", "baseline"])
    append_event(record.path, "note", text="unrelated")
    assert open_run("piano/1", root).document["tags"] == ["x", "baseline"]
    amend(record.path, tags=None)
    assert retag(place, ["a"], []) == ([], ["a"])


@given(st.text(max_size=120))
def test_a_tag_is_one_word_or_refused(text: str) -> None:
    said = ""
    tag = "none"
    try:
        tag = check_tag(text)
    except RunError as error:
        said = str(error)
    assert "\n" not in said
    assert "\x1b" not in said
    assert tag.split() == [tag]
    assert "\x1b" not in tag
    assert check_tag(tag) == tag


def test_pins_are_honoured_by_the_rotation(tmp_path: Path) -> None:
    folder = make_saves(tmp_path, 10, 20, 30, 40)
    engine = Checkpoints(folder)
    engine.mark_best(20)
    assert set_pin(folder, find_step(folder, "10", "x"), True, "x")
    assert not set_pin(folder, 10, True, "x")
    engine.clean(1)
    assert engine.steps() == [10, 20, 40]
    assert [(s.step, s.is_best, s.is_last, s.is_pinned) for s in saves(folder)] == [
        (10, False, False, True), (20, True, False, False), (40, False, True, False),
    ]  # fmt: skip
    assert set_pin(folder, find_step(folder, "10", "x"), False, "x")
    assert find_step(folder, "best", "x") == 20
    assert find_step(folder, "last", "x") == 40
    engine.clean(1)
    assert engine.steps() == [20, 40]


def test_pins_that_cannot_be(tmp_path: Path) -> None:
    folder = make_saves(tmp_path, 10, 20)
    (folder / "\u00b2").mkdir()  # a digit, but no number
    wrong = {"15": "no whole save at 15; it has 10, 20", "best": "marked as its best", "x": "not a checkpoint"}
    for word, said in wrong.items():
        with pytest.raises(RunError, match=said):
            find_step(folder, word, "piano/1")
    with pytest.raises(RunError, match="no whole save at 30 any more"):
        set_pin(folder, 30, True, "piano/1")
    with pytest.raises(RunError, match="has none"):
        find_step(tmp_path / "none", "last", "piano/1")
    (folder / "pinned").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="is damaged"):
        set_pin(folder, 10, True, "piano/1")
    (folder / "pinned").write_text("15\n")  # of a save that somebody deleted
    assert set_pin(folder, find_step(folder, "15", "piano/1"), False, "piano/1")


def test_sizes_count_a_file_once(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    make_saves(one, 10, num_bytes=1000)
    for folder in (one, two):
        (folder / "metrics").mkdir(parents=True)
        (folder / "metrics/000.ndjson").write_bytes(b"x" * 30)
        (folder / "run.json").write_bytes(b"x" * 7)
    (one / "mirror").mkdir()
    (one / "events.ndjson").write_bytes(b"x" * 5)
    os.link(one / "checkpoints/00000010/model.safetensors", one / "mirror/again")
    os.link(one / "checkpoints/00000010/model.safetensors", two / "weights")
    os.symlink(one, two / "link")
    manifest = (one / "checkpoints/00000010/manifest.json").stat().st_size
    sizes = [usage(one, "1"), usage(two, "2")]
    assert sizes[0].total == bytes_below(one) == 1000 + manifest + 30 + 7 + 5
    assert sizes[0].by_kind["metrics"] == 35
    assert sizes[1].by_kind["other"] == 1000 + 7 + (two / "link").lstat().st_size
    assert sum_once(sizes) == sizes[0].total + sizes[1].total - 1000
    assert freed_bytes(one) == sizes[0].total - 1000, "the other name of the file stays"
    assert freed_bytes(tmp_path) == sum_once(sizes)
