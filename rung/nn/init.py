"""Initial weights, each a function of (seed, parameter name) and of nothing else.

Neither the order in which modules are built nor the global random state matters: constructing a Projection or a Table
draws nothing, `initialise` draws each parameter from a generator of its own, on the CPU, so that every device starts
from the same numbers.

Schemes: `normal` is N(0, 0.02) with residual outputs divided by sqrt(2L), as in GPT-2; `xavier` is
N(0, 2 / (fan_in + fan_out)) with the fans of each part of a fused kernel; `depth_scaled` is xavier with residual
outputs divided by sqrt(2L).

The one surprising thing: in all schemes the matrix that makes logits is N(0, 0.02) only up to the width where logits
would raise the first loss by half a percent over ln V, and smaller beyond. GPT-2's own 0.02 at width 768 starts 1.4 %
above ln V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rung.nn.norms import Norm
from rung.recipe import key_of

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


class Table(nn.Embedding):
    """Embeddings of tokens or positions; `is_head` where the same matrix also makes logits."""

    def __init__(self, num_rows: int, width: int, is_head: bool = False) -> None:
        super().__init__(num_rows, width, _weight=torch.empty(num_rows, width))
        self.is_head = is_head


def initialise(model: nn.Module, scheme: str, num_layers: int, seed: int) -> None:
    """Fills every Projection, Table and Norm below `model`; other modules keep what they have."""
    for name, module in model.named_modules():
        if isinstance(module, Projection):
            stds = [std_of(scheme, module.role, module.in_features, part, num_layers) for part in module.parts]
            std_O1 = torch.cat([torch.full((part, 1), std) for part, std in zip(module.parts, stds, strict=True)])
            _fill(module.weight, _normal(module.weight, seed, f"{name}.weight") * std_O1)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Table):
            std = head_std(module.embedding_dim, module.num_embeddings) if module.is_head else BASE_STD
            _fill(module.weight, _normal(module.weight, seed, f"{name}.weight") * std)
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)
            if module.bias is not None:
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
    """The standard deviation of one part of a kernel."""
    if role == "head":
        return head_std(fan_in, fan_out)
    std = BASE_STD if scheme == "normal" else math.sqrt(2 / (fan_in + fan_out))
    if role == "residual" and scheme != "xavier":
        std /= math.sqrt(2 * num_layers)
    return std


def head_std(width: int, num_classes: int) -> float:
    # Normalised inputs give logits of variance width * std^2, and a loss of ln V + variance / 2.
    return min(BASE_STD, math.sqrt(0.01 * math.log(max(num_classes, 2)) / width))


def _normal(like: Tensor, seed: int, name: str) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(key_of(seed, name))
    return torch.randn(like.shape, generator=generator, device="cpu")


@torch.no_grad()
def _fill(parameter: Tensor, values: Tensor) -> None:
    parameter.copy_(values)
