"""What one logged step of 30 numbers costs the training process, against wandb in offline mode.

    python -m bench.logging [--quick]

CPU time of the process that trains, its threads included, so that work handed to a background thread counts; what
wandb's own service process burns besides does not. A tight loop, in turns. wandb is optional: without it only rung's
own cost is told.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from rung.bench.logging import NUM_SCALARS, cost_us, new_record
from rung.bench.report import facts, in_turns, pairwise, spread, verdict
from rung.runs.metrics import MetricsWriter

BAR_US = 10.0
BAR_RATIO = 20.0  # half of what two slow cores gave (45), as machines and versions of wandb differ


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps: does it run at all?")
    args = parser.parse_args()
    num_rounds, num_steps = (3, 200) if args.quick else (15, 5000)
    print(facts("msgspec", "wandb", scalars=NUM_SCALARS, steps=num_steps, rounds=num_rounds))
    with tempfile.TemporaryDirectory() as folder:
        bench(Path(folder), num_rounds, num_steps)


def bench(folder: Path, num_rounds: int, num_steps: int) -> None:
    writer = MetricsWriter(folder / "metrics", 0)
    record = new_record(folder / "runs")
    parties = {
        "rung, rows alone": lambda: cost_us(writer.log, num_steps),
        "rung, Record.log": lambda: cost_us(record.log, num_steps),
    }
    run, why_not = open_wandb(folder / "wandb")
    if run is not None:
        parties["wandb offline"] = lambda: cost_us(lambda step, row: run.log(row), num_steps // 10)
    figures = in_turns(num_rounds, parties)
    if run is not None:
        run.finish()
    record.finish("finished")
    writer.close()
    for name, values in figures.items():
        print(f"{name:<18} {spread(values, '.1f')} us a step")
    if run is None:
        print(f"wandb offline      left out: {why_not}")
    else:
        print(verdict("logging-vs-wandb", pairwise(figures["wandb offline"], figures["rung, Record.log"]), BAR_RATIO))
    print(verdict("logging-us", figures["rung, Record.log"], BAR_US, is_least=False, form=".2f"))


def open_wandb(folder: Path) -> tuple[Any, str]:
    """An offline run of wandb, or None and the reason."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    folder.mkdir()
    logging.getLogger("wandb").setLevel(logging.ERROR)
    try:
        import wandb
    except ImportError as error:
        return None, f"{error} (pip install 'rung[bench]')"
    try:
        return wandb.init(project="bench", dir=str(folder), mode="offline"), ""
    except Exception as error:  # whatever keeps a neighbour from starting is not our failure
        return None, f"it did not start: {error}"


if __name__ == "__main__":
    main()
