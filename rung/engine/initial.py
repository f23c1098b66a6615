"""What the weights were before the first update, by name: the proof that two runs began alike.

A checksum adds up the bits of a tensor as whole numbers, on its own device, so that a model of a billion parameters
costs milliseconds and one transfer. It tells other numbers apart, not the same numbers in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> what its bits are


@torch.no_grad()
def checksums(model: nn.Module) -> dict[str, list[object]]:
    """Name of each parameter -> shape and checksum."""
    named = dict(model.named_parameters())
    if not named:
        return {}
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, parameter in named.items():
        by_device.setdefault(parameter.device, []).append((name, _checksum(parameter)))
    sums = {name: value for some in by_device.values() for name, value in _read(some)}
    return {name: [list(p.shape), f"{sums[name] & (2**64 - 1):016x}"] for name, p in named.items()}


def _checksum(parameter: Tensor) -> Tensor:
    return parameter.detach().contiguous().view(_WHOLE[parameter.element_size()]).sum(dtype=torch.int64)


def _read(sums: list[tuple[str, Tensor]]) -> list[tuple[str, int]]:
    values = torch.stack([value for _, value in sums]).tolist()
    return list(zip([name for name, _ in sums], values, strict=True))
