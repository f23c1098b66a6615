"""If this fails, a run is resumed or sampled with another config than its weights were trained with, or a resume that
failed leaves a run that seems to have vanished."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rung
from rung.config import key, section
from rung.engine.checkpoint import Checkpoints
from rung.errors import CheckpointError
from rung.runs.query import open_run
from tests.contract.toy import Config, Model, Toy
from tests.errors import raises_code

WORDS = [
    "data.batch_size=4", "optimizer.max_iters=8", "lr.warmup_iters=2", "lr.learning_rate=1e-3", "eval_interval=4",
    "checkpoint.every=4", "checkpoint.keep=0", "system.device=cpu",
]  # fmt: skip


@dataclass
class LaterModel(Model):
    adversarial: float = key(0.5, "Its default was another one once.", low=0)
    depth: int = key(1, "Did not exist then.", low=1)


@dataclass
class LaterConfig(Config):
    model: LaterModel = section(LaterModel, "Both networks.")


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rung.Run:
    monkeypatch.chdir(tmp_path)
    return rung.train("tests.contract.toy:Toy", WORDS, check=False, display=False)


def losses(run: rung.Run) -> list[Any]:
    return [loss for loss in run.metrics(["loss"])["loss"] if loss is not None]


def edit(run: rung.Run, old: str, new: str) -> None:
    file = run.path / "config.yaml"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_a_default_that_changed_since_is_not_trained_on(
    trained: rung.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = losses(trained)
    monkeypatch.setattr(Toy, "Config", LaterConfig)
    assert losses(rung.train("tests.contract.toy:Toy", WORDS, check=False, display=False)) != before  # it matters
    again = rung.resume(trained, at=4)
    assert losses(again) == before
    said = capsys.readouterr().err
    assert "model.adversarial=0.1 (now 0.5)" in said
    assert "model.depth=1" in said
    assert rung.load(trained).config["model"] == {"width": 8, "dropout": 0.1, "adversarial": 0.1, "depth": 1}


def test_an_edited_config_is_refused_and_taken_when_it_is_asked_for(trained: rung.Run) -> None:
    before = losses(trained)
    edit(trained, "learning_rate: 0.001", "learning_rate: 0.002")
    edit(trained, "dropout: 0.1", "dropout: 0.0")
    with raises_code("config-edited") as caught:
        rung.resume(trained, at=4, display=False)
    assert "lr.learning_rate=0.001 is now 0.002" in str(caught.value)
    assert "model.dropout=0.1 is now 0.0" in str(caught.value)  # at its default when it was trained
    assert losses(trained) == before
    assert rung.load(trained).config["lr"]["learning_rate"] == 0.001  # what the weights were trained with
    again = rung.resume(trained, at=4, accept_edits=True, display=False)
    assert again.status == "finished"
    assert losses(again)[:4] == before[:4]
    assert losses(again)[5:] != before[5:]
    [event] = again.events("resume")
    assert event["edits"] == {"lr.learning_rate": [0.001, 0.002], "model.dropout": [0.1, 0.0]}


def test_what_each_attempt_may_take_anew_may_be_edited(trained: rung.Run) -> None:
    before = losses(trained)
    edit(trained, "threads: 0", "threads: 1")
    assert losses(rung.resume(trained, at=4, display=False)) == before


def test_saves_are_set_aside_again_after_some_of_them_were_deleted(trained: rung.Run) -> None:
    for _ in range(2):
        rung.resume(trained, at=4, display=False)
    shutil.rmtree(trained.path / "checkpoints" / "aside-1")
    assert rung.resume(trained, at=4, display=False).status == "finished"
    assert sorted(path.name for path in (trained.path / "checkpoints").glob("aside-*")) == ["aside-2", "aside-3"]


def test_a_resume_that_fails_leaves_the_run_as_it_was(trained: rung.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Checkpoints, after: int) -> list[int]:
        raise CheckpointError("no room", code="cannot-write")

    with monkeypatch.context() as patch, raises_code("cannot-write"):
        patch.setattr(Checkpoints, "set_aside", fail)
        rung.resume(trained, at=4, display=False)
    assert open_run(trained.id, trained.path.parent.parent).status == "finished"
    assert rung.resume(trained, at=4, display=False).status == "finished"
