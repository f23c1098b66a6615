"""Characters of Shakespeare: a recipe from outside of rung, and the loss it reaches in nanoGPT's published CPU setting.

    python -m bench.shakespeare [--quick] [--seeds N] [--text FILE] [--threads N]
    rung train bench.shakespeare:Characters

The benchmark runs the second command and reads the loss out of the run it left behind: nats per character over the
whole validation part, each character predicted once. nanoGPT prints 1.88 for the same model, text and number of steps,
estimated on 240 random windows of one run. Seeds move the exact loss by about 0.02, hence several runs and their
median; a run takes two to three minutes on a quiet core. nanoGPT's learning rate is too low for so few steps, so the
same is done with twice that rate. The recipe needs nothing of the engine that rung.recipe does not say.

The surprising thing is the order: rows are windows at random places, drawn anew for each position of the stream, so
that an epoch is only a unit of length here and not each window once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bench.report import facts, verdict
from rung.config import key, section
from rung.errors import DataError
from rung.recipe import Arrays, Batch, Draw, Loss, Objective, Recipe, Sample, Stream, key_of, scramble

if TYPE_CHECKING:
    from torch import nn

    from rung.nn.transformer import Transformer

TEXT = Path(__file__).parents[1] / ".." / "shared" / "data" / "text_tinyshakespeare" / "input.txt"
VALIDATION_SHARE = 0.1
NO_TARGET = 65535  # fills the last, shorter window of the validation part; the loss passes over it
BAR_NATS = 1.90
RATES = {  # the shape, batch and number of steps are nanoGPT's in both
    "nanogpt-lr": ["lr.learning_rate=1e-3", "lr.min_lr=1e-4"],
    "twice-its-lr": ["lr.learning_rate=2e-3", "lr.min_lr=2e-4"],
}


@dataclass
class Model:
    n_layer: int = key(4, "Transformer layers.", low=1)
    n_head: int = key(4, "Attention heads in each.", low=1)
    n_embd: int = key(128, "Width of the residual stream; a multiple of n_head.", low=1)
    dropout: float = key(0.0, "Share of activations dropped in training.", low=0, high=0.99)
    bias: bool = key(False, "Biases in linear layers and norms.")


@dataclass
class Data:
    context_size: int = key(64, "Characters in a row that are predicted.", low=1)


@dataclass
class Dataset:
    path: str = key(str(TEXT), "A text file; its last tenth is the validation part.")


@dataclass
class Sampling:
    num_characters: int = key(500, "Length of a sample.", low=1)
    temperature: float = key(0.8, "Below 1 is safer, above 1 wilder.", low=0)


@dataclass
class Keys:
    model: Model = section(Model, "The network.")
    data: Data = section(Data, "Rows.")
    dataset: Dataset = section(Dataset, "The text.")
    sampling: Sampling = section(Sampling, "Samples after training.")


class Corpus:
    """A text as ids of its own characters, in two parts."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"no text at {path}; name one with dataset.path=FILE")
        raw = path.read_bytes()
        text = raw.decode("utf-8")
        self.fingerprint = hashlib.sha256(raw).hexdigest()[:16]
        self.characters = sorted(set(text))
        id_of = {character: number for number, character in enumerate(self.characters)}
        ids = np.array([id_of[character] for character in text], dtype=np.uint16)
        cut = int(len(ids) * (1 - VALIDATION_SHARE))
        self.train, self.validation = ids[:cut], ids[cut:]


class RandomWindows(Stream):
    """Windows at random places of a text; the place is a function of the seed and the position in the stream."""

    def __init__(self, ids: np.ndarray, context: int, fingerprint: str) -> None:
        if len(ids) <= context:
            raise DataError(
                f"a text of {len(ids)} characters has no row of data.context_size={context}; take a longer one"
            )
        self.num_rows = len(ids) // context
        self.targets_per_row = float(context)
        self.fingerprint = f"{fingerprint}/random-{context}"
        self._view = np.lib.stride_tricks.sliding_window_view(ids, context + 1)

    def ids(self, position: int, num_rows: int, seed: int) -> np.ndarray:
        places = np.arange(position, position + num_rows, dtype=np.uint64)
        drawn = scramble(places + np.uint64(key_of(seed, "windows")))
        return (drawn % np.uint64(len(self._view))).astype(np.int64)

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {"tokens": self._view[ids]}


class Tiles(Stream):
    """Windows side by side: each character but the first is predicted once."""

    def __init__(self, ids: np.ndarray, context: int, fingerprint: str) -> None:
        self.num_rows = -(-(len(ids) - 1) // context)
        self.targets_per_row = (len(ids) - 1) / self.num_rows
        self.fingerprint = f"{fingerprint}/tiles-{context}"
        filled = np.full(self.num_rows * context + 1, NO_TARGET, dtype=np.uint16)
        filled[: len(ids)] = ids
        self._view = np.lib.stride_tricks.sliding_window_view(filled, context + 1)[::context]

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {"tokens": self._view[ids]}


class Characters(Recipe):
    Config = Keys
    cfg: Keys

    def __init__(self, cfg: Keys, seed: int) -> None:
        super().__init__(cfg, seed)
        self.corpus = Corpus(Path(cfg.dataset.path))

    def streams(self) -> Mapping[str, Stream]:
        corpus, context = self.corpus, self.cfg.data.context_size
        return {
            "train": RandomWindows(corpus.train, context, corpus.fingerprint),
            "val": Tiles(corpus.validation, context, corpus.fingerprint),
        }

    def model(self) -> nn.Module:
        from rung.nn.transformer import Shape, Transformer

        cfg = self.cfg.model
        shape = Shape(
            vocab_size=len(self.corpus.characters),
            context_size=self.cfg.data.context_size,
            n_layer=cfg.n_layer,
            n_head=cfg.n_head,
            n_embd=cfg.n_embd,
            bias=cfg.bias,
            dropout=cfg.dropout,
        )
        return Transformer(shape, self.seed)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        transformer = cast("Transformer", model)

        def next_character(batch: Batch, draw: Draw) -> Loss:
            from rung.nn.losses import cross_entropy_sums

            tokens = batch["tokens"].long()
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            logits = transformer(inputs.masked_fill(inputs == NO_TARGET, 0))  # nothing that counts comes after these
            return Loss(*cross_entropy_sums(logits, targets, ignore=NO_TARGET))

        return [
            Objective("next_character", list(model.parameters()), next_character, hidden=transformer.hidden_matrices())
        ]

    def identity(self) -> Mapping[str, Any]:
        return {"characters": "".join(self.corpus.characters)}

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        import torch

        from rung.nn.generate import generate

        transformer, cfg = cast("Transformer", model), self.cfg.sampling
        device = transformer.norm.weight.device
        prompt = torch.zeros((1, 1), dtype=torch.long, device=device)  # the first character in order: a line break
        ids = generate(
            transformer,
            prompt,
            cfg.num_characters,
            temperature=cfg.temperature,
            generator=draw.generator("sample", device),
        )
        text = "".join(self.corpus.characters[i] for i in ids[0].tolist())
        caption = f"{cfg.num_characters} characters, temperature {cfg.temperature:g}"
        return [Sample("sample.txt", text.encode(), caption)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="twenty steps: does it run at all?")
    parser.add_argument("--text", type=Path, default=TEXT, help="the text to learn")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--seeds", type=int, default=2, help="how many runs, each with a seed of its own")
    args = parser.parse_args()
    print(facts("torch", threads=args.threads), flush=True)
    words = [f"dataset.path={args.text.resolve()}", f"system.threads={args.threads}", "system.device=cpu"]
    if args.quick:
        words += ["optimizer.max_iters=20", "lr.warmup_iters=5", "eval_iters=10", "sampling.num_characters=20"]
    seeds = range(1337, 1337 + (1 if args.quick else args.seeds))
    print("nats per character over the whole validation part; nanoGPT publishes 1.88, estimated on 240 windows of it")
    for name, rates in RATES.items():
        with tempfile.TemporaryDirectory() as folder:
            losses = [train(Path(folder), [*words, *rates, f"seed={seed}"]) for seed in seeds]
        print(verdict(f"shakespeare-{name}", losses, BAR_NATS, is_least=False, form=".4f"), flush=True)


def train(folder: Path, words: Sequence[str]) -> float:
    """Runs `rung train` as a user would and returns the loss of the last eval."""
    from rung.runs.query import open_run

    command = [sys.executable, "-m", "rung", "train", "bench.shakespeare:Characters", *words, "--runs", str(folder)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1], env={**os.environ, "PYTHONUNBUFFERED": "1"})
    last = open_run("characters/last", folder).evals()[-1]
    return float(last["loss"])


if __name__ == "__main__":
    main()
