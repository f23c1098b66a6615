"""Keeps a bad step from being applied, and a run at the state before it.

Three cases, from free to dear:
- A loss or a gradient is not finite. A fused optimizer honours `found_inf`, a tensor on the device: when it is 1 the
  whole update is left out there, moments and step number included. The latch is sticky, so that however late the host
  reads the signals, weights and optimizers are still exactly those before the first bad step; it costs neither a copy
  nor a wait. Optimizers that do not know the flag make the host look at it before each update.
- A forward moves buffers (running statistics). They are small, and kept while the latch is open; large ones (tables,
  masks) only if they move in the first steps.
- Finite gradients make bad weights (an eps that underflows, a square that overflows). That is a matter of the first
  steps and of wild times, so for some steps after a start and after a spike the guard is armed: weights and optimizers
  are copied before the update and looked at after it, and a bad update is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LARGE = 2**18  # elements of a buffer that is worth finding out whether it moves


class Before(NamedTuple):
    """A copy of what an update changes."""

    weights: list[Tensor]
    optimizers: list[dict[Any, dict[str, Any]]]


class Guard:
    def __init__(self, device: torch.device, model: nn.Module, armed_steps: int = 0) -> None:
        self.latch = torch.zeros((), device=device)  # one tensor for good, so that a captured graph may hold it
        self._armed_steps, self._armed_until = armed_steps, 0
        self._model = model
        self._still: set[str] = set()  # large buffers that nothing writes into
        self._kept: dict[torch.dtype, tuple[list[tuple[str, torch.Size]], Tensor]] = {}
        self._at_first: dict[str, Tensor] | None = None

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

    def open(self) -> None:
        """Forgets a bad step: the run goes on without it."""
        self.latch.zero_()

    def arm(self, step: int) -> None:
        """From this step on, for a while, updates are looked at."""
        self._armed_until = max(self._armed_until, step + self._armed_steps)

    def is_armed(self, step: int) -> bool:
        return step < self._armed_until

    def keep_buffers(self) -> None:
        """Before a forward. By name, as a forward may also put a new tensor in place of the old; a dtype at a time,
        in one piece, because a model can have hundreds of them."""
        buffers = [(n, b) for n, b in self._model.named_buffers() if b.numel() and n not in self._still]
        if self._at_first is None:
            self._at_first = {name: b.clone() for name, b in buffers if b.numel() > LARGE}
        for dtype in {buffer.dtype for _, buffer in buffers}:
            some = [(name, buffer) for name, buffer in buffers if buffer.dtype == dtype]
            layout = [(name, buffer.shape) for name, buffer in some]
            flat = torch.cat([buffer.detach().reshape(-1) for _, buffer in some])
            before = self._kept.get(dtype)
            if before is not None and before[0] == layout:  # never by multiplication: 0 times NaN is NaN
                flat = torch.where(self.latch > 0, before[1], flat)
            self._kept[dtype] = (layout, flat)

    def forget_still_buffers(self) -> None:
        """After some steps: tables and masks that nothing wrote into need no copies."""
        now = dict(self._model.named_buffers())
        for name, at_first in (self._at_first or {}).items():
            if name in now and torch.equal(at_first, now[name]):
                self._still.add(name)
        self._at_first = {}

    @torch.no_grad()
    def restore_buffers(self) -> None:
        for layout, flat in self._kept.values():
            pieces = flat.split([shape.numel() for _, shape in layout])
            for (name, shape), piece in zip(layout, pieces, strict=True):
                owner, _, last = name.rpartition(".")
                buffers = self._model.get_submodule(owner)._buffers
                if (buffer := buffers.get(last)) is not None and buffer.shape == shape:
                    buffer.copy_(piece.view(shape))
                else:
                    buffers[last] = piece.view(shape).clone()


def copy_before(parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> Before:
    weights = [parameter.detach().clone() for parameter in parameters]
    states = [
        {p: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()} for p, state in o.state.items()}
        for o in optimizers
    ]
    return Before(weights, states)


@torch.no_grad()
def bring_back(before: Before, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for parameter, weight in zip(parameters, before.weights, strict=True):
        parameter.copy_(weight)
    for optimizer, states in zip(optimizers, before.optimizers, strict=True):
        for made in [key for key in optimizer.state if key not in states]:
            del optimizer.state[made]  # by the step that is undone
        for key, state in states.items():
            optimizer.state[key].update(state)


def not_finite(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers of the tensors with an element that is NaN or infinite. The host waits for it.

    Norms first, in one pass; only where one is not finite the elements are looked at, for it may just have overflowed.
    """
    if not tensors:
        return []
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(tensors))])
    odd = torch.nonzero(~torch.isfinite(norms)).flatten().tolist()
    return [number for number in odd if not torch.isfinite(tensors[number]).all()]


def moments_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """The floating tensors of the optimizers' state."""
    return [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
    ]
