"""Rivals of a verdict: what may have been wrong before the step that failed, so that the step only shows it.

Numbers that overflow in an operation say where it ended, not why. Before the operation, the data or the optimizer is
named, these are weighed: weights that the last updates blew up, weights that were too large from the start, inputs of
another scale, and moments that no gradients leave behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from rung.doctor.history import History

GROWN = 10.0  # times: a weight that is so much larger than at the start; healthy runs of 5000 steps reach 4
REPLACED = 0.5  # of a matrix, changed by one update: healthy .076
RISEN = 10.0  # times the loss, or a thousand times the norm, of the first steps
LOUD = 100.0  # rms of an input, where models are made for 1; and of what a layer makes of such an input
FAR_TOO_FAR = 100.0  # learning rates that one element of Adam moves; gradients allow about 7 with betas (.9, .999)
LATELY = 20  # steps


def moments_fault(parameter: Tensor, state: Mapping[str, object], group: Mapping[str, object]) -> str:
    """What is wrong with the moments of one parameter; empty where gradients can have made them.

    By Cauchy-Schwarz, the first moment of Adam is at most a small multiple of the root of the second: what has moments
    beyond that was written to, loaded wrongly, or lost its second moment to the type.
    """
    first, second = state.get("exp_avg"), state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.shape != second.shape:
        return ""
    m, v = first.detach().float(), second.detach().float()
    dtype = str(second.dtype).removeprefix("torch.")
    if num_negative := int((v < 0).sum()):
        return f"the second moment is negative in {num_negative} of {v.numel()} elements, which no gradient makes it"
    betas = group.get("betas")
    if not isinstance(betas, tuple | list) or not m.numel() or not bool(torch.isfinite(m).all()):
        return ""
    beta1, beta2, t = float(betas[0]), float(betas[1]), max(float(state.get("step", 1.0)), 1.0)  # type: ignore[arg-type]
    root = (v / (1 - beta2**t if beta2 < 1 else 1.0)).sqrt() + float(group.get("eps", 0.0))  # type: ignore[arg-type]
    moved = (m / (1 - beta1**t if beta1 < 1 else 1.0)).abs() / root.clamp(min=1e-45)
    moved = torch.where(m == 0, 0.0, moved)
    is_far = moved > FAR_TOO_FAR
    if not bool(is_far.any()):
        return ""
    most = float(moved[torch.isfinite(moved)].max()) if bool(torch.isfinite(moved).any()) else math.inf
    how = f"the next update would move {int(is_far.sum())} of {m.numel()} elements by up to {most:.3g} learning rates"
    num_lost = int((is_far & (v == 0)).sum())
    if dtype == "float16":
        return (
            f"the moments are {dtype}, in which squares of gradients below 2.4e-4 are 0: the second moment is 0 in "
            f"{num_lost} elements whose first is not, and {how}"
        )
    return f"the first moment is larger than the second allows, which no gradients do: {how}"


def state_faults(named: Iterable[tuple[str, nn.Parameter]], optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Of all parameters, as sentences with their names."""
    names = {parameter: name for name, parameter in named}
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                fault = moments_fault(parameter, optimizer.state.get(parameter, {}), group)
                found += [f"{names.get(parameter, '?')}: {fault}"] if fault else []
    return found


def small_moments(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """The type of the second moments, where it is too small for squares of gradients."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            second = state.get("exp_avg_sq")
            if isinstance(second, Tensor) and second.dtype is torch.float16:
                return "float16"
    return ""


def blown_up(model: nn.Module, history: History | None, step: int, earlier: Mapping[str, Tensor] | None) -> list[str]:
    """Signs that the updates before this step were too large for the weights; two kinds of them, or none at all.

    Weights are compared with the first ones that are known: `earlier`, else the norms in the record.
    """
    weights, updates, curve = "", "", ""
    first: dict[str, float] = {}
    if earlier is not None:
        first = {name: float(torch.linalg.vector_norm(t.float())) for name, t in earlier.items() if t.ndim > 1}
    table = history.table("tensors") if history is not None else None
    if table is not None and not first:
        first = dict(zip(table.names, table.columns["weight"][0].tolist()))
    usual = float(np.median([n for n in first.values() if math.isfinite(n)] or [0.0]))
    grown: dict[str, float] = {}
    for name, p in model.named_parameters():
        was = first.get(name, math.nan)
        if p.ndim > 1 and was > 0.05 * usual:  # what began at zero grows as it should
            norm = float(torch.linalg.vector_norm(p.detach().double()))
            grown[name] = norm / was if math.isfinite(norm) else math.inf
    if grown:
        name, median = max(grown, key=lambda n: grown[n]), float(np.median(list(grown.values())))
        if grown[name] > GROWN:
            weights = f"{name} grew to {grown[name]:.3g} times the norm it began with (x{median:.3g} in the median)"
    if table is not None:
        rows = np.flatnonzero((table.steps < step) & (table.steps >= step - LATELY))
        names = np.flatnonzero([name in grown for name in table.names])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (table.columns["update"] / table.columns["weight"])[np.ix_(rows, names)]
        if ratio.size and np.nanmax(np.where(np.isfinite(ratio), ratio, -1)) > REPLACED:
            row, place = np.unravel_index(np.nanargmax(np.where(np.isfinite(ratio), ratio, -1)), ratio.shape)
            updates = (
                f"the update of step {table.steps[rows[row]]} changed {table.names[names[place]]} by "
                f"{ratio[row, place]:.3g} times its norm (healthy below {REPLACED})"
            )
    if history is not None:
        for name, times in (("loss", RISEN), ("norm", 1e3)):
            values = history[name].between(0, step + 1).finite.values
            lately, level = values[1:][-LATELY:], float(values[0]) if len(values) else math.nan
            if len(lately) and level > 0 and float(lately.max()) > times * level:
                curve = curve or f"the {name} rose from {level:.4g} to {float(lately.max()):.4g} while still finite"
    signs = [sign for sign in (weights, updates, curve) if sign]
    return signs if len(signs) >= 2 or (weights and history is None) else []


def loud_inputs(batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Names of arrays of floats whose rms is far from what models are made for, and that rms."""
    found = {}
    for name, tensor in batch.items():
        if tensor.is_floating_point() and tensor.numel():
            rms = float(tensor.double().square().mean().sqrt())
            if math.isfinite(rms) and rms > LOUD:
                found[name] = rms
    return found


def loud_weights(model: nn.Module) -> dict[str, float]:
    """Names of parameters that make something LOUD of inputs of size 1, and how much."""
    found = {}
    for name, p in model.named_parameters():
        if p.numel() and p.is_floating_point():
            fan_in = p[0].numel() if p.ndim > 1 else 1
            gain = float(p.detach().double().square().mean().sqrt()) * math.sqrt(fan_in)
            if math.isfinite(gain) and gain > LOUD:
                found[name] = gain
    return found
