"""Rotary positions: each head is turned by an angle that grows with the position (half-split layout, as in GPT-NeoX).

The tables are buffers that no checkpoint holds. The one surprising thing is that they are computed anew whenever the
module moves: a cast to bfloat16 must not round the angles, and a move off the meta device must not leave them empty.

Shapes: B rows, H heads, T positions, D head width, R half of the rotated width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rung.nn.norms import widen

Angles = tuple[Tensor, Tensor]  # cos and sin, (T, R) or (B, 1, T, R)


class Rope(nn.Module):
    cos_SR: Tensor
    sin_SR: Tensor

    def __init__(self, width: int, context_size: int, theta: float) -> None:
        super().__init__()
        self.width, self.context_size, self.theta = width, context_size, theta
        cos_SR, sin_SR = self._tables(torch.get_default_device())
        self.register_buffer("cos_SR", cos_SR, persistent=False)
        self.register_buffer("sin_SR", sin_SR, persistent=False)

    def forward(self, start: int, num_positions: int, positions: Tensor | None) -> Angles:
        """The angles of positions [start, start + num_positions), or of `positions` (T,) or (B, T) where given."""
        if positions is None:
            end = start + num_positions
            return self.cos_SR[start:end], self.sin_SR[start:end]
        if positions.dim() == 2:
            positions = positions[:, None]
        return self.cos_SR[positions], self.sin_SR[positions]

    def _tables(self, device: torch.device) -> Angles:
        powers_R = torch.arange(0, self.width, 2, dtype=torch.float32, device=device) / self.width
        places_S = torch.arange(self.context_size, dtype=torch.float32, device=device)
        angles_SR = places_S[:, None] * (1.0 / self.theta**powers_R)
        return angles_SR.cos(), angles_SR.sin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.cos_SR, self.sin_SR = self._tables(self.cos_SR.device)
        return self


def rotate(x_BHTD: Tensor, angles: Angles) -> Tensor:
    """Turns the first 2R numbers of each head and leaves the rest; computed in float32."""
    cos, sin = angles
    half = cos.shape[-1]
    wide = widen(x_BHTD)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        turned.append(rest)
    return torch.cat(turned, dim=-1).to(x_BHTD.dtype)
