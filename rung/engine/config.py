"""The keys of the engine: everything that is the same for every recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rung.config import key, section
from rung.units import Budget


@dataclass
class System:
    device: str = key("auto", "Where to train: auto (a GPU if there is one), cpu, cuda, cuda:1, mps.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        "Precision of forward and backward; weights stay float32. auto: bfloat16 on a GPU that has it, else float32.",
    )
    compile: bool = key(
        False, "Compile with torch.compile what the recipe names, its loss or parts of its model; evals run as written."
    )
    activation_checkpointing: bool = key(
        False, "Keep only what goes into the model's blocks and compute the rest again in backward; slower."
    )
    data_workers: int = key(
        1, "Threads, or processes, that gather batches ahead of steps and evals; 0 gathers in the step itself.", low=0
    )
    threads: int = key(
        0, "CPU threads of torch; 0: OMP_NUM_THREADS, or on a CPU by the cores and the size of a batch.", low=0
    )
    deterministic: bool = key(
        False, "Ask torch for deterministic kernels; slower on a GPU, no effect on most CPU work."
    )


@dataclass
class Ddp:
    backend: Literal["auto", "nccl", "gloo"] = key(
        "auto", "How ranks talk to each other; auto: nccl on GPUs, else gloo."
    )
    timeout_minutes: float = key(
        30.0,
        "How long a rank may wait for the others before the run ends with the stacks of all; longer than a save and "
        "samples take, which the first rank makes alone; 0 = forever.",
        low=0,
    )


@dataclass
class Data:
    batch_size: int = key(32, "Rows in one forward pass.", low=1)


@dataclass
class Optimizer:
    name: Literal["adamw", "muon"] = key("adamw", "adamw, or muon for the hidden matrices with adamw for the rest.")
    gradient_accumulation_steps: int = key(
        1, "Forward passes of batch_size rows in one step, over all ranks together.", low=1
    )
    max_iters: Budget = key(
        "2000", "Length of the run: steps, tokens, epochs or time; with several the first due ends it."
    )
    weight_decay: float = key(0.1, "Decoupled decay of matrices and embeddings; biases and norms have none.", low=0)
    grad_clip: float = key(1.0, "Largest gradient norm of a step; larger ones are scaled down to it; 0 = never.", low=0)
    beta1: float = key(0.9, "Decay of the first moment.", low=0, high=0.999999)
    beta2: float = key(0.95, "Decay of the second moment.", low=0, high=0.999999)
    eps: float = key(1e-8, "Added to the root of the second moment.", low=1e-30)
    momentum: float = key(0.95, "Momentum of muon; adamw has none, its first moment is beta1.", low=0, high=1)


@dataclass
class Lr:
    learning_rate: float = key(1e-3, "Peak learning rate; init_lr means the same.", low=0, alias="init_lr")
    min_lr: float = key(0.0, "Learning rate at the end of the decay, and after it.", low=0)
    warmup_iters: Budget = key(
        "100",
        "Length of the linear rise to learning_rate; steps, tokens or epochs; 0 = none; warmup_steps means the same.",
        alias="warmup_steps",
    )
    warmup_start_lr: float = key(0.0, "Learning rate of step 0, where the rise begins.", low=0)
    scale: float = key(1.0, "Multiplies warmup_start_lr, learning_rate and min_lr, so that none is left behind.", low=0)
    decay_lr: bool = key(True, "Whether the rate falls after the warm-up; false keeps it at learning_rate.")
    lr_decay_iters: Budget = key(
        "${optimizer.max_iters}", "Where the decay ends, counted from step 0; a run may end before."
    )
    schedule: Literal["cosine", "linear", "wsd", "plateau", "constant"] = key(
        "cosine", "Shape of the fall; wsd holds, then falls at the end; plateau falls when eval stops improving."
    )
    wsd_decay_fraction: float = key(0.2, "Share of the horizon in which wsd falls.", low=0, high=1)
    plateau_factor: float = key(0.5, "What plateau multiplies the rate by.", low=0, high=1)
    plateau_patience: int = key(3, "Evals without a new best before plateau lowers the rate.", low=1)

    def check(self) -> Iterator[str]:
        if self.min_lr > self.learning_rate:
            yield f"lr.min_lr={self.min_lr:g} is above lr.learning_rate={self.learning_rate:g}; change one of them"
        if self.warmup_start_lr > self.learning_rate:
            yield f"lr.warmup_start_lr={self.warmup_start_lr:g} is above lr.learning_rate={self.learning_rate:g}"
        if self.warmup_iters.seconds is not None:
            yield f"lr.warmup_iters={self.warmup_iters} is a time; a rate must not depend on the clock: give steps"


@dataclass
class Checkpoint:
    every: Budget = key(
        "1000", "Distance between saves: steps, tokens, epochs or time; 0 = only the best and the last."
    )
    keep: int = key(
        2, "How many of those to keep; the best, the last and pinned ones are always kept; 0 keeps all.", low=0
    )
    best: bool = key(True, "Save whenever the first eval set has a new lowest loss.")
    initial: bool = key(False, "Also save before the first step, and keep that save.")
    geometric: float = key(
        0.0, "Keep a save each time the eval loss falls below this share of the loss at the last such save; 0 = never.",
        low=0, high=1,
    )  # fmt: skip


@dataclass
class Logging:
    log_interval: int = key(
        10, "Steps between lines where there is no terminal; the record always has every step.", low=1
    )
    wandb_log: bool = key(False, "Also write the run for wandb, offline unless WANDB_MODE says otherwise.")
    wandb_project: str = key("", "The project it belongs to there; empty: the experiment.")


@dataclass
class Guard:
    policy: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "After a step that is not finite: stop; skip its batch; or go back to the last save, past the batch.",
    )
    armed_steps: int = key(
        20, "Steps after a start, a resume or a spike in which updates are checked and undone if they break weights.",
        low=0,
    )  # fmt: skip
    most: int = key(10, "Skips or rollbacks after which the run stops.", low=1)


@dataclass
class Signals:
    layers_every: int = key(20, "Steps between norms of gradient, weight and update per tensor; 0 = never.", low=0)
    activation_stats_every: int = key(
        100, "Steps between looks at activations and attention, on a few rows of the batch; 0 = never.", low=0
    )
    probes: bool = key(True, "Try the size of the update, and what each declared input is worth, at some of the evals.")
    doctor: bool = key(True, "Report findings while the run trains; `rung doctor` reports them at any time.")


@dataclass
class Engine:
    """The root of the engine's keys."""

    seed: int = key(1337, "Start of every random stream: weights, order of the data, dropout, samples.", low=0)
    init_from: str = key(
        "scratch_next_token",
        "Initial weights: scratch_next_token, scratch, a run such as piano/7 (its best), a checkpoint folder, a "
        "Hugging Face folder, or a nanoGPT file.",
    )
    system: System = section(System, "The machine.")
    ddp: Ddp = section(Ddp, "Several processes, of torchrun or of --nproc.")
    data: Data = section(Data, "Batches.")
    optimizer: Optimizer = section(Optimizer, "The update.")
    lr: Lr = section(Lr, "The learning rate, a function of the step over the declared horizon.")
    eval_interval: Budget = key("250", "Distance between evals: steps, tokens, epochs or time; 0 = only at the end.")
    eval_iters: int = key(0, "Batches per eval, spread evenly over the fixed set; 0 = the whole set.", low=0)
    eval_patience: int = key(0, "Evals without a new lowest loss after which the run ends; 0 = never.", low=0)
    eval_only: bool = key(False, "Evaluate init_from on every eval set, print the result as JSON, train nothing.")
    sample_interval: Budget = key("0", "Distance between samples during training; 0 = only at the end.")
    checkpoint: Checkpoint = section(Checkpoint, "Saves.", is_late=True)
    guard: Guard = section(Guard, "What happens to steps that are not finite.", is_late=True)
    signals: Signals = section(Signals, "What is measured besides the loss.")
    logging: Logging = section(Logging, "What is shown.")

    def check(self) -> Iterator[str]:
        if self.optimizer.max_iters.is_never:
            yield f"optimizer.max_iters={self.optimizer.max_iters} trains nothing; give 1 or more, or eval_only=true"
        if self.eval_only and self.init_from in SCRATCH:
            yield f"eval_only=true needs weights, but init_from={self.init_from}; name a run or a checkpoint"
        if self.lr.schedule == "plateau" and self.lr.decay_lr and self.eval_interval.seconds is not None:
            yield f"lr.schedule=plateau follows the evals, but eval_interval={self.eval_interval} is a time; give steps"
        if self.eval_patience and self.eval_interval.is_never:
            yield f"eval_patience={self.eval_patience} counts evals, but eval_interval=0 has only the last; give steps"
        horizon = self.lr.lr_decay_iters
        falls = self.lr.decay_lr and self.lr.schedule in ("cosine", "linear", "wsd")
        if falls and horizon.steps is None and horizon.targets is None and horizon.epochs is None:
            yield (
                f"lr.schedule={self.lr.schedule} falls over lr.lr_decay_iters={horizon}, which is a time: the rate "
                "would depend on the clock; give lr.lr_decay_iters in steps, tokens or epochs, or set lr.decay_lr=false"
            )


SCRATCH = ("scratch", "scratch_next_token")
