"""Checks from weights and optimizers alone, without a forward pass, that the first update can be finite.

The dry run steps a copy of each optimizer on a corner of one parameter per group and dtype, with a gradient of 0 and
with a small one. It needs to know nothing of eps, fused kernels or classes of optimizers. The copy is made without
calling the constructor, whose arguments nobody kept.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from rung.doctor.preflight.result import CheckContext, Result, check
from rung.engine.guarded import not_finite

GRADIENTS = (0.0, 1e-4)  # float16 AdamW with eps 1e-8 gives NaN at the first and -inf at the second
CORNER = 8  # rows and columns of a parameter that are enough to step on
HALVES = (torch.float16, torch.bfloat16)


@check("optimizer dry run", "N5")
def dry_run(context: CheckContext) -> Result:
    """Steps a copy of every (optimizer, group, dtype) with g = 0 and g = 1e-4."""
    peak = context.setup.schedule.peak or 1e-3
    names = {id(p): name for name, p in context.setup.state.model.named_parameters()}
    broken, tried, not_tried = [], 0, []
    for trained in context.setup.state.objectives:
        for optimizer in trained.optimizers:
            for group in optimizer.param_groups:
                for dtype in dict.fromkeys(p.dtype for p in group["params"]):
                    parameter = min((p for p in group["params"] if p.dtype == dtype), key=lambda p: p.numel())
                    where = f"{type(optimizer).__name__} on {names.get(id(parameter), trained.name)}"
                    where += f" ({str(dtype).removeprefix('torch.')})"
                    try:
                        outcome = step_on_copy(optimizer, group, parameter, peak * group.get("lr_scale", 1.0))
                    except Exception as error:  # a closure it wants, say
                        not_tried.append(f"{where}: {str(error).splitlines()[0] if str(error) else type(error)}")
                        continue
                    tried += 1
                    broken += [f"{where}: {bad} with a gradient of {g:g}" for g, bad in outcome.items() if bad]
    if broken:
        seen = "; ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
        remedy = (
            "keep trained parameters in float32 and compute in half precision with system.dtype; or use a fused "
            "optimizer, or an eps of 1e-6 or more"
        )
        return Result("fail", seen, remedy)
    if not_tried:
        return Result("skip", f"{tried} groups fine; could not step {not_tried[0]}")
    return Result("pass", f"{tried} groups step to finite numbers")


def step_on_copy(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, lr: float
) -> dict[float, str]:
    """For each gradient what became non-finite: "weights", "state", or nothing."""
    outcome = {}
    for value in GRADIENTS:
        corner = parameter.detach()[tuple(slice(CORNER) for _ in range(parameter.dim()))].clone()
        copied = nn.Parameter(corner.nan_to_num(0.0, 0.0, 0.0))  # that it is finite now is checked elsewhere
        copied.grad = torch.full_like(copied, value)
        dry = object.__new__(type(optimizer))
        dry.__dict__.update(optimizer.__dict__)
        dry.__dict__.pop("found_inf", None)
        dry.state = defaultdict(dict)
        is_tensor = isinstance(group.get("lr"), Tensor)
        dry.param_groups = [{**group, "params": [copied], "lr": torch.full_like(group["lr"], lr) if is_tensor else lr}]
        dry._optimizer_step_pre_hooks = OrderedDict()
        dry._optimizer_step_post_hooks = OrderedDict()
        dry.step()
        tensors = [t for t in dry.state[copied].values() if isinstance(t, Tensor)]
        bad = "" if all(torch.isfinite(t).all() for t in tensors) else "state not finite"
        outcome[value] = bad if torch.isfinite(copied).all() else "weights not finite"
    return outcome


@check("parameter dtypes", "N5")
def dtypes(context: CheckContext) -> Result:
    """Half-precision weights that are trained have no room for small updates; frozen ones are fine."""
    names = {id(p): name for name, p in context.setup.state.model.named_parameters()}
    trained = [p for o in context.setup.state.objectives for p in o.parameters]
    halves = [names.get(id(p), "?") for p in trained if p.dtype in HALVES]
    frozen = sum(p.dtype in HALVES and not p.requires_grad for p in context.setup.state.model.parameters())
    if halves:
        seen = f"{len(halves)} of {len(trained)} trained tensors are in half precision, such as {halves[0]}"
        remedy = (
            "leave them in float32: an update below 1/256 (bfloat16) or 1/2048 (float16) of a weight is rounded away; "
            "system.dtype sets the precision of forward and backward"
        )
        return Result("warn", seen, remedy)
    more = f"; {frozen} frozen in half precision" if frozen else ""
    return Result("pass", f"{len(trained)} trained tensors, none in half precision{more}")


@check("finite weights", "N3")
def finite_weights(context: CheckContext) -> Result:
    """Parameters must be finite. In buffers only NaN is an error: a mask is made of infinities."""
    model = context.setup.state.model
    with torch.no_grad():
        bad = [name for name, p in model.named_parameters() if not_finite([p.detach()])]
        bad += [name for name, b in model.named_buffers() if b.is_floating_point() and b.isnan().any()]
    if bad:
        context.shared["broken"] = f"{bad[0]} is not finite"
        seen = f"not finite before the first step: {', '.join(bad[:5])}"
        return Result("fail", seen, "check how it is initialised, or the checkpoint it came from")
    return Result("pass", f"{sum(1 for _ in model.parameters())} parameters, and buffers without NaN")
