"""If this fails, `--mirror` shows another run than the record has, changes a run, or costs one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rung.cli import main
from rung.runs.query import Run, open_run

Call = Callable[..., str]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`rung ...` in this process, in a folder of its own; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RUNG_RUNS", raising=False)

    def call(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["rung", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert ended.value.code == code, out + err
        return out + err

    return call


@pytest.fixture
def train(call: Call, piano_data: Path) -> Call:
    words = (
        "model.n_layer=1 model.n_head=1 model.n_embd=16 data.context_size=32 data.batch_size=4 lr.warmup_iters=2 "
        "optimizer.max_iters=10 eval_interval=4 checkpoint.every=4 checkpoint.keep=9 sampling.num_tokens=4 "
        "system.device=cpu system.threads=1"
    )

    def train(*more: str, code: int = 0) -> str:
        data = f"dataset.base_dataset_name={piano_data}"
        return call("train", "piano", data, *words.split(), "--no-check", *more, code=code)

    return train


def curve(run: Run, name: str) -> list[tuple[int, float]]:
    columns = run.metrics([name])
    return [(step, value) for step, value in zip(columns["step"], columns[name]) if value is not None]


def assert_tensorboard_shows(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path / "mirror/tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    names = [name for name in run.metrics() if name not in ("step", "unix_s")]
    assert sorted(found.Tags()["scalars"]) == sorted(names)
    for name in names:
        shown = [(event.step, pytest.approx(event.value, rel=1e-6, nan_ok=True)) for event in found.Scalars(name)]
        assert curve(run, name) == shown, name


def test_tensorboard_shows_the_record_after_a_train_and_after_a_resume(train: Call, call: Call) -> None:
    text = train("--mirror", "tensorboard", "--mirror", "tensorboard")
    run = open_run("piano/1", Path("runs"))
    assert len(list((run.path / "mirror/tensorboard").iterdir())) == 1, "named twice is one mirror"
    assert text.count("tensorboard --logdir runs/piano/1/mirror/tensorboard") == 2, "at the start and at the end"
    assert_tensorboard_shows(run)
    call("resume", "piano/1", "--at", "4", "--mirror", "tensorboard")
    again = open_run("piano/1", Path("runs"))
    assert [part["first_step"] for part in again.document["segments"]] == [0, 4]
    assert len(curve(again, "loss")) == 10
    assert_tensorboard_shows(again)


def test_a_mirror_that_fails_does_not_change_the_run(train: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from rung.trackers.tensorboard import TensorboardSink

    train()
    write = TensorboardSink.row

    def fails(self: TensorboardSink, step: int, *rest: Any) -> None:
        if step >= 3:
            raise OSError("no \x1b[31mspace")
        write(self, step, *rest)

    monkeypatch.setattr(TensorboardSink, "row", fails)
    text = train("--mirror", "tensorboard")
    plain, mirrored = (open_run(f"piano/{number}", Path("runs")) for number in (1, 2))
    assert mirrored.status == "finished"
    assert curve(mirrored, "loss") == curve(plain, "loss")
    assert mirrored.evals() == plain.evals()
    told = [event["text"] for event in mirrored.events("warning") if event["text"].startswith("mirror")]
    assert len(told) == 1
    num_lost = sum(step >= 3 for step in mirrored.metrics()["step"])
    assert f"{num_lost} rows " in text
    assert "rung mirror piano/2 tensorboard" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_a_missing_package_is_said_before_a_run_exists(
    train: Call, call: Call, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    words = ("--mirror", "tensorboard", "--mirror", "wandb")
    text = train(*words, code=2) if verb == "train" else call("resume", "piano/1", *words, code=2)
    assert " wandb" in text
    assert text.count("\n") == 1
    assert not Path("runs").exists()


def test_a_tag_of_a_new_run_follows_the_rules_of_tags(train: Call) -> None:
    assert "two words" in train("--tag", "two words", code=2)
    assert not Path("runs").exists()
