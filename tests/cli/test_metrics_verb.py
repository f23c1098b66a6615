"""If this fails, `rung metrics` writes numbers that another program reads differently from what was recorded."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rung.cli import metrics
from rung.errors import RunError
from rung.runs.record import Record
from tests.errors import raises_code

LOSSES = [0.1 + 0.2, math.nan, math.inf, -math.inf, 1e-320, 2.0]
ODD = 'näme, with "quotes"\nand a line'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    record = Record.create(
        root, "own", recipe="mine", preset=None, command=["x"], seed=7, config={}, sources={}, derived={}, data={}
    )
    for step, loss in enumerate(LOSSES):
        record.log(step, {"loss": loss, "epoch": step, **({ODD: 0.5} if step == 2 else {})})
    record.event("eval", step=5, results={"val": {"loss": 0.1 + 0.2, "count": 17}, "test": {"loss": math.nan}})
    record.finish("finished")
    Record.create(
        root, "empty", recipe="mine", preset=None, command=["x"], seed=7, config={}, sources={}, derived={}, data={}
    ).finish("crashed")
    return root


def ask(root: Path, *args: str) -> Result:
    result = CliRunner().invoke(metrics.command, [*args, "--runs", str(root)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def same(found: list[Any], wanted: list[Any]) -> bool:
    return repr([float(value) for value in found]) == repr([float(value) for value in wanted])


def test_csv_read_back_by_three_libraries(root: Path, tmp_path: Path) -> None:
    text = ask(root, "own/1", "loss", "epoch", ODD).stdout
    file = tmp_path / "rows.csv"
    file.write_text(text)
    pandas, polars, duckdb = (pytest.importorskip(name) for name in ("pandas", "polars", "duckdb"))
    frame = pandas.read_csv(io.StringIO(text))
    assert list(frame.columns) == ["step", "loss", "epoch", ODD]
    assert same(frame["loss"].tolist(), LOSSES)
    assert frame["epoch"].tolist() == list(range(6))
    table = polars.read_csv(io.BytesIO(text.encode()))
    assert same(table["loss"].to_list(), LOSSES)
    assert table.to_series(3).to_list() == [None, None, 0.5, None, None, None]
    assert same([row[0] for row in duckdb.sql(f"select loss::double from read_csv('{file}')").fetchall()], LOSSES)


def test_json_rows_leave_out_what_is_absent(root: Path) -> None:
    rows = json.loads(ask(root, "own", "--json").stdout)
    assert [row["loss"] for row in rows] == [0.1 + 0.2, "NaN", "Infinity", "-Infinity", 1e-320, 2.0]
    assert [ODD in row for row in rows] == [False, False, True, False, False, False]
    assert all("unix_s" in row for row in rows)


def test_parquet_read_back_by_three_libraries(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "rows.parquet"
    ask(root, "own", "loss", "epoch", ODD, "--parquet", str(file))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("part")] == []
    pandas, polars, duckdb = (pytest.importorskip(name) for name in ("pandas", "polars", "duckdb"))
    table = polars.read_parquet(file)
    assert same(table["loss"].to_list(), LOSSES)
    assert table[ODD].to_list() == [None, None, 0.5, None, None, None]
    assert table["epoch"].dtype == polars.Int64
    assert same(pandas.read_parquet(file)["loss"].tolist(), LOSSES)
    found = duckdb.sql(f"select loss from '{file}'").fetchall()
    assert same([row[0] for row in found], LOSSES)


def test_which_rows(root: Path) -> None:
    assert ask(root, "own", "epoch", "--every", "2").stdout == "step,epoch\n0,0\n2,2\n4,4\n"
    assert ask(root, "own", "epoch", "--last", "2").stdout == "step,epoch\n4,4\n5,5\n"
    assert ask(root, "own", ODD).stdout.splitlines()[-1] == "2,0.5"  # only the row that has it
    assert ask(root, "empty").stdout == "step\n"
    assert ask(root, "empty", "--json").stdout == "[]\n"


def test_evals(root: Path) -> None:
    assert ask(root, "own", "--evals").stdout == f"step,set,loss,count\n5,val,{0.1 + 0.2!r},17\n5,test,NaN,\n"
    assert json.loads(ask(root, "own", "--evals", "loss", "--json").stdout)[1] == {
        "step": 5,
        "set": "test",
        "loss": "NaN",
    }


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["own", "los"], "no-metric"),
        (["own", "--evals", "los"], "no-metric"),
        (["empty", "loss"], "no-metric"),
        (["own", "--csv", "--json"], "options-conflict"),
    ],
)
def test_mistakes(root: Path, words: list[str], code: str) -> None:
    with raises_code(code):
        ask(root, *words)


def test_a_folder_that_is_not_there(root: Path) -> None:
    with pytest.raises(RunError, match=r"x\.parquet"):
        ask(root, "own", "--parquet", "no/such/folder/x.parquet")


def test_without_pyarrow_parquet_says_what_to_install(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RunError, match=r"pip install 'rung\[query\]'"):
        ask(root, "own", "--parquet", "x.parquet")


def test_needs_neither_numpy_nor_torch(root: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from rung.cli import metrics\n"
        f"metrics.command(['own', 'epoch', '--runs', {str(root)!r}], standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("step,epoch\n0,0\n")
