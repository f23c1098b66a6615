"""If this fails, two processes learn something else than one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rung.engine.parallel import World, share
from tests.errors import raises_code


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.slow
def test_two_ranks_equal_one(piano_data: Path, tmp_path: Path) -> None:
    words = [
        "train", "piano", f"dataset.base_dataset_name={piano_data}", "model.n_layer=1", "model.n_head=1",
        "model.n_embd=16", "data.context_size=32", "data.batch_size=4", "optimizer.gradient_accumulation_steps=2",
        "optimizer.max_iters=6", "lr.warmup_iters=2", "eval_interval=3", "sampling.num_tokens=4", "system.device=cpu",
        "signals.probes=false",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = ["-m", "rung"]
    subprocess.run([sys.executable, *launch, *words, "--experiment", "one"], cwd=tmp_path, env=environment, check=True)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "rung"]
    subprocess.run([sys.executable, *launch, *words, "--experiment", "two"], cwd=tmp_path, env=environment, check=True)

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


def test_rows_that_do_not_divide_are_refused_with_a_remedy() -> None:
    world = World(0, 8, torch.device("cpu"))
    with raises_code("bad-batch-size") as error:
        share(12, 5, world)
    assert "set batch_size=16, gradient_accumulation_steps=4" in str(error.value)
    assert len(share(16, 4, world).micros()) == 1
