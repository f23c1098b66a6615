"""Random numbers by name, keyed by (seed, name, step, row) and by nothing that was drawn before.

Because no draw has a past, any step can be computed alone, on any rank and in any micro.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # torch takes seconds to import
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers as a function of (seed, step, row, name), never of what was drawn before.

    `rows` are places in the global batch of the step, so a draw does not change when the batch is shared by other
    ranks or cut into other micros.
    """

    seed: int
    step: int
    rows: np.ndarray

    def uniform(self, name: str, num_values: int = 1) -> np.ndarray:
        """(rows, num_values) float64 in [0, 1)."""
        key = np.uint64(self.key(name))
        counter = self.rows.astype(np.uint64)[:, None] * np.uint64(num_values) + np.arange(num_values, dtype=np.uint64)
        return (scramble(scramble(counter + key) ^ key) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, name: str, high: int | np.ndarray) -> np.ndarray:
        """(rows,) int64 in [0, high)."""
        return (self.uniform(name)[:, 0] * high).astype(np.int64)

    @property
    def is_eval(self) -> bool:
        """Evals draw at step -1, always: what grows with the step, or only regularises, looks here."""
        return self.step < 0

    def noise(self, name: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """(rows, *shape) float32 in [0, 1), made on the device; the same for a row on any device and in any cut."""
        import torch

        num_values = math.prod(shape)
        first, num_rows = int(self.rows[0]) if len(self.rows) else 0, len(self.rows)
        if np.array_equal(self.rows, np.arange(first, first + num_rows)):  # of a micro: nothing to be sent
            rows = torch.arange(first, first + num_rows, device=device)
        else:
            rows = torch.from_numpy(self.rows.astype(np.int64)).to(device)
        counter = rows[:, None] * num_values + torch.arange(num_values, device=device)
        key = self.key(name)
        bits = _scramble_tensor(_scramble_tensor(counter + key) ^ key)
        return ((bits >> 40) & 0xFFFFFF).float().mul_(2.0**-24).reshape(len(self.rows), *shape)

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator for bulk noise; unlike the row-wise draws it depends on the cut of the batch."""
        import torch

        return torch.Generator(device).manual_seed(self.key(f"{name}/{int(self.rows[0]) if len(self.rows) else 0}"))

    def key(self, name: str) -> int:
        return key_of(self.seed, self.step, name)


def key_of(*parts: object) -> int:
    """63 bits out of any printable parts, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def scramble(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection on uint64 whose output bits all depend on all input bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _scramble_tensor(x: Tensor) -> Tensor:
    """`scramble` on int64: products wrap as those of uint64 do; a shift must not drag the sign along."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
