"""One of everything at full size before the run: steps, an eval batch of each set, a save, a load.

Reports the memory that took and how long the whole run will take, and finds what does not fit before the run starts.
Weights change, so this comes last. The save goes to the disk of the runs. Before it: keys that nothing has read.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from rung.doctor.preflight.plan import FALLING, NEAR
from rung.doctor.preflight.result import CheckContext, Result, check
from rung.engine import checkpoint
from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.contract import gather
from rung.engine.evaluate import EVAL_STEP, eval_mode
from rung.engine.prefetch import to_device
from rung.engine.state import set_training
from rung.errors import CheckpointError
from rung.random import Draw
from rung.text import error_text
from rung.units import Budget, duration, size

# Keys of the engine that only the loop or the command line reads, after everything that is looked at here.
LATE = ("eval_interval", "sample_interval", "eval_only", "logging.", "signals.", "system.data_workers")
FULL = 0.95  # of the device's memory: a longer row, or fragments, will not fit
T = TypeVar("T")


class Costs(NamedTuple):
    first_step_s: float
    step_s: float
    eval_s: dict[str, float]  # of a batch, by set
    save_s: float
    load_s: float
    save_bytes: int


@check("unread keys", "R1")
def unread_keys(context: CheckContext) -> Result:
    """Keys that were set and not read by the build, by other checks and by one row of every eval set."""
    config = context.setup.config
    try:
        for name in context.setup.evaluator.streams:
            _eval_batch(context.setup, name, 1)
    except Exception as error:  # other checks say what is wrong with it
        seen = f"running one row failed ({error_text(error)}), so it is not known which keys are read"
        return Result("skip", seen)
    keys = [key for key in config.unread() if not key.startswith(LATE)]
    if unread := [key for key in keys if not config.sources[key].startswith("preset")]:
        why = {key: config.schema.keys[key].doc for key in unread} | dict(context.setup.notes.unused)
        what = "; ".join(f"{key}={config.values[key]} ({why[key]})" for key in unread)
        return Result("warn", f"these keys have no effect: {what}", "remove them, or set what they depend on")
    num_set = sum(not source.startswith(("default", "derived")) for source in config.sources.values())
    return Result("pass", f"all {num_set} keys that were set are read")


@check("rehearsal", is_quick=False, changes_state=True)
def rehearse(context: CheckContext) -> Iterator[Result]:
    setup = context.setup
    if setup.world.size > 1:
        yield Result("skip", "runs on one rank only; every rank needs as much")
        return
    root = Path(context.shared.get("runs_root", "runs")).resolve()
    while not root.is_dir():
        root = root.parent
    if setup.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.world.device)
    try:
        costs = _measure_costs(setup, root)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not is_memory:
            raise
        rows = setup.cfg.data.batch_size
        seen = f"out of memory with data.batch_size={rows}: {' '.join(str(error).split())[:120]}"
        remedy = (
            f"set data.batch_size={max(1, rows // 2)} optimizer.gradient_accumulation_steps="
            f"{2 * setup.cfg.optimizer.gradient_accumulation_steps}: the same step in smaller parts"
        )
        yield Result("fail", seen, remedy)
        return
    except CheckpointError as error:
        yield Result("fail", str(error), "free some space, or keep runs elsewhere with `--runs`")
        return

    # Memory
    device, rows = setup.world.device, setup.cfg.data.batch_size
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        yield Result("pass", f"the process took {size(peak)} at most", name="rehearsal: memory")
    else:
        peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
        seen = f"{size(peak)} of {size(total)} on {device} with {rows} rows a micro"
        remedy = f"lower data.batch_size={rows}: a longer row may not fit"
        yield Result("warn" if peak > FULL * total else "pass", seen, remedy, name="rehearsal: memory")

    # Time
    eval_s = sum(-(-len(setup.evaluator.rows(setup.streams[s])) // rows) * a for s, a in costs.eval_s.items())
    parts = f"a step {_s(costs.step_s)} (the first {_s(costs.first_step_s)}), an eval {_s(eval_s)}"
    parts += f", a save {_s(costs.save_s)}, a load {_s(costs.load_s)}"
    num_evals = _num_times(setup, setup.cfg.eval_interval, costs)
    num_saves = _num_times(setup, setup.cfg.checkpoint.every, costs)
    if setup.num_steps is None:
        seen = f"{parts}; ended by optimizer.max_iters={setup.cfg.optimizer.max_iters}"
    else:
        total_s = setup.num_steps * costs.step_s + num_evals * eval_s + num_saves * costs.save_s
        seen = f"about {duration(total_s)} for {setup.num_steps} steps, {num_evals} evals and {num_saves} saves"
        seen += f"; {parts}"
    yield Result("pass", seen, name="rehearsal: time")

    # Disk: whether the saves that exist at once fit, those that are kept, the best and the last.
    keep = setup.cfg.checkpoint.keep
    most = (num_saves if keep == 0 else min(keep + 1, num_saves)) + setup.cfg.checkpoint.best
    wanted, free = most * costs.save_bytes, shutil.disk_usage(root).free
    seen = f"{most} saves of {size(costs.save_bytes)} at once are {size(wanted)}; {size(free)} are free in {root}"
    remedy = "free some space, lower checkpoint.keep, or keep runs on another disk with `--runs`"
    yield Result("fail" if wanted > free else "pass", seen, remedy, name="rehearsal: disk")

    # Schedule: how far a run that time ends will come.
    seconds, schedule = setup.cfg.optimizer.max_iters.seconds, setup.schedule
    if seconds is None or schedule.shape not in FALLING:
        return
    steps = int(seconds / costs.step_s)
    steps = min(steps, setup.num_steps) if setup.num_steps is not None else steps
    is_fine = NEAR[0] <= steps / schedule.decay_steps <= NEAR[1] or steps == setup.num_steps
    seen = f"about {steps} steps fit into {duration(seconds)}, {schedule.shape} falls over {schedule.decay_steps}"
    remedy = f"set lr.lr_decay_iters={max(1, steps)}, or end the run by steps: optimizer.max_iters={max(1, steps)}"
    yield Result("pass" if is_fine else "warn", seen, remedy, name="rehearsal: schedule", rule="O10")


def _measure_costs(setup: Setup, root: Path) -> Costs:
    def timed(work: Callable[[], T]) -> tuple[float, T]:
        """Seconds until the device has done it."""
        begun = time.perf_counter()
        done = work()
        if setup.world.device.type == "cuda":
            torch.cuda.synchronize(setup.world.device)
        return time.perf_counter() - begun, done

    def one_step() -> None:
        setup.stepper.step(progress.step, prefetcher.take(progress.step), setup.schedule.peak, clock)
        progress.step += 1
        progress.position += setup.layout.rows_per_step

    def load() -> None:
        saved = checkpoint.load(path)
        saved.load_into(setup.state.model)
        setup.state.load_tensors(saved.tensors())

    prefetcher, clock, progress = setup.prefetcher(), Clock(), setup.state.progress
    set_training(setup.state.model)
    try:
        first_s, _ = timed(one_step)  # compiles, allocates and warms up
        step_s, _ = timed(one_step)
    finally:
        prefetcher.close()
    num_rows = setup.cfg.data.batch_size
    eval_s = {name: timed(partial(_eval_batch, setup, name, num_rows))[0] for name in setup.evaluator.streams}
    with tempfile.TemporaryDirectory(prefix=".rung-check-", dir=root) as folder:
        save_s, path = timed(lambda: checkpoint.Checkpoints(Path(folder)).save(setup.state, setup.save_extra()))
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        load_s, _ = timed(load)
    return Costs(first_s, step_s, eval_s, save_s, load_s, num_bytes)


def _eval_batch(setup: Setup, name: str, num_rows: int) -> None:
    """Runs what an eval would, on some rows of a set."""
    stream = setup.streams[name]
    rows = setup.evaluator.rows(stream)[:num_rows]
    draw = Draw(setup.cfg.seed, EVAL_STEP, np.arange(len(rows)))
    batch, _ = to_device(gather(stream, rows, draw), setup.world.device)
    with eval_mode(setup.state.model), setup.precision.autocast():
        setup.stepper.objectives[0].plain_loss(batch, draw)
        setup.recipe.measure(setup.state.model, batch, draw)


def _num_times(setup: Setup, every: Budget, costs: Costs) -> int:
    """How often something recurs in the whole run, its end included."""
    seconds = setup.cfg.optimizer.max_iters.seconds
    num_steps = setup.num_steps if setup.num_steps is not None else int((seconds or 0) / costs.step_s)
    steps = None if every.is_never else setup.rate.steps(every)
    if steps is None and every.seconds:
        steps = int(every.seconds / costs.step_s)
    return 1 + max(0, num_steps - 1) // max(1, steps) if steps is not None else 1


def _s(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else duration(seconds)
