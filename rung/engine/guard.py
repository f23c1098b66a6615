"""Keeps a bad step from being applied.

A fused optimizer honours `found_inf`, a tensor on the device: when it is 1 the whole update is left out there, moments
and step number included. The latch is sticky, so that however late the host reads the signals, the weights and the
optimizers are still exactly those before the first bad step; and it costs neither a copy nor a wait. Optimizers that do
not know the flag make the host look at it before each update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Guard:
    def __init__(self, device: torch.device) -> None:
        self.latch = torch.zeros((), device=device)  # one tensor for good, so that a captured graph may hold it

    def judge(self, is_bad: Tensor, is_fatal: Tensor) -> Tensor:
        """1 where this step must not be applied; after a fatal one, no step is."""
        torch.maximum(self.latch, is_fatal.to(self.latch.dtype), out=self.latch)
        return torch.maximum(self.latch, is_bad.to(self.latch.dtype))

    def apply(self, optimizers: Sequence[torch.optim.Optimizer], skip: Tensor) -> None:
        """Steps the optimizers of an objective, all or none."""
        all_fused = all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)
        if not all_fused and skip.item():
            return
        for optimizer in optimizers:
            if all_fused:
                optimizer.found_inf = skip  # type: ignore[attr-defined]
            optimizer.step()
