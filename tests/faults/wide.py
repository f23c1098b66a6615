"""Processes of their own for test_long.py: one that logs for ever, and one that starts many runs at once."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def log_for_long(num_steps: int) -> dict[str, object]:
    """A loop of one's own: a row each step, an eval each thousand; memory after a tenth, and at the end."""
    import rung

    run = rung.init("long", config={"lr": 0.1}, code=False)
    after_a_tenth, began = 0, time.process_time()
    for step in range(num_steps):
        row = {"loss": 1.0 / (step + 1), "norm": 0.5, "lr": 0.1, "tokens_per_s": 1e5 + step}
        run.log(row | {"val/loss": 2.0} if step % 1000 == 0 else row)
        if step == num_steps // 10:
            after_a_tenth = resident_bytes()
    at_end, cpu_s = resident_bytes(), time.process_time() - began
    run.finish()
    return {"after_a_tenth": after_a_tenth, "at_end": at_end, "cpu_s": cpu_s}


def record_for_long(num_steps: int) -> dict[str, object]:
    """What the engine writes of a run: rows, tables of layers, evals; then the copy by column is made and read."""
    from rung.runs.columns import read_series
    from rung.runs.record import Record

    record = Record.create(
        Path("runs"), "long", recipe="toy", preset=None, command=["rung"], seed=0, config={}, sources={}, derived={},
        data={},
    )  # fmt: skip
    layers, after_a_tenth, began = [f"layer{i}" for i in range(10)], 0, time.process_time()
    for step in range(num_steps):
        record.log(step, {"loss": 1.0 / (step + 1), "norm": 0.5, "lr": 0.1, "targets": 512, "wait_s": 0.001})
        if step % 1000 == 0:
            record.table("tensors", step, layers, {"grad": [0.1] * 10, "weight": [0.2] * 10})
            record.event("eval", step=step, results={"val": {"loss": 1.0}})
        if step == num_steps // 10:
            after_a_tenth = resident_bytes()
    at_end, cpu_s = resident_bytes(), time.process_time() - began
    record.finish("finished")
    read = len(read_series(record.path / "metrics", "loss"))
    return {"after_a_tenth": after_a_tenth, "at_end": at_end, "cpu_s": cpu_s, "read": read, "reading": resident_bytes()}


def start_at_once(num_runs: int) -> dict[str, object]:
    """So many processes wait for one moment and then each starts a run of one experiment, logs and ends."""
    import rung.runs.executed  # noqa: F401  (what all children would import)
    from rung.runs.record import Record

    gate, opener = os.pipe()
    children = []
    for number in range(num_runs):
        pid = os.fork()
        if pid == 0:
            os.close(opener)
            os.read(gate, 1)
            record = Record.create(
                Path("runs"), "wide", recipe="toy", preset=None, command=["rung"], seed=number, config={}, sources={},
                derived={}, data={},
            )  # fmt: skip
            for step in range(5):
                record.log(step, {"loss": float(number)})
            record.finish("finished")
            os._exit(0)
        children.append(pid)
    os.close(opener)
    return {"codes": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]}


if __name__ == "__main__":
    name, number = sys.argv[1:]
    print(json.dumps(globals()[name](int(number))), file=sys.stdout)  # noqa: T201
