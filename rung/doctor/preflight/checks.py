"""Runs the checks, one after the other, and leaves the run as it was.

Checks that only read the config, the weights and the host's data come first; then the ids, which end a process on CUDA
if they are out of range; then forward passes; checks that change state come last and are not part of the quick form. A
check that raises is reported as such and stops no other, but for a recipe that breaks its contract.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
import torch

from rung.doctor.preflight import (
    batches,
    causality,
    copies,
    cut,
    inputs,
    leakage,
    numerics,
    objective,
    plan,
    provenance,
    pure,
    rehearsal,
    scale,
    trained,
)
from rung.doctor.preflight.result import Check, CheckContext, NotApplicable, Result
from rung.engine.build import Setup
from rung.engine.purity import pure as unchanged
from rung.errors import RecipeError

FILES = (
    plan, provenance, leakage, numerics, batches, trained, scale, pure, objective, causality, cut, inputs, copies,
    rehearsal,
)  # fmt: skip
QUICK_S = 10.0  # after that the rest of the quick form is skipped: a large model on a slow device


def all_checks() -> list[Check]:
    found = [value for file in FILES for value in vars(file).values() if isinstance(value, Check)]
    return sorted(found, key=lambda check: check.changes_state)


def run_checks(context: CheckContext, report: Callable[[str, int, int], None] | None = None) -> list[Result]:
    """All results, in order. `report(name, done, total)` is called before each check."""
    checks = [c for c in all_checks() if not context.is_quick or (c.is_quick and not c.changes_state)]
    results: list[Result] = []

    def add(name: str, level: str, seen: str, remedy: str = "") -> None:
        results.append(Result(level, seen, remedy, name=name, rule=""))

    def versions() -> dict[str, int]:
        """How often each weight was written to: torch counts that, and a copy would take as much memory again."""
        return {name: parameter._version for name, parameter in context.setup.state.model.named_parameters()}

    begun, before = time.monotonic(), versions()
    kept = ExitStack()  # what a forward or an eval writes into weights is told below, and undone before training
    kept.enter_context(unchanged(context.setup.state))
    for number, check in enumerate(checks):
        if check.changes_state:
            kept.close()
        if report is not None:
            report(check.name, number, len(checks))
        if broken := context.shared.get("broken"):
            add(check.name, "skip", f"skipped: {broken}")
            continue
        if context.is_quick and time.monotonic() - begun > QUICK_S:
            add(check.name, "skip", f"skipped after {QUICK_S:g} s; the full check runs it")
            continue
        first = len(results)
        with nullcontext() if check.changes_state else untouched(context.setup):
            try:
                results += check(context)
            except NotApplicable as reason:
                add(check.name, "skip", str(reason))
            except RecipeError:  # a mistake that training would make too, with its place: nothing else is worth saying
                raise
            except Exception as error:  # checks run code of other people
                seen = f"the check failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                remedy = "fix the recipe if training fails like this too; if the recipe is right, please report a bug"
                add(check.name, "warn", seen, remedy)
        now = versions()
        moved = [name for name, version in now.items() if before.get(name) != version]
        is_told = any(result.level in ("warn", "fail") for result in results[first:])
        if moved and not check.changes_state and not (is_told and check is pure.evals_and_samples):
            seen = f"a forward pass wrote into {moved[0]} (during: {check.name})"
            remedy = "change parameters through the optimizer only, and keep what a forward pass updates in buffers"
            add("weights stand still", "warn", seen, remedy)
        before = now
    kept.close()
    return results


def quick(setup: Setup) -> list[Result]:
    """What `rung train` checks before step 0. Changes nothing of the run."""
    return run_checks(CheckContext(setup, is_quick=True))


@contextmanager
def untouched(setup: Setup) -> Iterator[None]:
    """Restores what a check may change: random states, modes, buffers, gradients, and which keys count as read."""
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
