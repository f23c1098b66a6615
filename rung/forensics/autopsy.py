"""Why an update of finite gradients broke the weights: looks at the elements that went bad, one tensor at a time."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rung.forensics.first import is_usable
from rung.forensics.rerun import Rerun, Try
from rung.forensics.rivals import moments_fault


class Autopsy(NamedTuple):
    tensor: str
    cause: str  # eps, square, half, state, large, rate, size, unknown
    what: str
    fine: list[str] = []  # implementations of the same update that stay finite


def autopsy(rerun: Rerun, failed: Try) -> Autopsy | None:
    """The first tensor that the update breaks, element by element; nothing stays changed."""
    named = dict(rerun.model.named_parameters())
    bad = [name for name in named if any(name == t or t.endswith(f" of {name}") for t in failed.tensors)]
    if not bad:
        return None
    parameter = named[bad[0]]
    optimizers = [optimizer for objective in rerun.due for optimizer in objective.optimizers]
    owner = next((o for o in optimizers if any(p is parameter for g in o.param_groups for p in g["params"])), None)
    if owner is None:  # frozen: no update has touched it
        return None
    with rerun.undone():
        before = parameter.detach().clone()
        rerun.update(failed.gradients)
        gradient = failed.gradients.get(parameter, torch.zeros_like(before))
        cause, what = _cause(parameter, before, gradient, owner)

    # Which of torch's implementations of this update stay finite; what undoes the update sets its flags back, too.
    fine = []
    for name, foreach, fused in (("single", False, None), ("foreach", True, None), ("fused", None, True)):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if not all("foreach" in group and "fused" in group for group in groups):
            break
        with contextlib.suppress(Exception), rerun.undone():  # not every optimizer and device has all three
            for group in groups:
                group["foreach"], group["fused"] = foreach, fused
            if not any(rerun.update(failed.gradients)):
                fine.append(name)
    return Autopsy(bad[0], cause, what, fine)


def _cause(
    parameter: nn.Parameter, before: Tensor, gradient: Tensor, optimizer: torch.optim.Optimizer
) -> tuple[str, str]:
    """Of one parameter after the update; `before` and `gradient` are what the update was given."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    dtype, limits = str(parameter.dtype).removeprefix("torch."), torch.finfo(parameter.dtype)
    for key in ("lr", "weight_decay"):
        if not math.isfinite(float(group.get(key, 0.0))):
            return "rate", f"{key} is {float(group[key])}"
    second = optimizer.state[parameter].get("exp_avg_sq")
    if second is not None and not bool(torch.isfinite(second).all()):
        worst = gradient[~torch.isfinite(second)].abs()
        return "square", (
            f"the square of a gradient of {float(worst.max()):.4g} does not fit {second.dtype} "
            f"(largest {torch.finfo(second.dtype).max:.4g}), so the second moment is infinite in {worst.numel()} "
            f"of {second.numel()} elements, and these never move again"
        )
    if second is not None and not is_usable(second):
        return "large", (
            f"the second moment reaches {float(second.max()):.4g}, from a gradient of "
            f"{float(gradient.abs().max()):.4g}, and no norm of it fits"
        )
    lr = float(group["lr"])
    if lr > 1e-3 * limits.max:
        return "rate", f"lr is {lr:g}: updates of that size do not fit {dtype}"
    is_bad = ~torch.isfinite(parameter.detach())
    fault = moments_fault(parameter, optimizer.state[parameter], group)
    broken = "half" if second is not None and second.dtype is torch.float16 else "state"
    if not bool(is_bad.any()) and fault:
        return broken, fault
    if not bool(is_bad.any()):
        largest = float(parameter.detach().abs().max())
        return "size", f"weights reach {largest:.4g} with lr={lr:g}; no norm of them fits"
    num_bad = f"{int(is_bad.sum())} of {is_bad.numel()} elements"
    eps = float(group.get("eps", math.nan))
    if torch.tensor(eps, dtype=parameter.dtype).item() == 0:
        return "eps", (
            f"eps={eps:g} is 0 in {dtype} (smallest {limits.smallest_normal:.3g}): {num_bad} were divided by 0, "
            f"{int((gradient[is_bad] == 0).sum())} of them with a gradient of exactly 0"
        )
    if fault:
        return broken, fault
    largest = float(before[is_bad].abs().max())
    if largest > 0.5 * limits.max:
        return "size", f"the weight itself was {largest:.4g}, near the largest of {dtype}"
    return "unknown", f"{num_bad}, gradients up to {float(gradient[is_bad].abs().max()):.4g}"
