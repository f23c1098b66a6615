"""If this fails, a run that was deleted cannot come back, or one went that somebody needs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.runs.maintenance import moving, trash
from rung.runs.maintenance.cleaning import clean
from rung.runs.maintenance.selection import select, state_of
from rung.runs.maintenance.trash import reasons_to_keep
from rung.runs.marks import set_pin
from rung.runs.query import list_runs
from rung.runs.record import Record, amend, read_document
from tests.errors import raises_code
from tests.runs.maintenance.made import age, contents, make_saves, remove

Start = Callable[..., Record]


def test_names_of_runs(ended: Start, root: Path) -> None:
    for _ in range(5):
        ended()
    assert [p.id for p in select(["piano/2..4", "piano/4", "piano/last"], root)] == [f"piano/{n}" for n in (2, 3, 4, 5)]
    assert [p.id for p in select(["piano/4.."], root)] == ["piano/4", "piano/5"]
    assert [p.id for p in select(["piano/..2"], root)] == ["piano/1", "piano/2"]
    assert [p.number for p in select([str(root / "piano/3")], root)] == [3]
    for ref in ("piano/7..9", "piano/9", "bach/1..2"):
        with raises_code("no-run"):
            select([ref], root)


def test_a_folder_outside_of_a_runs_folder_is_left_to_its_owner(ended: Start, root: Path, tmp_path: Path) -> None:
    os.rename(ended().path, tmp_path / "copy")
    with raises_code("bad-folder"):
        select([str(tmp_path / "copy")], root)


# the trash


def test_there_and_back(ended: Start, root: Path) -> None:
    record = ended()
    before = contents(record.path)
    gone = remove(root, "piano/1")
    assert list_runs(root) == []
    assert contents(gone[0].run) == before
    assert [one.id for one in trash.trashed(root)] == ["piano/1"]
    assert ended().id == "piano/2", "a number was given twice"
    assert [one.id for one in trash.restore(root, ["piano/1"])] == ["piano/1"]
    assert contents(root / "piano/1") == before
    assert trash.trashed(root) == []


def test_a_number_is_not_given_again_where_the_counter_was_lost(ended: Start, root: Path) -> None:
    ended(), ended()
    (root / "piano/.last").unlink()  # as in a folder that was copied without hidden files
    remove(root, "piano/2")
    assert ended().id == "piano/3"
    (root / "piano/.last").unlink()
    remove(root, "piano/3")
    trash.restore(root, [])
    assert ended().id == "piano/4"


def test_the_last_removal_comes_back_together(ended: Start, root: Path) -> None:
    for _ in range(4):
        ended()
    remove(root, "piano/1")
    remove(root, "piano/2..3")
    assert sorted(one.id for one in trash.restore(root, [])) == ["piano/2", "piano/3"]
    assert [one.id for one in trash.restore(root, [])] == ["piano/1"]
    with raises_code("trash-empty"):
        trash.restore(root, [])


def test_coming_back_to_a_place_that_is_taken(ended: Start, root: Path) -> None:
    ended(), ended()
    remove(root, "piano/1..2")
    (root / "piano/2").mkdir()
    with raises_code("run-exists"):
        trash.restore(root, [])
    assert len(trash.trashed(root)) == 2, "one came back although both could not"
    with raises_code("no-run"):
        trash.restore(root, ["piano/7"])


def test_a_running_run_stays(start: Start, root: Path) -> None:
    start()
    with raises_code("wrong-state"):
        remove(root, "piano/1", force=True)
    with raises_code("wrong-state"):
        moving.move("piano", "bach", root, is_forced=True)
    assert [run.id for run in list_runs(root)] == ["piano/1"]
    assert not (root / "bach").exists()
    assert trash.entries(root) == []


def test_where_it_cannot_be_known_the_user_says_so(start: Start, root: Path) -> None:
    record = start()
    record.close()
    amend(record.path, process={**read_document(record.path)["process"], "host": "elsewhere"})
    age(record.path / "heartbeat", 1)
    with raises_code("wrong-state") as caught:
        remove(root, "piano/1")
    assert "--force" in str(caught.value)
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
    reasons = list(reasons_to_keep([state_of(p) for p in select(["piano/1"], root)]))
    assert [text.split()[0] for text in reasons] == [f"piano/{n}" for n in (2, 3, 4, 5, 6)], reasons
    assert list(reasons_to_keep([state_of(p) for p in select(["piano/1..6"], root)])) == [], "they go together"
    set_pin(folder, 30, True, "piano/1")
    assert "pinned" in "".join(reasons_to_keep([state_of(p) for p in select(["piano/1..6"], root)]))


def test_who_needs_a_run_that_rotated_its_save_away_or_is_of_a_newer_rung(ended: Start, root: Path) -> None:
    ended()
    ended(config={"init_from": "piano/1"}, derived={"weights_from": {"step": 30, "manifest": "0" * 64}})
    child = ended(parent="piano/1")
    (child.path / "run.json").write_text(json.dumps({**read_document(child.path), "schema": 99}))
    reasons = list(reasons_to_keep([state_of(p) for p in select(["piano/1"], root)]))
    assert reasons == ["piano/2 started with the weights of piano/1", "piano/3 comes from piano/1"]


def test_asking_who_needs_many_runs_reads_each_other_once(
    ended: Start, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        ended()
    read: list[Path] = []

    def weights(path: Path, document: Any) -> trash.InitialWeights:
        read.append(path)
        return trash.InitialWeights("", None)

    monkeypatch.setattr(trash, "initial_weights", weights)
    assert list(reasons_to_keep([state_of(p) for p in select(["piano/1..3"], root)])) == []
    assert [path.name for path in read] == ["4", "5", "6"]


@pytest.mark.parametrize("text", [b"{", b"[]", b"null", b'{"schema": 99, "status": "finished"}'])
def test_a_run_that_cannot_be_read_can_go_and_come_back(ended: Start, root: Path, text: bytes) -> None:
    record = ended()
    (record.path / "run.json").write_bytes(text)
    age(record.path / "heartbeat", 1)
    place = select(["piano/1"], root)[0]
    assert state_of(place).problem is not None
    with raises_code("run-damaged"):
        moving.move("piano/1", "bach", root)
    assert not (root / "bach").exists()
    remove(root, "piano/1", force=True)
    trash.restore(root, [])
    assert (root / "piano/1/run.json").read_bytes() == text


@pytest.mark.parametrize("note", [b"{", b"[]", b'{"id": "../../etc", "unix_s": "x"}'])
def test_a_damaged_note_does_not_lose_the_run(ended: Start, root: Path, note: bytes) -> None:
    ended("a.b-c")
    gone = remove(root, "a.b-c/1")
    (gone[0].folder / "note.json").write_bytes(note)
    assert [one.id for one in trash.trashed(root)] == ["a.b-c/1"]
    trash.restore(root, ["a.b-c/1"])
    assert [run.id for run in list_runs(root)] == ["a.b-c/1"]


def test_what_somebody_put_into_the_trash_by_hand_goes_nowhere_else(root: Path) -> None:
    for name in ("odd", ".odd", "a b.1"):
        (root / ".trash" / name / "run").mkdir(parents=True)
    names = [one.id for one in trash.trashed(root)]
    assert len(names) == 3
    for ids in ([], *([name] for name in names)):
        with raises_code("run-damaged"):
            trash.restore(root, ids)
    assert len(clean(root, is_real=True).items) == 3
