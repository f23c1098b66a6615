"""Questions that a curve cannot answer, asked of the model itself at some of the evals.

How large an update would have been best, and how much worse the loss becomes without each input that the recipe
declares: a model that ignores an input loses nothing without it. Both losses of an ablation use the same rows and
random numbers and are compared row by row; the interval comes from a bootstrap over rows. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.contract import gather
from rung.engine.evaluate import EVAL_STEP, eval_mode
from rung.engine.guarded import Snapshot
from rung.engine.prefetch import to_device
from rung.engine.purity import pure
from rung.engine.state import set_training
from rung.engine.step import seed_torch
from rung.errors import RecipeError
from rung.random import Draw, key_of
from rung.recipe import Batch, Input, Loss, Stream
from rung.text import error_text

T = TypeVar("T")

SCALES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
OFTEN, SELDOM = 5, 5  # at the first five evals after the warm-up, then at every fifth
NUM_ROWS = 32  # of the eval set, for the worth of an input
NUM_BOOTSTRAPS = 1000  # the ends of a 95 % interval are then within about a tenth of its width


def probe(setup: Setup) -> dict[str, float]:
    """What there is to know at this state, as rows of the record name it; nothing when it is not the time."""
    progress = setup.state.progress
    after_warmup = sum(step > setup.schedule.warmup_steps for step in progress.eval_steps)
    if not after_warmup or (after_warmup > OFTEN and after_warmup % SELDOM):
        return {}
    found: dict[str, float] = {}

    def ablate_inputs() -> None:
        inputs, streams = setup.recipe.inputs(), setup.evaluator.streams
        if not (inputs and streams and setup.world.is_first):  # exchanges nothing, so one rank is enough
            return
        batch, draw = held_out(next(iter(streams.values())), NUM_ROWS, setup.cfg.seed, setup.world.device)
        # What this changes has just been told of the eval, which runs the same code.
        with pure(setup.state), eval_mode(setup.state.model), setup.precision.autocast():
            rises = ablate(setup.stepper.objectives[0].plain_loss, batch, draw, inputs)
        for name, (mean, low, high) in rises.items():
            key = f"probe/without_{name}"
            found.update({key: mean, f"{key}_low": low, f"{key}_high": high})

    _on_all_ranks(setup, ablate_inputs)
    if after_warmup <= OFTEN and (setup.num_steps is None or progress.step < 0.8 * setup.num_steps):
        found["probe/k"] = best_scale(setup)
    return found


class ProbeError(Exception):
    """A probe that failed on one of several ranks, which all know it and go on together."""


def _on_all_ranks(setup: Setup, work: Callable[[], T]) -> T:
    """What `work` gives; where it fails on one rank, all ranks leave the probe."""
    if setup.world.size == 1:
        return work()
    try:
        done, error = work(), ""
    except Exception as problem:
        done, error = None, error_text(problem)
    if failed := [text for text in setup.world.from_all(error) if text]:
        raise ProbeError(failed[0])
    return cast(T, done)


def best_scale(setup: Setup) -> float:
    """The multiple of the next update that is best for rows it was not made from; much more than 1: the rate is low.

    The update is made for once, and taken back: weights, optimizers, buffers and scale end as they began. All ranks
    make it together; each tries it on rows of its own, and the first one's count.
    """
    state, stepper, step = setup.state, setup.stepper, setup.state.progress.step
    objective = stepper.objectives[0]
    parameters = [p for o in stepper.objectives for p in o.parameters]
    optimizers = [x for o in stepper.objectives for x in o.optimizers]
    prefetcher = setup.prefetcher(workers=0)
    before = _on_all_ranks(setup, lambda: Snapshot(parameters, optimizers))  # for which memory may not be enough
    latch = stepper.guard.latch.clone()
    scale = state.loss_scale.state_dict() if state.loss_scale is not None else None
    set_training(state.model)
    losses = {}
    try:
        stepper.step(step, prefetcher.take(step), setup.schedule.lr(step, state.progress.evals), Clock())
        change = torch._foreach_sub([p.detach() for p in parameters], before.weights)
        fresh = prefetcher.take(step + 1)[0]
        for k in SCALES:
            with torch.no_grad():
                for parameter, weight, moved in zip(parameters, before.weights, change, strict=True):
                    parameter.copy_(torch.add(weight, moved, alpha=k))
            with eval_mode(state.model), setup.precision.autocast():
                seed_torch(objective.name, fresh.draw)
                loss = float(objective.plain_loss(fresh.batch, fresh.draw).sum)
            losses[k] = loss if loss == loss else float("inf")
    finally:
        before.restore()
        stepper.guard.latch.copy_(latch)
        stepper.guard.restore_buffers()
        for parameter in parameters:  # of a trial that ended half-way, for lack of memory say
            parameter.grad = None
        if state.loss_scale is not None and scale is not None:
            state.loss_scale.load_state_dict(scale)
    return min(losses, key=lambda k: losses[k])


class Rise(NamedTuple):
    """Relative rise of the loss, with the 95 % interval over rows; 0.26 is 26 %."""

    mean: float
    low: float
    high: float


def held_out(stream: Stream, num_rows: int, seed: int, device: torch.device) -> tuple[Batch, Draw]:
    """Rows spread evenly over a set: neighbours in time are so alike that exchanging them takes nothing away."""
    num_rows = min(num_rows, stream.num_rows)
    ids = np.arange(num_rows) * stream.num_rows // num_rows
    draw = Draw(seed, EVAL_STEP, np.arange(num_rows))
    return to_device(gather(stream, ids, draw), device)[0], draw


def ablate(
    loss: Callable[[Batch, Draw], Loss], batch: Batch, draw: Draw, inputs: Sequence[Input], rows_at_once: int = 1
) -> dict[str, Rise]:
    """What taking each input away costs, by its name. The caller has set eval mode and autocast."""
    if not inputs:
        return {}
    before = row_losses(loss, batch, draw, rows_at_once)
    return {
        given.name: rise(before, row_losses(loss, take_away(batch, given, draw), draw, rows_at_once), draw.seed)
        for given in inputs
    }


def take_away(batch: Batch, given: Input, draw: Draw) -> Batch:
    """The batch without what this input says; other tensors are shared with it, none is written to.

    permute: that of another row, the same other row for all tensors of the input, in place and time unchanged.
    zero: nothing but zeros. shift: that of another time of the same row, half a row away.
    """
    if given.how not in ("permute", "zero", "shift"):
        raise RecipeError(
            f"inputs() takes {given.name} away by {given.how!r}; it can be permute, zero or shift", code="bad-input"
        )
    missing = [name for name in given.tensors if name not in batch]
    if missing:
        raise RecipeError(
            f"inputs() says that {given.name} is in the tensor {missing[0]!r}, but a batch has {', '.join(batch)}; "
            "name one of these",
            code="bad-input",
        )
    is_all = set(given.tensors) >= set(batch)
    return {**batch, **{name: _without(batch[name], given.how, draw, is_all) for name in given.tensors}}


def _without(tensor: Tensor, how: str, draw: Draw, is_all: bool) -> Tensor:
    num_rows = len(tensor)
    has_time = tensor.ndim > 1 and tensor.shape[1] > 1
    if how == "zero":
        return torch.zeros_like(tensor)
    if how == "shift" and has_time:
        length = tensor.shape[1]
        return pick(tensor, slice(None), (torch.arange(length, device=tensor.device) + length // 2) % length)
    is_ids = tensor.ndim == 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool
    if (is_all or is_ids) and has_time:
        # The order in time is what is removed: swapping whole rows would swap the targets with them and change nothing.
        # The first place stays, for what begins a row is often never a target.
        order = 1 + np.argsort(draw.uniform("ablation/order", tensor.shape[1] - 1), axis=1)
        order = np.concatenate([np.zeros((len(order), 1), np.int64), order], axis=1)
        rows = torch.arange(len(tensor), device=tensor.device)[:, None]
        tensor = pick(tensor, rows, torch.from_numpy(order).to(tensor.device))
    if is_all or num_rows < 2:
        return tensor
    # By one distance for all rows, so that no row keeps its own and each is used once.
    distance = 1 + int(Draw(draw.seed, draw.step, np.zeros(1, np.int64)).integers("ablation", num_rows - 1)[0])
    return pick(tensor, (torch.arange(num_rows, device=tensor.device) + distance) % num_rows)


def pick(tensor: Tensor, *index: Any) -> Tensor:
    """tensor[index]; on CUDA torch cannot index the unsigned types that ids travel in, but the same bits it can."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(tensor.dtype)
    return tensor[index] if signed is None else tensor.view(signed)[index].view(tensor.dtype)


def row_losses(loss: Callable[[Batch, Draw], Loss], batch: Batch, draw: Draw, rows_at_once: int = 1) -> np.ndarray:
    """(groups, 2) float64: sum and count of each group of rows, computed apart from the others."""
    pairs = []
    for start in range(0, len(draw.rows), rows_at_once):
        few = slice(start, start + rows_at_once)
        part = Draw(draw.seed, draw.step, draw.rows[few])
        seed_torch("eval", part)
        found = loss({name: tensor[few] for name, tensor in batch.items()}, part)
        device = found.sum.device
        pairs.append(torch.stack([torch.as_tensor(x, device=device).detach().float().reshape(()) for x in found[:2]]))
    return torch.stack(pairs).cpu().double().numpy()


def rise(before: np.ndarray, after: np.ndarray, seed: int = 0) -> Rise:
    """How much larger the mean loss is in `after`, row for row the same rows; both are (rows, 2) sums and counts."""
    rng = np.random.default_rng(key_of(seed, "bootstrap"))
    drawn = rng.integers(0, len(before), (NUM_BOOTSTRAPS, len(before)))
    drawn = np.concatenate([np.arange(len(before))[None], drawn])  # the first is the sample itself
    with np.errstate(divide="ignore", invalid="ignore"):
        means = [pairs[drawn].sum(1) @ [1.0, 0.0] / (pairs[drawn].sum(1) @ [0.0, 1.0]) for pairs in (before, after)]
        ratio = np.where(means[0] == means[1], 0.0, (means[1] - means[0]) / np.abs(means[0]))
    low, high = np.nanquantile(ratio[1:], [0.025, 0.975]) if np.isfinite(ratio[1:]).any() else (np.nan, np.nan)
    return Rise(float(ratio[0]), float(low), float(high))
