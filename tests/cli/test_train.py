"""If this fails, training from the command line does not do what its help says."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mido
import pytest
import torch
from safetensors.torch import load_file

from rung.cli import main
from rung.runs.query import Run, open_run
from rung.runs.record import amend

TINY = [
    "model.n_layer=1",
    "model.n_head=1",
    "model.n_embd=16",
    "data.context_size=32",
    "data.batch_size=4",
    "lr.warmup_iters=2",
    "eval_interval=4",
    "sampling.num_tokens=60",
    "system.device=cpu",
    "system.threads=1",
]


class Rung:
    """`rung ...` in this process, in a folder of its own."""

    def __init__(self, folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.folder, self._patch, self._capsys = folder, monkeypatch, capsys
        self.words = [f"dataset.base_dataset_name={data}", *TINY]
        monkeypatch.chdir(folder)

    def __call__(self, *words: str, code: int = 0) -> str:
        self._patch.setattr(sys, "argv", ["rung", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert ended.value.code == code, out + err
        return out + err

    def train(self, *words: str, code: int = 0) -> str:
        given = {word.partition("=")[0] for word in words}
        return self("train", "piano", *(w for w in self.words if w.partition("=")[0] not in given), *words, code=code)

    def run(self, ref: str) -> Run:
        return open_run(ref, self.folder / "runs")

    def losses(self, ref: str) -> list[float]:
        return [value for value in self.run(ref).metrics(["loss"])["loss"] if value is not None]

    def weights(self, ref: str, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "runs" / ref / "checkpoints" / f"{step:08d}" / "model.safetensors")


@pytest.fixture
def rung(tmp_path: Path, piano_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rung:
    return Rung(tmp_path, piano_data, monkeypatch, capsys)


def test_a_run_from_start_to_end(rung: Rung) -> None:
    text = rung.train("optimizer.max_iters=10", "--why", "to see it run", "--tag", "first")
    run = rung.run("piano/1")
    assert run.status == "finished"
    assert run.document["why"] == "to see it run"
    assert [row["step"] for row in run.evals()] == [4, 8, 10]
    assert len(rung.losses("piano/1")) == 10
    assert f"{run.best['loss']:.4f}" in text
    (tune,) = (rung.folder / "runs/piano/1/samples").glob("*/*.mid")
    assert mido.MidiFile(tune).length >= 0
    assert str(tune.relative_to(rung.folder)) in text
    assert [int(name) for name in run.checkpoints()] == [4, 8, 10] or run.best["step"] in (4, 8, 10)


def test_the_record_has_what_each_step_did(rung: Rung) -> None:
    rung.train("optimizer.max_iters=6")
    columns = rung.run("piano").metrics()
    for name in ("loss", "norm", "norm_clipped", "lr", "targets", "step_s", "wait_s", "forward_backward_s", "update_s"):
        assert len([v for v in columns[name] if v is not None]) == 6, name
    for norm, clipped in zip(columns["norm"], columns["norm_clipped"], strict=True):
        assert norm is None or clipped <= min(norm, 1.0) * (1 + 1e-6)


def test_eval_gives_the_loss_of_the_record_and_sample_leaves_the_run_alone(rung: Rung) -> None:
    rung.train("optimizer.max_iters=8")
    run = rung.run("piano/1")
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    results = json.loads(rung("eval", "piano/1", "--json"))
    assert results["full_val"]["loss"] == run.best["loss"]
    made = json.loads(rung("sample", "piano/1", "--json", "sampling.num_samples=2"))
    assert {Path(row["path"]).suffix for row in made} >= {".mid", ".png"}
    assert all(Path(row["path"]).stat().st_size for row in made)
    assert before == {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}


def test_eval_only_evaluates_and_records_no_run(rung: Rung) -> None:
    rung.train("optimizer.max_iters=4")
    text = rung.train("eval_only=true", "init_from=piano/1")
    assert json.loads(text)["full_val"]["loss"] == rung.run("piano/1").best["loss"]
    assert not (rung.folder / "runs/piano/2").exists()


def test_resume_at_another_cut_goes_on_the_same(rung: Rung) -> None:
    """Half of the steps at 4 x 1, the rest at 2 x 2: equal to 1e-6 in every loss, and in the weights at the end."""
    words = ("optimizer.max_iters=12", "checkpoint.every=6", "checkpoint.keep=0", "model.dropout=0")
    rung.train(*words)
    rung.train(*words)
    for path in (rung.folder / "runs/piano/2/checkpoints").glob("0000001?"):
        shutil.rmtree(path)
    amend(rung.run("piano/2").path, status="stopped")  # as if it had been stopped after its save at step 8
    rung("resume", "piano/2", "data.batch_size=2", "optimizer.gradient_accumulation_steps=2")
    assert [segment["first_step"] for segment in rung.run("piano/2").document["segments"]][1:] == [8]
    assert rung.losses("piano/2") == pytest.approx(rung.losses("piano/1"), rel=1e-6)
    for name, tensor in rung.weights("piano/1", 12).items():
        torch.testing.assert_close(rung.weights("piano/2", 12)[name], tensor, rtol=0, atol=2e-5)


def test_from_says_what_changed_and_keeps_the_parent(rung: Rung) -> None:
    rung.train("optimizer.max_iters=3", "lr.warmup_iters=1")
    text = rung("train", "--parent", "piano/1", "optimizer.grad_clip=0.5", "--why", "less")
    assert "optimizer.grad_clip 1.0 -> 0.5" in text
    child = rung.run("piano/2")
    assert child.document["parent"] == "piano/1"
    assert child.config()["model"] == rung.run("piano/1").config()["model"]
    assert child.sources()["optimizer.grad_clip"] == "command line"
    assert child.sources()["model.n_embd"] == "run piano/1"


def test_init_from_takes_the_weights_and_nothing_else(rung: Rung) -> None:
    rung.train("optimizer.max_iters=4")
    rung.train("optimizer.max_iters=1", "init_from=piano/1", "lr.learning_rate=0", "lr.min_lr=0", "lr.warmup_iters=0")
    assert rung.run("piano/2").metrics(["step"])["step"][0] == 0
    best = rung.run("piano/1").best["step"]
    for name, tensor in rung.weights("piano/1", best).items():
        assert torch.equal(rung.weights("piano/2", 1)[name], tensor)
    shutil.rmtree(rung.folder / "runs/piano/1")  # what the run began with is no longer needed to use it
    rung("eval", "piano/2")


@pytest.mark.parametrize("budget", ["900 tokens", "0.5 epochs", "7"])
def test_budgets_end_the_run_in_any_unit(rung: Rung, budget: str) -> None:
    rung.train(f"optimizer.max_iters={budget}", "lr.warmup_iters=0")
    run = rung.run("piano/1")
    steps = len(rung.losses("piano/1"))
    derived = run.document["derived"]
    row_targets = derived["rows_per_step"] * derived["targets_per_row"]
    expected = {"900 tokens": 900 // row_targets, "0.5 epochs": -(-derived["epoch_rows"] // 2 // 4), "7": 7}[budget]
    assert steps == derived["num_steps"]
    assert steps == pytest.approx(expected, abs=1)


def test_a_time_budget_ends_the_run(rung: Rung) -> None:
    rung.train("optimizer.max_iters=100000 steps, 1 s", "lr.schedule=constant")
    run = rung.run("piano/1")
    assert run.status == "finished"
    assert 0 < run.document["last_step"] < 100000


def test_a_run_that_diverges_says_so_and_keeps_good_weights(rung: Rung) -> None:
    words = ["optimizer.max_iters=60", "lr.learning_rate=1e18", "optimizer.grad_clip=0", "lr.warmup_iters=0"]
    rung.train(*words, code=1)
    run = rung.run("piano/1")
    assert run.status == "diverged"
    columns = run.metrics(["loss", "norm"])
    pairs = [(l, n) for l, n in zip(columns["loss"], columns["norm"]) if l is not None]
    bad = [not (math.isfinite(l) and math.isfinite(n)) for l, n in pairs]
    assert bad[-1], "non-finite values are kept in the record as they are"
    assert sum(bad) == 1, "nothing is logged after the first bad step"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_at_the_next_step_and_resume_ends_like_one_run(rung: Rung, number: signal.Signals) -> None:
    words = ["optimizer.max_iters=40", "logging.log_interval=1", "eval_interval=0"]
    rung.train(*words, "--experiment", "whole")
    mine = [word for word in rung.words if not word.startswith("eval_interval")]
    command = [sys.executable, "-m", "rung", "train", "piano", *mine, *words, "--experiment", "cut"]
    process = subprocess.Popen(
        command, cwd=rung.folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 5/"):
            process.send_signal(number)
            break
    rest = process.stdout.read()
    assert process.wait() == 128 + number
    assert "rung resume cut/1" in rest
    run = rung.run("cut/1")
    assert run.status == "stopped"
    step = run.document["last_step"]
    assert 6 <= step < 40
    assert [int(name) for name in run.checkpoints()] == [step]
    rung("resume", "cut/1")
    assert rung.losses("cut/1") == rung.losses("whole/1")
    for name, tensor in rung.weights("whole/1", 40).items():
        assert torch.equal(rung.weights("cut/1", 40)[name], tensor)


def test_compiled_and_plain_agree(rung: Rung, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole capture but without generating kernels, which takes a minute and a half on a CPU."""
    rung.train("optimizer.max_iters=3", "eval_interval=0")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    rung.train("optimizer.max_iters=3", "eval_interval=0", "system.compile=true")
    assert rung.losses("piano/2") == pytest.approx(rung.losses("piano/1"), rel=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("float16", 0.02)])
def test_lower_precision_trains_with_float32_weights(rung: Rung, dtype: str, tolerance: float) -> None:
    rung.train("optimizer.max_iters=8")
    rung.train("optimizer.max_iters=8", f"system.dtype={dtype}")
    assert all(t.dtype == torch.float32 for t in rung.weights("piano/2", 8).values())
    one, two = (rung.run(f"piano/{n}").best["loss"] for n in (1, 2))
    assert two == pytest.approx(one, rel=tolerance)


def test_muon_learns(rung: Rung) -> None:
    rung.train("optimizer.max_iters=20", "optimizer.name=muon", "lr.learning_rate=1e-2")
    losses = rung.losses("piano/1")
    assert losses[-1] < losses[0] - 0.5


def test_a_reader_that_goes_away_does_not_end_training(rung: Rung) -> None:
    """As with `rung train ... | head -1`."""
    command = [sys.executable, "-m", "rung", "train", "piano", *rung.words, "optimizer.max_iters=12"]
    process = subprocess.Popen(
        command, cwd=rung.folder, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 0
    assert rung.run("piano/1").status == "finished"
    assert len(rung.losses("piano/1")) == 12
