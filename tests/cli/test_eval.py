"""If this fails, a run cannot be evaluated on what it never saw, or what was found is lost or wrong."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.cli.test_train import Rung


@pytest.fixture
def rung(tmp_path: Path, piano_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rung:
    return Rung(tmp_path, piano_data, monkeypatch, capsys)


def test_another_split_is_evaluated_and_kept_with_the_run(rung: Rung) -> None:
    rung.train("optimizer.max_iters=4")
    text = rung("eval", "piano/1", "--split", "test")
    folder = rung.folder / "runs/piano/1/evals"
    found = json.loads((folder / "test-4.json").read_text())
    assert (found["run"], found["split"], found["step"], found["weights"]) == ("piano/1", "test", 4, "checkpoint 4")
    seen = found["sets"]["test"]
    assert f"{seen['loss']:.4f}" in text
    assert {"note_on", "velocity", "time"} <= set(seen["parts"])
    assert seen["rows"] == len((folder / "test-4.windows.jsonl").read_text().splitlines())
    rows = list(csv.DictReader((folder / "test-4.csv").open()))
    known = [loss for loss in seen["positions"]["loss"] if loss is not None]
    assert [float(row["loss"]) for row in rows if row["loss"]] == known
    assert (folder / "test-4.svg").read_text().startswith("<svg")
    events = list(rung.run("piano/1").events("examined"))
    assert [event["file"] for event in events] == ["evals/test-4.json"]


def test_the_same_look_twice_gives_the_same_bytes(rung: Rung) -> None:
    rung.train("optimizer.max_iters=4")
    folder = rung.folder / "runs/piano/1/evals"
    rung("eval", "piano/1", "--split", "test")
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    rung("eval", "piano/1", "--split", "test", "data.batch_size=4")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


def test_validation_by_split_is_the_eval_of_training(rung: Rung) -> None:
    rung.train("optimizer.max_iters=4")
    text = rung("eval", "piano/1", "--split", "validation", "--json", "--at", "4")
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    trained = rung.run("piano/1").evals()[-1]
    assert found["sets"]["validation"]["loss"] == pytest.approx(trained["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--split", "tst"], "train, validation, test"),
        (["--weights", "nowhere"], "nowhere"),
        (["--split", "test", "--weights", ".", "--at", "4"], "--at"),
        (["--weights", "."], "--weights"),
    ],
)
def test_mistakes_get_a_sentence(rung: Rung, words: list[str], said: str) -> None:
    rung.train("optimizer.max_iters=4")
    assert said in rung("eval", "piano/1", *words, code=2)
    assert not (rung.folder / "runs/piano/1/evals").exists()


def test_the_first_save_is_kept_for_good(rung: Rung) -> None:
    rung.train("optimizer.max_iters=9", "checkpoint.initial=true", "checkpoint.every=2", "checkpoint.keep=1")
    assert "00000000" in rung.run("piano/1").checkpoints()
    rung("eval", "piano/1", "--at", "0")


def test_patience_ends_a_run_that_no_longer_improves(rung: Rung) -> None:
    """A learning rate of zero: the first eval stays the best for ever."""
    words = ["optimizer.max_iters=40", "eval_interval=2", "eval_patience=3", "--no-check"]
    words += ["lr.learning_rate=0", "lr.min_lr=0"]
    rung.train(*words)
    run = rung.run("piano/1")
    assert run.status == "finished"
    assert [row["step"] for row in run.evals()] == [2, 4, 6, 8]
    assert run.checkpoints()[-1] == "00000008"


def test_patience_without_evals_is_refused(rung: Rung) -> None:
    assert "eval_patience=3 " in rung.train("eval_patience=3", "eval_interval=0", code=2)


def test_show_tells_of_it_and_survives_a_damaged_file(rung: Rung) -> None:
    rung.train("optimizer.max_iters=4")
    rung("eval", "piano/1", "--split", "test")
    file = rung.folder / "runs/piano/1/evals/test-4.json"
    seen = json.loads(file.read_text())["sets"]["test"]
    assert f"test {seen['loss']:.4f} ± {seen['se'] or 0:.4f}" in rung("show", "piano/1")
    file.write_text("{")
    assert "evals/test-4.json" in rung("show", "piano/1")
