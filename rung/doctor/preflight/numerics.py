"""Asks of weights and optimizers alone whether the first update can be finite. No forward is made.

The dry run takes each optimizer as it stands and lets it step on a copy of a corner of one parameter of each of its
groups and dtypes: with no gradient at all and with a small one. So it knows nothing of eps, of fused kernels or of any
class of optimizers, and sees what the update would really do. The surprising thing: a copy of an optimizer is made
without its constructor, which may want arguments that nobody kept.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.guard import not_finite

GRADIENTS = (0.0, 1e-4)  # float16 AdamW with eps 1e-8 gives NaN at the first and -inf at the second
CORNER = 8  # rows and columns of a parameter that are enough to step on
HALVES = (torch.float16, torch.bfloat16)


def dry_run(bench: Bench) -> Iterator[Result]:
    """Steps a copy of every (optimizer, group, dtype) with g = 0 and g = 1e-4 (N5)."""
    peak = bench.setup.cfg.lr.learning_rate or 1e-3
    names = {id(p): name for name, p in bench.setup.state.model.named_parameters()}
    broken, tried, not_tried = [], 0, []
    for trained in bench.setup.state.objectives:
        for optimizer in trained.optimizers:
            for group in optimizer.param_groups:
                for parameter in smallest_by_dtype(group["params"]):
                    where = f"{type(optimizer).__name__} on {names.get(id(parameter), trained.name)}"
                    where += f" ({str(parameter.dtype).removeprefix('torch.')})"
                    try:
                        outcome = step_on_copy(optimizer, group, parameter, peak * trained.lr_scale)
                    except Exception as error:  # a closure it wants, say
                        not_tried.append(f"{where}: {str(error).splitlines()[0] if str(error) else type(error)}")
                        continue
                    tried += 1
                    broken += [f"{where}: {bad} with a gradient of {g:g}" for g, bad in outcome.items() if bad]
    if broken:
        yield Result(
            "optimizer dry run", "fail", "; ".join(broken[:3]) + (f" and {len(broken) - 3} more" * (len(broken) > 3)),
            "keep trained parameters in float32 and compute in half precision with system.dtype; else a fused "
            "optimizer, or eps of 1e-6 or more", "N5",
        )  # fmt: skip
    elif not_tried:
        yield Result("optimizer dry run", "skip", f"{tried} groups fine; could not step {not_tried[0]}", rule="N5")
    else:
        yield Result("optimizer dry run", "pass", f"{tried} groups step to finite numbers", rule="N5")


def smallest_by_dtype(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    found: dict[torch.dtype, nn.Parameter] = {}
    for parameter in parameters:
        if parameter.dtype not in found or parameter.numel() < found[parameter.dtype].numel():
            found[parameter.dtype] = parameter
    return list(found.values())


def step_on_copy(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, lr: float
) -> dict[float, str]:
    """For each gradient what became non-finite: "weights", "state", or nothing."""
    outcome = {}
    for value in GRADIENTS:
        corner = parameter.detach()[tuple(slice(CORNER) for _ in range(parameter.dim()))].clone()
        copied = nn.Parameter(corner.nan_to_num(0.0, 0.0, 0.0))  # whether it is finite now is another check's question
        copied.grad = torch.full_like(copied, value)
        dry = object.__new__(type(optimizer))
        dry.__dict__.update(optimizer.__dict__)
        dry.__dict__.pop("found_inf", None)
        dry.state = defaultdict(dict)
        dry.param_groups = [{**group, "params": [copied], "lr": _like(group.get("lr"), lr)}]
        dry._optimizer_step_pre_hooks = OrderedDict()
        dry._optimizer_step_post_hooks = OrderedDict()
        dry.step()
        tensors = [t for t in dry.state[copied].values() if isinstance(t, Tensor)]
        bad = "" if all(torch.isfinite(t).all() for t in tensors) else "state not finite"
        outcome[value] = bad if torch.isfinite(copied).all() else "weights not finite"
    return outcome


def _like(old: Any, lr: float) -> Any:
    return torch.full_like(old, lr) if isinstance(old, Tensor) else lr


def dtypes(bench: Bench) -> Iterator[Result]:
    """Half-precision weights that are trained have no room for small updates; frozen ones are fine."""
    names = {id(p): name for name, p in bench.setup.state.model.named_parameters()}
    trained = [p for o in bench.setup.state.objectives for p in o.parameters]
    halves = [names.get(id(p), "?") for p in trained if p.dtype in HALVES]
    frozen = sum(p.dtype in HALVES and not p.requires_grad for p in bench.setup.state.model.parameters())
    if halves:
        yield Result(
            "parameter dtypes", "warn",
            f"{len(halves)} of {len(trained)} trained tensors are in half precision, such as {halves[0]}",
            "leave them in float32: an update below 1/256 (bfloat16) or 1/2048 (float16) of a weight is rounded away; "
            "system.dtype sets the precision of forward and backward", "N5",
        )  # fmt: skip
    else:
        more = f"; {frozen} frozen in half precision" if frozen else ""
        seen = f"{len(trained)} trained tensors, none in half precision{more}"
        yield Result("parameter dtypes", "pass", seen, rule="N5")


def finite_weights(bench: Bench) -> Iterator[Result]:
    """Parameters must be finite. In buffers only NaN is an error: a mask is made of infinities."""
    model = bench.setup.state.model
    with torch.no_grad():
        bad = [name for name, p in model.named_parameters() if not_finite([p.detach()])]
        bad += [name for name, b in model.named_buffers() if b.is_floating_point() and b.isnan().any()]
    if bad:
        bench.shared["broken"] = f"{bad[0]} is not finite"
        yield Result(
            "finite weights", "fail", f"not finite before the first step: {', '.join(bad[:5])}",
            "look at how it is initialised, or at the checkpoint it came from", "N3",
        )  # fmt: skip
    else:
        num = sum(1 for _ in model.parameters())
        yield Result("finite weights", "pass", f"{num} parameters, and buffers without NaN", rule="N3")


CHECKS = [
    Check("optimizer dry run", dry_run),
    Check("parameter dtypes", dtypes),
    Check("finite weights", finite_weights),
]
