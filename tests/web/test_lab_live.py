"""If this fails, the page does not see what a run logs now, or reads a long file again for each new row."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rung.runs.annotate import note
from rung.runs.query import open_run
from rung.runs.record import Record
from rung.runs.tail import Tail
from tests.web.labs import ServedLab, start


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    record = start(tmp_path / "runs")
    record.log(0, {"loss": 4.0, "norm": 1.0})
    yield record
    record.close()


def tail_of(record: Record, *metrics: str) -> Tail:
    return Tail(record.id, record.path / "metrics", metrics)


def steps(found: dict[str, Any] | None) -> list[int]:
    assert found is not None
    return [row["step"] for row in found["rows"]]


def test_a_tail_gives_what_was_logged_since_and_each_row_once(record: Record) -> None:
    tail = tail_of(record)
    assert tail.read() is None
    record.log(1, {"loss": 3.0})
    record.log(2, {"loss": float("nan")})
    found = tail.read()
    assert steps(found) == [1, 2]
    assert found is not None
    assert found["rows"][1]["loss"] == "NaN"
    assert tail.read() is None


def test_a_tail_reads_only_the_new_bytes(record: Record) -> None:
    """What lies before is replaced by something that no reader could take for rows."""
    for step in range(1, 50):
        record.log(step, {"loss": 1.0})
    tail, file = tail_of(record), record.path / "metrics" / "000.ndjson"
    size = file.stat().st_size
    with file.open("r+b") as out:
        out.write(b'{"step":7,"loss":9}\n' * (size // 20))
    record.log(50, {"loss": 2.0})
    assert steps(tail.read()) == [50]


def test_a_line_that_is_being_written_waits_until_it_is_whole(record: Record) -> None:
    file = record.path / "metrics" / "000.ndjson"
    with file.open("ab") as out:
        out.write(b'{"step": 1, "lo')
    tail = tail_of(record)
    assert tail.read() is None
    with file.open("ab") as out:
        out.write(b'ss": 2.5}\nnot a row\n{"step": 2, "loss"')
    found = tail.read()
    assert found is not None
    assert found["rows"] == [{"step": 1, "loss": 2.5}]


def test_a_tail_of_some_metrics_leaves_the_others_out(record: Record) -> None:
    tail = tail_of(record, "loss")
    record.log(1, {"loss": 3.0, "norm": 2.0})
    record.log(1, {"eval/val/loss": 2.0})
    found = tail.read()
    assert found is not None
    assert [sorted(row) for row in found["rows"]] == [["loss", "step", "unix_s"]]


def test_a_resume_is_told(record: Record) -> None:
    record.finish("stopped")
    tail = tail_of(record)
    again = Record.reopen(record.path, command=["rung", "resume"])
    again.log(0, {"loss": 7.0})
    found = tail.read()
    assert found is not None
    assert (steps(found), found["restarted"]) == ([0], True)
    again.log(1, {"loss": 6.0})
    assert steps(tail.read()) == [1]
    again.close()


def test_a_run_that_has_logged_nothing_yet_is_followed_from_its_first_row(tmp_path: Path) -> None:
    folder = tmp_path / "piano" / "1" / "metrics"
    tail = Tail("piano/1", folder)
    assert tail.read() is None
    folder.mkdir(parents=True)
    (folder / "000.ndjson").write_bytes(b'{"step": 0, "loss": 1.0}\n')
    found = tail.read()
    assert steps(found) == [0]
    assert found is not None
    assert "restarted" not in found


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    kind = ""
    while line := response.readline():
        if line.startswith(b"event: "):
            kind = line[7:].decode().strip()
        elif line.startswith(b"data: "):
            yield kind, json.loads(line[6:])


def test_the_page_hears_of_rows_notes_new_runs_and_ends(record: Record, capfd: pytest.CaptureFixture[str]) -> None:
    served = ServedLab(record.path.parents[1])
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("GET", "/api/live?runs=piano/1")
    response = connection.getresponse()
    assert str(response.getheader("content-type")).startswith("text/event-stream")
    told = events(response)
    assert next(told) == ("hello", {"runs": ["piano/1"]})
    record.log(1, {"loss": 3.5})
    kind, found = next(told)
    assert (kind, found["run"], steps(found)) == ("rows", "piano/1", [1])

    other = start(record.path.parents[1], "world")
    note(open_run("piano/1", record.path.parents[1]), "look at this")
    changed: dict[str, Any] = {}
    while set(changed) < {"piano/1", "world/1"}:
        kind, found = next(told)
        assert kind == "runs"
        changed |= {row["run"]: row for row in found["changed"]}
    assert changed["piano/1"]["note"] == "look at this"
    assert changed["world/1"]["status"] == "running"
    other.finish("crashed")
    while changed["world/1"]["status"] == "running":
        changed |= {row["run"]: row for row in next(told)[1]["changed"]}
    assert changed["world/1"]["status"] == "crashed"
    served.stop()  # ends also while a page listens, and without complaint
    assert "Traceback" not in capfd.readouterr().err
    connection.close()


def test_a_process_that_is_gone_is_told_though_no_file_changed(tmp_path: Path) -> None:
    """As after kill -9: run.json says running for ever."""
    pid = os.fork()
    if pid == 0:
        start(tmp_path / "runs").log(0, {"loss": 1.0})
        os._exit(0)
    os.waitpid(pid, 0)
    served = ServedLab(tmp_path / "runs")
    (row,) = served.get("/api/runs")["runs"]
    assert (row["run"], row["status"]) == ("piano/1", "vanished")
    served.stop()
