"""What one logged step of 30 numbers costs the process that trains, in CPU time with its threads'."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rung.runs.record import Record

NUM_SCALARS = 30


def cost_us(log: Callable[[int, dict[str, float]], Any], num_steps: int) -> float:
    """CPU time of one call, in microseconds; the median over parts of the loop, as one hiccup spoils a mean."""
    rows = [{f"part/{i}/loss": math.sin(step * NUM_SCALARS + i) for i in range(NUM_SCALARS)} for step in range(100)]
    part = max(1, num_steps // 20)
    found = []
    for start in range(0, num_steps, part):
        begun = time.process_time()
        for step in range(start, start + part):
            log(step, rows[step % 100])
        found.append((time.process_time() - begun) / part * 1e6)
    return statistics.median(found)


def new_record(root: Path) -> Record:
    return Record.create(
        root,
        "logging",
        recipe="none",
        preset=None,
        command=["bench"],
        seed=0,
        config={},
        sources={},
        derived={},
        data={},
    )
