"""Whether a recipe's stream keeps up with its step: both alone, with the model and the batch of a run."""

from __future__ import annotations

import time
from typing import Any

import torch

from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.state import set_training


def stream_against_step(setup: Setup, num_steps: int) -> dict[str, Any]:
    """Seconds of each step, in turns, the first left out. Weights change; nothing is recorded.

    `gather_s` is what gathering the rows of a step takes in the step's own thread; `wait_s` what a step then waits for
    `system.data_workers` threads or processes that gather meanwhile.
    """
    device, progress = setup.world.device, setup.state.progress
    inline, ahead, clock = setup.prefetcher(workers=0), setup.prefetcher(), Clock()
    found: dict[str, list[float]] = {"gather_s": [], "wait_s": [], "step_s": []}
    set_training(setup.state.model)
    try:
        for number in range(num_steps + 1):
            seconds = []
            begun = time.perf_counter()
            inline.take(progress.step)
            _wait_for(device)
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            micros = ahead.take(progress.step)
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            setup.stepper.step(progress.step, micros, setup.schedule.peak, clock)
            _wait_for(device)
            seconds.append(time.perf_counter() - begun)
            progress.step += 1
            progress.position += setup.layout.rows_per_step
            if number:
                for values, value in zip(found.values(), seconds, strict=True):
                    values.append(value)
    finally:
        inline.close()
        ahead.close()
    return {**found, "rows_per_step": setup.layout.rows_per_step, "data_workers": setup.cfg.system.data_workers}


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
