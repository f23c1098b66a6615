"""Norms per tensor around one update: gradient, weight, change, and how surprising the gradient was to Adam.

Measured at some steps only, in a few foreach passes, and left on the device; who wants the numbers copies them. The
change is the difference of the weights themselves, not what an optimizer's state suggests: exactly 0 means that nothing
changed, whatever the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rung.engine.guarded import ObjectiveState

COLUMNS = ("grad", "weight", "update", "rms", "eps_share")


class Layers:
    """`begin` before an update, `end` after it; then `measured` has one tensor per column, in the order of `names`."""

    def __init__(self, model: nn.Module, objectives: Sequence[ObjectiveState]) -> None:
        self._name_of = {id(p): name for name, p in model.named_parameters()}
        self._objectives = list(objectives)
        parameters = [p for objective in objectives for p in objective.parameters]
        self.names = self.names_of(parameters)
        self.fixed = {
            "numel": [float(p.numel()) for p in parameters],
            "decayed": [float(p.ndim >= 2) for p in parameters],
        }
        self.measured: dict[str, Tensor] = {}
        self.norm_first: Tensor | None = None  # where a step has several micros
        self._before: dict[str, list[Tensor]] = {}
        self._indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        return [self._name_of.get(id(p), f"not in the model {tuple(p.shape)}") for p in parameters]

    def note_first(self, objective: ObjectiveState, per_target: Tensor) -> None:
        """The norm of the gradient of the first micro's mean loss: what a step of its size would have."""
        gradients = [p.grad for p in objective.parameters if p.grad is not None]
        if gradients:
            self.norm_first = torch.linalg.vector_norm(_stacked(torch._foreach_norm(gradients))) * per_target

    def begin(self, due: Sequence[ObjectiveState], copies: Sequence[Tensor] | None) -> None:
        """`copies` of all parameters of `due`, if there are any already; they are overwritten."""
        self._before, start = {}, 0
        for objective in due:
            stop = start + len(objective.parameters)
            mine = [p.detach().clone() for p in objective.parameters] if copies is None else list(copies[start:stop])
            self._before[objective.name] = mine
            start = stop

    @torch.no_grad()
    def end(self, gradient_norms: Mapping[str, Tensor]) -> None:
        """Call it before the gradients are freed."""
        columns: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
        for objective in self._objectives:
            device = objective.parameters[0].device
            nothing = torch.full((len(objective.parameters),), math.nan, device=device)
            found = dict.fromkeys(COLUMNS, nothing)
            norms = gradient_norms.get(objective.name)
            if norms is not None:  # the objective was due at this step
                with_grad = [place for place, p in enumerate(objective.parameters) if p.grad is not None]
                if with_grad:
                    found["grad"] = nothing.index_copy(0, self._index(with_grad, device), norms.float())
                before = self._before[objective.name]
                found["weight"] = _stacked(torch._foreach_norm(before))
                torch._foreach_sub_(before, [p.detach() for p in objective.parameters])
                found["update"] = _stacked(torch._foreach_norm(before))
                found["rms"], found["eps_share"] = self._adam(objective, nothing)
            for name, values in found.items():
                columns[name].append(values.float())
        self.measured = {name: torch.cat(values) for name, values in columns.items()}
        self._before = {}

    def _adam(self, objective: ObjectiveState, nothing: Tensor) -> tuple[Tensor, Tensor]:
        """How many times larger than usual the gradient is, root mean square; and where eps rules in place of it."""
        rms, eps_share, device = nothing, nothing, nothing.device
        places = {id(p): place for place, p in enumerate(objective.parameters)}
        for optimizer in objective.optimizers:
            for group in optimizer.param_groups:
                known = [
                    p for p in group["params"] if p.grad is not None and "exp_avg_sq" in optimizer.state.get(p, {})
                ]
                if not known:
                    continue
                at = self._index([places[id(p)] for p in known], device)
                steps = _stacked([torch.as_tensor(optimizer.state[p]["step"], device=device) for p in known])
                correction = (1 - group["betas"][1] ** steps).clamp(min=1e-12)
                roots = torch._foreach_sqrt([optimizer.state[p]["exp_avg_sq"] for p in known])
                limits = (group["eps"] * correction.sqrt()).unbind()
                below = torch.stack([(root < limit).float().mean() for root, limit in zip(roots, limits)])
                torch._foreach_add_(roots, 1e-30)
                ratios = torch._foreach_div([p.grad for p in known], roots)
                scale = torch.stack([c / p.numel() for c, p in zip(correction.unbind(), known)]).sqrt()
                rms = rms.index_copy(0, at, _stacked(torch._foreach_norm(ratios)) * scale)
                eps_share = eps_share.index_copy(0, at, below)
        return rms, eps_share

    def _index(self, places: Sequence[int], device: torch.device) -> Tensor:
        """Places as a tensor, sent to the device once and not at every measurement, which would wait for it."""
        key = (tuple(places), device)
        if len(self._indices) > 64:  # a model that routes has many sets
            self._indices.clear()
        if key not in self._indices:
            self._indices[key] = torch.tensor(places, device=device)
        return self._indices[key]


def _stacked(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([value.float() for value in values])
