"""If this fails, an odd file of another tracker ends `rung import` with a traceback, or becomes wrong numbers."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import struct
import zlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from rung.cli import cli
from rung.runs.query import list_runs, open_run
from rung.trackers.protobuf import of_bytes, of_double, of_int, of_single, of_text
from rung.trackers.tensorboard import frame


def ask(*words: str) -> str:
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def event_file(folder: Path, *events: tuple[float, int, dict[str, float]]) -> Path:
    folder.mkdir()
    data = b""
    for unix_s, step, values in events:
        scalars = b"".join(of_bytes(1, of_text(1, tag) + of_single(2, value)) for tag, value in values.items())
        data += frame(of_double(1, unix_s) + of_int(2, step) + of_bytes(5, scalars))
    (folder / "events.out.tfevents.1.x").write_bytes(data)
    return folder


def wandb_file(folder: Path, *rows: dict[str, str], config: str = "1") -> Path:
    """Records as wandb frames them; each value is JSON, or should be."""
    records = [of_bytes(17, of_text(1, folder.name) + of_text(3, "p") + of_text(8, "n\x1b[31m"))]
    records += [of_bytes(5, of_bytes(1, of_text(2, "key") + of_text(16, config)))]
    for row in rows:
        items = [of_bytes(1, of_text(2, key) + of_text(16, value)) for key, value in row.items()]
        records.append(of_bytes(2, b"".join(items)))
    data = b":W&B\xe1\xbe\x00"
    for record in records:
        data += struct.pack("<IHB", zlib.crc32(b"\x01" + record), len(record), 1) + record
    folder.mkdir()
    (folder / "run-x.wandb").write_bytes(data)
    return folder


@pytest.mark.parametrize("unix_s", [math.nan, math.inf, 1e300, -1e300, -5.0])
def test_a_moment_that_no_calendar_has_is_unknown(tmp_path: Path, unix_s: float) -> None:
    folder = event_file(tmp_path / "a", (unix_s, 0, {"loss": 1.0}), (unix_s, 1, {"loss": 0.5}))
    assert "1 of 1 runs imported" in ask("import", "tensorboard", str(folder), "--runs", str(tmp_path / "runs"))
    time = {"_timestamp": str(unix_s).replace("nan", "NaN").replace("inf", "Infinity")}
    folder = wandb_file(tmp_path / "b", {"loss": "1.0", "_step": "0", **time})
    assert "1 of 1 runs imported" in ask("import", "wandb", str(folder), "--runs", str(tmp_path / "runs"))
    for run in list_runs(tmp_path / "runs"):
        assert run.metrics(["loss"])["loss"][0] == 1.0
        assert run.document["totals"]["elapsed_s"] == 0.0


def test_steps_and_values_that_cannot_be(tmp_path: Path) -> None:
    rows = [
        {"loss": "1.5", "_step": "1"},
        {"loss": "2.5", "_step": "1" + "0" * 400},
        {"loss": "3.5", "_step": "1e300"},
        {"loss": "[" * 20_000, "_step": "2"},
        {"loss": "{", "_step": "3"},
        {"loss": "4.5", "_step": "4"},
    ]
    folder = wandb_file(tmp_path / "a", *rows, config="{")
    text = ask("import", "wandb", str(folder), "--experiment", "x", "--runs", str(tmp_path / "runs"))
    assert "2 rows with an impossible step" in text
    assert "1 records cannot be decoded" in text
    assert "\x1b" not in text
    assert open_run("x/1", tmp_path / "runs").metrics(["loss"]) == {"step": [1, 4], "loss": [1.5, 4.5]}


def test_a_metric_named_step_is_not_the_step(tmp_path: Path) -> None:
    values = {"step": 7.0, "tensorboard/step": 8.0, "unix_s": 9.0}
    folder = event_file(tmp_path / "a", (1.0, 3, values))
    ask("import", "tensorboard", str(folder), "--experiment", "x", "--runs", str(tmp_path / "runs"))
    columns = open_run("x/1", tmp_path / "runs").metrics()
    assert columns["step"] == [3]
    assert columns["unix_s"] == [1.0]
    assert sorted(value for (value,) in columns.values()) == [1.0, 3, 7.0, 8.0, 9.0]


def test_a_trackio_row_without_a_name_or_nested_without_end(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "p.db")) as database:
        database.execute("CREATE TABLE metrics (timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)")
        rows = [("2026-01-01", None, 0, '{"loss": 1}'), ("0001-01-01", None, 1, "[" * 100_000)]
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
        database.commit()
    text = ask("import", "trackio", str(tmp_path / "p.db"), "--runs", str(tmp_path / "runs"))
    assert "1 of 1 runs imported" in text
    assert "cannot be decoded" in text
