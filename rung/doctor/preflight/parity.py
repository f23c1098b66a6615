"""Whether the accelerator computes what the CPU does: one batch, the same weights, loss and gradient norm compared.

In eval mode, for dropout draws other numbers on each device; in float32 on the CPU, whatever the run computes in. What
differs by more than rounding is a kernel, a device, or code that asks where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from rung.config import Config
from rung.data.prefetch import Cut, Feed
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine import checkpoint
from rung.engine.build import Setup, build
from rung.engine.step import seed_torch

# Relative, of the loss and of the norm. Measured once: a GPT of 124M in bfloat16 on an H200 differed from float32 on
# the CPU by 3.8e-6 in the loss and by 4.5e-4 in the norm. The limits lie far above that; they are chosen, not measured.
LIMITS = {"float32": (1e-4, 1e-3), "float16": (5e-3, 5e-2), "bfloat16": (1e-2, 1e-1)}
MUCH = 10  # times the limit: broken, not merely odd


def same_as_on_cpu(bench: Bench) -> Iterator[Result]:
    name, setup = "same on the CPU", bench.setup
    if setup.world.device.type == "cpu":
        yield Result(name, "skip", "the run itself is on the CPU")
        return
    if setup.world.size > 1:
        yield Result(name, "skip", "asked on one rank only")
        return
    try:
        yield compare(setup, on_cpu(setup), name)
    except Exception as error:  # int8 layers, say, have no kernels there
        yield Result(name, "skip", f"the CPU cannot run it: {type(error).__name__}: {error}")


def on_cpu(setup: Setup) -> Setup:
    """The same run on the CPU in float32, with the weights of this one."""
    config = setup.config
    values = {**config.values, "system.device": "cpu", "system.dtype": "float32"}
    there = Config(config.schema, values, config.sources)
    twin = build(there, type(setup.recipe), Path("runs"), is_training=False, is_new=False)
    weights = {name: tensor.cpu() for name, tensor in checkpoint.canonical(setup.state.model).items()}
    checkpoint.load_weights(twin.state.model, weights, Path("the model itself"))
    return twin


def compare(setup: Setup, other: Setup, name: str) -> Result:
    (loss, norm), (other_loss, other_norm) = measured(setup), measured(other)
    limits = LIMITS[setup.precision.name]
    apart = _apart(loss, other_loss), _apart(norm, other_norm)
    seen = (
        f"loss {loss:.6g} here and {other_loss:.6g} on the CPU ({apart[0]:.1e} apart, limit {limits[0]:g}), gradient "
        f"norm {norm:.6g} and {other_norm:.6g} ({apart[1]:.1e}, limit {limits[1]:g}) in {setup.precision.name}"
    )
    worst = max(a / limit for a, limit in zip(apart, limits))
    if worst <= 1:
        return Result(name, "pass", seen)
    remedy = "try system.dtype=float32 and system.compile=false, and look for code that depends on the device"
    return Result(name, "fail" if worst > MUCH else "warn", seen, remedy)


def measured(setup: Setup, num_rows: int = 4) -> tuple[float, float]:
    """Loss and gradient norm of the first objective on rows of step 0, in eval mode; leaves no gradients behind."""
    rows = min(num_rows, setup.cut.micro_rows)
    micro = Feed(setup.streams["train"], Cut(rows, rows), setup.cfg.seed, setup.world.device, 0).take(0)[0]
    model, objective = setup.state.model, setup.stepper.objectives[0]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        seed_torch("parity", micro.draw)
        with setup.precision.autocast():
            loss = objective.plain_loss(micro.batch, micro.draw)
        gradients = torch.autograd.grad(loss.sum / loss.count, objective.parameters, allow_unused=True)
    finally:
        for module, training in modes:
            module.training = training
    norm = torch.nn.utils.get_total_norm([g.float() for g in gradients if g is not None])
    return float((loss.sum / loss.count).detach()), float(norm)


def _apart(a: float, b: float) -> float:
    """Relative difference; both non-finite in the same way is none, one of them is all."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(abs(a), abs(b), 1e-12)
    return 0.0 if str(a) == str(b) else math.inf


CHECKS: list[Check] = [Check("same on the CPU", same_as_on_cpu, is_quick=False)]
