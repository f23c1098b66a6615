"""If this fails, an imported run is not what its tracker knew of it, or a verb cannot read it."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import RunError
from rung.runs.query import list_runs, open_run
from rung.runs.record import Record, check_name
from rung.trackers import import_run as import_module
from rung.trackers.history import History
from rung.trackers.import_run import earlier, experiment_for, import_run, renamed
from rung.trackers.tensorboard import TensorboardSink

Rung = Callable[..., subprocess.CompletedProcess[str]]


def history(**fields: Any) -> History:
    made = History("wandb", "p/abc", Path("wandb/run-abc"), "dreamy", "my project", **fields)
    for step in range(10):
        made.add(step, 1000.0 + step, {"train/loss": 2.0 - 0.1 * step, "grad_norm": math.inf if step == 3 else 1.0})
        if step % 5 == 4:
            made.add(step, 1000.5 + step, {"val/loss": math.nan if step == 9 else 1.5, "val/acc": 0.5, "step": step})
    return made


def event_file(folder: Path, why: str = "", **values: float) -> None:
    sink = TensorboardSink(folder, {"id": "a/1", "why": why}, {"lr": 0.1})
    sink.open()
    for step in range(5):
        sink.row(step, 1000.0 + step, {"loss": 1.0 / (step + 1), "val/loss": 2.0 / (step + 1), **values})
    sink.close("finished")


def test_a_run_has_rows_evals_config_times_and_its_source(tmp_path: Path) -> None:
    source = history(
        config={"a": {"b": 1}, "seed": 3}, notes="so\nand so", tags=["x"], status="crashed", reason="exit 1"
    )
    source.remarks.append((4, 1004.0, "a remark"))
    result = import_run(source, tmp_path, "series")
    run = open_run("series/1", tmp_path)
    assert result.run_id == run.id == "series/1"
    columns = run.metrics()
    assert columns["loss"] == [2.0 - 0.1 * step for step in range(10)]
    assert columns["norm"][3] == math.inf
    assert columns["unix_s"][0] == 1000.0
    assert columns["eval/val/loss"][4] == 1.5
    assert columns["wandb/step"][4] == 4
    assert [(e["step"], e["set"], str(e["loss"]), e["acc"]) for e in run.evals()] == [
        (4, "val", "1.5", 0.5),
        (9, "val", "nan", 0.5),
    ]
    assert run.best == {"step": 4, "set": "val", "loss": 1.5}
    assert run.config() == {"a": {"b": 1}, "seed": 3}
    assert run.sources() == {"a.b": "wandb", "seed": "wandb"}
    document = run.document
    assert (document["created"], document["ended"]) == ("1970-01-01T00:16:40.000Z", "1970-01-01T00:16:49.500Z")
    assert (run.status, document["reason"], document["seed"], document["tags"]) == ("crashed", "exit 1", 3, ["x"])
    assert (document["recipe"], document["why"]) == ("import wandb", "dreamy: so\nand so")
    assert document["code"]["kind"] == "none"
    assert "wandb" in document["code"]["reason"]
    assert {key: document["imported"][key] for key in ("from", "id", "path")} == {
        "from": "wandb", "id": "p/abc", "path": "wandb/run-abc"
    }  # fmt: skip
    assert document["imported"]["renamed"] == {
        "loss": "train/loss", "norm": "grad_norm", "eval/val/loss": "val/loss", "eval/val/acc": "val/acc",
        "wandb/step": "step",
    }  # fmt: skip
    assert [note["text"] for note in run.notes()] == ["a remark"]


def test_the_same_source_is_known_again(tmp_path: Path) -> None:
    assert earlier(tmp_path)(history()) is None
    import_run(history(), tmp_path, "series")
    found = earlier(tmp_path)(history())
    assert found is not None
    assert found.id == "series/1"


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_module, "write_json", fails)
    with pytest.raises(RunError, match="no space left"):
        import_run(history(), tmp_path / "runs", "series")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    assert import_run(history(), tmp_path / "runs", "series", is_dry=True).num_evals == 2
    assert list(tmp_path.iterdir()) == []


def test_no_two_metrics_become_one() -> None:
    made = history()
    for name in ("loss", "val_loss", "eval/val/loss", "unix_s", "train_loss"):
        made.add(0, None, {name: 0.0})
    names = renamed(made)
    assert len(set(names.values())) == len(names)
    assert names["loss"] == "loss"  # what is called so keeps it
    assert names["train/loss"] == "train/loss"
    assert names["eval/val/loss"] == "eval/val/loss"
    assert not {"step", "unix_s"} & set(names.values())


@given(st.lists(st.text(max_size=12) | st.sampled_from(["loss", "train/loss", "val_loss", "val/loss", "step"])))
def test_renaming_never_joins(names: list[str]) -> None:
    made = History("wandb", "x", Path("x"), "x")
    for name in names:
        made.add(0, None, {name: 1.0})
    assert len(set(renamed(made).values())) == len(set(names))


@given(st.text(max_size=120))
def test_any_project_gives_a_name_that_can_be_used(group: str) -> None:
    check_name(experiment_for(History("wandb", "x", Path("x"), "x", group)))


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab")), max_size=60))
def test_a_curve_that_goes_back_is_what_its_last_passes_say(points: list[tuple[int, str]]) -> None:
    made = History("tensorboard", "x", Path("x"), "x")
    expected: dict[str, dict[int, int]] = {"a": {}, "b": {}}
    for value, (step, name) in enumerate(points):
        made.add(step, None, {name: value})
        curve = expected[name]
        expected[name] = {**{s: v for s, v in curve.items() if s < step}, step: value}
    for name, curve in expected.items():
        assert {step: row[name] for step, _, row in made.rows() if name in row} == curve


def test_the_verb_imports_reports_and_skips(rung: Rung, tmp_path: Path) -> None:
    event_file(tmp_path / "logs" / "a", why="\x1b[31mred\x1b[0m <b>")
    event_file(tmp_path / "logs" / "b")
    dry = rung("import", "tensorboard", "logs", "--dry-run").stdout
    assert "nothing was written" in dry
    assert not (tmp_path / "runs").exists()
    done = rung("import", "tensorboard", "logs", "--experiment", "tb")
    assert "2 of 2 runs imported" in done.stdout
    assert "1 text" in done.stdout
    again = json.loads(rung("import", "tensorboard", "logs", "--experiment", "tb", "--json").stdout)
    assert [one["run"] for one in again] == [None, None]
    assert "imported as tb/1" in again[0]["remark"]
    assert "2 of 2" in rung("import", "tensorboard", "logs", "--experiment", "tb", "--again").stdout
    listed = json.loads(rung("ls", "--json").stdout)
    assert [one["id"] for one in listed] == ["tb/1", "tb/2", "tb/3", "tb/4"]
    shown = json.loads(rung("show", "tb/1", "--json").stdout)
    assert shown["best"] == {"step": 4, "set": "val", "loss": pytest.approx(0.4)}
    assert "import tensorboard" in rung("show", "tb/1").stdout
    rung("doctor", "tb/1")


def test_an_imported_run_can_be_mirrored_and_imported_once_more(rung: Rung, tmp_path: Path) -> None:
    event_file(tmp_path / "logs")
    rung("import", "tensorboard", "logs", "--experiment", "tb")
    said = rung("mirror", "tb/1", "tensorboard").stdout
    assert "5 rows of tb/1 for TensorBoard" in said
    assert "tensorboard --logdir runs/tb/1/mirror/tensorboard" in said
    rung("import", "tensorboard", "runs/tb/1/mirror", "--experiment", "back")
    first, second = (open_run(name, tmp_path / "runs").metrics() for name in ("tb/1", "back/1"))
    assert {name: first[name] for name in ("step", "loss", "eval/val/loss", "unix_s")} == {
        name: second[name] for name in ("step", "loss", "eval/val/loss", "unix_s")
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["wandb", "nothing"], "nothing does not exist"),
        (["wandb", "empty"], "no .wandb files under empty"),
        (["wandb", "wrong.wandb"], "is not a wandb file"),
        (["tensorboard", "empty"], "no event files of TensorBoard under empty"),
        (["tensorboard", "wrong.wandb"], "is not an event file of TensorBoard"),
        (["trackio", "nothing"], "no trackio database nothing"),
        (["trackio", "wrong.wandb"], "cannot be read as a trackio database"),
        (["tensorboard", "logs", "--experiment", "a/b"], "cannot name an experiment"),
    ],
)
def test_what_cannot_be_imported_is_one_sentence(rung: Rung, tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong.wandb").write_bytes(b"neither fish nor fowl, but long enough to be looked at")
    event_file(tmp_path / "logs")
    done = rung("import", *words, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_one_damaged_file_costs_no_other_run(rung: Rung, tmp_path: Path) -> None:
    event_file(tmp_path / "logs" / "good")
    (tmp_path / "logs" / "bad").mkdir()
    (tmp_path / "logs" / "bad" / "events.out.tfevents.1").write_bytes(b"x" * 100)
    done = rung("import", "tensorboard", "logs")
    assert "1 of 1 runs imported" in done.stdout
    assert "is not an event file" in done.stderr
    assert len(list_runs(tmp_path / "runs")) == 1


def test_a_trackio_project_becomes_runs(rung: Rung, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "proj.db") as database:
        database.execute("CREATE TABLE metrics (timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)")
        for step in range(3):
            database.execute("INSERT INTO metrics VALUES (?, 'a', ?, ?)", ("2026-01-01", step, '{"val_loss": "NaN"}'))
    database.close()
    rung("import", "trackio", "proj.db")
    run = open_run("proj/1", tmp_path / "runs")
    assert [str(one["loss"]) for one in run.evals()] == ["nan"] * 3
    assert run.best is None
    assert "does not say how a run ended" in run.document["reason"]


def test_a_mirror_of_an_unknown_or_empty_run(rung: Rung, start: Callable[..., Record], tmp_path: Path) -> None:
    missing = rung("mirror", "piano/9", "tensorboard", check=False)
    assert (missing.returncode, "Traceback" in missing.stderr) == (2, False)
    start().finish("stopped")
    assert "0 rows" in rung("mirror", "piano/1", "tensorboard").stdout
