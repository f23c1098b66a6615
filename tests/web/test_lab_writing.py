"""If this fails, what somebody writes on the page is lost, or is something else than the verbs would have written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rung.runs.query import open_run
from tests.web.labs import ServedLab, start


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[ServedLab]:
    root = tmp_path / "runs"
    first = start(root, why="a first try")
    first.finish("finished")
    start(root, parent=first.id).finish("finished")
    served = ServedLab(root)
    yield served
    served.stop()


def write(lab: ServedLab, what: str, run: str = "piano/1", **body: Any) -> dict[str, Any]:
    answer = lab.post(f"/api/run/{run}/{what}", body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def refused(lab: ServedLab, what: str, run: str = "piano/1", **body: Any) -> str:
    answer = lab.post(f"/api/run/{run}/{what}", body)
    assert 400 <= answer.status < 500
    return answer.code


def test_a_note_is_one_of_the_run_and_can_be_taken_back(lab: ServedLab, tmp_path: Path) -> None:
    assert write(lab, "note", text="grüße\n# 2\n")["note"] == "grüße\n# 2"
    assert write(lab, "note", text="another")["note"] == "another"
    assert write(lab, "note", undo=True)["note"] == "grüße\n# 2"
    assert [note["text"] for note in open_run("piano/1", tmp_path / "runs").notes()] == ["grüße\n# 2"]
    assert refused(lab, "note", text="  ") == "text-empty"
    assert refused(lab, "note", text="x" * 100_001) == "too-large"
    assert refused(lab, "note") == "bad-value"


def test_a_hypothesis_replaces_the_one_before_and_stays_in_the_events(lab: ServedLab, tmp_path: Path) -> None:
    assert write(lab, "hypothesis", text="clipping is the cause")["why"] == "clipping is the cause"
    run = open_run("piano/1", tmp_path / "runs")
    assert run.document["why"] == "clipping is the cause"
    assert [event["text"] for event in run.events("hypothesis")] == ["clipping is the cause"]
    assert write(lab, "hypothesis", text="")["why"] is None


def test_a_verdict_is_given_and_taken_back(lab: ServedLab, tmp_path: Path) -> None:
    row = write(lab, "verdict", verdict="refuted", text="the norm did not fall")
    assert (row["verdict"], row["verdict_text"]) == ("refuted", "the norm did not fall")
    assert refused(lab, "verdict", verdict="perhaps") == "bad-value"
    assert write(lab, "verdict", verdict=None)["verdict"] is None
    assert refused(lab, "verdict", verdict=None) == "no-verdict"
    given = [event.get("word") for event in open_run("piano/1", tmp_path / "runs").events("verdict")]
    assert given == ["refuted", None]


def test_tags_are_those_that_were_sent(lab: ServedLab, tmp_path: Path) -> None:
    assert write(lab, "tags", tags=["a", "b"])["tags"] == ["a", "b"]
    assert write(lab, "tags", tags=["b", "c"])["tags"] == ["b", "c"]
    assert refused(lab, "tags", tags=["two words"]) == "bad-name"
    assert refused(lab, "tags", tags="b") == "bad-value"
    assert open_run("piano/1", tmp_path / "runs").document["tags"] == ["b", "c"]


def test_a_run_gets_another_name_and_its_children_follow(lab: ServedLab) -> None:
    assert write(lab, "rename", name="bach/5")["run"] == "bach/5"
    rows = {row["run"]: row for row in lab.get("/api/runs")["runs"]}
    assert rows["piano/2"]["parent"] == "bach/5"
    assert lab.ask("/api/run/piano/1").code == "run-moved"
    assert refused(lab, "rename", "piano/2", name="../x") == "bad-name"
    assert refused(lab, "rename", "piano/2", name="bach/5") == "run-exists"


def test_a_run_goes_to_the_trash_and_comes_back(lab: ServedLab, tmp_path: Path) -> None:
    assert refused(lab, "trash") == "in-use"  # piano/2 comes from it
    answer = write(lab, "trash", force=True)
    assert answer["is_trashed"]
    assert any("piano/2" in note for note in answer["notes"])
    assert [row["run"] for row in lab.get("/api/runs")["runs"]] == ["piano/2"]
    assert (tmp_path / "runs" / ".trash" / "piano.1" / "run" / "run.json").is_file()
    back = lab.post("/api/restore", {"run": "piano/1"})
    assert (back.status, back.json["run"]) == (200, "piano/1")
    assert len(lab.get("/api/runs")["runs"]) == 2


def test_a_run_that_is_running_is_not_thrown_away_but_may_be_written_to(lab: ServedLab, tmp_path: Path) -> None:
    record = start(tmp_path / "runs")
    assert refused(lab, "trash", record.id) == "wrong-state"
    assert write(lab, "note", record.id, text="while it runs")["note"] == "while it runs"
    record.finish("finished")
    assert open_run(record.id, tmp_path / "runs").notes()[0]["text"] == "while it runs"


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b"null", b"x" * ((1 << 20) + 1)])
def test_a_body_that_is_no_small_object_is_refused(lab: ServedLab, body: bytes) -> None:
    assert lab.post("/api/run/piano/1/note", body).status == 400
