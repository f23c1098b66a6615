"""If this fails, a run cannot be found by its name, or another one is found."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from rung import parse
from rung.runs import query
from rung.runs.query import Run, list_runs, open_run
from rung.runs.record import Record, amend
from tests.errors import raises_code

Start = Callable[..., Record]


@pytest.fixture
def root(start: Start, tmp_path: Path) -> Path:
    for loss in (3.0, 1.5, math.nan, None):
        record = start()
        if loss is not None:
            record.update(best={"step": 1, "set": "val", "loss": loss, "checkpoint": None})
        record.finish("finished")
    start("text").finish("stopped")
    return tmp_path / "runs"


def test_the_ways_to_name_a_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ref, number in {"/2": 2, "": 4, "/last": 4, "/best": 2, "/02": 2, "/": 4}.items():
        assert open_run(f"piano{ref}", root).id == f"piano/{number}"
    assert open_run(str(root / "piano/3"), root).id == "piano/3"
    assert open_run(root / "text/1", Path("/nowhere")).id == "text/1"
    monkeypatch.chdir(root / "piano")
    assert open_run("3", Path("/nowhere")).id == "piano/3"


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("pinao/2", "piano"),
        ("zzz", "piano, text"),
        ("piano/9", "1 to 4"),
        ("text/best", "rung ls text"),
        ("a b/..", ""),
    ],
)
def test_names_that_lead_nowhere(ref: str, hint: str, root: Path) -> None:
    with raises_code("no-run") as caught:
        open_run(ref, root)
    assert hint in str(caught.value)


def test_a_folder_that_is_no_run(root: Path, tmp_path: Path) -> None:
    with raises_code("no-run"):
        open_run(str(tmp_path), root)
    with raises_code("no-run"):
        open_run("piano", tmp_path / "empty")


def test_listing_is_in_order_and_names_what_it_cannot_read(root: Path) -> None:
    assert [run.id for run in list_runs(root)] == ["piano/1", "piano/2", "piano/3", "piano/4", "text/1"]
    assert [run.id for run in list_runs(root, "text")] == ["text/1"]
    (root / "piano/11").mkdir()  # a start that was killed
    (root / "notes.txt").write_text("x")
    amend(root / "piano/2", schema=99)
    problems: list[str] = []
    assert len(list_runs(root, None, problems)) == 4
    assert len(problems) == 1
    assert "newer rung" in problems[0]
    with raises_code("no-run") as caught:
        list_runs(root, "txet")
    assert "text" in str(caught.value)
    assert list_runs(root / "nothing") == []


def test_listing_opens_only_run_json(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = parse.open_file

    def open_file(path: Path) -> IO[bytes]:
        opened.append(path.name)
        return real(path)

    monkeypatch.setattr(parse, "open_file", open_file)
    monkeypatch.setattr(builtins, "open", lambda *a, **k: pytest.fail(f"opened {a}"))
    assert {run.status for run in list_runs(root)} == {"finished", "stopped"}
    assert opened == ["run.json"] * 5


def test_what_a_run_holds(start: Start, tmp_path: Path) -> None:
    record = start()
    for name, is_whole in [("1000", True), ("200", True), ("300", False)]:
        (record.path / "checkpoints" / name).mkdir(parents=True)
        (record.path / "checkpoints" / name / "model.bin").write_bytes(b"x" * 1000)
        if is_whole:
            (record.path / "checkpoints" / name / "manifest.json").write_text("{}")
    (record.path / "checkpoints/link").hardlink_to(record.path / "checkpoints/200/model.bin")
    run = open_run("piano", tmp_path / "runs")
    assert run.checkpoints() == ["200", "1000"]
    assert 3000 < run.disk_bytes() < 3000 + 16_000
    assert run.config()["lr"] == {"learning_rate": 1e-4, "schedule": "cosine"}
    assert run.sources()["lr.learning_rate"] == "command line"
    assert run.data() == {"train": {"fingerprint": "7c1e"}}
    assert run.environment()["python"]
    assert run.document["code"]["kind"] == "none"


def test_a_broken_event_line_is_passed_over(start: Start, tmp_path: Path) -> None:
    record = start()
    record.event("note", text="one")
    record.close()
    with open(record.path / "events.ndjson", "ab") as file:
        file.write(b'{"kind": "no')
    amend(record.path, status="stopped")
    Record.reopen(record.path, command=[]).event("note", text="two")
    run = Run(record.path, query.read_document(record.path))
    assert [event.get("text") for event in run.events("note")] == ["one", "two"]


@pytest.mark.parametrize("field", ["id", "derived", "best", "code", "tags", "segments", "last_step"])
def test_a_field_of_another_shape_is_a_damaged_run_and_no_traceback(root: Path, field: str) -> None:
    amend(root / "piano/1", **{field: 1.5})
    with raises_code("run-damaged") as caught:
        open_run("piano/1", root)
    assert field in str(caught.value)
    problems: list[str] = []
    assert len(list_runs(root, "piano", problems)) == 3
    assert len(problems) == 1


def test_an_eval_of_several_events_is_one_and_a_resume_replaces_it(start: Start) -> None:
    record = start()
    record.log(0, {"loss": 1.0})
    record.event("eval", step=1, results={"val": {"loss": 2.0, "set": 5.0, "step": 9.0}})
    record.event("eval", step=1, results={"val": {"acc": 0.5}})
    assert query.open_run(record.path, Path()).evals() == [{"step": 1, "set": "val", "loss": 2.0, "acc": 0.5}]
    record.rewind()
    record.log(1, {"loss": 1.0})
    record.event("eval", step=1, results={"val": {"acc": 0.7}})
    assert query.open_run(record.path, Path()).evals() == [{"step": 1, "set": "val", "acc": 0.7}]
    record.finish("finished")


def test_a_step_that_no_array_can_hold_is_a_broken_row(start: Start) -> None:
    record = start()
    record.log(0, {"loss": 1.0})
    record.finish("finished")
    with (record.path / "metrics" / "000.ndjson").open("a") as file:
        file.write('{"step": 1' + "0" * 30 + ', "loss": 2.0}\n{"step": true, "loss": 3.0}\n')
    run = open_run(record.path, Path())
    assert run.metrics(["loss"])["loss"] == run.metrics()["loss"] == [1.0]
    assert run.series("loss").values.tolist() == [1.0]
