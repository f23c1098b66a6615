"""Fingerprints of weights, taken on their own device: a billion parameters cost milliseconds on a GPU.

`fingerprint` is for frozen tensors, which the recipe builds again: a save holds it in place of them. It
is taken anew at each save, so that a frozen tensor that was changed after all is written. `checksums` prove that two
runs began with the same weights. Both are made to find another model, not a forger.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

CHUNK = 1 << 20  # words of 8 bytes
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> what its bits are


@torch.no_grad()
def fingerprint(tensor: Tensor) -> str:
    """64 bits over dtype, shape and every byte with its place."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole, tail = data[: data.numel() // 8 * 8].view(torch.int64), data[data.numel() // 8 * 8 :]
    last = torch.zeros(8, dtype=torch.uint8, device=data.device)
    last[: tail.numel()] = tail
    odd = torch.arange(1, 2 * min(CHUNK, whole.numel()) + 1, 2, device=data.device)
    total = last.view(torch.int64)[0] * (2 * whole.numel() + 1)
    for start in range(0, whole.numel(), CHUNK):
        words = whole[start : start + CHUNK]
        mixed = words ^ (words >> 31)  # so that the upper bits of a word reach all of the sum
        total += (mixed * odd[: words.numel()]).sum() + 2 * start * mixed.sum()  # whole numbers, which wrap around
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {int(total) & (2**64 - 1):016x}"


def unchanged(tensors: Mapping[str, Tensor], fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Those of the fingerprints that tensors of these names still have."""
    return {name: was for name, was in fingerprints.items() if name in tensors and fingerprint(tensors[name]) == was}


@torch.no_grad()
def checksums(model: nn.Module) -> dict[str, list[object]]:
    """Name of each parameter -> shape and the sum of its bits as whole numbers, with one transfer per device.

    It tells other numbers apart, not the same numbers in another order.
    """
    named = dict(model.named_parameters())
    sums: dict[str, int] = {}
    for device in {p.device for p in named.values()}:
        here = {name: p.detach().contiguous() for name, p in named.items() if p.device == device}
        bits = torch.stack([p.view(_WHOLE[p.element_size()]).sum(dtype=torch.int64) for p in here.values()])
        sums |= zip(here, bits.tolist(), strict=True)
    return {name: [list(p.shape), f"{sums[name] & (2**64 - 1):016x}"] for name, p in named.items()}
