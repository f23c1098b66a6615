"""If this fails, a mirror can stop, slow or outlive a run, or loses rows without saying so."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rung.runs.query import open_run
from rung.runs.record import Record
from rung.trackers import mirror as mirror_module
from rung.trackers.mirror import Mirror, open_mirror, replay, require
from tests.errors import raises_code

Start = Callable[..., Record]


class Kept:
    """A sink that remembers, and can be told to stand still or to fail."""

    name = "Kept"

    def __init__(self, *, stands: bool = False, fails_at: int | None = None) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.notes: list[str] = []
        self.status: str | None = None
        self.num_refused = 0
        self.goes = threading.Event()
        self.taken = threading.Event()
        self._fails_at = fails_at
        if not stands:
            self.goes.set()

    def open(self) -> None: ...

    def row(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self.taken.set()
        self.goes.wait()
        if step == self._fails_at:
            raise SystemExit("the server\nsaid no")
        self.rows.append((step, values))

    def note(self, step: int | None, unix_s: float, text: str) -> None:
        self.notes.append(text)

    def flush(self) -> None: ...

    def close(self, status: str) -> None:
        self.status = status

    def summary_line(self) -> str:
        return "mirror: kept"


def followed(start: Start, sink: Kept) -> tuple[Record, Mirror]:
    record = start()
    mirror = Mirror("tensorboard", sink, record.path, record.id)
    record.follow(mirror)
    return record, mirror


def warnings(record: Record) -> list[str]:
    return [event["text"] for event in open_run(record.path, record.path).events("warning")]


def test_every_row_and_note_arrives_before_finish_returns(start: Start) -> None:
    sink = Kept()
    record, mirror = followed(start, sink)
    for step in range(500):
        record.log(step, {"loss": float(step), "targets": 3})
    record.event("note", text="<b>so far</b>")
    record.event("save", step=3)
    record.finish("stopped")
    assert [step for step, _ in sink.rows] == list(range(500))
    assert sink.rows[7][1] == {"loss": 7.0, "targets": 3}
    assert (sink.notes, sink.status) == (["<b>so far</b>"], "stopped")
    assert (mirror.problem, mirror.num_dropped, mirror.summary_line()) == (None, 0, "mirror: kept")


def test_a_full_queue_drops_rows_and_never_waits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "MOST_WAITING", 5)
    sink = Kept(stands=True)
    record, mirror = followed(start, sink)
    record.log(0, {"loss": 0.0})
    sink.taken.wait()  # row 0 is out of the queue now, and held
    for step in range(1, 20):
        record.log(step, {"loss": 0.0})
    assert mirror.num_dropped == 14
    sink.goes.set()
    record.finish("finished")
    assert [step for step, _ in sink.rows] == [0, 1, 2, 3, 4, 5]
    assert "14 rows are not in it" in mirror.summary_line()
    assert "rung mirror" in mirror.summary_line()
    assert len(warnings(record)) == 1
    assert "14 rows" in warnings(record)[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_ends_the_mirror_and_not_the_run(start: Start) -> None:
    sink = Kept(fails_at=3)
    record, mirror = followed(start, sink)
    for step in range(50):
        record.log(step, {"loss": 1.0})
    record.finish("finished")
    run = open_run(record.path, record.path)
    assert run.status == "finished"
    assert len(run.metrics(["loss"])["step"]) == 50
    assert mirror.problem == "Kept failed: the server said no"
    assert "47 rows are not in it" in mirror.summary_line(), "from step 3 on"
    assert len(warnings(record)) == 1, "it is told once"
    assert "the server said no" in warnings(record)[0]
    assert "rung mirror" in warnings(record)[0]


def test_finish_gives_up_on_a_tracker_that_stands_still(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "FINISH_S", 0.01)
    sink = Kept(stands=True)
    record, mirror = followed(start, sink)
    for step in range(4):
        record.log(step, {"loss": 1.0})
    record.finish("finished")
    assert mirror.problem is not None
    assert "did not take everything" in mirror.problem
    assert "4 rows are not in it" in mirror.summary_line()
    assert len(warnings(record)) == 1
    sink.goes.set()


def test_values_that_are_no_plain_numbers_do_not_end_it(start: Start) -> None:
    import numpy as np

    sink = Kept()
    mirror = Mirror("tensorboard", sink, start().path, "piano/1")
    mirror.row(0, {"a": np.float32(0.5), "b": None, "c": True, "d": "text", "e": 10**400, "f": float("nan")})
    mirror.finish("finished")
    values = dict(sink.rows[0][1])
    assert str(values.pop("f")) == "nan"
    assert values == {"a": 0.5, "c": 1, "e": float("inf")}


def test_a_missing_package_is_said_before_anything_starts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    record = start()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises_code("not-installed"):
        open_mirror("wandb", record.path, open_run(record.path, record.path).document, {})
    require("tensorboard")
    with raises_code("no-mirror"):
        require("mlflow")


def test_a_replay_that_fails_leaves_the_earlier_mirror(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    record = start()
    record.log(0, {"loss": 1.0})
    record.finish("finished")
    run = open_run(record.path, record.path)
    replay("tensorboard", run)
    before = sorted(path.name for path in (record.path / "mirror").rglob("*"))

    def fails(*_: Any) -> None:
        raise ValueError("no\nmore")

    monkeypatch.setattr("rung.trackers.tensorboard.TensorboardSink.row", fails)
    with raises_code("mirror-failed"):
        replay("tensorboard", run)
    assert sorted(path.name for path in (record.path / "mirror").rglob("*")) == before


def test_the_mirror_of_a_running_run_is_not_replaced_under_it(start: Start) -> None:
    record = start()
    record.log(0, {"loss": 1.0})
    run = open_run(record.path, record.path)
    assert replay("tensorboard", run)[1] == 1  # there was none yet
    with raises_code("wrong-state"):
        replay("tensorboard", run)
    record.finish("finished")
    replay("tensorboard", open_run(record.path, record.path))


def test_a_replay_is_complete_and_replaces(start: Start, tmp_path: Path) -> None:
    from rung.trackers.tensorboard import read

    record = start()
    for step in range(10):
        record.log(step, {"loss": float(step)})
    record.finish("stopped")
    again = Record.reopen(record.path, command=["rung", "resume"])
    for step in range(6, 12):
        again.log(step, {"loss": -float(step)})
    again.finish("finished")
    run = open_run(record.path, tmp_path)
    for _ in range(2):
        _, num_rows = replay("tensorboard", run)
        assert num_rows == 12
    histories = list(read(record.path / "mirror", []))
    assert len(histories) == 1
    assert [(step, row["loss"]) for step, _, row in histories[0].rows()] == [
        (step, float(step) if step < 6 else -float(step)) for step in range(12)
    ]
