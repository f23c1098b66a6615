"""If this fails, an upgrade of rung costs a user the runs that an older one recorded, or misreads those of a newer one.

older/november.tar.gz was written by rung 0.1.0 as of 18 November 2026 (commit 48eda1a), before saves and captures named
a schema: toy/1 finished, toy/2 was stopped at step 7 of 12, toy/3 diverged, own/1 is a loop of one's own; and data.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rung
from rung.cli import cli
from rung.compare.code import Snapshot, ran
from rung.compare.scaling.measured import split_eval
from rung.data.store import Store
from rung.engine import capture, checkpoint
from rung.remote.bucket import Bucket
from rung.remote.manifest import read_manifest
from rung.remote.push import push_run
from rung.runs.files import read_json, write_json
from rung.runs.query import Run, list_runs, open_run
from rung.runs.record import read_document
from rung.sweep.plan import load
from tests.errors import raises_code
from tests.sweep.made import made_sweep

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the user worked in, with the recipe, which is their own."""
    with tarfile.open(Path(__file__).with_name("older") / "november.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    shutil.copy(ROOT / "tests/contract/toy.py", tmp_path / "film.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("film", None)


def losses(run: Run) -> list[tuple[int, float]]:
    columns = run.metrics(["loss"])
    return [(step, loss) for step, loss in zip(columns["step"], columns["loss"]) if loss is not None]


def test_they_open_and_are_shown(lab: Path) -> None:
    runs = {run.id: run for run in list_runs(lab / "runs")}
    assert {name: run.status for name, run in runs.items()} == {
        "own/1": "finished", "toy/1": "finished", "toy/2": "stopped", "toy/3": "diverged",
    }  # fmt: skip
    assert [step for step, _ in losses(runs["toy/1"])] == list(range(12))
    assert losses(runs["toy/2"]) == losses(runs["toy/1"])[:7]
    assert len(losses(runs["own/1"])) == 20
    assert runs["own/1"].config() == {"lr": 0.1, "width": 4}
    assert [one["step"] for one in runs["toy/1"].evals()] == [5, 10, 12]
    for words in (["ls"], ["show", "toy/1"], ["show", "own/1"], ["diff", "toy/1", "toy/3"], ["metrics", "toy/2"]):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
    assert json.loads(CliRunner().invoke(cli, ["doctor", "toy/3", "--json"]).output)


def test_one_that_was_stopped_is_resumed_to_the_same_end(lab: Path) -> None:
    run = rung.resume("toy/2", display=False)
    assert run.status == "finished"
    whole = dict(losses(open_run("toy/1", lab / "runs")))
    assert dict(losses(run)) == pytest.approx(whole, rel=1e-5)  # to the bit where torch and the processor are the same
    saved = run.path / "checkpoints/00000012/manifest.json"
    assert read_json(saved)["schema"] == checkpoint.SCHEMA


def test_what_else_it_left_is_read(lab: Path) -> None:
    loss = rung.evaluate("toy/1")["held_out"]["loss"]
    assert loss == pytest.approx(open_run("toy/1", lab / "runs").evals()[-1]["loss"], rel=1e-5)
    (step,) = capture.steps(lab / "runs/toy/3/captures")
    assert capture.read(lab / f"runs/toy/3/captures/{step:08d}").facts[0]["step"] == step
    assert Store.open(lab / "data/toy").arrays["ids"].tolist() == list(range(12))
    assert push_run(Bucket(str(lab / "place"), is_new=True), lab / "runs/toy/1").num_sent > 10


def raised(file: Path) -> Path:
    """The same document, as if by a newer rung."""
    write_json(file, {**read_json(file), "schema": 99})
    return file


def of_an_eval(lab: Path) -> None:
    write_json(lab / "runs/toy/1/evals/test-12.json", {"schema": 99, "sets": {}})
    split_eval(open_run("toy/1", lab / "runs"), "test")


def of_what_it_executed(lab: Path) -> None:
    write_json(lab / "runs/toy/1/executed.json", {"schema": 99, "files": ["x"]})
    run = open_run("toy/1", lab / "runs")
    ran(run, Snapshot(run.id, run.path, {}))


def of_an_item(lab: Path) -> None:
    bucket = Bucket(str(lab / "place"), is_new=True)
    push_run(bucket, lab / "runs/own/1")
    raised(lab / "place/runs/own/1/manifest.json")
    read_manifest(bucket, "run", "own/1")


NEWER: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run.json": ("version-mismatch", lambda lab: read_document(raised(lab / "runs/toy/1/run.json").parent)),
    "a save": (
        "version-mismatch",
        lambda lab: checkpoint.load(raised(lab / "runs/toy/1/checkpoints/00000012/manifest.json").parent),
    ),
    "a capture": (
        "version-mismatch",
        lambda lab: capture.read(raised(next((lab / "runs/toy/3/captures").glob("*/capture.0.json"))).parent),
    ),
    "an eval": ("version-mismatch", of_an_eval),
    "executed.json": ("version-mismatch", of_what_it_executed),
    "data": ("data-mismatch", lambda lab: Store.open(raised(lab / "data/toy/manifest.json").parent)),
    "a sweep": ("sweep-newer", lambda lab: load(raised(made_sweep(lab / "runs").folder / "sweep.json").parent)),
    "an item in a bucket": ("version-mismatch", of_an_item),
}


@pytest.mark.parametrize("what", NEWER)
def test_what_a_newer_rung_wrote_is_refused(lab: Path, what: str) -> None:
    code, read = NEWER[what]
    (lab / "runs/toy/1/evals").mkdir()
    with raises_code(code) as raised_error:
        read(lab)
    assert "newer rung" in str(raised_error.value) or "update rung" in str(raised_error.value)
