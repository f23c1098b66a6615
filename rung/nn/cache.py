"""Keys and values of the positions seen so far, so that the next position costs one forward of length one.

Memory is taken once, at the full length; a step writes its slice and copies nothing. Keys and values of a cross
attention's memory are computed at the first call and kept. Use it without gradients, and pass only the new positions.

The one surprising thing: `length` moves at the end of a forward, not with each layer, so a forward that raises does not
count.

Shapes: L layers, B rows, K key/value heads, S places, T new positions, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rung.errors import DataError
from rung.nn.attention import Mask


class Cache:
    def __init__(self, keys_LBKSD: Tensor, values_LBKSD: Tensor) -> None:
        self.keys_LBKSD, self.values_LBKSD = keys_LBKSD, values_LBKSD
        self.length = 0
        self.memory: Tensor | None = None  # what the cross keys were computed from
        self.cross_mask: Mask | None = None  # None where it held for the first queries only
        self.cross: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def empty(cls, sizes: tuple[int, int, int, int, int], device: torch.device, dtype: torch.dtype) -> Cache:
        """Room for (L, B, K, S, D)."""
        # Zeros rather than empty: unused places are never read, but a NaN in a dump would send people hunting.
        return cls(torch.zeros(sizes, device=device, dtype=dtype), torch.zeros(sizes, device=device, dtype=dtype))

    @property
    def capacity(self) -> int:
        return self.keys_LBKSD.shape[3]

    def check_room(self, num_new: int, batch: int) -> None:
        if self.length + num_new > self.capacity:
            raise DataError(
                f"{num_new} positions after {self.length} do not fit a cache of {self.capacity}; make a longer one"
            )
        if batch != self.keys_LBKSD.shape[1]:
            raise DataError(f"{batch} rows do not fit a cache made for {self.keys_LBKSD.shape[1]}")

    def extend(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new positions of one layer; returns views of all of them, (B, K, length + T, D)."""
        end = self.length + k_BKTD.shape[2]
        keys_BKSD, values_BKSD = self.keys_LBKSD[layer], self.values_LBKSD[layer]
        keys_BKSD[:, :, self.length : end] = k_BKTD
        values_BKSD[:, :, self.length : end] = v_BKTD
        return keys_BKSD[:, :, :end].to(k_BKTD.dtype), values_BKSD[:, :, :end].to(v_BKTD.dtype)

    def advance(self, num_new: int) -> None:
        self.length += num_new
