"""Normalisation layers that compute in float32 whatever the activations are in.

Under autocast the residual stream stays float32 and comes back as such; in a model cast to bfloat16 the result goes
back to bfloat16. float64 stays float64, so that gradients can be checked numerically.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def widen(x: Tensor) -> Tensor:
    """At least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis."""

    def __init__(self, kind: str, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        wide = widen(x)
        weight = self.weight.to(wide.dtype)
        if self.kind == "rmsnorm":
            return F.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        return F.layer_norm(wide, weight.shape, weight, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"
