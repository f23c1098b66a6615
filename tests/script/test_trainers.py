"""If this fails, a run of somebody's Trainer has other numbers, or another end, than the Trainer told.

Whole healthy trainings with both are in tests/test_examples.py. Here are trainings that meet a NaN, and what the
Trainers tell, without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rung.script.huggingface import Callback
from rung.script.lightning import LoggerMixin
from rung.script.run import OwnRun
from tests.script.test_one_core import python, read, rows
from tests.script.test_run import ended

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
    callback, book = Callback("theirs", every=0), LoggerMixin("theirs")
    callback.on_log(Arguments(), state(1), None, logs={"loss": 1.0})
    assert callback.run is run
    assert book.experiment is run


def test_what_lightning_tells(start: Start) -> None:
    book = LoggerMixin("theirs", why="to see")
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


def fail(book: LoggerMixin) -> None:
    try:
        raise ValueError("the loader broke")
    except ValueError:
        book.finalize("failed")
        raise


def test_a_training_of_lightning_that_fails_has_crashed(start: Start) -> None:
    book = LoggerMixin("theirs")
    book.log_metrics({"train_loss": 1.0}, step=0)
    with pytest.raises(ValueError, match="broke"):
        fail(book)
    assert book.experiment.status == "crashed"


HF = """
import sys, torch, rung
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from rung.script.huggingface import RungCallback

accumulation, fault, policy = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(0)
ids = torch.randint(31, (64, 8))
if fault == "nan":
    ids[20] = 31
rows = [{"input_ids": row, "labels": row} for row in ids]
sizes = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)

class Faulty(GPT2LMHeadModel):
    def forward(self, input_ids, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        known = (input_ids < 31).float().mean(1)
        output["loss"] = output["loss"] + 0 * known.log().mean()
        return output

class TwoForwards(Trainer):  # as a loss that compares two views of a batch
    def compute_loss(self, model, inputs, **kwargs):
        return model(**inputs)["loss"] + model(**inputs)["loss"]

def made(callbacks):
    args = TrainingArguments(
        output_dir="out", max_steps=64 // (4 * accumulation) + 1, per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation, logging_steps=2, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, seed=7,
    )
    kind = TwoForwards if fault == "two" else Trainer
    return kind(model=Faulty(sizes), args=args, train_dataset=rows, callbacks=callbacks)

def build():
    trainer = made([])
    return trainer.model, trainer.create_optimizer(), lambda batch: trainer.model(**batch)["loss"]

if __name__ == "__main__":
    callback = RungCallback("theirs", policy=None if policy == "none" else policy)
    trainer = made([callback])
    try:
        trainer.train()
    except rung.Diverged as error:
        verdict = callback.guard.replay()
        print("replayed", verdict.op, verdict.samples)
        raise
    print("weights", sum(p.double().abs().sum().item() for p in trainer.model.parameters()).hex())
"""


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_nan_under_the_trainer_of_hugging_face_is_held_back_and_replayed(tmp_path: Path, accumulation: int) -> None:
    (tmp_path / "train.py").write_text(HF)
    done = python(tmp_path, "train.py", str(accumulation), "nan", "stop", expected=1)
    assert "replayed aten.log [" in done.stdout
    last = rows(tmp_path, "theirs/1")[-1]
    assert (last["skipped"], last["loss"]) == (1, "NaN")
    step = last["step"]
    assert sorted({row["step"] for row in rows(tmp_path, "theirs/1")}) == list(range(step + 1))
    assert read(tmp_path, "show", "theirs")["status"] == "diverged"
    found = {finding["rule"]: finding for finding in read(tmp_path, "doctor", "theirs")["findings"]}
    advised = f"rung replay theirs/1@{step} --build FILE:FUNCTION"
    assert (found["N1"]["severity"], found["N1"]["probe"]) == ("fatal", advised)
    verdict = read(tmp_path, "replay", "theirs", "--build", "train.py:build")
    assert (verdict["step"], len(verdict["samples"])) == (step, 1)


def test_the_trainer_of_hugging_face_learns_the_same_under_a_guard(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HF)
    found = [python(tmp_path, "train.py", "2", "no", policy).stdout.split("weights ")[1] for policy in ("none", "stop")]
    assert found[0] == found[1]
    measured = [row for row in rows(tmp_path, "theirs/2") if "norm_clipped" in row]
    assert [row["step"] for row in measured] == list(range(9))


def test_a_loss_of_several_forwards_is_recorded_and_not_guarded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HF)
    found = [
        python(tmp_path, "train.py", "1", "two", policy).stdout.split("weights ")[1] for policy in ("none", "stop")
    ]
    assert found[0] == found[1]
    assert [row["step"] for row in rows(tmp_path, "theirs/2") if "norm_clipped" in row] == list(range(16))
    assert [row["step"] for row in rows(tmp_path, "theirs/2") if "loss" in row] == list(range(1, 16, 2))
    events = (tmp_path / "runs/theirs/2/events.ndjson").read_text()
    assert events.count('"kind":"warning"') == 1


LIGHTNING = """
import math, sys, lightning, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import rung
from rung.script.lightning import RungCallback, RungLogger

accumulation, fault, uses = int(sys.argv[1]), sys.argv[2], sys.argv[3]

class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

torch.manual_seed(0)
x, module, logger = torch.randn(64, 4), Line(), RungLogger("theirs")
if fault == "nan":
    x[6 * 4 * accumulation] = math.nan  # a sample of step 6
callback = RungCallback(logger)
trainer = lightning.Trainer(
    max_epochs=1, logger=logger, callbacks=[callback] if uses == "guard" else [], log_every_n_steps=1,
    accelerator="cpu", accumulate_grad_batches=accumulation, gradient_clip_val=0.5, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
try:
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
except rung.Diverged:
    print("replayed", callback.guard.replay().origin)
    raise
print("weights", sum(p.double().abs().sum().item() for p in module.parameters()).hex())
"""


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_nan_under_lightning_is_held_back_and_replayed(tmp_path: Path, accumulation: int) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    done = python(tmp_path, "train.py", str(accumulation), "nan", "guard", expected=1)
    assert "replayed DATA" in done.stdout
    last = rows(tmp_path, "theirs/1")[-1]
    assert (last["step"], last["skipped"], last["loss"]) == (6, 1, "NaN")
    assert read(tmp_path, "show", "theirs")["status"] == "diverged"
    found = {finding["rule"]: finding for finding in read(tmp_path, "doctor", "theirs")["findings"]}
    assert (found["N1"]["severity"], found["N1"]["probe"]) == ("fatal", "rung replay theirs/1@6 --build FILE:FUNCTION")


def test_lightning_learns_the_same_under_a_guard(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    found = [python(tmp_path, "train.py", "2", "no", uses).stdout.split("weights ")[1] for uses in ("none", "guard")]
    assert found[0] == found[1]
