"""Keeps a non-finite step from being applied.

A fused optimizer honours `found_inf`, a tensor on the device: when it is 1 the whole update is skipped there, moments
and step number included. The flag is sticky, so that however late the host reads the signals, the weights and the
optimizer are still exactly those before the first bad step; and it costs neither a copy nor a wait. Optimizers that do
not know the flag make the host look at it before each update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Guard:
    def __init__(self, device: torch.device, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._latch = torch.zeros((), device=device)
        self._all_fused = all(getattr(o, "_step_supports_amp_scaling", False) for o in optimizers)

    def update(self, optimizers: Sequence[torch.optim.Optimizer], loss_sum: Tensor, norm: Tensor) -> None:
        """Steps the optimizers, unless this step or an earlier one was not finite."""
        is_bad = ~(torch.isfinite(loss_sum) & torch.isfinite(norm))
        self._latch = torch.maximum(self._latch, is_bad.to(self._latch.dtype))
        if not self._all_fused and self._latch.item():
            return
        for optimizer in optimizers:
            if self._all_fused:
                optimizer.found_inf = self._latch  # type: ignore[attr-defined]
            optimizer.step()
