"""If this fails, two processes learn something else than one, or a run of several ends without saying why."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from rung.engine.buckets import GradientBuckets
from rung.engine.parallel import World, join, share
from rung.ranks import check_nproc
from rung.runs.query import Run, open_run
from tests.engine.ranked import FAULT_STEP, Ranked, Rows
from tests.errors import raises_code


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def rung(folder: Path, *words: str, launch: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, *launch, "-m", "rung", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def train(
    folder: Path, name: str, nproc: int, *words: str, steps: int = 12
) -> tuple[Run, subprocess.CompletedProcess[str]]:
    done = rung(
        folder, "train", "tests.engine.ranked:Ranked", "--experiment", name, "--nproc", str(nproc),
        "data.batch_size=3", "optimizer.gradient_accumulation_steps=4", f"optimizer.max_iters={steps}",
        "lr.warmup_iters=2", "eval_interval=4", "checkpoint.every=4", "system.device=cpu", *words,
    )  # fmt: skip
    assert (folder / "runs" / name / "1").is_dir(), done.stderr
    return open_run(f"{name}/1", folder / "runs"), done


def rows_of(run: Run) -> dict[int, dict[str, float]]:
    """By step; those of a later segment are what the run went on with."""
    rows: dict[int, dict[str, float]] = {}
    for file in sorted((run.path / "metrics").glob("*.ndjson")):
        for row in map(json.loads, file.read_text().splitlines()):
            rows.setdefault(row["step"], {}).update(row)
    return rows


def assert_same(one: Run, other: Run, names: tuple[str, ...]) -> None:
    rows, others = rows_of(one), rows_of(other)
    assert list(rows) == list(others)
    for step, row in rows.items():
        for name in names:
            assert (name in row) == (name in others[step]), (step, name)
            if name in row:
                value = float(row[name])  # JSON has inf as a text
                assert float(others[step][name]) == pytest.approx(value, rel=1e-6, abs=1e-7), (step, name)


@pytest.mark.slow
def test_two_ranks_of_torchrun_equal_one(piano_data: Path, tmp_path: Path) -> None:
    words = [
        "train", "piano", f"dataset.base_dataset_name={piano_data}", "model.n_layer=1", "model.n_head=1",
        "model.n_embd=16", "data.context_size=32", "data.batch_size=4", "optimizer.gradient_accumulation_steps=2",
        "optimizer.max_iters=6", "lr.warmup_iters=2", "eval_interval=3", "sampling.num_tokens=4", "system.device=cpu",
        "signals.probes=false",
    ]  # fmt: skip
    assert rung(tmp_path, *words, "--experiment", "one").returncode == 0
    launch = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}")
    done = rung(tmp_path, *words, "--experiment", "two", launch=launch)
    assert done.returncode == 0, done.stderr

    one, two = (load_file(tmp_path / f"runs/{n}/1/checkpoints/00000006/model.safetensors") for n in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=2e-6)
    rows = [
        [json.loads(line) for line in (tmp_path / f"runs/{n}/1/metrics/000.ndjson").read_text().splitlines()]
        for n in ("one", "two")
    ]
    assert len(rows[0]) == len(rows[1]) == 8
    for a, b in zip(*rows, strict=True):
        assert a["step"] == b["step"]
        for name in ("loss", "norm", "targets", "eval/full_val/loss", "eval/full_val/note_on", "eval/full_val/targets"):
            assert (name in a) == (name in b)
            assert name not in a or b[name] == pytest.approx(a[name], rel=2e-6), name
    assert sorted(p.name for p in (tmp_path / "runs/two").iterdir() if p.is_dir()) == ["1"]


SAME = ("loss", "norm", "targets", "critic/loss", "critic/norm", "skipped", "eval/val/loss", "eval/val/loss_se",
        "probe/k", "probe/without_tokens", "lr")  # fmt: skip


@pytest.mark.slow
def test_any_number_of_ranks_learns_the_same(tmp_path: Path) -> None:
    """Tied weights, a part that most steps do not use, a frozen part, an objective of every other step, accumulation,
    a batch that is left out, checks and probes."""
    bad_row = int(Rows(Ranked.Config()).ids(5 * 12 + 1, 1, 1337)[0])  # in step 5
    words = (f"bad_row={bad_row}", "guard.policy=skip", "guard.armed_steps=2")
    runs = {}
    for nproc in (1, 2, 4):
        runs[nproc], done = train(tmp_path, f"n{nproc}", nproc, *words)
        assert (done.returncode, runs[nproc].status) == (0, "finished"), done.stderr
        assert runs[nproc].document["derived"]["num_ranks"] == nproc
        assert [event["step"] for event in runs[nproc].events("skip")] == [5, 11]  # it is there in each epoch
        assert "checks passed" in done.stdout
        assert done.stdout.count("finished") == 1
        assert sum("probe/k" in row for row in rows_of(runs[nproc]).values()) == 2
    for nproc in (2, 4):
        assert_same(runs[1], runs[nproc], SAME)


@pytest.mark.slow
def test_ranks_go_back_to_a_save_together(tmp_path: Path) -> None:
    bad_row = int(Rows(Ranked.Config()).ids(5 * 12 + 7, 1, 1337)[0])
    runs = [train(tmp_path, f"n{n}", n, f"bad_row={bad_row}", "guard.policy=rollback")[0] for n in (1, 2)]
    for run in runs:
        assert run.status == "finished"
        assert [(event["step"], event["to"]) for event in run.events("rollback")] == [(5, 4), (10, 8)]
    assert_same(*runs, SAME)


@pytest.mark.slow
def test_a_stop_saves_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    whole, _ = train(tmp_path, "whole", 1, steps=24)
    run, done = train(tmp_path, "parts", 2, "fault=stop", steps=24)
    assert (done.returncode, run.status) == (143, "stopped"), done.stderr  # 128 + SIGTERM
    assert FAULT_STEP < run.document["last_step"] < 24
    done = rung(tmp_path, "resume", "parts/1", "--nproc", "4")
    run = open_run("parts/1", tmp_path / "runs")
    assert (done.returncode, run.status) == (0, "finished"), done.stderr
    assert_same(whole, run, SAME[:8])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "status", "says"),
    [
        ("raise", 1, "crashed", "rank 1 failed: ZeroDivisionError: this rank cannot"),
        ("data", 2, "stopped", "a row is damaged"),
        ("killed", 137, "crashed", "rank 1 failed: it was ended by SIGKILL"),
        ("drift", 2, "stopped", "rank 1 of 2 has other weights than the rest, first in body.weight (1 of 9"),
    ],
)
def test_a_rank_that_fails_is_named(tmp_path: Path, fault: str, code: int, status: str, says: str) -> None:
    run, done = train(tmp_path, "sick", 2, f"fault={fault}", "signals.probes=false", "--no-check")
    assert (done.returncode, run.status) == (code, status), done.stderr
    assert says in run.document["reason"]
    assert says in done.stderr
    if fault == "drift":
        (event,) = run.events("ranks_differ")
        assert (event["ranks"], event["tensors"], event["step"]) == ([1], ["body.weight"], 8)
    if fault == "raise":
        assert "in strike" in done.stderr  # the traceback of that rank


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_all_stacks(tmp_path: Path) -> None:
    run, done = train(tmp_path, "sick", 2, "fault=hang", "ddp.timeout_minutes=0.02", "--no-check")
    assert (done.returncode, run.status) == (1, "crashed"), done.stderr
    assert "rank 0 has waited" in run.document["reason"]
    assert "rank 1 is at" in run.document["reason"]
    assert str(run.path / "stalls") in run.document["reason"]
    assert "in strike" in (run.path / "stalls/rank-1.txt").read_text()
    assert "finish" in (run.path / "stalls/rank-0.txt").read_text()  # of the buckets
    assert [event["step"] for event in run.events("stall")] == [FAULT_STEP]


def of_a_rank(rank: int, port: int, folder: str) -> None:
    """What each of three processes does in the next test; what it finds goes into a file."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    world = join(torch.device("cpu"), "auto", 30.0)
    # As torch imports it by itself, once a group is there.
    __import__("torch.distributed.nn.functional")
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
    parameters = list(layers.parameters())
    buckets = GradientBuckets(parameters, world, bucket_bytes=200)
    found["num_buckets"] = len(buckets.buckets)

    def backward(number: int) -> None:
        x = torch.full((2, 5), 1.0 + number)
        # Each rank leaves out another layer, and all leave out the last one.
        for n, layer in enumerate(layers):
            if n not in (rank, 5):
                x = layer(x)
        x.square().sum().backward()

    backward(10 * rank)
    buckets.begin()
    backward(10 * rank + 1)
    buckets.end()
    found["sums"] = buckets.finish(torch.tensor([[float(rank), 1.0]], dtype=torch.float64)).tolist()
    found["summed"] = [None if p.grad is None else p.grad.tolist() for p in parameters]
    for p in parameters:
        p.grad = None
    backward(10 * rank)
    backward(10 * rank + 1)
    found["own"] = [None if p.grad is None else p.grad.tolist() for p in parameters]
    with torch.no_grad():
        if rank == 2:
            parameters[4][1, 1] = torch.nextafter(parameters[4][1, 1], torch.tensor(9.0))
    found["difference"] = world.difference(parameters)
    found["any"] = [world.any(rank == 1), world.any(False)]
    found["from_first"], found["from_all"] = world.from_first(f"rank {rank}"), world.from_all(rank)
    world.leave()
    tasks = Path("/proc/self/task")
    found["threads"] = [p.read_text().strip() for p in tasks.glob("*/comm")] if tasks.exists() else []
    assert not dist.is_initialized()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_gradients_are_summed_while_the_backward_runs(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(of_a_rank, (free_port(), str(tmp_path)), nprocs=3)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert ranks[0]["num_buckets"] == 3
    for found in ranks:
        assert found["summed"] == ranks[0]["summed"]  # to the bit
        assert found["sums"] == [[3.0, 3.0]]
        assert found["difference"] == [[2], [4]]
        assert found["any"] == [True, False]
        assert (found["from_first"], found["from_all"]) == ("rank 0", [0, 1, 2])
        # A group that somebody keeps beyond its end has threads that may abort the process when the interpreter ends.
        assert not [name for name in found["threads"] if "gloo" in name]
    for number, summed in enumerate(ranks[0]["summed"]):
        own = [torch.tensor(found["own"][number]) for found in ranks if found["own"][number] is not None]
        if number >= 10:
            assert summed is None  # of the layer that no rank used
            assert not own
        else:
            torch.testing.assert_close(torch.tensor(summed), torch.stack(own).sum(0), rtol=1e-6, atol=0)


def test_buckets_start_during_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six layers all sums but that of the first are on their way before its gradient is there."""
    layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
    started: list[int] = []
    buckets = GradientBuckets(list(layers.parameters()), World(0, 2, torch.device("cpu")), bucket_bytes=100)

    def all_reduce(tensor: torch.Tensor, async_op: bool = False) -> Any:
        started.append(len(buckets._arrived))
        return type("Work", (), {"wait": lambda self: None})()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    layers(torch.ones(2, 5)).sum().backward()
    assert not started  # a micro before the last
    buckets.begin()
    layers(torch.ones(2, 5)).sum().backward()
    assert started == [2, 4, 6, 8, 10, 12]  # parameters whose gradients were there
    assert buckets.num_bytes == 6 * 4 * (32 + 16)  # 25 and 5 numbers, each to a multiple of 16


def test_rows_that_do_not_divide_are_refused_with_a_remedy() -> None:
    world = World(0, 8, torch.device("cpu"))
    with raises_code("bad-batch-size") as error:
        share(12, 5, world)
    assert "set batch_size=16, gradient_accumulation_steps=4" in str(error.value)
    assert len(share(16, 4, world).micros()) == 1


def test_processes_that_cannot_be_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_nproc(2, "auto")
    check_nproc(9, "cpu")
    for device in ("auto", "cuda"):
        with raises_code("no-device"):
            check_nproc(3, device)
    with raises_code("options-conflict"):
        check_nproc(2, "cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_nproc(3, "auto")
    with raises_code("no-device"):
        check_nproc(2, "cuda")
    monkeypatch.setenv("RANK", "0")
    with raises_code("options-conflict"):
        check_nproc(2, "cpu")
