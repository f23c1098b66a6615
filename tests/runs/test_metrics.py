"""If this fails, rows that a run logged are lost, changed or shown twice."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.errors import RunError
from rung.runs.metrics import Faults, MetricsWriter, last_row, next_segment, read_columns, read_rows
from tests.errors import raises_code

VALUES = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name not in ("step", "unix_s"))


def write(folder: Path, segment: int, steps: range, **values: float) -> None:
    writer = MetricsWriter(folder, segment)
    for step in steps:
        writer.log(step, {"loss": float(step), **values})
    writer.close()


@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=5), max_size=5))
@settings(max_examples=60, deadline=None)
def test_every_number_comes_back_exactly(rows: list[dict[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        writer = MetricsWriter(Path(name), 0)
        for step, row in enumerate(rows):
            writer.log(step, row)
        writer.close()
        back = list(read_rows(Path(name)))
        columns = read_columns(Path(name), [key for row in rows for key in row])
    assert [row["step"] for row in back] == list(range(len(rows)))
    for step, (row, read) in enumerate(zip(rows, back, strict=True)):
        assert read.keys() == {"step", "unix_s", *row}
        for key, value in row.items():
            assert same(read[key], value)
            assert same(columns[key][step], value)


def same(a: float, b: float) -> bool:
    return type(a) is type(b) and (repr(a) == repr(b))  # tells -0.0 from 0.0, and takes NaN for NaN


def test_scalars_of_other_libraries_and_none(tmp_path: Path) -> None:
    import numpy as np

    writer = MetricsWriter(tmp_path, 0)
    scalars: dict[str, Any] = {"a": np.float32(0.5), "b": np.int64(3), "c": np.float64("nan"), "d": 10**400, "e": True}
    writer.log(0, scalars)
    writer.log(1, {"a": None, "b": 1.0})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="metric 'a' is 'x', not a number"):
        writer.log(2, {"a": "x"})  # type: ignore[dict-item]
    first, second = read_rows(tmp_path)
    assert (first["a"], first["b"], first["d"], first["e"]) == (0.5, 3, math.inf, True)
    assert math.isnan(first["c"])
    assert read_columns(tmp_path, ["e"])["e"] == [True, None]
    assert "a" not in second


def test_a_torn_last_line_is_skipped_and_a_broken_one_counted(tmp_path: Path) -> None:
    write(tmp_path, 0, range(3))
    lines = (tmp_path / "000.ndjson").read_bytes().splitlines(keepends=True)
    (tmp_path / "000.ndjson").write_bytes(lines[0] + b'{"step": 1, "lo\xff\n' + b"[1]\n" + lines[2] + lines[1][:-5])
    by_row, by_column = Faults(), Faults()
    assert [row["step"] for row in read_rows(tmp_path, by_row)] == [0, 2]
    assert read_columns(tmp_path, [], by_column)["step"] == [0, 2]
    assert by_row.broken == by_column.broken == 2


def test_a_resume_supersedes_what_it_runs_again(tmp_path: Path) -> None:
    write(tmp_path, 0, range(10), attempt=0)
    write(tmp_path, 1, range(6, 9), attempt=1)
    write(tmp_path, 2, range(0))  # killed before its first row: supersedes nothing
    write(tmp_path, 3, range(8, 12), attempt=3)
    columns = read_columns(tmp_path)
    assert columns["step"] == list(range(12))
    assert columns["attempt"] == [0] * 6 + [1] * 2 + [3] * 4
    assert read_columns(tmp_path, ["attempt"])["attempt"] == columns["attempt"]
    assert [row["step"] for row in read_rows(tmp_path)] == list(range(12))
    assert next_segment(tmp_path) == 4


def test_a_column_that_starts_late_is_none_before(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0)
    writer.log(0, {"loss": 1.0})
    writer.log(1, {"loss": 0.5, "late": 2.0})
    for names in (None, ["loss", "late", "never"]):
        columns = read_columns(tmp_path, names)
        assert columns["late"] == [None, 2.0]
        assert columns["loss"] == [1.0, 0.5]
    assert columns["never"] == [None, None]
    assert read_columns(tmp_path / "nothing") == {"step": []}


def test_two_attempts_never_share_a_file(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, 0).close()
    with pytest.raises(FileExistsError):
        MetricsWriter(tmp_path, 0)


def test_last_row_reads_past_a_torn_line_and_an_empty_segment(tmp_path: Path) -> None:
    assert last_row(tmp_path) is None
    write(tmp_path, 0, range(200), **{f"value_{i}": 0.1 for i in range(30)})
    write(tmp_path, 1, range(0))
    with open(tmp_path / "000.ndjson", "ab") as file:
        file.write(b'{"step": 200, "lo')
    row = last_row(tmp_path)
    assert row is not None
    assert row["step"] == 199


WRITER = """
import sys
from pathlib import Path
from rung.runs.metrics import MetricsWriter
writer = MetricsWriter(Path(sys.argv[1]), 0)
for step in range(10**9):
    writer.log(step, {f"value_{i}": step + 0.1 * i for i in range(30)})
    if step % 50 == 0:
        sys.stdout.write(f"{step}\\n")
        sys.stdout.flush()
"""


def test_kill_9_loses_nothing_that_was_logged(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    printed = [int(child.stdout.readline()) for _ in range(20)][-1]
    child.send_signal(signal.SIGKILL)
    child.wait()
    printed = max([printed, *map(int, child.stdout.read().split("\n")[:-1])])
    child.stdout.close()
    faults = Faults()
    rows = list(read_rows(tmp_path, faults))
    assert faults.broken == 0
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) > printed
    assert all(len(row) == 32 and row["value_29"] == row["step"] + 0.1 * 29 for row in rows)


def test_a_full_disk_leaves_whole_lines_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = MetricsWriter(tmp_path, 0)
    writer.log(0, {"loss": 1.0})
    before = (tmp_path / "000.ndjson").read_bytes()
    real, room = os.write, [10]

    def short(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken, room[0] = data[: room[0]], 0
        return real(fd, taken)

    monkeypatch.setattr(os, "write", short)
    with raises_code("disk-full") as caught:
        writer.log(1, {"loss": 0.5})
    assert "000.ndjson" in str(caught.value)
    assert (tmp_path / "000.ndjson").read_bytes() == before
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
    room[0] = 10
    with pytest.raises(RunError):
        writer.log(1, {"loss": 0.5})
    monkeypatch.undo()
    writer.log(2, {"loss": 0.25})  # room again: the torn line must not swallow this one
    assert [row["step"] for row in read_rows(tmp_path)] == [0, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_really_full_device(tmp_path: Path) -> None:
    (tmp_path / "events.ndjson").symlink_to("/dev/full")
    from rung.runs.files import LineFile

    with raises_code("disk-full"):
        LineFile(tmp_path / "events.ndjson").append(b"{}\n")
