"""If this fails, trackio's databases are read otherwise than trackio wrote them."""

from __future__ import annotations

import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from rung.trackers.trackio import find, home, read

pytest.importorskip("trackio")

SCRIPT = """
import math, trackio
trackio.init(project="my proj", name="first", config={"lr": 1e-3, "m": {"d": 2}}, embed=False)
for i in range(40):
    row = {"loss": 1 / (i + 1), "val/loss": math.nan if i == 2 else i, "inf": -math.inf, "nest": {"a": i}, "t": "x"}
    trackio.log(row, step=10 * i)
trackio.alert("look", text="at this")
trackio.finish()
trackio.init(project="my proj", name="first", config={"lr": 1e-2}, embed=False, resume="never")
trackio.log({"loss": 3.0})
trackio.finish()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trackio")
    subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        check=True,
    )
    return folder


def test_what_trackio_writes_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    problems: list[str] = []
    found = find("my proj")
    assert found == find(None) == find(str(folder)) == find(str(found[0])) == [home() / "myproj.db"]
    first, second = read(found, problems)
    assert problems == []
    rows = list(first.rows())
    assert [step for step, _, _ in rows] == list(range(0, 400, 10))
    assert [row["loss"] for _, _, row in rows] == [1 / (i + 1) for i in range(40)]
    assert math.isnan(rows[2][2]["val/loss"])
    assert (rows[3][2]["val/loss"], rows[3][2]["inf"], rows[3][2]["nest.a"]) == (3, -math.inf, 3)
    assert (first.name, first.group, first.config) == ("first", "myproj", {"lr": 1e-3, "m": {"d": 2}})
    assert first.left_out["text"] == 40
    assert [text for _, _, text in first.remarks] == ["look: at this"]
    assert first.started is not None
    assert all(unix_s is not None and unix_s >= first.started for _, unix_s, _ in rows)
    assert (second.name, second.config, second.num_rows) == ("first", {"lr": 1e-2}, 1)  # two runs of one name
    assert first.id != second.id


def test_an_older_database_without_ids_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        rows = [
            ("2026-01-01T00:00:00", "a", 0, '{"loss": "NaN"}'),
            ("x", "a", 1, "not json"),
            ("x", "b", 0, '{"loss": 1}'),
        ]
        database.executemany("INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?)", rows)
    database.close()
    a, b = read([path], [])
    assert [(a.name, a.num_rows), (b.name, b.num_rows)] == [("a", 1), ("b", 1)]
    assert "cannot be decoded" in a.problems[0]
    assert a.started == 1767225600.0
    assert b.started is None


def test_what_is_no_such_database_is_said(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database at all, but a text that is long enough to be looked at")
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE metrics (a)")
    database.close()
    problems: list[str] = []
    assert list(read(find(str(tmp_path)), problems)) == []
    assert [("not a trackio database" in problem, "cannot be read" in problem) for problem in problems] == [
        (True, False),
        (False, True),
    ]
    assert find("nothing of this name") == find(".") == []
