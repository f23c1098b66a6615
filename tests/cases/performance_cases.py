"""Runs that lose time or memory. All are made by hand: a clock on a shared machine measures the neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rung.doctor.history import History, Series
from tests.cases import statistics as stat
from tests.cases.case import Ask, Case, diagnosed

NUM_STEPS = 600


def made(num_steps: int = NUM_STEPS, seed: int = 1, **columns: Any) -> History:
    """A healthy run of so many steps as it would be recorded on a GPU; columns replace or add values.

    A column is one number, one per step, or a pair of steps and values.
    """
    rng = np.random.default_rng(seed)
    steps = np.arange(num_steps)
    warmup = np.minimum(1.0, (steps + 1) / 20)
    usual: dict[str, Any] = {
        "loss": 1.1 + 2.3 * np.exp(-steps / 60) + rng.normal(0, 0.03, num_steps),
        "norm": 0.6 + 0.6 * np.exp(-steps / 40) + rng.uniform(0, 0.5, num_steps),
        "lr": 3e-3 * warmup * (1 - 0.9 * steps / num_steps),
        "targets": 16384.0,
        "targets_min": 16384.0,
        "skipped": 0.0,
        "step_s": 0.1 * rng.lognormal(0, 0.03, num_steps),
        "wait_s": 0.002 * rng.lognormal(0, 0.5, num_steps),
        "copy_s": 0.004 * rng.lognormal(0, 0.1, num_steps),
        "mfu": 0.4,
        "memory_mb": (steps[::20], 4000 + rng.normal(0, 2, len(steps[::20]))),
        "rss_mb": (steps[::20], 2000 + rng.normal(0, 2, len(steps[::20]))),
    }
    usual["norm_clipped"] = np.minimum(np.broadcast_to(columns.get("norm", usual["norm"]), num_steps), 1.0)
    rows = {name: _series(steps, values) for name, values in (usual | columns).items()}
    return History(
        run_id="made/1",
        status="finished",
        config={"system.data_workers": 1, "optimizer.grad_clip": 1.0, "lr.learning_rate": 3e-3},
        derived={"num_steps": num_steps, "warmup_steps": 20, "decay_steps": num_steps, "device": "cuda",
                 "dtype": "bfloat16", "num_ranks": 1, "rows_per_step": 16, "epoch_rows": 1600, "parameters": 1000},
        rows=rows,
    )  # fmt: skip


def _series(steps: np.ndarray, values: Any) -> Series:
    if isinstance(values, tuple):
        return Series(np.asarray(values[0]), np.asarray(values[1], np.float64))
    return Series(steps, np.array(np.broadcast_to(values, len(steps)), np.float64))


def judged(make: Callable[[int], History]) -> Ask:
    """What the doctor finds in a history that `make` makes of a seed."""
    return lambda root, seed: diagnosed(make(seed))


def slow_loader(seed: int) -> History:
    """Two milliseconds a row, and one thread that gathers."""
    wait = 0.16 * np.random.default_rng(seed).lognormal(0, 0.2, NUM_STEPS)
    return made(seed=seed, wait_s=wait, step_s=0.1 + wait)


def a_hiccup(seed: int) -> History:
    """The disk slept for two seconds, once."""
    wait = np.full(NUM_STEPS, 0.002)
    wait[550] = 2.0
    return made(seed=seed, wait_s=wait, step_s=0.1 + wait)


def slow_copies(seed: int) -> History:
    """Rows of float32 pictures over a bus that is busy."""
    copy = 0.15 * np.random.default_rng(seed).lognormal(0, 0.1, NUM_STEPS)
    return made(seed=seed, copy_s=copy, wait_s=copy, step_s=0.1 + copy)


def hidden_copies(seed: int) -> History:
    """As long, but beside the step before."""
    return made(seed=seed, copy_s=0.05)


def kept_graphs(seed: int) -> History:
    """Losses that are kept with their graph: half a megabyte a step."""
    steps = np.arange(0, NUM_STEPS, 20)
    return made(seed=seed, memory_mb=(steps, 4000 + 0.5 * steps + np.random.default_rng(seed).normal(0, 5, len(steps))))


def caches_fill(seed: int) -> History:
    """Grows for a while and stays; and a store that is mapped into memory page by page, in its first epoch."""
    steps = np.arange(0, NUM_STEPS, 20)
    rising = 2000 + 3.0 * np.minimum(steps, 100) + np.random.default_rng(seed).normal(0, 2, len(steps))
    return made(seed=seed, rss_mb=(steps, rising), memory_mb=(steps, 4000 + np.minimum(steps, 150)))


def throttled(seed: int) -> History:
    """From step 300 on the device takes half as long again."""
    slow = np.where(np.arange(NUM_STEPS) >= 300, 1.5, 1.0)
    return made(seed=seed, step_s=0.5 * slow * np.random.default_rng(seed).lognormal(0, 0.05, NUM_STEPS))


def noisy_clock(seed: int) -> History:
    """Steps of different lengths, with a bad minute now and then, but not slower in the end."""
    rng = np.random.default_rng(seed)
    seconds = 0.5 * rng.lognormal(0, 0.08, NUM_STEPS)
    seconds[250:270] *= 3
    return made(seed=seed, step_s=seconds)


CASES = [
    Case("P1", "slow-loader", judged(slow_loader), judged(a_hiccup), is_quick=True,
         statistic=stat.held("P1", stat.waits)),
    Case("P2", "copies-not-hidden", judged(slow_copies), judged(hidden_copies), is_quick=True,
         statistic=stat.held("P2", stat.copies)),
    Case("P4", "kept-graphs", judged(kept_graphs), judged(caches_fill), is_quick=True,
         statistic=stat.held("P4", stat.memory_grows)),
    Case("P5", "throttled", judged(throttled), judged(noisy_clock), is_quick=True,
         statistic=stat.held("P5", stat.slower)),
]  # fmt: skip
