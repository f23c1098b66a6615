"""A model's linear layers for a few rows at a time on a CPU, as generation needs them.

oneDNN lays a weight out for a number of rows once, and multiplies it with them 1.5 to 2.5 times as fast as `F.linear`
does each time. The layout is a second copy of the weights. What it computes differs from `F.linear` in the last digits.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.nn.init import Embedding, Projection

M = TypeVar("M", bound=nn.Module)

LEAST_CALLS = 32  # so that packing pays for itself
MOST_BYTES = 4 << 30  # larger weights are not copied
LEAST_ROWS = 2  # one row takes 1.3 to 1.5 times as long as two: oneDNN has a slower kernel for vectors


class PackedProjection(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...], num_rows: int) -> None:
        super().__init__()
        self.plain, self.bias, self.parts, self.num_rows = weight, bias, parts, num_rows
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), max(num_rows, LEAST_ROWS))

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // x.shape[-1]
        if num_rows != self.num_rows or x.dtype != self.plain.dtype:
            return F.linear(x, self.plain, self.bias)
        if num_rows >= LEAST_ROWS:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        x_2I = x.reshape(1, -1).expand(LEAST_ROWS, -1)
        y_2O = torch.ops.mkldnn._linear_pointwise(x_2I, self.weight, self.bias, "none", [], "")
        return y_2O[:1].view(*x.shape[:-1], -1)


def packed(model: M, num_rows: int, num_calls: int) -> M:
    """`model`, or where it pays for that many calls with `num_rows` rows, a copy of it that shares all but the packed
    weights. The copy is in the mode that `model` is in now; later changes of a weight reach it in part. A copy is given
    back as it is, so who generates often packs once and keeps it."""
    if any(isinstance(module, PackedProjection) for module in model.modules()):
        return model
    weights = [weight for module in model.modules() if (weight := _weight_of(module)) is not None]
    size_bytes = sum(weight.nbytes for weight in weights)
    has_kernels = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not weights or num_calls < LEAST_CALLS or size_bytes > MOST_BYTES or not has_kernels:
        return model
    return _copy(model, num_rows)


def _weight_of(module: nn.Module) -> Tensor | None:
    """What can be packed."""
    if torch.is_autocast_enabled("cpu"):  # which does not know the packed operation
        return None
    if not (type(module) is Projection or (isinstance(module, Embedding) and module.is_head)):
        return None
    weight = module.weight
    is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32
    return weight if is_plain and not module._forward_hooks and not module._forward_pre_hooks else None


def _copy(module: M, num_rows: int) -> M:
    if isinstance(module, Projection) and (weight := _weight_of(module)) is not None:
        return PackedProjection(weight, module.bias, module.parts, num_rows)  # type: ignore[return-value]
    if "forward" in vars(module):  # replaced by somebody, and bound to the original
        return module
    twin = copy.copy(module)
    vars(twin)["_modules"] = {name: child and _copy(child, num_rows) for name, child in module._modules.items()}
    tokens = twin._modules.get("tokens")
    if isinstance(tokens, Embedding) and (weight := _weight_of(tokens)) is not None:
        # The head of a Transformer that has none of its own, but for the None that stands for it.
        vars(twin).pop("head", None)
        twin._modules["head"] = PackedProjection(weight, None, (tokens.num_embeddings,), num_rows)
    return twin
