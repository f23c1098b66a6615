"""If this fails, a step that is taken again is another step than the one that was recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from rung.api import rebuild
from rung.cli.replay import command
from rung.engine import capture
from rung.engine.guarded import ObjectiveState
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.errors import CheckpointError, RunError, UserError
from rung.forensics.examine import examine
from rung.forensics.replay import replay_healthy
from rung.forensics.rerun import Rerun
from rung.forensics.walk import Walk
from rung.random import Draw
from rung.recipe import Batch, Loss
from rung.runs.query import Run, open_run
from tests.engine.test_parallel import free_port
from tests.forensics.failing import fail, sample_of, train, verdict_of
from tests.forensics.faulty import FIRST, Faulty, Mlp
from tests.forensics.faulty import Config as Keys

HEALTHY = ("optimizer.max_iters=50", "dropout=0.2", "data.batch_size=4", "optimizer.gradient_accumulation_steps=2",
           "checkpoint.every=20", "checkpoint.keep=0", "eval_interval=10")  # fmt: skip


def call(*words: object, root: Path) -> Result:
    return CliRunner().invoke(command, [*map(str, words), "--runs", str(root)])


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(Faulty, tmp_path_factory.mktemp("healthy"), *HEALTHY)


def root_of(run: Run) -> Path:
    return run.path.parent.parent


def test_fifty_healthy_steps_come_out_equal_to_the_bit(healthy: Run) -> None:
    recorded = [row for row in zip(*healthy.metrics(["loss", "norm"]).values(), strict=True) if row[2] is not None]
    walk = Walk(rebuild(healthy, "float32", runs=root_of(healthy)), healthy)
    walk.saves = type(walk.saves)(healthy.path / "none")  # from the beginning, whatever was saved
    assert walk.go_to(0) == "the beginning"
    taken = []
    for step in range(50):
        row = walk.take()
        taken.append((step, row["loss"], row["norm"]))
    assert taken == recorded


@pytest.mark.parametrize(("step", "begun"), [(7, "the beginning"), (20, "step 20"), (39, "step 20"), (49, "step 40")])
def test_any_step_is_replayed_from_the_last_save_before_it(healthy: Run, step: int, begun: str) -> None:
    setup = rebuild(healthy, "float32", runs=root_of(healthy))
    compared = replay_healthy(setup, healthy, step, lambda text: None)
    assert compared.is_equal, compared.lines()
    assert begun in compared.begun
    assert "equal to the bit" in compared.lines()[0]


def test_a_step_that_comes_out_otherwise_is_shown_with_both_numbers(healthy: Run, tmp_path: Path) -> None:
    setup = rebuild(healthy, "float32", runs=root_of(healthy))
    setup.schedule = setup.schedule.__class__(**{**vars(setup.schedule), "peak": 1.0})
    compared = replay_healthy(setup, healthy, 12, lambda text: None)
    assert not compared.is_equal
    assert "recorded" in " ".join(compared.lines())


def test_the_verb_shows_a_healthy_step(healthy: Run) -> None:
    done = call("case/1@12", root=root_of(healthy))
    assert done.exit_code == 0, done.output
    assert "case/1  step 12  equal to the bit" in done.stdout
    told = json.loads(call("case/1@12", "--json", root=root_of(healthy)).stdout)
    assert told["is_equal"] is True
    assert told["loss"] == told["recorded_loss"]


def test_the_verb_shows_a_verdict(tmp_path: Path) -> None:
    run = fail(tmp_path, "nan feature", 4, "float32", bad_micro=2)
    before = written(run.path)
    done = call("case/1", root=tmp_path)
    assert done.exit_code == 0, done.output
    first, *rest = done.stdout.splitlines()
    assert first == f"case/1  DATA  sure  step 3  micro 2  sample {sample_of(4, 2)}"
    text = "\n".join(rest)
    for word in ("aten.mm", "faulty.py:", "not finite", "8 other batches", "fix or drop the sample"):
        assert word in text
    assert "looking for the sample" in done.stderr
    told = json.loads(call("case/1@3", "--json", root=tmp_path).stdout)
    assert (told["origin"], told["samples"], told["run"]) == ("DATA", [sample_of(4, 2)], "case/1")
    assert written(run.path) == before
    assert [(event["step"], "DATA" in event["text"]) for event in run.events("replay")] == [(3, True), (3, True)]


def written(folder: Path) -> list[tuple[Path, int]]:
    """All that lies in a run but its events, and when it was written."""
    return sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.name != "events.ndjson")


def test_a_ready_command_is_shown_where_keys_would_cure_it(tmp_path: Path) -> None:
    fail(tmp_path, "float16", 1, "float16")
    last = call("case/1", root=tmp_path).stdout.splitlines()[-1]
    assert "rung train --parent" in last
    assert "system.dtype=bfloat16" in last


def test_the_debugger_stops_before_the_forward(healthy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def look() -> None:
        there = dict(sys._getframe(1).f_locals)
        loss = there["objective"].loss(there["batch"], there["draw"]).sum
        seen.append(there | {"step": there["setup"].state.progress.step, "loss": float(loss.detach())})

    monkeypatch.setattr(sys, "breakpointhook", look)
    assert call("case/1@12", "--debug", root=root_of(healthy)).exit_code == 0
    assert seen[0]["step"] == 12
    assert set(seen[0]) >= {"setup", "micros", "model", "batch", "draw", "objective"}
    fail(tmp_path, "log 0", 1, "float32")
    assert call("case/1", "--debug", root=tmp_path).exit_code == 0
    assert seen[1]["step"] == FIRST
    assert not np.isfinite(seen[1]["loss"])


# Bad input: one sentence each, of a kind that the command line shows without a traceback.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("case/1", r"no capture: none of its steps failed"),
        ("case/1@500", r"no row of step 500 .* it has steps 0 to 49"),
        ("case/1@x", r"x is not a step"),
        ("case/9", r"there is no case/9"),
    ],
)
def test_what_is_not_there_is_said(healthy: Run, words: str, said: str) -> None:
    done = call(words, root=root_of(healthy))
    assert isinstance(done.exception, RunError)
    assert_sentence(done.exception, said)


def assert_sentence(error: BaseException, said: str) -> None:
    import re

    assert isinstance(error, UserError)
    assert re.search(said, str(error)), str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["batch.0.safetensors", "capture.0.json", "model.safetensors", "state.json"])
def test_a_damaged_capture_is_refused(name: str, tmp_path: Path) -> None:
    run = fail(tmp_path, "log 0", 1, "float32")
    file = run.path / "captures" / "00000003" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done = call("case/1", root=tmp_path)
    assert isinstance(done.exception, CheckpointError), done.output
    assert_sentence(done.exception, "damaged")


def test_other_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(tmp_path, "nan feature", 1, "float32", bad_micro=0)
    from tests.forensics import faulty

    monkeypatch.setattr(
        faulty.Rows, "fingerprint", property(lambda self: "other", lambda self, value: None), raising=False
    )
    done = call("case/1", root=tmp_path)
    assert isinstance(done.exception, CheckpointError)
    assert_sentence(done.exception, "data here is other")


# Weights and optimizers.


def test_an_update_that_breaks_weights_is_named_from_an_armed_capture(tmp_path: Path) -> None:
    run = fail(tmp_path, "none", 1, "float32", "lr.learning_rate=1e38", "lr.warmup_iters=0", "optimizer.weight_decay=0")
    assert capture.steps(run.path / "captures") == [0]
    verdict = verdict_of(run, tmp_path)
    assert (verdict.origin, verdict.step) == ("LEARNING RATE", 0), verdict.lines()
    assert "lr is 1e+38" in verdict.what


def test_weights_that_broke_before_the_capture_are_traced_to_their_step(tmp_path: Path) -> None:
    run = fail(tmp_path, "none", 1, "float32", "lr.learning_rate=1e39", "lr.warmup_iters=0", "guard.armed_steps=0")
    assert capture.steps(run.path / "captures") == [1]  # whose loss is the first to show it
    verdict = verdict_of(run, tmp_path)
    assert (verdict.origin, verdict.step) == ("LEARNING RATE", 0), verdict.lines()
    assert "lr is 1e+39" in verdict.what


def test_weights_that_grew_out_of_bounds_are_blamed(tmp_path: Path) -> None:
    run = fail(tmp_path, "grown", 1, "float32", "lr.learning_rate=10", "lr.warmup_iters=0", "optimizer.grad_clip=0")
    verdict = verdict_of(run, tmp_path)
    assert (verdict.module, verdict.op) == ("odd", "aten.exp"), verdict.lines()
    assert verdict.origin == "LEARNING RATE"
    assert "times as large" in " ".join(verdict.evidence)


def test_a_run_that_left_batches_out_is_replayed_past_them(tmp_path: Path) -> None:
    run = fail(tmp_path, "nan feature", 1, "float32", "guard.policy=skip", bad_micro=0)
    assert run.status == "finished"
    compared = replay_healthy(rebuild(run, "float32", runs=tmp_path), run, 6, lambda text: None)
    assert compared.is_equal, compared.lines()


# Compiled code.


def compiled(backend: Any, bad_row: int | None = None, whole_model: bool = False) -> Rerun:
    torch.manual_seed(0)
    model: Any = Mlp(Keys())
    network = torch.compile(model, backend=backend) if whole_model else model

    def loss(batch: Batch, draw: Draw) -> Loss:
        logits = network(batch["x"], batch["token"])
        return Loss(nn.functional.cross_entropy(logits, batch["y"], reduction="sum"), torch.tensor(4.0))

    ids = np.arange(100, 104)
    x = torch.rand(4, 256)
    if bad_row is not None:
        x[bad_row, 3] = torch.nan
    batch = {"x": x, "token": torch.zeros(4, dtype=torch.long), "y": torch.arange(4)}
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = loss if whole_model else torch.compile(loss, backend=backend)
    trained = ObjectiveState("own", whole, list(model.parameters()), [own], eager=loss)
    return Rerun(
        model, [trained], [Micro(ids, Draw(0, 5, np.arange(4)), batch)], Precision("float32", torch.device("cpu")),
        nominal=4.0, step=5, is_compiled=True,
        other_batches=lambda: [[Micro(ids + 4, Draw(0, 5, np.arange(4)), batch | {"x": torch.rand(4, 256)})]],
    )  # fmt: skip


@pytest.mark.parametrize("whole_model", [False, True], ids=["the loss", "the model"])
def test_a_compiled_model_is_looked_into_through_eager(whole_model: bool) -> None:
    rerun = compiled("aot_eager", bad_row=2, whole_model=whole_model)
    before = {name: tensor.clone() for name, tensor in rerun.model.state_dict().items()}
    verdict = examine(rerun)
    assert (verdict.origin, verdict.module, verdict.op) == ("DATA", "first", "aten.mm"), verdict.lines()
    assert verdict.samples == [102]
    assert "faulty.py" in verdict.line
    for name, tensor in rerun.model.state_dict().items():  # nor has any of the tries left a trace
        assert torch.equal(tensor, before[name]), name
    assert not rerun.objectives[0].optimizers[0].state


def test_what_fails_compiled_only_is_the_compilers() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        return lambda *args: [value * torch.nan for value in graph(*args)]

    verdict = examine(compiled(broken))
    assert (verdict.origin, verdict.changes) == ("COMPILER", {"system.compile": "false"}), verdict.lines()


# Ranks.


@pytest.mark.slow
def test_two_ranks_name_the_right_one(tmp_path: Path) -> None:
    """Four micros of 4 rows on two ranks: the first two are rank 0's."""
    bad_micro = 3
    words = [
        "train", "tests.forensics.faulty:Faulty", "--experiment", "case", "fault=nan feature", "seed=1",
        f"bad_position={FIRST * 16 + bad_micro * 4 + 1}", "data.batch_size=4",
        "optimizer.gradient_accumulation_steps=4", "optimizer.max_iters=8", "lr.warmup_iters=2", "system.device=cpu",
        "system.threads=1",
    ]  # fmt: skip
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "rung"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, *launch, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    run = open_run("case/1", tmp_path / "runs")
    assert run.status == "diverged", done.stdout + done.stderr
    verdict = verdict_of(run, tmp_path / "runs")
    assert (verdict.origin, verdict.rank, verdict.micro) == ("DATA", bad_micro // 2, bad_micro % 2), verdict.lines()
    assert verdict.samples == [sample_of(4, bad_micro)]
