"""If this fails, a summary, a curve or an export shows other numbers than the rows of the run, or stale ones."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.runs import columns
from rung.runs.columns import current, read_arrays, read_lists, read_series, summaries
from rung.runs.metrics import MetricsWriter, read_columns, read_rows

VALUES = (
    st.floats(allow_nan=True, allow_infinity=True)
    | st.integers(-(2**70), 2**70)
    | st.booleans()
    | st.none()
    | st.text(max_size=3)
)
NAMES = st.sampled_from(["loss", "norm", "eval/val/loss", "Loss", "a\nb", 'é"\\'])
ROWS = st.lists(st.dictionaries(NAMES, VALUES, max_size=4), max_size=12)
SEGMENTS = st.lists(st.tuples(st.integers(0, 12), ROWS), min_size=1, max_size=4)


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any run counts as long, and chunks are short."""
    monkeypatch.setattr(columns, "_SMALL_BYTES", 1)
    monkeypatch.setattr(columns, "_CHUNK_ROWS", 3)


def text_of(first: int, rows: list[dict[str, Any]]) -> bytes:
    lines = []
    for at, row in enumerate(rows):
        named = {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        named = {k: {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(str(v), v) for k, v in named.items()}
        lines.append(json.dumps({"step": first + at // 2, **named}, allow_nan=False).encode() + b"\n")
    return b"".join(lines)


def expected(folder: Path) -> dict[str, list[tuple[int, int, float]]]:
    """Name -> (row, step, value) of what read_rows says and what is a number."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for at, row in enumerate(read_rows(folder)):
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                number = float(value) if abs(value) < 1e300 or isinstance(value, float) else math.inf
                found.setdefault(name, []).append((at, row["step"], number))
    return found


def check(folder: Path) -> None:
    wanted = expected(folder)
    found = summaries(folder)
    assert found.keys() == wanted.keys()
    arrays = read_arrays(folder, list(wanted))
    assert list(arrays.steps) == [row["step"] for row in read_rows(folder)]
    lists = read_lists(folder, list(wanted))
    for name, points in wanted.items():
        rows, values = arrays.columns[name]
        assert list(rows) == [row for row, _, _ in points]
        np.testing.assert_array_equal(values, [value for _, _, value in points])  # to the bit, but for NaN
        series = read_series(folder, name)
        assert list(series.steps) == [step for _, step, _ in points]
        if lists is not None:
            there = [(at, float(v)) for at, v in enumerate(lists[name]) if v is not None]
            assert repr(there) == repr([(row, value) for row, _, value in points])
        one = found[name]
        finite = [(value, step) for _, step, value in points if math.isfinite(value)]
        assert (one.count, one.num_non_finite) == (len(points), len(points) - len(finite))
        assert repr((one.last, one.last_step)) == repr((points[-1][2], points[-1][1]))
        if finite:
            assert (one.min, one.min_step) == min(finite, key=lambda pair: pair[0])
            assert (one.max, one.max_step) == max(finite, key=lambda pair: pair[0])
        else:
            assert one.min is one.max is one.min_step is one.max_step is None


@pytest.mark.parametrize("small_bytes", [1, 1 << 30])
@given(parts=SEGMENTS, cuts=st.lists(st.floats(0, 1), max_size=3))
@settings(max_examples=80, deadline=None)
def test_columns_are_the_rows_however_they_grew(
    small_bytes: int, parts: list[tuple[int, list[dict[str, Any]]]], cuts: list[float]
) -> None:
    """Segments are superseded, lines torn, and a reader looks again and again while the text grows."""
    with (
        tempfile.TemporaryDirectory() as name,
        patch.object(columns, "_SMALL_BYTES", small_bytes),
        patch.object(columns, "_CHUNK_ROWS", 3),
    ):
        folder = Path(name)
        for number, (first, rows) in enumerate(parts):
            text = text_of(first, rows)
            for cut in [*sorted(cuts), 1.0]:
                (folder / f"{number:03d}.ndjson").write_bytes(text[: int(cut * len(text))])
                check(folder)


def write(folder: Path, steps: range, segment: int = 0, **values: float) -> None:
    writer = MetricsWriter(folder, segment)
    for step in steps:
        writer.log(step, {"loss": 1.0 / (step + 1), **values})
    writer.close()


def test_a_run_that_grew_has_only_its_new_rows_read(long: None, tmp_path: Path) -> None:
    write(tmp_path, range(10))
    first = current(tmp_path)
    text = (tmp_path / "000.ndjson").read_bytes()
    progress: list[tuple[int, int]] = []
    with open(tmp_path / "000.ndjson", "ab") as file:
        file.write(text_of(10, [{"loss": 0.5, "late": 3}] * 4) + b'{"step": 99, "lo')
    second = current(tmp_path, lambda done, total: progress.append((done, total)))
    assert second.mark == first.mark is not None
    assert min(done for done, _ in progress) > len(text)
    assert second.num_rows == 14
    assert read_series(tmp_path, "late").values.tolist() == [3.0] * 4
    assert summaries(tmp_path)["late"].is_whole
    assert not summaries(tmp_path)["loss"].is_whole
    check(tmp_path)


def test_a_resume_makes_the_copy_anew_and_leaves_nothing_of_the_old(long: None, tmp_path: Path) -> None:
    write(tmp_path, range(10), old=1.0)
    first = current(tmp_path)
    write(tmp_path, range(4, 6), 1)
    second = current(tmp_path)
    assert first.mark != second.mark
    assert not [name for name in os.listdir(tmp_path / "columns") if name.startswith(str(first.mark))]
    assert summaries(tmp_path)["old"].count == 4
    check(tmp_path)


def test_another_file_of_the_same_name_is_not_taken_for_a_longer_one(long: None, tmp_path: Path) -> None:
    write(tmp_path, range(3))
    current(tmp_path)
    (tmp_path / "000.ndjson").write_bytes(text_of(7, [{"loss": 9.5}] * 40))
    check(tmp_path)
    assert summaries(tmp_path)["loss"].min == 9.5


def damaged_index(out: Path) -> None:
    (out / "index.json").write_bytes(b'{"version": 1, "par')


def index_of_another_version(out: Path) -> None:
    index = json.loads((out / "index.json").read_bytes())
    (out / "index.json").write_text(json.dumps({**index, "version": 99}))


def short_array(out: Path) -> None:
    file = next(out.glob("*.f8"))
    file.write_bytes(file.read_bytes()[:-8])


def no_array(out: Path) -> None:
    next(out.glob("*.step")).unlink()


def rest_of_a_killed_extension(out: Path) -> None:
    for file in out.glob("*.f8"):
        file.write_bytes(file.read_bytes() + b"\x01" * 11)


@pytest.mark.parametrize(
    "harm", [damaged_index, index_of_another_version, short_array, no_array, rest_of_a_killed_extension]
)
def test_a_damaged_copy_is_made_again(harm: Any, long: None, tmp_path: Path) -> None:
    write(tmp_path, range(10))
    current(tmp_path)
    harm(tmp_path / "columns")
    check(tmp_path)
    with open(tmp_path / "000.ndjson", "ab") as file:
        file.write(text_of(10, [{"loss": 0.5}] * 4))
    check(tmp_path)


def test_where_nothing_can_be_written_the_rows_are_read(
    long: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, range(10))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(Path, "mkdir", refuse)
    check(tmp_path)
    assert read_lists(tmp_path, ["loss"]) is None
    assert not (tmp_path / "columns").exists()


def test_a_disk_that_fills_up_leaves_no_half_copy(long: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(10))
    real, left = columns._append, [3]

    def append(path: Path, numbers: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(path, numbers)

    monkeypatch.setattr(columns, "_append", append)
    assert summaries(tmp_path)["loss"].count == 10
    assert os.listdir(tmp_path / "columns") == []


def _look(folder: str) -> float | None:
    columns._SMALL_BYTES = 1
    return summaries(Path(folder))["loss"].min


def test_many_readers_at_once_leave_one_whole_copy(long: None, tmp_path: Path) -> None:
    write(tmp_path, range(3000))
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert set(pool.map(_look, [str(tmp_path)] * 6)) == {1 / 3000}
    assert len({name.partition(".")[0] for name in os.listdir(tmp_path / "columns")} - {"index"}) == 1
    check(tmp_path)


def test_short_runs_keep_a_summary_and_no_arrays(tmp_path: Path) -> None:
    write(tmp_path, range(5))
    check(tmp_path)
    assert os.listdir(tmp_path / "columns") == ["index.json"]
    assert summaries(tmp_path / "nothing") == {}
    assert not (tmp_path / "nothing").exists()


def test_lists_hold_whole_numbers_as_such(long: None, tmp_path: Path) -> None:
    write(tmp_path, range(4), epoch=3, mixed=1)
    assert read_lists(tmp_path, ["epoch", "loss", "never", "step"]) == {
        "step": [0, 1, 2, 3],
        "epoch": [3, 3, 3, 3],
        "loss": read_columns(tmp_path, ["loss"])["loss"],
        "never": [None] * 4,
    }


def test_a_segment_whose_first_line_is_broken_supersedes_from_its_first_row_on(long: None, tmp_path: Path) -> None:
    write(tmp_path, range(10))
    (tmp_path / "001.ndjson").write_bytes(b"not a row\n")
    assert current(tmp_path).broken == 1
    assert summaries(tmp_path)["loss"].count == 10
    with open(tmp_path / "001.ndjson", "ab") as file:
        file.write(text_of(4, [{"loss": 0.5}]))
    assert summaries(tmp_path)["loss"].count == 5
    check(tmp_path)
