"""Whether the model uses its declared inputs, asked of a second copy that is trained for some seconds.

The copy is built from the same config and given the same weights, so that the run itself stays as it is. It is trained
at the peak rate after a short rise, not along the schedule, whose warm-up may be longer than all of this. After so few
steps an input that is not used may yet be: what is found here is a warning, and no verdict.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from rung.data.prefetch import Cut, Feed
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine import checkpoint
from rung.engine.ablation import Rise, ablate, held_out
from rung.engine.build import Setup, build
from rung.engine.clock import Clock
from rung.engine.evaluate import eval_mode
from rung.engine.state import set_training
from rung.recipe import Input

MOST_STEPS, MOST_S = 200, 20.0
LEAST_STEPS = 20
RISE_STEPS = 20  # to the peak rate
NUM_ROWS = 64
USED = 0.01  # relative rise of the loss; an ignored control has 0, an irrelevant one -0.8 .. 0.1 %, a used one far more
LEARNT = 0.02  # relative fall of the loss: a copy that has learnt nothing uses nothing


def inputs_are_used(bench: Bench) -> Iterator[Result]:
    name, setup = "inputs are used", bench.setup
    inputs = list(setup.recipe.inputs())
    if not inputs:
        yield Result(name, "skip", "the recipe declares none; see Recipe.inputs", rule="C1")
        return
    if any(tensor not in bench.micro.batch for given in inputs for tensor in given.tensors):
        yield Result(name, "skip", "not asked: a tensor that the recipe names is not in a batch", rule="C1")
        return
    if setup.world.size > 1:
        yield Result(name, "skip", "asked on one rank only", rule="C1")
        return
    try:
        copy = second(setup)
        losses = train(copy)
        fell = 1 - losses[-1] / losses[0]
        if len(losses) < LEAST_STEPS or not fell > LEARNT:
            seen = f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} steps: nothing to ask yet"
            yield Result(name, "skip", seen, rule="C1")
            return
        found = _ablate(copy)
    except (torch.OutOfMemoryError, MemoryError):
        yield Result(name, "skip", "no memory for a second copy of the model", rule="C1")
        return
    for given in inputs:
        wholes = [other.name for other in inputs if set(other.tensors) > set(given.tensors)]
        whole = next((other for other in wholes if found[other].low >= USED), "")
        yield _judge(given, found[given.name], len(losses), whole)


def _judge(given: Input, rise: Rise, num_steps: int, whole: str) -> Result:
    """`whole` is an input that is used and of which this one is a part: then the way to the model is open."""
    name, is_cut_off = f"{given.name} is used", rise.low == rise.high == 0
    seen = (
        f"without it ({given.how}) the loss rises by {rise.mean:+.1%} [{rise.low:+.1%}, {rise.high:+.1%}] "
        f"after {num_steps} steps of a copy"
    )
    if rise.high < USED and (is_cut_off or not whole):
        what = "does nothing at all" if is_cut_off else "is hardly used"
        remedy = (
            "see that it reaches the model (not zeroed, detached, overwritten or normalised away) and fits its rows in "
            "time; so few steps prove no absence: the run asks again at its evals"
        )
        return Result(name, "warn", f"it {what}: {seen}", remedy, "C1")
    part = f"; it is part of {whole}, which is used" if rise.high < USED else ""
    return Result(name, "pass", seen + part, rule="C1")


def second(setup: Setup) -> Setup:
    """The same run once more, with the same weights; not compiled, which would take longer than all of this."""
    copy = build(setup.config, type(setup.recipe), Path("runs"), is_training=False, is_new=False)
    weights = {name: tensor.clone() for name, tensor in checkpoint.canonical(setup.state.model).items()}
    checkpoint.load_weights(copy.state.model, weights, Path("the model itself"))
    return copy


def train(setup: Setup) -> list[float]:
    """Trains on micros of the configured size until steps or seconds are spent; returns the losses of the steps.

    The first and the last are means over a tenth of them, so that they can be compared.
    """
    rows = setup.cut.micro_rows
    feed = Feed(setup.streams["train"], Cut(rows, rows), setup.cfg.seed, setup.world.device, 0)
    begun, clock, losses = time.monotonic(), Clock(), list[float]()
    set_training(setup.state.model)
    for step in range(MOST_STEPS):
        lr = setup.schedule.peak * min(1.0, (step + 1) / RISE_STEPS)
        signals = setup.stepper.step(step, feed.take(step), lr, clock)
        losses.append(float(signals["loss/sum"] / signals["loss/count"]))
        if time.monotonic() - begun > MOST_S:
            break
    few = max(1, len(losses) // 10)
    losses[0], losses[-1] = sum(losses[:few]) / few, sum(losses[-few:]) / few
    return losses


def _ablate(setup: Setup) -> dict[str, Rise]:
    name = next(iter(setup.evaluator.streams), "train")
    batch, draw = held_out(setup.streams[name], NUM_ROWS, setup.cfg.seed, setup.world.device)
    with eval_mode(setup.state.model), setup.precision.autocast():
        return ablate(setup.stepper.objectives[0].plain_loss, batch, draw, list(setup.recipe.inputs()))


CHECKS: list[Check] = [Check("inputs are used", inputs_are_used, is_quick=False)]
