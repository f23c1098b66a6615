"""Whether a recipe's stream keeps up with its step: both alone, with the model and the batch of a run."""

from __future__ import annotations

import time
from typing import Any

import torch

from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.state import set_training


def stream_against_step(setup: Setup, num_steps: int) -> dict[str, Any]:
    """Seconds of `num_steps` steps, after some that are left out. Weights change; nothing is recorded.

    `gather_s` is what gathering the rows of a step takes in the step's own thread. `wait_s` is what a step waits for
    `system.data_workers` threads or processes that gather meanwhile, and `step_s` what it takes then. The two are
    measured one after the other: what is gathered inline would give the workers time to get ahead.
    """
    device, progress = setup.world.device, setup.state.progress
    rows_per_step, num_workers = setup.layout.rows_per_step, setup.cfg.system.data_workers
    found: dict[str, list[float]] = {"gather_s": [], "wait_s": [], "step_s": []}
    inline = setup.prefetcher(workers=0)
    try:
        for _ in range(num_steps + 1):
            begun = time.perf_counter()
            inline.take(progress.step)
            _wait_for(device)
            found["gather_s"].append(time.perf_counter() - begun)
            progress.step += 1
            progress.position += rows_per_step
    finally:
        inline.close()
    # Further rows, which no cache has yet. The workers gather the first steps before the first one runs.
    num_warm, clock, ahead = num_workers + 2, Clock(), setup.prefetcher()
    set_training(setup.state.model)
    try:
        for _ in range(num_warm + num_steps):
            begun = time.perf_counter()
            micros = ahead.take(progress.step)
            waited = time.perf_counter()
            setup.stepper.step(progress.step, micros, setup.schedule.peak, clock)
            _wait_for(device)
            found["wait_s"].append(waited - begun)
            found["step_s"].append(time.perf_counter() - waited)
            progress.step += 1
            progress.position += rows_per_step
    finally:
        ahead.close()
    kept = {name: values[-num_steps:] for name, values in found.items()}
    return {**kept, "rows_per_step": rows_per_step, "data_workers": num_workers}


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
