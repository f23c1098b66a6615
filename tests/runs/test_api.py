"""If this fails, `from rung import runs` gives other numbers than were recorded, or other runs than were asked for."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rung import runs
from rung.runs import columns
from rung.runs.query import Run, read_document
from rung.runs.record import Record, amend
from tests.errors import raises_code

Start = Callable[..., Record]


@pytest.fixture(params=["short", "long"])
def run(request: pytest.FixtureRequest, start: Start, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Six steps, an eval every other one, a NaN and an infinity, and a whole number."""
    if request.param == "long":
        monkeypatch.setattr(columns, "_SMALL_BYTES", 1)
    record = start()
    for step in range(6):
        loss = {3: math.nan, 4: math.inf}.get(step, 0.1 + step)
        record.log(step, {"loss": loss, "lr": 1e-3 / (step + 1), "epoch": step // 2})
        if step % 2:
            record.log(step, {"eval/val/loss": step / 3})
    record.finish("finished")
    return Run(record.path, read_document(record.path))


def test_series_hold_what_was_recorded(run: Run) -> None:
    loss = run.series("loss")
    assert loss.steps.tolist() == list(range(6))
    np.testing.assert_array_equal(loss.values, [0.1, 1.1, 2.1, math.nan, math.inf, 5.1])
    assert run.series("eval/val/loss").values.tolist() == [1 / 3, 3 / 3, 5 / 3]
    assert run.names() == ["loss", "lr", "epoch", "eval/val/loss"]
    assert run.summary()["loss"].num_non_finite == 2
    with raises_code("no-metric") as caught:
        run.series("los")
    assert "loss" in str(caught.value)


def test_metrics_as_lists_are_the_same_short_or_long(run: Run) -> None:
    found = run.metrics(["loss", "epoch", "never"])
    assert found["step"] == [0, 1, 1, 2, 3, 3, 4, 5, 5]
    assert found["epoch"] == [0, 0, None, 1, 1, None, 2, 2, None]
    assert found["never"] == [None] * 9
    assert repr(found["loss"]) == "[0.1, 1.1, None, 2.1, nan, None, inf, 5.1, None]"


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_frames_tell_absent_from_nan(run: Run, kind: str) -> None:
    pytest.importorskip(kind)
    every = run.frame(kind=kind)
    columns = rows_of(every)
    assert list(columns) == ["step", "loss", "lr", "epoch", "eval/val/loss"]
    assert repr(columns["loss"]) == "[0.1, 1.1, None, 2.1, nan, None, inf, 5.1, None]"
    assert columns["epoch"] == [0, 0, None, 1, 1, None, 2, 2, None]
    assert columns["eval/val/loss"] == [None, None, 1 / 3, None, None, 1.0, None, None, 5 / 3]
    some = rows_of(run.frame(["lr", "epoch"], kind))
    assert some == {
        "step": list(range(6)),
        "lr": [1e-3 / (step + 1) for step in range(6)],
        "epoch": [0, 0, 1, 1, 2, 2],
    }
    assert all(type(value) is int for value in some["epoch"])


def rows_of(frame: Any) -> dict[str, list[Any]]:
    if hasattr(frame, "to_dicts"):
        return {str(name): frame[name].to_list() for name in frame.columns}
    import pandas

    return {
        str(name): [None if value is pandas.NA else value for value in frame[name].tolist()] for name in frame.columns
    }


def test_a_frame_of_what_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_code("no-metric"):
        run.frame(["los"])
    with raises_code("bad-value"):
        run.frame(kind="excel")
    monkeypatch.setitem(sys.modules, "polars", None)
    with raises_code("not-installed") as caught:
        run.frame(kind="polars")
    assert "pip install 'polars'" in str(caught.value)


def test_open_list_and_table_look_where_they_should(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, rate in enumerate([1e-3, 1e-4, 1e-5], start=1):
        record = start(config={"lr": {"learning_rate": rate}}, why=f"try {number}")
        record.log(0, {"loss": 3.0 - number})
        record.update(best={"step": 0, "set": "val", "loss": [2.0, math.nan, 1.0][number - 1]})
        record.finish("finished" if number < 3 else "stopped")
    start("text").finish("crashed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNG_RUNS", raising=False)
    assert runs.open("piano").id == "piano/3"
    assert [run.id for run in runs.list()] == ["piano/1", "piano/2", "piano/3", "text/1"]
    assert [run.id for run in runs.list("piano", where=["lr.learning_rate<1e-3"], sort="min:loss")] == [
        "piano/3",
        "piano/2",
    ]
    assert [run.id for run in runs.list("piano", sort="best")] == ["piano/3", "piano/1", "piano/2"]  # NaN comes last
    assert [run.id for run in runs.list("piano", sort="best", reverse=True)] == ["piano/1", "piano/3", "piano/2"]
    assert runs.table("piano", columns=["lr.learning_rate", "min:loss", "status"], where=["status!=stopped"]) == [
        {"run": "piano/1", "lr.learning_rate": 1e-3, "min:loss": 2.0, "status": "finished"},
        {"run": "piano/2", "lr.learning_rate": 1e-4, "min:loss": 1.0, "status": "finished"},
    ]
    assert runs.table("text")[0]["best"] is None
    monkeypatch.chdir("/")
    assert runs.list() == []
    assert runs.open("piano/1", root=tmp_path / "runs").id == "piano/1"
    monkeypatch.setenv("RUNG_RUNS", str(tmp_path / "runs"))
    assert len(runs.list()) == 4
    amend(tmp_path / "runs/piano/1", schema=99)
    with raises_code("version-mismatch"):
        runs.list()
    problems: list[str] = []
    assert len(runs.list(problems=problems)) == len(runs.table()) == 3
    assert len(problems) == 1


def test_the_quick_copy_of_a_config_is_the_config(start: Start) -> None:
    tree = {"lr": {"rate": 1e-5, "names": ["NaN", "x"]}, "empty": {}, "none": None, "text": "1e-5", "on": True}
    record = start(config=tree)
    for _ in range(2):
        assert Run(record.path, read_document(record.path)).config(keep=True) == tree
    plain = start(config={"a": {"b": 1}})
    assert Run(plain.path, read_document(plain.path)).config() == {"a": {"b": 1}}
    assert not (plain.path / ".config.json").exists()
    assert Run(plain.path, read_document(plain.path)).config(keep=True) == {"a": {"b": 1}}
    assert (plain.path / ".config.json").is_file()
    assert Run(plain.path, read_document(plain.path)).config() == {"a": {"b": 1}}
    (plain.path / ".config.json").write_bytes(b"{")
    assert Run(plain.path, read_document(plain.path)).config() == {"a": {"b": 1}}
    (plain.path / "config.yaml").write_text("a: {b: 12345}\n")
    assert Run(plain.path, read_document(plain.path)).config() == {"a": {"b": 12345}}
    (plain.path / "config.yaml").write_text("a: [\n")
    with raises_code("run-damaged"):
        Run(plain.path, read_document(plain.path)).config()


def test_importing_the_api_imports_no_numpy() -> None:
    code = (
        "import sys\nfrom rung import runs\nruns.list(root='nowhere')\n"
        "print([name for name in ('numpy', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_tables_and_several_runs_as_data_frames(start: Start, tmp_path: Path, kind: str) -> None:
    pytest.importorskip(kind)
    root = tmp_path / "runs"
    for number in (1, 2):
        record = start(config={"lr": {"learning_rate": number / 10}}, tags=("a", "b")[:number])
        for step in range(number):
            record.log(step, {"loss": step + number / 2, **({"late": 1.0} if number == 2 else {})})
        record.finish("finished")
    asked = {"columns": ["lr.learning_rate", "tags", "min:late"], "root": root}
    plain = runs.table("piano", **asked)
    assert plain[1] == {"run": "piano/2", "lr.learning_rate": 0.2, "tags": ["a", "b"], "min:late": 1.0}
    columns = rows_of(runs.table("piano", kind=kind, **asked))
    assert (columns["run"], columns["lr.learning_rate"], columns["tags"]) == (
        ["piano/1", "piano/2"], [0.1, 0.2], ["a", "a b"],
    )  # fmt: skip
    both = rows_of(runs.frame([plain[0]["run"], runs.open("piano/2", root)], kind=kind, root=root))
    assert both["run"] == ["piano/1", "piano/2", "piano/2"]
    assert both["step"] == [0, 0, 1]
    assert both["loss"] == [0.5, 1.0, 2.0]
    assert both["late"][1:] == [1.0, 1.0]
    assert both["late"][0] is None
    with raises_code("bad-value"):
        runs.table("piano", kind="excel", root=root)
    with raises_code("too-few"):
        runs.frame([], kind=kind)
