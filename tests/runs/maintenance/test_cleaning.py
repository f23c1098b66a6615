"""If this fails, gc deletes what a run still needs, or leaves what nobody does."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from rung.runs.maintenance import trash
from rung.runs.maintenance.cleaning import clean, refs_of
from rung.runs.maintenance.disk import bytes_below
from rung.runs.query import list_runs, open_run
from rung.runs.record import Record, amend, read_document
from tests.runs.maintenance.made import age, git, make_saves, refs, remove

Start = Callable[..., Record]


def test_only_what_was_agreed_to_is_deleted(ended: Start, root: Path) -> None:
    ended(), ended()
    remove(root, "piano/1")
    plan = clean(root)
    assert [item.name for item in plan.items] == ["piano/1"]
    assert plan.bytes_by_kind()["trash"] == bytes_below(plan.items[0].path) > 0
    assert len(trash.trashed(root)) == 1, "looking deletes nothing"
    assert clean(root, days=1, is_real=True).items == []
    done = clean(root, is_real=True)
    assert done.bytes_by_kind() == plan.bytes_by_kind()
    assert not (root / ".trash").exists()
    assert [run.id for run in list_runs(root)] == ["piano/2"]
    assert ended().id == "piano/3"


def test_a_snapshot_goes_with_its_run_and_no_other(ended: Start, start: Start, repo: Path, tmp_path: Path) -> None:
    """Another runs folder of the same checkout has runs of the same names, and of the same commit."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ended(root=ours, code_root=repo)
    ended(root=theirs, code_root=repo)
    (repo / "a.py").write_text("a = 2\n")
    ended(root=theirs, code_root=repo)
    ended(root=ours, code_root=repo)
    path = ours / "piano/2"
    Record.reopen(path, command=["rung"]).finish("finished")
    before = refs(repo)
    uid = read_document(path)["uid"]
    assert {f"refs/rung/{uid}", f"refs/rung/{uid}.1"} < set(before)
    kept = {ref.ref for run in list_runs(theirs) for ref in refs_of(run.document)}
    remove(ours, "piano/2")
    assert refs(repo) == before, "what can be brought back keeps its code"
    done = clean(ours, is_real=True)
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
    assert clean(root, is_real=True).refs == []
    assert name in refs(repo)


def test_a_run_json_cannot_have_a_branch_deleted(ended: Start, root: Path, repo: Path) -> None:
    record = ended(code_root=repo)
    code = read_document(record.path)["code"]
    for ref in ("refs/heads/main", "refs/rung/x/1\ndelete refs/heads/main"):
        amend(record.path, code={**code, "ref": ref})
        remove(root, "piano/1")
        assert clean(root).refs == []
        trash.restore(root, [])


def test_starts_that_were_killed(start: Start, ended: Start, root: Path) -> None:
    ended()
    for number in (2, 3, 4):
        (root / f"piano/{number}").mkdir()
        (root / f"piano/{number}/config.yaml").write_text("a: 1\n")
    make_saves(root / "piano/4", 10)  # this was a run: somebody has lost its run.json
    for number in (2, 4):
        age(root / f"piano/{number}", 2)
    done = clean(root, is_real=True)
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
    done = clean(root, is_real=True)
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
    assert clean(root, is_real=True).items == []
    assert clean(root, days=1, aside=True).items == []
    done = clean(root, aside=True, copies=True, is_real=True)
    assert [item.name for item in done.items] == ["piano/1 aside-1", "piano/1 columns"], "piano/2 began with aside-2"
    assert (record.path / "metrics/000.ndjson").exists()


def test_a_save_set_aside_stays_for_who_loaded_it_by_the_name_of_the_run(ended: Start, root: Path) -> None:
    folder = make_saves(ended().path, 30)
    manifest = hashlib.sha256((folder / "00000030/manifest.json").read_bytes()).hexdigest()
    ended(config={"init_from": "piano/1"}, derived={"weights_from": {"step": 30, "manifest": manifest}})
    (folder / "aside-1").mkdir()
    os.rename(folder / "00000030", folder / "aside-1/00000030")  # as a resume from before step 30 does
    assert clean(root, aside=True, is_real=True).items == []
    age(folder, 10)
    remove(root, "piano/2")
    assert clean(root, days=5, aside=True, is_real=True).items == [], "whoever loaded it may come back"
    assert [item.kind for item in clean(root, aside=True, is_real=True).items] == ["trash", "aside"]


def test_a_run_of_a_newer_rung_keeps_its_snapshot(ended: Start, root: Path, repo: Path) -> None:
    code = read_document(ended(code_root=repo).path)["code"]
    newer = ended()
    amend(newer.path, code=code, schema=99)
    remove(root, "piano/1")
    assert clean(root, is_real=True).refs == []
    assert refs(repo) == {code["ref"]: code["commit"]}


def test_a_gc_that_was_killed_is_gone_on_with(ended: Start, root: Path, repo: Path) -> None:
    ended(code_root=repo)
    remove(root, "piano/1")
    os.rename(root / ".trash/piano.1", root / ".trash/.gone-piano.1.5")
    assert trash.trashed(root) == []
    assert len(clean(root, is_real=True).refs) == 1
    assert not (root / ".trash").exists()
    assert refs(repo) == {}
