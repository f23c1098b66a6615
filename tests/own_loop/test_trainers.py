"""If this fails, a run of somebody's Trainer has other numbers, or another end, than the Trainer told.

Whole trainings with both are in tests/test_examples.py; here is what they tell, without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rung.own_loop.huggingface import Callback
from rung.own_loop.lightning import Book
from rung.own_loop.run import OwnRun
from tests.own_loop.test_run import ended

Start = Callable[..., OwnRun]


@dataclasses.dataclass
class Arguments:
    learning_rate: float = 5e-5
    output_dir: str = "somewhere"
    hub_token: str = "hf_secret"
    seed: int = 3
    warmup_steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def state(step: int, is_first: bool = True) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, is_world_process_zero=is_first, max_steps=20, best_metric=None)


def test_what_the_trainer_of_hugging_face_tells(start: Start) -> None:
    callback, args = Callback("theirs", why="to see", every=0), Arguments(learning_rate=1e-3)
    callback.on_train_begin(args, state(0), None)
    callback.on_log(args, state(10), None, logs={"loss": 2.0, "grad_norm": 0.5, "learning_rate": 1e-3, "epoch": 0.5})
    for name, loss in (("wiki", 3.0), ("code", 4.0)):
        logs = {f"eval_{name}_loss": loss, f"eval_{name}_runtime": 0.1, "epoch": 0.5}
        callback.on_log(args, state(10), None, logs=logs)
    callback.on_log(args, state(20), None, logs={"loss": 1.0, "epoch": 1.0})
    callback.on_log(args, state(20), None, logs={"train_runtime": 9.0, "train_loss": 1.5})
    callback.on_train_end(args, state(20), None)
    assert callback.run is not None
    found = ended(callback.run)
    assert (found.document["experiment"], found.document["why"], found.document["seed"]) == ("theirs", "to see", 3)
    rows = found.metrics(["loss", "norm", "lr"])
    assert [(s, v) for s, v in zip(rows["step"], rows["loss"]) if v is not None] == [(9, 2.0), (19, 1.0)]
    assert [(e["step"], e["set"], e["loss"]) for e in found.evals()] == [(10, "wiki", 3.0), (10, "code", 4.0)]
    assert found.document["derived"]["num_steps"] == found.step == 20
    assert found.document["summary"]["train_loss"] == 1.5
    assert found.config()["logging"] == {"output_dir": "somewhere", "hub_token": "(hidden)"}
    assert found.sources()["learning_rate"] == "script"
    assert found.sources()["warmup_steps"] == "default"


def test_other_processes_of_hugging_face_say_nothing(start: Start) -> None:
    callback = Callback("theirs")
    callback.on_train_begin(Arguments(), state(0, is_first=False), None)
    callback.on_log(Arguments(), state(1, is_first=False), None, logs={"loss": 1.0})
    assert callback.run is None


def test_a_run_that_is_going_on_is_taken(start: Start) -> None:
    run = start("already")
    callback, book = Callback("theirs", every=0), Book("theirs")
    callback.on_log(Arguments(), state(1), None, logs={"loss": 1.0})
    assert callback.run is run
    assert book.experiment is run


def test_what_lightning_tells(start: Start) -> None:
    book = Book("theirs", why="to see")
    book.log_hyperparams({"width": 8})
    book.log_metrics({"train_loss": 1.0, "epoch": 0}, step=0)
    book.log_metrics({"val_loss": 2.0, "epoch": 0}, step=0)
    book.finalize("success")
    book.log_metrics({"test_acc": 0.5}, step=1)
    assert (book.name, book.version) == ("theirs", "1")
    found = ended(book.experiment)
    assert found.config() == {"width": 8}
    assert [(e["step"], e["set"]) for e in found.evals()] == [(0, "val"), (1, "test")]
    assert found.status == "finished"


def fail(book: Book) -> None:
    try:
        raise ValueError("the loader broke")
    except ValueError:
        book.finalize("failed")
        raise


def test_a_training_of_lightning_that_fails_has_crashed(start: Start) -> None:
    book = Book("theirs")
    book.log_metrics({"train_loss": 1.0}, step=0)
    with pytest.raises(ValueError, match="broke"):
        fail(book)
    assert book.experiment.status == "crashed"
