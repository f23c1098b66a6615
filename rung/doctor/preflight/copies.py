"""Checks on a copy of the run, with its config and weights, so that the run itself stays as it is.

One copy is trained for some seconds, to see whether the model uses its declared inputs: at the peak rate after a short
warm-up, not along the schedule, whose warm-up may be longer than all of this. Another one runs on the CPU, to see
whether the accelerator computes the same: a difference beyond rounding is a kernel, a device, or code that depends on
where it runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from rung.config import Config
from rung.doctor.preflight.forward import forward, gap_of
from rung.doctor.preflight.result import CheckContext, Result, check
from rung.engine import checkpoint
from rung.engine.build import Setup, build
from rung.engine.clock import Clock
from rung.engine.evaluate import eval_mode
from rung.engine.prefetch import BatchLayout, Prefetcher
from rung.engine.probes import Rise, ablate, held_out
from rung.engine.state import set_training
from rung.text import error_text

MOST_STEPS, MOST_S = 200, 20.0
LEAST_STEPS = 20
RISE_STEPS = 20  # to the peak rate
NUM_ROWS = 64
USED = 0.01  # relative rise of the loss; an ignored control has 0, an irrelevant one -0.8 .. 0.1 %, a used one far more
LEARNT = 0.02  # relative fall of the loss: a copy that has learnt nothing uses nothing
# Relative, of the loss and of the norm. Measured once: a GPT of 124M in bfloat16 on an H200 differed from float32 on
# the CPU by 3.8e-6 in the loss and by 4.5e-4 in the norm. The limits lie far above that; they are chosen, not measured.
LIMITS = {"float32": (1e-4, 1e-3), "float16": (5e-3, 5e-2), "bfloat16": (1e-2, 1e-1)}
MUCH = 10  # times the limit: broken, not just odd


def copy_of(setup: Setup, **system: str) -> Setup:
    """The same run with the same weights, with other keys of `system`; not compiled, which would take too long."""
    values = {**setup.config.values, **{f"system.{key}": value for key, value in system.items()}}
    config = Config(setup.config.schema, values, setup.config.sources)
    copy = build(config, type(setup.recipe), Path("runs"), is_training=False, is_new=False)
    weights = {n: t.to(copy.world.device, copy=True) for n, t in checkpoint.canonical(setup.state.model).items()}
    checkpoint.load_weights(copy.state.model, weights, Path("the model itself"))
    return copy


@check("inputs are used", "C1", is_quick=False)
def inputs_are_used(context: CheckContext) -> Iterator[Result]:
    """After so few steps an input may just not be used yet, so the worst result is a warning."""
    setup, inputs = context.setup, list(context.setup.recipe.inputs())
    if not inputs:
        yield Result("skip", "the recipe declares none; see Recipe.inputs")
        return
    if any(tensor not in context.micro.batch for given in inputs for tensor in given.tensors):
        yield Result("skip", "a tensor that the recipe names is not in a batch")
        return
    if setup.world.size > 1:
        yield Result("skip", "runs on one rank only")
        return
    try:
        copy = copy_of(setup)
        losses = train(copy)
        if len(losses) < LEAST_STEPS or not 1 - losses[-1] / losses[0] > LEARNT:
            seen = f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses)} steps: too little to tell"
            yield Result("skip", seen)
            return
        found = ablate_inputs(copy)
    except (torch.OutOfMemoryError, MemoryError):
        yield Result("skip", "no memory for a second copy of the model")
        return
    for given in inputs:
        rise = found[given.name]
        # An input that is used and contains this one: then this one reaches the model too.
        wholes = [other.name for other in inputs if set(other.tensors) > set(given.tensors)]
        whole = next((other for other in wholes if found[other].low >= USED), "")
        name, is_cut_off = f"{given.name} is used", rise.low == rise.high == 0
        seen = (
            f"without it ({given.how}) the loss rises by {rise.mean:+.1%} [{rise.low:+.1%}, {rise.high:+.1%}] "
            f"after {len(losses)} steps of a copy"
        )
        # What helps a little, beyond chance, reaches the model: it is learned later (speech, at 47 of 700 steps).
        if rise.high < USED and not (is_cut_off or whole or rise.low > 0) and len(losses) < MOST_STEPS:
            yield Result("skip", f"{seen}: there was no time for the {MOST_STEPS} steps that would tell", name=name)
        elif rise.high < USED and (is_cut_off or not (whole or rise.low > 0)):
            what = "does nothing at all" if is_cut_off else "is hardly used"
            remedy = (
                "check that it reaches the model (not zeroed, detached, overwritten or normalised away) and is aligned "
                "in time; so few steps prove nothing: the run tests it again at its evals"
            )
            yield Result("warn", f"it {what}: {seen}", remedy, name=name)
        else:
            part = f"; it is part of {whole}, which is used" if whole and rise.high < USED else ""
            yield Result("pass", seen + part, name=name)


def train(setup: Setup) -> list[float]:
    """Trains on micros of the configured size until steps or seconds are used up; returns the losses of the steps.

    The first and the last are means over a tenth of them, so that they can be compared.
    """
    rows = setup.layout.micro_rows
    prefetcher = Prefetcher(setup.streams["train"], BatchLayout(rows, rows), setup.cfg.seed, setup.world.device, 0)
    begun, clock, losses = time.monotonic(), Clock(), list[float]()
    set_training(setup.state.model)
    for step in range(MOST_STEPS):
        lr = setup.schedule.peak * min(1.0, (step + 1) / RISE_STEPS)
        signals = setup.stepper.step(step, prefetcher.take(step), lr, clock)
        losses.append(float(signals["loss/sum"] / signals["loss/count"]))
        if time.monotonic() - begun > MOST_S:
            break
    few = max(1, len(losses) // 10)
    losses[0], losses[-1] = sum(losses[:few]) / few, sum(losses[-few:]) / few
    return losses


def ablate_inputs(setup: Setup) -> dict[str, Rise]:
    name = next(iter(setup.evaluator.streams), "train")
    batch, draw = held_out(setup.streams[name], NUM_ROWS, setup.cfg.seed, setup.world.device)
    with eval_mode(setup.state.model), setup.precision.autocast():
        return ablate(setup.stepper.objectives[0].plain_loss, batch, draw, list(setup.recipe.inputs()))


@check("same on the CPU", is_quick=False)
def same_as_on_cpu(context: CheckContext) -> Result:
    setup = context.setup
    if setup.world.device.type == "cpu":
        return Result("skip", "the run itself is on the CPU")
    if setup.world.size > 1:
        return Result("skip", "runs on one rank only")
    try:
        return compare(setup, copy_of(setup, device="cpu", dtype="float32"))
    except Exception as error:  # int8 layers, say, have no kernels there
        return Result("skip", f"the CPU cannot run it: {error_text(error)}")


def compare(setup: Setup, other: Setup) -> Result:
    """In eval mode, since dropout draws other numbers on each device."""
    (loss, norm), (other_loss, other_norm) = loss_and_norm(setup), loss_and_norm(other)
    limits = LIMITS[setup.precision.name]
    # 0 if both are not finite in the same way, infinite if only one is.
    apart = [
        gap_of(a, b) if math.isfinite(a) and math.isfinite(b) else 0.0 if str(a) == str(b) else math.inf
        for a, b in ((loss, other_loss), (norm, other_norm))
    ]
    seen = (
        f"loss {loss:.6g} here and {other_loss:.6g} on the CPU ({apart[0]:.1e} apart, limit {limits[0]:g}), gradient "
        f"norm {norm:.6g} and {other_norm:.6g} ({apart[1]:.1e}, limit {limits[1]:g}) in {setup.precision.name}"
    )
    worst = max(a / limit for a, limit in zip(apart, limits))
    remedy = "try system.dtype=float32 and system.compile=false, and look for code that depends on the device"
    return Result("pass" if worst <= 1 else "warn" if worst <= MUCH else "fail", seen, remedy)


def loss_and_norm(setup: Setup) -> tuple[float, float]:
    """Of the first objective, on rows of step 0; leaves no gradients behind."""
    context = CheckContext(setup)
    loss = forward(context, context.micro)
    mean = loss.sum / loss.count
    gradients = torch.autograd.grad(mean, setup.state.objectives[0].parameters, allow_unused=True)
    norm = torch.nn.utils.get_total_norm([g.float() for g in gradients if g is not None])
    return float(mean.detach()), float(norm)
