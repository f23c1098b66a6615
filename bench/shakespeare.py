"""Characters of Shakespeare: the losses that the text recipe reaches in nanoGPT's published settings, and in its own.

    python -m bench.shakespeare [--device cuda] [--seeds N] [--text FILE] [--threads N] [--quick]

Each run is a `rung train text` of its own; the loss is read out of what it left behind: nats per character over the
whole validation part (the last tenth of the text), each character predicted once. On the CPU, nanoGPT prints 1.88 for
the same shape, text and number of steps, estimated on 240 random windows of one run; seeds move the exact loss by about
0.02, hence several runs and their median. Its learning rate is too low for so few steps, so the same is done with twice
that rate. On a GPU, it publishes a best of 1.4697 in 5000 steps; the preset `characters` has half of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rung.bench.report import facts, verdict

TEXT = Path(__file__).parents[1] / ".." / "shared" / "data" / "text_tinyshakespeare" / "input.txt"
ROWS = ["data.sampling=token_uniform", "data.eval_windows=0"]
NANO = ["model.architecture=gpt2", "model.bias=false", "optimizer.beta2=0.99", "lr.warmup_iters=100", *ROWS]
NANO_CPU = [
    "model.n_layer=4", "model.n_head=4", "model.n_embd=128", "data.context_size=64", "data.batch_size=12",
    "optimizer.max_iters=2000", "eval_interval=250", *NANO,
]  # fmt: skip
NANO_GPU = [
    "model.n_layer=6", "model.n_head=6", "model.n_embd=384", "model.dropout=0.2", "data.context_size=256",
    "data.batch_size=64", "optimizer.max_iters=5000", "eval_interval=250", "lr.learning_rate=1e-3", "lr.min_lr=1e-4",
    "system.compile=true", *NANO,
]  # fmt: skip


@dataclass(frozen=True)
class Setting:
    name: str
    words: Sequence[str]
    bar_nats: float


SETTINGS = {
    "cpu": (
        Setting("shakespeare-nanogpt-lr", [*NANO_CPU, "lr.learning_rate=1e-3", "lr.min_lr=1e-4"], 1.90),
        Setting("shakespeare-twice-its-lr", [*NANO_CPU, "lr.learning_rate=2e-3", "lr.min_lr=2e-4"], 1.90),
    ),
    "cuda": (
        Setting("shakespeare-nanogpt-gpu", NANO_GPU, 1.48),
        Setting("shakespeare-characters", ["preset=characters"], 1.47),
    ),
}
QUICK = ["optimizer.max_iters=20", "lr.warmup_iters=5", "eval_interval=20", "sampling.num_tokens=20"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="twenty steps: does it run at all?")
    parser.add_argument("--device", choices=SETTINGS, default="cpu", help="cuda: the settings published for a GPU")
    parser.add_argument("--text", type=Path, default=TEXT, help="the text to learn")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--seeds", type=int, default=2, help="how many runs, each with a seed of its own")
    args = parser.parse_args()
    print(facts("torch", threads=args.threads), flush=True)
    print("nats per character over the whole validation part, at the best eval")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "shakespeare"
        rung("data", "text", "--from", args.text.resolve(), "--name", data, "dataset.tokenizer=characters")
        common = [f"dataset.base_dataset_name={data}", f"system.threads={args.threads}", f"system.device={args.device}"]
        for setting in SETTINGS[args.device]:
            words = {word.partition("=")[0]: word for word in [*setting.words, *(QUICK if args.quick else [])]}
            seeds = range(1337, 1337 + (1 if args.quick else args.seeds))
            losses = [train(Path(folder) / "runs", [*words.values(), *common, f"seed={seed}"]) for seed in seeds]
            print(verdict(setting.name, losses, setting.bar_nats, is_least=False, form=".4f"), flush=True)


def train(runs: Path, words: Sequence[str]) -> float:
    """Runs `rung train` as a user would and returns the loss of the best eval."""
    from rung.runs.query import open_run

    rung("train", "text", *words, "--runs", runs)
    best = open_run("text/last", runs).best
    assert best is not None, "a run without an eval"
    print(f"  {best['loss']:.4f} at step {best['step']}", flush=True)
    return float(best["loss"])


def rung(*words: object) -> None:
    command = [sys.executable, "-m", "rung", *map(str, words)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1], env={**os.environ, "PYTHONUNBUFFERED": "1"})


if __name__ == "__main__":
    main()
