"""Linear layers, embeddings and norms, and their initial weights.

Each initial weight is a function of (seed, parameter name) and of nothing else: constructing a module draws nothing,
and `initialise` draws each parameter on the CPU from its own generator, so that every device starts from the same
numbers. The schemes are those of `std_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.random import key_of

BASE_STD = 0.02


class Projection(nn.Linear):
    """A linear layer that knows its part in the whole: which outputs are fused in it, and where they go.

    `parts` are the widths of the fused outputs. `role` is "hidden", "residual" (its output is added to the residual
    stream) or "head" (its output is logits).
    """

    def __init__(self, num_in: int, parts: Sequence[int], bias: bool, role: str = "hidden") -> None:
        super().__init__(num_in, sum(parts), bias=bias)
        self.parts, self.role = tuple(parts), role

    def reset_parameters(self) -> None:
        """Draws nothing: see initialise."""


class Embedding(nn.Embedding):
    """Embeddings of tokens or positions; `is_head` where the same matrix also makes logits."""

    def __init__(self, num_rows: int, width: int, is_head: bool = False) -> None:
        super().__init__(num_rows, width, _weight=torch.empty(num_rows, width))
        self.is_head = is_head


def widen(x: Tensor) -> Tensor:
    """At least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, computed in float32 whatever the activations are in.

    Under autocast the residual stream stays float32 and comes back as such; in a model cast to bfloat16 the result
    goes back to bfloat16. float64 stays float64, so that gradients can be checked numerically.
    """

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


@torch.no_grad()
def initialise(model: nn.Module, scheme: str, num_layers: int, seed: int) -> None:
    """Fills every Projection, Embedding and Norm below `model`; other modules keep what they have."""
    for name, module in model.named_modules():
        if isinstance(module, Norm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Projection | Embedding):
            generator = torch.Generator("cpu").manual_seed(key_of(seed, f"{name}.weight"))
            drawn = torch.randn(module.weight.shape, generator=generator, device="cpu")
            if isinstance(module, Projection):
                stds = [std_of(scheme, module.role, module.in_features, part, num_layers) for part in module.parts]
                std_O1 = torch.cat([torch.full((part, 1), std) for part, std in zip(module.parts, stds, strict=True)])
                module.weight.copy_(drawn * std_O1)
            else:
                is_head, num_in, num_out = module.is_head, module.embedding_dim, module.num_embeddings
                module.weight.copy_(drawn * (head_std(num_in, num_out) if is_head else BASE_STD))
        if isinstance(module, Norm | Projection) and module.bias is not None:
            nn.init.zeros_(module.bias)


def reset_by_name(model: nn.Module, seed: int) -> None:
    """Calls each module's own `reset_parameters` with random numbers that belong to its name, parts before wholes.

    For models of plain torch modules. A module that wants something else of its parts has a `reset_parameters` too,
    which comes after theirs.
    """
    with torch.random.fork_rng(devices=[]):
        for name, module in reversed(list(model.named_modules())):
            if callable(reset := getattr(module, "reset_parameters", None)):
                torch.manual_seed(key_of(seed, name))
                reset()


def std_of(scheme: str, role: str, fan_in: int, fan_out: int, num_layers: int) -> float:
    """The standard deviation of one part of a kernel, with the fans of that part.

    `normal` is 0.02 with residual outputs divided by sqrt(2L), as in GPT-2; `xavier` is sqrt(2 / (fan_in + fan_out));
    `depth_scaled` is xavier with residual outputs divided by sqrt(2L).
    """
    if role == "head":
        return head_std(fan_in, fan_out)
    std = BASE_STD if scheme == "normal" else math.sqrt(2 / (fan_in + fan_out))
    if role == "residual" and scheme != "xavier":
        std /= math.sqrt(2 * num_layers)
    return std


def head_std(width: int, num_classes: int) -> float:
    # Normalised inputs give logits of variance width * std^2, and a loss of ln V + variance / 2: half a percent above
    # ln V at most. GPT-2's own 0.02 at width 768 starts 1.4 % above.
    return min(BASE_STD, math.sqrt(0.01 * math.log(max(num_classes, 2)) / width))
