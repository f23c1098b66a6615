"""Why an update of finite gradients broke the weights: looks at the elements that went bad, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rung.forensics.first import is_usable


class Autopsy(NamedTuple):
    tensor: str
    cause: str  # eps, square, large, rate, size, unknown
    what: str
    fine: list[str] = []  # implementations of the same update that stay finite


def autopsy(
    name: str, parameter: nn.Parameter, before: Tensor, gradient: Tensor, optimizer: torch.optim.Optimizer
) -> Autopsy:
    """Of one parameter after the update; `before` and `gradient` are what the update was given."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    dtype = str(parameter.dtype).removeprefix("torch.")
    for key in ("lr", "weight_decay"):
        if not math.isfinite(float(group.get(key, 0.0))):
            return Autopsy(name, "rate", f"{key} is {float(group[key])}")
    state: Mapping[str, Any] = optimizer.state[parameter]
    second = state.get("exp_avg_sq")
    if second is not None and not bool(torch.isfinite(second).all()):
        worst = gradient[~torch.isfinite(second)].abs()
        return Autopsy(
            name, "square", f"the square of a gradient of {float(worst.max()):.4g} does not fit {second.dtype} "
            f"(largest {torch.finfo(second.dtype).max:.4g}), so the second moment is infinite in {worst.numel()} "
            f"of {second.numel()} elements, and these never move again",
        )  # fmt: skip
    if second is not None and not is_usable(second):
        return Autopsy(
            name, "large", f"the second moment reaches {float(second.max()):.4g}, from a gradient of "
            f"{float(gradient.abs().max()):.4g}, and no norm of it fits",
        )  # fmt: skip
    is_bad = ~torch.isfinite(parameter.detach())
    if float(group["lr"]) > 1e-3 * torch.finfo(parameter.dtype).max:
        return Autopsy(name, "rate", f"lr is {float(group['lr']):g}: updates of that size do not fit {dtype}")
    if not bool(is_bad.any()):
        largest = float(parameter.detach().abs().max())
        return Autopsy(
            name, "size", f"weights reach {largest:.4g} with lr={float(group['lr']):g}; no norm of them fits"
        )
    eps = float(group.get("eps", math.nan))
    num_zero = int((gradient[is_bad] == 0).sum())
    if torch.tensor(eps, dtype=parameter.dtype).item() == 0:
        return Autopsy(
            name, "eps", f"eps={eps:g} is 0 in {dtype} (smallest {torch.finfo(parameter.dtype).smallest_normal:.3g}): "
            f"{int(is_bad.sum())} of {is_bad.numel()} elements were divided by 0, {num_zero} of them with a gradient "
            "of exactly 0",
        )  # fmt: skip
    largest = float(before[is_bad].abs().max())
    if largest > 0.5 * torch.finfo(parameter.dtype).max:
        return Autopsy(name, "size", f"the weight itself was {largest:.4g}, near the largest of {dtype}")
    found = (
        f"{int(is_bad.sum())} of {is_bad.numel()} elements, gradients up to {float(gradient[is_bad].abs().max()):.4g}"
    )
    return Autopsy(name, "unknown", found)


def implementations(optimizers: list[torch.optim.Optimizer], is_fine: Callable[[], bool]) -> list[str]:
    """Which of torch's implementations of this update stay finite; `is_fine` makes the update and undoes it."""
    fine = []
    for name, flags in {"single": (False, None), "foreach": (True, None), "fused": (None, True)}.items():
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if not all("foreach" in group and "fused" in group for group in groups):
            return []
        kept = [(group["foreach"], group["fused"]) for group in groups]
        try:
            for group in groups:
                group["foreach"], group["fused"] = flags
            if is_fine():
                fine.append(name)
        except Exception:  # not every optimizer and device has all three
            continue
        finally:
            for group, (foreach, fused) in zip(groups, kept, strict=True):
                group["foreach"], group["fused"] = foreach, fused
    return fine
