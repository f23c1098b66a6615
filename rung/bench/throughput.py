"""Steps of `fit` with everything on, and of a bare PyTorch loop, in turns and in one process.

rung: the real loop with record, metrics of every step, plain display, prefetch, guard, clipping. Bare: the same model
class, batches that already lie on the device, a mean cross entropy, clip_grad_norm_, fused AdamW, a learning rate per
step; it logs nothing and reads nothing back.

Figures are wall time of whole chunks of steps, with the device waited for at both ends. Evals, saves and samples are in
neither. The surprising thing: the bare loop runs inside of rung's, from the display, which `fit` tells of each step. So
it also gains from the garbage collector that rung has switched off; a bare loop elsewhere would not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.config import Layer, Schema, key, load_file, section
from rung.data.store import Store, StoreWriter
from rung.data.stream import Windows
from rung.engine.build import Setup, build
from rung.engine.config import Engine
from rung.engine.loop import fit
from rung.engine.optim import set_lr
from rung.engine.prefetch import Prefetcher
from rung.nn.losses import cross_entropy_sums
from rung.nn.transformer import Shape, Transformer
from rung.progress import PlainDisplay
from rung.random import Draw
from rung.recipe import Batch, Loss, Objective, ParameterGroup, Recipe, Stream
from rung.recipes import presets
from rung.recipes.piano.recipe import Piano
from rung.recipes.piano.tokenizer import PAD, VOCAB_SIZE, Tokenizer
from rung.runs.record import Record

STEPS = 1_000_000  # more than will be taken: the benchmark ends the run, not the budget
GPT2_VOCAB = 50_304  # GPT-2's 50257 filled up to a multiple of 64


@dataclass
class GptData:
    context_size: int = key(1024, "Ids in a row that are predicted.", low=1)


@dataclass
class GptConfig:
    data: GptData = section(GptData, "Rows.")
    store: str = key("", "The folder of the store.")


class Gpt(Recipe):
    """GPT-2 of 124M parameters on any ids; id 0 only fills rows up."""

    Config = GptConfig
    cfg: GptConfig

    def streams(self, split: str | None = None) -> Mapping[str, Stream]:
        return {"train": Windows(Store.open(self.cfg.store), "train", self.cfg.data.context_size)}

    def model(self) -> nn.Module:
        shape = Shape(GPT2_VOCAB, self.cfg.data.context_size, n_layer=12, n_head=12, n_embd=768, bias=False)
        return Transformer(shape, self.seed)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def next_id(batch: Batch, draw: Draw) -> Loss:
            tokens = batch["tokens"].long()
            return Loss(*cross_entropy_sums(model(tokens[:, :-1]), tokens[:, 1:], ignore=0))

        return [Objective("next_id", [ParameterGroup("all", model.parameters())], next_id)]


class Done(Exception):
    """Enough rounds."""


class Spent(NamedTuple):
    """Seconds a step: on the wall, and of all threads of this process."""

    wall: float
    cpu: float


def now() -> Spent:
    return Spent(time.perf_counter(), time.process_time())


def since(begun: Spent, num_steps: int) -> Spent:
    wall, cpu = now()
    return Spent((wall - begun.wall) / num_steps, (cpu - begun.cpu) / num_steps)


class Bare:
    """The peer, in a few lines."""

    def __init__(self, setup: Setup, num_batches: int) -> None:
        cfg, self.setup = setup.cfg, setup
        self.model = setup.recipe.model().to(setup.world.device).train()
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": cfg.optimizer.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            betas=(cfg.optimizer.beta1, cfg.optimizer.beta2),
            fused=True,
        )
        self.loss = torch.compile(self._loss, dynamic=False) if cfg.system.compile else self._loss
        prefetcher = Prefetcher(setup.streams["train"], setup.layout, cfg.seed, setup.world.device, workers=0)
        rows = [
            torch.cat([micro.batch["tokens"] for micro in prefetcher.take(step)]).long() for step in range(num_batches)
        ]
        self.batches = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in rows]
        self.step = 0

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            inputs, targets = self.batches[self.step % len(self.batches)]
            set_lr([self.optimizer], self.setup.schedule.lr(self.step))
            with self.setup.precision.autocast():
                loss = self.loss(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.cfg.optimizer.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1


class Turns(PlainDisplay):
    """The plain display of a run; after each chunk of rung's steps it lets the bare loop take as many."""

    def __init__(self, setup: Setup, bare: Bare, chunk: int, num_rounds: int, log: TextIO) -> None:
        super().__init__(setup.num_steps, setup.cfg.logging.log_interval, {})
        self._setup, self._bare, self._log = setup, bare, log
        self._chunk, self._num_rounds = chunk, num_rounds
        self.seconds: dict[str, list[Spent]] = {"rung": [], "bare": []}  # a step, by round
        self._begin()

    def _begin(self) -> None:
        self._first_step, self._begun = self._setup.state.progress.step, now()

    def step(self, step: int, row: Mapping[str, float]) -> None:
        super().step(step, row)
        # Rows arrive some steps late where the device works ahead: what counts is the steps that were started.
        num_steps = self._setup.state.progress.step - self._first_step
        if num_steps < self._chunk:
            return
        wait_for(self._setup.world.device)
        self.seconds["rung"].append(since(self._begun, num_steps))
        begun = now()
        self._bare.run(num_steps)
        wait_for(self._setup.world.device)
        self.seconds["bare"].append(since(begun, num_steps))
        if len(self.seconds["rung"]) > self._num_rounds:  # the first round warms up
            raise Done
        self._begin()

    def say(self, text: str) -> None:
        self._log.write(text + "\n")
        self._log.flush()


def set_up(folder: Path, size: str, device: str, threads: int, batch: int | None) -> Setup:
    """A run that is ready to start, as `rung train` would make it."""
    write_store(folder / "ids", VOCAB_SIZE if size == "piano" else GPT2_VOCAB)
    tree: dict[str, Any] = {
        "system": {"device": device, "threads": threads},
        "optimizer": {"max_iters": STEPS},
        "eval_interval": 0,
        "checkpoint": {"every": 0},
    }
    layers = [Layer("bench", tree)]
    recipe_class: type[Recipe] = Piano if size == "piano" else Gpt
    if size == "piano":
        layers.insert(0, plain_piano())
        tree["dataset"] = {"base_dataset_name": str(folder / "ids")}
    else:
        tree["store"] = str(folder / "ids")
        tree["system"] |= {"dtype": "bfloat16", "compile": True}
        tree["data"] = {"batch_size": 64}
    if batch is not None:
        tree["data"] = {"batch_size": batch}
    schema = Schema({"engine": Engine, "recipe": recipe_class.Config})
    return build(schema.resolve(layers), recipe_class, folder / "runs")


def plain_piano() -> Layer:
    """The preset tiny as a plain transformer: random ids follow no grammar, and the bare loop knows only ids."""
    tree = load_file(presets(Piano)["tiny"])
    model = {**tree["model"], "positions": "learned", "sounding_keys": False}
    data = {**tree["data"], "end_token": False, "moving_cuts": False}
    optimizer = {**tree["optimizer"], "name": "adamw"}
    return Layer("bench", {**tree, "loss_grammar": False, "model": model, "data": data, "optimizer": optimizer})


def write_store(path: Path, vocab_size: int, num_records: int = 20, record_ids: int = 200_000) -> None:
    """Random ids above the special ones, in a store that says of itself what the piano recipe asks."""
    numbers = np.random.default_rng(1)
    with StoreWriter(path, kind="piano") as writer:
        writer.array("tokens", np.uint16)
        for number in range(num_records):
            start = writer.append("tokens", numbers.integers(2, vocab_size, record_ids).astype(np.uint16))
            writer.record("train" if number else "validation", start, record_ids, piece=str(number))
        writer.info = {
            "tokenizer": Tokenizer().description,
            "settings": {"pause_detection_threshold": 4.0},
            "unigram_nats": dict.fromkeys(("train", "validation"), float(np.log(vocab_size - 2))),
        }


def record_of(folder: Path, name: str, setup: Setup) -> Record:
    return Record.create(
        folder / "runs",
        name,
        recipe="bench",
        preset=None,
        command=["bench"],
        seed=setup.cfg.seed,
        config=setup.config.tree(),
        sources=setup.config.sources,
        derived=setup.derived,
        data=setup.data,
    )


def measure(folder: Path, setup: Setup, rounds: int, chunk: int) -> dict[str, list[Spent]]:
    """Seconds a step of both parties, by round."""
    bare = Bare(setup, num_batches=chunk)
    record = record_of(folder, "throughput", setup)
    with (folder / "log").open("w") as log:
        turns = Turns(setup, bare, chunk, rounds, log)
        try:
            fit(setup, record, turns)
        except Done:
            record.finish("stopped")
    return {name: values[1:] for name, values in turns.seconds.items()}


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
