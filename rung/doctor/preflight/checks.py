"""Runs the checks, one after the other, and leaves the run as it was.

What only reads the config, the weights and the host's data comes first; then the ids, whose being out of range would
end a process on CUDA; then what makes forwards; what changes state comes last and is not part of the quick form. A
check that raises is a failure of its own and stops no other one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rung.doctor.preflight import (
    batches,
    causality,
    cut,
    inputs,
    leakage,
    numerics,
    objective,
    plan,
    rehearsal,
    scale,
)
from rung.doctor.preflight.forward import NotAsked
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.build import Setup

FILES = (plan, leakage, numerics, batches, scale, objective, causality, cut, inputs, rehearsal)
QUICK_S = 10.0  # where the quick form takes longer, because a model is large and its device slow, the rest is left out


def all_checks() -> list[Check]:
    found = [check for file in FILES for check in file.CHECKS]
    return sorted(found, key=lambda check: check.changes_state)


def quick(setup: Setup, recipe_name: str) -> list[Result]:
    """What `rung train` asks before step 0. Nothing of the run is changed."""
    return run_checks(Bench(setup, is_quick=True, recipe_name=recipe_name))


def run_checks(bench: Bench, report: Callable[[str, int, int], None] | None = None) -> list[Result]:
    """All results, in order. `report(name, done, total)` is told what is being looked at."""
    checks = [c for c in all_checks() if not bench.is_quick or (c.is_quick and not c.changes_state)]
    results: list[Result] = []
    begun, versions = time.monotonic(), _versions(bench)
    for number, check in enumerate(checks):
        if report is not None:
            report(check.name, number, len(checks))
        if broken := bench.shared.get("broken"):
            results.append(Result(check.name, "skip", f"not asked: {broken}"))
        elif bench.is_quick and time.monotonic() - begun > QUICK_S:
            results.append(Result(check.name, "skip", f"not asked: {QUICK_S:g} s were over; `rung check` takes longer"))
        elif check.changes_state:
            results += _run(check, bench)
        else:
            with untouched(bench.setup):
                results += _run(check, bench)
            if moved := [name for name, version in _versions(bench).items() if versions.get(name) != version]:
                results.append(_wrote(check, moved[0]))
                versions = _versions(bench)
    return results


def _run(check: Check, bench: Bench) -> list[Result]:
    found: list[Result] = []
    try:
        found += check.look(bench)
    except NotAsked as reason:
        found.append(Result(check.name, "skip", str(reason)))
    except Exception as error:  # a check meets code that nobody here has seen
        line = (str(error).splitlines() or [""])[0]
        seen = f"could not be asked: {type(error).__name__}: {line}"
        found.append(Result(check.name, "warn", seen, "if training does the same, mend the recipe; if not, tell us"))
    return found


@contextmanager
def untouched(setup: Setup) -> Iterator[None]:
    """Puts back what looking may move: random states, modes, buffers, gradients, and which keys count as read."""
    model, device = setup.state.model, setup.world.device
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    gradients = [(p, p.grad) for p in model.parameters()]
    states, reads = (random.getstate(), np.random.get_state()), set(setup.config.reads)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                module._buffers[name] = buffer
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random.setstate(states[0])
        np.random.set_state(states[1])
        setup.config.reads.intersection_update(reads)


def _versions(bench: Bench) -> dict[str, int]:
    """Weights are not copied, that would take as much memory again; each counts how often it was written to."""
    return {name: parameter._version for name, parameter in bench.setup.state.model.named_parameters()}


def _wrote(check: Check, name: str) -> Result:
    return Result(
        "weights stand still", "warn", f"a forward wrote into {name} (during: {check.name})",
        "change parameters through the optimizer only, and keep what a forward moves in buffers",
    )  # fmt: skip
