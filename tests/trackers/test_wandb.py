"""If this fails, wandb's files are read otherwise than wandb reads them, or a mirror in wandb differs from its record.

What we read is held against wandb's own `wandb leet inspect`; what we mirror is read back by both.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rung.runs.query import open_run
from rung.runs.record import Record
from rung.trackers.history import History
from rung.trackers.mirror import open_mirror, replay
from rung.trackers.wandb import from_wandb_name, is_ended, log_records, read, to_wandb_name
from tests.errors import raises_code

pytest.importorskip("wandb")

SCRIPT = """
import math, os, sys, wandb
run = wandb.init(mode="offline", dir=sys.argv[1], id="abc", name="näme", notes="why\\nnot", tags=["a", "b"],
                 project="p", config={"a": {"b": 1, "c": [1, 2]}, "lr": 1e-4, "gone": 1, "seed": 5},
                 settings=wandb.Settings(console="off", x_disable_stats=True, silent=True))
run.config.update({"late": "x"})
for i in range(800):
    row = {"loss": 1.0 / (i + 1), "a/b": i, "nest": {"x": i, "y": {"z": 2.5}}, "flag": i % 2 == 0, "big": 2**60 + i}
    if i % 300 == 7:
        row |= {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "val/loss": 1.0 / (i + 1), "step": i}
        row["k"] = "x" * 40000  # longer than a block of the file
    run.log(row, step=2 * i)
run.log({"table": wandb.Table(columns=["a"], data=[[1]]), "h": wandb.Histogram([1, 2]), "text": "t"}, step=9999)
run.alert("title", "text")
if sys.argv[2] == "dies":
    os.kill(os.getpid(), 9)
run.finish(exit_code=int(sys.argv[2]))
"""

GLOBAL_STEP = """
import sys, wandb
settings = wandb.Settings(console="off", silent=True)
run = wandb.init(mode="offline", dir=sys.argv[1], id="hf", project="p", settings=settings)
run.define_metric("train/global_step")
run.define_metric("*", step_metric="train/global_step", step_sync=True)
for step in (10, 20, 30):
    run.log({"train/loss": 1.0 / step, "train/global_step": step})
    run.log({"eval/loss": 2.0 / step, "train/global_step": step})
run.finish()
"""


def wandb_run(script: str, folder: Path, *words: str) -> Path:
    folder.mkdir()
    home = {f"WANDB_{name}_DIR": str(folder / "home") for name in ("CONFIG", "CACHE", "DATA")}
    subprocess.run(
        [sys.executable, "-c", script, str(folder), *words],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}, **home, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wandb_run(SCRIPT, tmp_path_factory.mktemp("wandb") / "run", "0")


def file_of(folder: Path) -> Path:
    return next(folder.rglob("*.wandb"))


def only(path: Path, problems: list[str] | None = None) -> History:
    histories = list(read(path, [] if problems is None else problems))
    assert len(histories) == 1
    return histories[0]


def inspected(path: Path) -> list[dict[str, Any]]:
    """The records as wandb itself reads them."""
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"this wandb cannot inspect its files: {done.stderr[-200:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_rows_are_those_that_wandb_reads(finished: Path) -> None:
    history = only(finished)
    ours = {step: row for step, _, row in history.rows()}
    num_rows = 0
    for record in inspected(file_of(finished)):
        if record["type"] != "history":
            continue
        item = record["history"]["item"]
        row = ours.pop(item["_step"], {})
        for name, value in item.items():
            if name in ("_step", "_timestamp", "_runtime", "k", "text") or name.split(".")[0] in ("table", "h"):
                continue
            expected = float(value) if value in ("NaN", "Infinity", "-Infinity") else value
            assert str(float(row.pop(name))) == str(float(expected)), name
        assert row == {}
        num_rows += 1
    assert (num_rows, ours) == (801, {})


def test_what_is_said_of_the_run_is_read(finished: Path) -> None:
    history = only(finished)
    assert (history.id, history.name, history.notes, history.tags) == ("p/abc", "näme", "why\nnot", ["a", "b"])
    assert history.config == {"a": {"b": 1, "c": [1, 2]}, "lr": 1e-4, "gone": 1, "seed": 5, "late": "x"}
    assert (history.status, history.reason, history.problems) == ("finished", "", [])
    assert is_ended(file_of(finished))
    assert history.left_out == {"table-file": 1, "histogram": 1, "text": 4}
    assert history.remarks == [(None, None, "title: text")]
    assert history.environment["packages"]["wandb"]
    assert history.started is not None
    assert history.ended is not None
    assert history.ended >= history.started
    rows = {step: row for step, _, row in history.rows()}
    assert rows[14]["nest.y.z"] == 2.5
    assert rows[14]["big"] == 2**60 + 7
    assert math.isnan(rows[14]["nan"])
    assert (rows[14]["inf"], rows[14]["minus"], rows[14]["flag"]) == (math.inf, -math.inf, 0)


def test_how_it_ended_is_what_the_file_says(tmp_path: Path) -> None:
    failed = only(wandb_run(SCRIPT, tmp_path / "failed", "3"))
    assert (failed.status, failed.reason) == ("crashed", "exit code 3")
    died = only(wandb_run(SCRIPT, tmp_path / "died", "dies"))
    assert died.status == "crashed"
    assert "killed, or is still running" in died.reason


def test_the_metric_that_is_the_step_of_all_is_the_step(tmp_path: Path) -> None:
    history = only(wandb_run(GLOBAL_STEP, tmp_path / "hf"))
    assert [(step, sorted(row)) for step, _, row in history.rows()] == [
        (step, ["eval/loss", "train/global_step", "train/loss"]) for step in (10, 20, 30)
    ]


def test_a_torn_file_gives_what_was_whole(finished: Path, tmp_path: Path) -> None:
    whole = file_of(finished).read_bytes()
    num_records = len(list(log_records(file_of(finished), [])))
    torn = tmp_path / "run-abc.wandb"
    last = 0
    for length in sorted({*range(7, 400), *range(32768 - 20, 32768 + 20), *range(7, len(whole), 9973)}):
        torn.write_bytes(whole[:length])
        problems: list[str] = []
        found = len(list(log_records(torn, problems)))
        assert problems == []
        assert last <= found < num_records
        last = found
    assert not is_ended(torn)
    history = only(torn)
    assert history.status == "crashed"
    assert history.num_rows > 300


def test_a_damaged_block_is_passed_over_and_told(finished: Path, tmp_path: Path) -> None:
    data = bytearray(file_of(finished).read_bytes())
    data[3 * 32768 + 500] ^= 0xFF
    damaged = tmp_path / "run-abc.wandb"
    damaged.write_bytes(data)
    history = only(damaged)
    whole = only(file_of(finished))
    assert len(history.problems) == 1
    assert "is damaged at byte" in history.problems[0]
    assert whole.num_rows - 200 < history.num_rows < whole.num_rows
    rows = {step: row for step, _, row in whole.rows()}
    assert all(str(rows[step]) == str(row) for step, _, row in history.rows())


@given(st.lists(st.integers(0, 70_000) | st.integers(32_740, 32_768), max_size=5), st.integers(0, 20))
def test_records_of_any_length_come_back(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], first: int
) -> None:
    """Held against the description of the format, not against wandb: its writer does not let us choose lengths."""
    expected = [bytes([number % 251]) * length for number, length in enumerate([32_768 - 7 - 7 - first, *lengths])]
    data = b":W&B\xe1\xbe\x00"
    for record in expected:
        rest, is_first = record, True
        while rest or is_first:
            left = 32_768 - len(data) % 32_768
            if left < 7:
                data += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[is_first, not rest]
            data += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            is_first = False
    path = tmp_path_factory.mktemp("lengths") / "x.wandb"
    path.write_bytes(data)
    problems: list[str] = []
    assert list(log_records(path, problems)) == expected
    assert problems == []


@given(st.binary(max_size=200))
def test_no_bytes_bring_it_down(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "x.wandb"
    path.write_bytes(b":W&B\xe1\xbe\x00" + data)
    list(log_records(path, []))


def test_another_kind_of_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.wandb"
    path.write_bytes(b"PK\x03\x04 and so on")
    with raises_code("bad-source"):
        list(log_records(path, []))
    problems: list[str] = []
    assert list(read(tmp_path, problems)) == []
    assert "is not a wandb file" in problems[0]


def test_a_mirror_holds_what_the_record_holds(start: Callable[..., Record], tmp_path: Path) -> None:
    record = start(why="is <b>this</b>\nkept?", tags=("a", "x" * 80))
    run = open_run(record.path, tmp_path)
    mirror = open_mirror("wandb", record.path, run.document, run.config())
    record.follow(mirror)
    odd = {"_step": 1.0, "": 2.0, "a.b": 3.0, "%41": 4.0, "ü\n": 5.0, "step_": 6.0}
    for step in range(50):
        record.log(step, {"loss": 1 / (step + 1), "norm": math.inf, "batch_hash": 7901251229803357.0, **odd})
        if step % 10 == 0:
            record.log(step, {"eval/val/loss": math.nan, "eval/val/acc": -math.inf})
    record.event("note", text="a note")
    record.finish("diverged")
    assert mirror.problem is None
    assert "wandb sync" in mirror.summary_line()

    assert len(list((record.path / "mirror" / "wandb").glob("offline-run-*"))) == 1
    for _ in range(2):
        history = only(record.path / "mirror")
        assert history.id == f"piano/{run.document['uid']}"
        assert (history.name, history.notes, history.tags) == (run.id, "is <b>this</b>\nkept?\n\na note", ["a"])
        assert (history.status, history.config) == ("diverged", run.config())
        merged: dict[int, dict[str, Any]] = {}
        for at in range(50):
            merged[at] = {"loss": 1 / (at + 1), "norm": math.inf, "batch_hash": 7901251229803357.0, **odd}
            if at % 10 == 0:
                merged[at] |= {"eval/val/loss": math.nan, "eval/val/acc": -math.inf}
        found = {step: row for step, _, row in history.rows()}
        assert {step: {k: str(float(v)) for k, v in sorted(row.items())} for step, row in found.items()} == {
            step: {k: str(float(v)) for k, v in sorted(row.items())} for step, row in merged.items()
        }
        replay("wandb", open_run(record.path, tmp_path))  # and the same once more from the record


@given(st.text())
@example("\n")
@example("")
def test_names_travel_and_come_back(name: str) -> None:
    there = to_wandb_name(name)
    assert there
    assert not there.startswith("_")
    assert from_wandb_name(there) == name


@given(st.lists(st.text(), unique=True, max_size=8))
def test_no_two_names_become_one(names: list[str]) -> None:
    assert len({to_wandb_name(name) for name in names}) == len(names)
