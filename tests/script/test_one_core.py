"""If this fails, a training script of somebody's own gets a worse lab book than a recipe: a NaN that the doctor does
not see, a capture that replay denies, a GradScaler's calibration called fatal, or two scripts called one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# In the shape of nanoGPT's train.py: a model, get_batch, accumulation, clipping, a GradScaler, one loop.
SCRIPT = """
from __future__ import annotations
import math, sys
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F
import rung

options = dict(word.split("=") for word in sys.argv[1:])
accumulation = int(options.get("accumulation", 1))
bad_step, bad = int(options.get("bad_step", -1)), options.get("bad", "")
uses = options.get("uses", "guard")
dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(options.get("dtype", ""))
max_iters = int(options.get("max_iters", 30))

class Block(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.norm = nn.LayerNorm(n_embd)
        self.attention = nn.Linear(n_embd, 3 * n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
    def forward(self, x):
        q, k, v = (t[:, None] for t in self.attention(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.mlp(x)

@dataclass
class Config:
    vocab: int = 17
    n_embd: int = 16

class Gpt(nn.Module):
    def __init__(self, config=Config()):
        super().__init__()
        self.wte, self.block = nn.Embedding(config.vocab, config.n_embd), Block(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab)
    def forward(self, idx, weights=None):
        logits = self.head(self.block(self.wte(idx[:, :-1])))
        losses = F.cross_entropy(logits.float().flatten(0, 1), idx[:, 1:].flatten(), reduction="none")
        return losses.mean() if weights is None else (losses.view(len(idx), -1).mean(1) * weights).mean()

def build():
    torch.manual_seed(1337)
    model = Gpt()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    if options.get("optimizers") == "two":
        optimizer = [torch.optim.AdamW(matrices, lr=1e-3), torch.optim.SGD(vectors, lr=1e-2)]
    else:
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=options.get("fused") == "true")
    return model, optimizer, loss_of(model)

def loss_of(model):
    def loss(batch):
        idx, weights = batch
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return model(idx, weights) / accumulation
    return loss

data = torch.Generator().manual_seed(0)

def get_batch(step):
    idx = torch.randint(17, (4, 9), generator=data)
    weights = torch.ones(4)
    if step == bad_step:
        weights[2] = {"nan": math.nan, "huge": 1e30}[bad]
    return idx, weights

if __name__ == "__main__":
    run = rung.init("mine", config={"seed": 1337, "lr": 1e-3, "max_iters": max_iters})
    model, optimizer, loss = build()
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    scale = float(options.get("scale", 0))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
    guard = None
    if uses == "guard":
        clip = float(options.get("guard_clip", 0))
        made_by = build if options.get("build") == "yes" else None
        guard = run.guard(model, optimizer, loss, clip=clip, scaler=scaler, build=made_by)
    elif uses == "watch":
        run.watch(model, optimizer, share=1)
    for step in range(max_iters):
        if options.get("zero_grad", "after") == "before":
            for each in optimizers:
                each.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(accumulation):
            batch = get_batch(step)
            value = loss(batch)
            scaler.scale(value).backward()
            total += value.item()
            if guard is not None and accumulation > 1:
                guard.micro(value, batch)
        norm = None
        if options.get("clip") == "outside":
            for each in optimizers:
                scaler.unscale_(each)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if guard is not None:
            guard.step() if accumulation > 1 else guard.step(value, batch)
        else:
            for each in optimizers:
                scaler.step(each)
            scaler.update()
        if options.get("zero_grad", "after") == "after":
            for each in optimizers:
                each.zero_grad(set_to_none=True)
        if options.get("logs", "yes") == "yes":
            run.log({"loss": total, **({} if norm is None else {"grad_norm": norm})}, step=step)
    run.finish()
"""


def python(folder: Path, *words: str, expected: int | None = 0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
    assert expected is None or done.returncode == expected, done.stderr[-3000:]
    return done


def rung(folder: Path, *words: str, expected: int | None = 0) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "rung", *words, expected=expected)


def read(folder: Path, *words: str) -> Any:
    return json.loads(rung(folder, *words, "--json", expected=None).stdout)


def rows(folder: Path, run: str = "mine/1") -> list[dict[str, Any]]:
    lines = (folder / "runs" / run / "metrics" / "000.ndjson").read_text().splitlines()
    return [json.loads(line) for line in lines]


def train(folder: Path, *options: str, script: str = "train.py", expected: int | None = 0) -> None:
    if not (folder / script).is_file():
        (folder / script).write_text(SCRIPT)
    python(folder, script, *options, expected=expected)


LOOPS = [
    ("plain",),
    ("logs=no",),
    ("accumulation=3",),
    ("accumulation=2", "zero_grad=before", "guard_clip=0.5"),
    ("clip=outside",),
    ("optimizers=two",),
    ("fused=true", "guard_clip=0.5"),
    ("dtype=bfloat16", "scale=1024"),
    ("dtype=bfloat16", "scale=1024", "clip=outside", "fused=true", "accumulation=2"),
]


@pytest.mark.parametrize("options", LOOPS, ids=" ".join)
def test_a_nan_in_a_script_is_recorded_diagnosed_and_replayed(tmp_path: Path, options: tuple[str, ...]) -> None:
    words = [word for word in options if word != "plain"]
    train(tmp_path, *words, "bad_step=21", "bad=nan", expected=1)
    last = rows(tmp_path)[-1]
    assert (last["step"], last["skipped"], last["loss"]) == (21, 1, "NaN")
    shown = read(tmp_path, "show", "mine")
    assert shown["status"] == "diverged"
    found = {finding["rule"]: finding for finding in read(tmp_path, "doctor", "mine")["findings"]}
    assert found["N1"]["severity"] == "fatal"
    assert found["N1"]["probe"] == "rung replay mine/1@21 --build FILE:FUNCTION"
    verdict = read(tmp_path, "replay", "mine/1@21", "--build", "train.py:build")
    assert (verdict["origin"], verdict["step"]) == ("DATA", 21)
    kept = [event for event in read(tmp_path, "show", "mine")["events"] if event["kind"] == "replay"]
    assert [(event["step"], event["text"][:4]) for event in kept] == [(21, "DATA")]


def test_replay_without_a_model_says_exactly_what_to_pass(tmp_path: Path) -> None:
    train(tmp_path, "bad_step=5", "bad=nan", expected=1)
    for name in ("mine", "mine/1@5"):
        done = rung(tmp_path, "replay", name, expected=2)
        assert "Traceback" not in done.stderr
        assert "rung replay mine/1@5 --build FILE:FUNCTION" in done.stderr
        assert "captures/00000005" in done.stderr
    healthy = rung(tmp_path, "replay", "mine/1@3", expected=2)
    assert "[no-capture]" in healthy.stderr
    wrong = rung(tmp_path, "replay", "mine/1@5", "--build", "train.py:nothing", expected=2)
    assert "[bad-build]" in wrong.stderr


def test_a_guard_that_knows_how_its_model_is_built_needs_no_more(tmp_path: Path) -> None:
    train(tmp_path, "bad_step=5", "bad=nan", "build=yes", expected=1)
    assert read(tmp_path, "replay", "mine")["origin"] == "DATA"
    (tmp_path / "train.py").rename(tmp_path / "elsewhere.py")
    gone = rung(tmp_path, "replay", "mine", expected=2)
    assert "--build FILE:FUNCTION" in gone.stderr


@pytest.mark.parametrize("fused", ["false", "true"])
@pytest.mark.parametrize("uses", ["watch", "nothing", "guard"])
def test_what_a_grad_scaler_leaves_out_is_no_disease(tmp_path: Path, uses: str, fused: str) -> None:
    """Gradients overflow float16 at the first scale: the scaler halves it until they fit, as it is meant to."""
    train(tmp_path, "dtype=float16", "scale=1e8", "clip=outside", f"uses={uses}", f"fused={fused}", "max_iters=40")
    recorded = rows(tmp_path)
    overflows = [row for row in recorded if row.get("norm") in ("Infinity", "NaN")]
    assert overflows, "the scale did not overflow, so nothing was tested"
    if uses != "nothing":
        assert all(row["skipped"] == 1 for row in overflows)
        assert all(row["skipped"] == 0 for row in recorded if row not in overflows and "skipped" in row)
    found = read(tmp_path, "doctor", "mine")["findings"]
    assert [f["rule"] for f in found if f["severity"] in ("fatal", "sick")] == []


def test_a_guard_with_a_scaler_records_every_norm(tmp_path: Path) -> None:
    train(tmp_path, "dtype=bfloat16", "scale=1024", "guard_clip=0.5")
    recorded = rows(tmp_path)
    assert [row["step"] for row in recorded] == list(range(30))
    for row in recorded:
        assert {"loss", "norm", "norm_clipped", "lr", "skipped", "scale"} <= row.keys()


def test_a_guard_changes_nothing_that_is_learned(tmp_path: Path) -> None:
    losses = []
    for number, uses in enumerate(("nothing", "watch", "guard"), start=1):
        train(tmp_path, f"uses={uses}", "accumulation=2", "clip=outside")
        losses.append([row["loss"] for row in rows(tmp_path, f"mine/{number}")])
    assert losses[0] == losses[1] == losses[2]


def test_two_scripts_of_one_folder_are_not_the_same_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SCRIPT)
    (tmp_path / "b.py").write_text(SCRIPT.replace("lr=1e-3, fused", "lr=3e-3, fused"))
    for script in ("a.py", "b.py"):
        train(tmp_path, "uses=watch", script=script)
    diff = read(tmp_path, "diff", "mine/1", "mine/2")
    of_code = [one for one in diff["differences"] if one["part"] == "code"]
    assert [one["name"] for one in of_code] == ["a.py -> b.py"]
    assert [(one["weight"], one["before"], one["after"]) for one in of_code] == [("hidden", 1, 1)]
    verdict = read(tmp_path, "ab", "--judge", "mine/1", "--", "mine/2")
    assert verdict["word"] == "CONFOUNDED"
