"""One of everything at full size before the run: steps, an eval batch of each set, a save, a load.

Says what memory that took and how long the whole run will take, and finds what does not fit while nobody waits for it.
The second step is the one that is timed: the first one compiles, allocates and warms up. Weights change, so this comes
last. The save goes beside where runs are kept, for another disk would say nothing.
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

from rung.data.prefetch import to_device
from rung.doctor.preflight import parity, provenance
from rung.doctor.preflight.plan import FALLING, NEAR
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine import checkpoint
from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.evaluate import EVAL_STEP, eval_mode
from rung.engine.state import set_training
from rung.errors import CheckpointError
from rung.recipe import Draw
from rung.units import Budget, duration, size

FULL = 0.95  # of the device's memory: a longer row, or fragments, will not fit
T = TypeVar("T")


class Costs(NamedTuple):
    """Seconds of each part, and bytes of a save."""

    first_step_s: float
    step_s: float
    eval_s: dict[str, float]  # of a batch, by set
    save_s: float
    load_s: float
    save_bytes: int


def rehearse(bench: Bench) -> Iterator[Result]:
    setup, name = bench.setup, "rehearsal"
    if setup.world.size > 1:
        yield Result(name, "skip", "asked on one rank only; each rank holds as much")
        return
    root = _existing(Path(bench.shared.get("runs_root", "runs")))
    if setup.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setup.world.device)
    try:
        costs = _costs(setup, root)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        rows = setup.cfg.data.batch_size
        seen = f"out of memory with data.batch_size={rows}: {str(error).splitlines()[0][:120]}"
        remedy = (
            f"set data.batch_size={max(1, rows // 2)} optimizer.gradient_accumulation_steps="
            f"{2 * setup.cfg.optimizer.gradient_accumulation_steps}: the same step in smaller parts"
        )
        yield Result(name, "fail", seen, remedy)
        return
    except CheckpointError as error:
        yield Result(name, "fail", str(error), "make room, or keep runs elsewhere: --runs")
        return
    yield _memory(setup)
    yield _time(setup, costs)
    yield _disk(setup, costs, root)
    yield from _schedule(setup, costs)


def _costs(setup: Setup, root: Path) -> Costs:
    feed, clock = setup.feed(), Clock()
    set_training(setup.state.model)
    progress = setup.state.progress

    def one_step() -> None:
        setup.stepper.step(progress.step, feed.take(progress.step), setup.schedule.peak, clock)
        progress.step += 1
        progress.position += setup.cut.rows_per_step

    try:
        first_s, _ = timed(setup, one_step)
        step_s, _ = timed(setup, one_step)
    finally:
        feed.close()
    eval_s = {name: timed(setup, partial(_eval_batch, setup, name))[0] for name in setup.evaluator.streams}
    with tempfile.TemporaryDirectory(prefix=".rung-check-", dir=root) as folder:
        save_s, path = timed(setup, lambda: checkpoint.Checkpoints(Path(folder)).save(setup.state, setup.save_extra()))
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        load_s, _ = timed(setup, lambda: _load(setup, path))
    return Costs(first_s, step_s, eval_s, save_s, load_s, num_bytes)


def timed(setup: Setup, work: Callable[[], T]) -> tuple[float, T]:
    """Seconds until the device has done it."""
    begun = time.perf_counter()
    done = work()
    if setup.world.device.type == "cuda":
        torch.cuda.synchronize(setup.world.device)
    return time.perf_counter() - begun, done


def _eval_batch(setup: Setup, name: str) -> None:
    stream = setup.streams[name]
    rows = setup.evaluator.rows(stream)[: setup.cfg.data.batch_size]
    draw = Draw(setup.cfg.seed, EVAL_STEP, np.arange(len(rows)))
    batch, _ = to_device(stream.gather(rows, draw), setup.world.device)
    with eval_mode(setup.state.model), setup.precision.autocast():
        setup.stepper.objectives[0].loss(batch, draw)
        setup.recipe.measure(setup.state.model, batch, draw)


def _load(setup: Setup, path: Path) -> None:
    saved = checkpoint.load(path)
    checkpoint.load_weights(setup.state.model, saved.weights, path)
    setup.state.load_tensors(saved.tensors())


def _memory(setup: Setup) -> Result:
    name, device = "rehearsal: memory", setup.world.device
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Result(name, "pass", f"the process took {size(peak)} at most")
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    seen = f"{size(peak)} of {size(total)} on {device} with {setup.cfg.data.batch_size} rows a micro"
    if peak > FULL * total:
        return Result(
            name, "warn", seen, f"lower data.batch_size={setup.cfg.data.batch_size}: a longer row may not fit"
        )
    return Result(name, "pass", seen)


def _time(setup: Setup, costs: Costs) -> Result:
    name = "rehearsal: time"
    batches = {
        set_: -(-len(setup.evaluator.rows(setup.streams[set_])) // setup.cfg.data.batch_size) for set_ in costs.eval_s
    }
    eval_s = sum(batches[set_] * seconds for set_, seconds in costs.eval_s.items())
    parts = f"a step {_s(costs.step_s)} (the first {_s(costs.first_step_s)}), an eval {_s(eval_s)}"
    parts += f", a save {_s(costs.save_s)}, a load {_s(costs.load_s)}"
    if setup.num_steps is None:
        return Result(name, "pass", f"{parts}; ended by optimizer.max_iters={setup.cfg.optimizer.max_iters}")
    num_evals = times(setup, setup.cfg.eval_interval, costs)
    num_saves = times(setup, setup.cfg.checkpoint.every, costs)
    total = setup.num_steps * costs.step_s + num_evals * eval_s + num_saves * costs.save_s
    seen = f"about {duration(total)} for {setup.num_steps} steps, {num_evals} evals and {num_saves} saves; {parts}"
    return Result(name, "pass", seen)


def times(setup: Setup, every: Budget, costs: Costs) -> int:
    """How often something recurs in the whole run, its end included."""
    seconds = setup.cfg.optimizer.max_iters.seconds
    num_steps = setup.num_steps if setup.num_steps is not None else int((seconds or 0) / costs.step_s)
    steps = None if every.is_never else setup.rate.steps(every)
    if steps is None and every.seconds:
        steps = int(every.seconds / costs.step_s)
    return 1 + max(0, num_steps - 1) // max(1, steps) if steps is not None else 1


def _disk(setup: Setup, costs: Costs, root: Path) -> Result:
    """Saves that will lie there at once: those that are kept, the best and the last."""
    name, keep = "rehearsal: disk", setup.cfg.checkpoint.keep
    num_saves = times(setup, setup.cfg.checkpoint.every, costs)
    most = (num_saves if keep == 0 else min(keep + 1, num_saves)) + setup.cfg.checkpoint.best
    wanted, free = most * costs.save_bytes, shutil.disk_usage(root).free
    seen = f"{most} saves of {size(costs.save_bytes)} at once are {size(wanted)}; {size(free)} are free in {root}"
    if wanted > free:
        return Result(name, "fail", seen, "make room, lower checkpoint.keep, or keep runs on another disk: --runs")
    return Result(name, "pass", seen)


def _schedule(setup: Setup, costs: Costs) -> Iterator[Result]:
    """How far a run that time ends will come along its schedule."""
    seconds, schedule = setup.cfg.optimizer.max_iters.seconds, setup.schedule
    if seconds is None or schedule.shape not in FALLING:
        return
    steps = int(seconds / costs.step_s)
    steps = min(steps, setup.num_steps) if setup.num_steps is not None else steps
    share = steps / schedule.decay_steps
    seen = f"about {steps} steps fit into {duration(seconds)}, {schedule.shape} falls over {schedule.decay_steps}"
    if NEAR[0] <= share <= NEAR[1] or steps == setup.num_steps:
        yield Result("rehearsal: schedule", "pass", seen, rule="O10")
    else:
        remedy = f"set lr.lr_decay_iters={max(1, steps)}, or end the run by steps: optimizer.max_iters={max(1, steps)}"
        yield Result("rehearsal: schedule", "warn", seen, remedy, "O10")


def _s(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else duration(seconds)


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


CHECKS: list[Check] = [
    *parity.CHECKS,
    provenance.UNREAD,
    Check("rehearsal", rehearse, is_quick=False, changes_state=True),
]
