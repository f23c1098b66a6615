"""If this fails, a question in SQL gets an answer that the record does not give, or could change a run."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rung.cli import sql
from rung.errors import RunError
from rung.runs import sql as tables
from rung.runs.query import Run
from rung.runs.record import Record, amend, append_event

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for number, rate in enumerate([1e-3, 1e-4], start=1):
        record = Record.create(
            root, "piano", recipe="piano", preset="tiny", command=["rung", "train"], seed=number,
            config={"lr": {"learning_rate": rate, "schedule": "cosine"}, "max": "40"},
            sources={"lr.learning_rate": "command line"}, derived={"parameters": 10}, data={},
            why="a 'quoted' \u001b[31m reason", tags=["baseline", f"n{number}"],
        )  # fmt: skip
        for step in range(4):
            row = {"loss": math.nan if step == 2 else 1.0 / (step + number), "norm": 0.1}
            record.log(step, row if number == 1 else {"loss": row["loss"]})
        record.log(3, {"eval/val/loss": 0.1 + 0.2})
        record.event("eval", step=3, results={"val": {"loss": 0.1 + 0.2}})
        record.update(best={"step": 3, "set": "val", "loss": 0.1 + 0.2})
        record.finish("finished")
    append_event(root / "piano/1", "note", text="first\nsecond")
    amend(root / "piano/2", verdict={"word": "refuted", "text": "no gain", "unix_s": 1.0})
    return root


def ask(root: Path, *args: str) -> Result:
    result = CliRunner().invoke(sql.command, [*args, "--runs", str(root)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows(root: Path, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ask(root, query, "--json").stdout)
    return found


def test_every_table_holds_what_the_record_says(root: Path) -> None:
    found = rows(root, "select id, seed, status, best_loss, verdict, verdict_text, tags, parameters, step from runs")
    assert found[1] == {
        "id": "piano/2", "seed": 2, "status": "finished", "best_loss": 0.1 + 0.2, "verdict": "refuted",
        "verdict_text": "no gain", "tags": ["baseline", "n2"], "parameters": 10, "step": 3,
    }  # fmt: skip
    query = "select run, value, number, source from config where key = 'lr.learning_rate' order by run"
    assert rows(root, query) == [
        {"run": "piano/1", "value": "0.001", "number": 0.001, "source": "command line"},
        {"run": "piano/2", "value": "0.0001", "number": 0.0001, "source": "command line"},
    ]
    assert rows(root, "select number from config where key = 'max' and run = 'piano/1'") == [{"number": 40.0}]
    assert rows(root, "select * from notes")[0]["text"] == "first\nsecond"
    assert rows(root, "select run, set, name, value from evals limit 1") == [
        {"run": "piano/1", "set": "val", "name": "loss", "value": 0.1 + 0.2}
    ]
    assert rows(root, "select kind, count(*) n from events group by kind order by kind")[0] == {"kind": "end", "n": 2}
    query = "select min, min_step, num_non_finite from summaries where run = 'piano/2' and name = 'loss'"
    assert rows(root, query) == [{"min": 0.2, "min_step": 3, "num_non_finite": 1}]
    assert rows(root, "select json->>'$.recipe' as recipe from runs limit 1") == [{"recipe": "piano"}]


def test_metrics_keep_nan_and_absence_apart(root: Path) -> None:
    found = rows(root, 'select run, step, loss, norm, "eval/val/loss" as val from metrics order by run, step, val')
    assert [row["loss"] for row in found[:5]] == [1.0, 0.5, "NaN", None, 0.25]
    assert [row["norm"] for row in found[5:]] == [None] * 5
    assert sorted(str(row["val"]) for row in found) == [str(0.1 + 0.2)] * 2 + ["None"] * 8
    joined = "select r.seed, min(m.loss) as best from metrics m join runs r on r.id = m.run group by 1 order by 1"
    assert rows(root, joined) == [{"seed": 1, "best": 0.25}, {"seed": 2, "best": 0.2}]
    assert rows(root, "select count(*) n from metrics") == [{"n": 10}]
    assert list(rows(root, "from metrics limit 1")[0]) == ["run", "step", "loss", "norm", "eval/val/loss"]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("select run, max(norm) from metrics group by run", ["norm"]),
        ("with m as (select loss, step from metrics) select step from m", []),
        ("select * from metrics", ["loss", "norm", "eval/val/loss"]),
        ("select count(*) from metrics", []),
    ],
)
def test_only_what_is_asked_for_is_read(
    query: str, names: list[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read = Run.arrays, []

    def arrays(run: Run, wanted: list[str]) -> Any:
        read.append(wanted)
        return real(run, wanted)

    monkeypatch.setattr(Run, "arrays", arrays)
    monkeypatch.setattr(Run, "events", lambda run, kind=None: pytest.fail("read"))
    ask(root, query)
    assert read == [names, names]


def test_csv_has_all_digits(root: Path) -> None:
    out = ask(root, "select id, best_loss, why from runs order by id", "--csv").stdout
    assert list(csv.reader(io.StringIO(out)))[1][:2] == ["piano/1", str(0.1 + 0.2)]


def test_a_table_on_the_screen_obeys_no_text(root: Path) -> None:
    out = ask(root, "select id, why from runs").stdout
    assert "\x1b" not in out
    assert "'quoted'" in out


def before(root: Path) -> dict[str, bytes]:
    kept = {}
    for folder, _, names in os.walk(root):
        for name in names:
            if "columns" not in folder and name != ".config.json":
                kept[os.path.join(folder, name)] = Path(folder, name).read_bytes()
    return kept


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select los from metrics", "los"),
        ("selec", "selec"),
        ("select * from nothing", "nothing"),
        ("", "0"),
        ("select 1; select 2", "2"),
        ("drop table runs", "drop"),
        ("create table x as select * from runs", "create"),
        ("copy runs to 'x.csv'", "copy"),
        ("attach 'x.db'", "attach"),
        ("set enable_external_access = true", "set"),
        ("select * from read_csv('{root}/piano/1/events.ndjson')", "read_csv|events.ndjson"),
        ("select * from '{root}/piano/1/run.json'", "run.json"),
        ("explain analyze copy runs to 'x.csv'", "copy|explain"),
    ],
)
def test_a_query_can_neither_write_nor_fail_with_a_traceback(query: str, said: str, root: Path) -> None:
    kept = before(root)
    with pytest.raises(RunError, match=said) as error:
        ask(root, query.format(root=root))
    assert "\n" not in str(error.value)
    assert before(root) == kept
    assert not Path("x.csv").exists()
    assert not Path("x.db").exists()


def test_without_a_query_the_tables_are_listed(root: Path) -> None:
    out = ask(root).stdout
    for name in (*tables.TABLES, "metrics"):
        assert f"{name} " in out
    assert "eval/val/loss" in out
    listed = json.loads(ask(root, "--json").stdout)
    assert listed["runs"]["best_loss"] == "DOUBLE"
    for example in sql._EXAMPLES:
        if "full_val" not in example:
            ask(root, example)
    assert "summaries" in ask(root, "show tables").stdout
    assert ask(root / "none", "select count(*) from runs, metrics").exit_code == 0


def test_runs_that_cannot_be_read_are_told_and_passed_over(root: Path) -> None:
    amend(root / "piano/1", schema=99)
    (root / "piano/2/config.sources.json").write_text("{")
    result = ask(root, "select id from runs", "--json")
    assert json.loads(result.stdout) == [{"id": "piano/2"}]
    assert "piano/1" in result.stderr
    assert rows(root, "select * from config") == []


def test_the_verb_is_light_and_says_what_is_missing(root: Path) -> None:
    code = (
        "import sys\nfrom rung.cli import sql\n"
        "print([name for name in ('torch', 'numpy', 'duckdb') if name in sys.modules])\n"
        "sys.modules['duckdb'] = None\n"
        "from rung.errors import RunError\n"
        f"try: sql.command(['select 1', '--runs', {str(root)!r}], standalone_mode=False)\n"
        "except RunError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, message = done.stdout.splitlines()
    assert loaded == "[]"
    assert "rung[query]" in message
