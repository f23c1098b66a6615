"""One step: from a global batch to new weights, or none.

For each objective that is due: forward and backward of every micro with summed losses, at the weights before the step.
Then one exchange over the ranks, one division by the count of targets of the whole step, the norm, clipping. Then all
objectives are updated, unless one of them is not finite: then none is. Nothing is averaged before the end, so the
result does not depend on how the batch was cut.

The surprising thing: backward runs on sum / `nominal`, a constant near the real count, and the gradients are brought to
sum / count together with clipping, in one pass. So the count need not be known before the first backward, float16 sees
numbers of the usual size, and no extra pass over the gradients is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rung.data.prefetch import Micro
from rung.engine.clock import Clock
from rung.engine.guard import Before, Guard, bring_back, copy_before, moments_of, not_finite
from rung.engine.layers import Layers
from rung.engine.optim import set_lr
from rung.engine.parallel import World
from rung.engine.precision import Precision
from rung.engine.sums import Sums
from rung.errors import RecipeError
from rung.recipe import Batch, Draw, Loss


@dataclass
class Trained:
    """An objective with what training it needs."""

    name: str
    loss: Callable[[Batch, Draw], Loss]  # compiled, if the user asked for it
    parameters: list[nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    every: int = 1
    lr_scale: float = 1.0
    eager: Callable[[Batch, Draw], Loss] | None = None  # as it was written, where `loss` is compiled

    @property
    def plain_loss(self) -> Callable[[Batch, Draw], Loss]:
        return self.eager or self.loss


class Ready(NamedTuple):
    """An objective whose gradients are those of sum / count, clipped, and wait to be applied."""

    objective: Trained
    norm: Tensor  # before clipping
    clipped: Tensor  # after
    norms: Tensor  # of each gradient, before clipping; parameters without one are left out
    names: list[str]
    packed: Tensor  # (names, 2) sums and counts over all ranks; the first is the loss
    micros: list[Tensor]  # (2,) sum and count of each micro of this rank

    def signals(self, is_shared: bool) -> dict[str, Tensor]:
        """`is_shared`: other ranks have micros too, so that which one was bad is not known from their number."""
        signals = {"norm": self.norm, "norm_clipped": self.clipped}
        for name, (value, count) in zip(self.names, self.packed, strict=True):
            signals[f"{name}/sum"], signals[f"{name}/count"] = value, count
        if len(self.micros) > 1 or (is_shared and self.micros):
            sums, counts = torch.stack(self.micros).unbind(dim=1)
            is_bad = ~torch.isfinite(sums)
            signals["targets_min"] = counts.min()
            signals["bad_micro"] = torch.where(is_bad.any(), is_bad.int().argmax(), -1)
        return signals


class Stepper:
    """Takes steps. Besides what it was given it holds the guard, which remembers that a step was bad."""

    def __init__(
        self,
        model: nn.Module,
        objectives: Sequence[Trained],
        precision: Precision,
        world: World,
        nominal: float,
        grad_clip: float,
        armed_steps: int = 0,
    ) -> None:
        self.objectives = objectives
        self.guard = Guard(world.device, model, armed_steps)
        self.layers = Layers(model, objectives)
        self.broken: list[str] = []  # tensors that the last armed update would have broken
        self.is_own = False  # whether a step is in its forward or backward: nothing exchanged, nothing applied
        self._precision, self._world = precision, world
        self._nominal, self._grad_clip = nominal, grad_clip

    def step(
        self, step: int, micros: Sequence[Micro], lr: float, clock: Clock, measures: bool = False
    ) -> dict[str, Tensor]:
        """Updates the weights in place; returns the signals of the step as tensors that nobody has waited for.

        With `measures` the norms of each tensor are left in `layers.measured`.
        """
        due = [objective for objective in self.objectives if step % objective.every == 0]
        self.is_own = True
        with clock.phase("forward_backward"):
            self.guard.keep_buffers()
            sums = [self._backward(objective, micros, measures and n == 0) for n, objective in enumerate(due)]
        self.is_own = False
        with clock.phase("update"):
            ready = [self._finish(objective, added) for objective, added in zip(due, sums, strict=True)]
            before = self._copy(due) if self.guard.is_armed(step) else None
            if measures:
                self.layers.begin(due, None if before is None else before.weights)
            scale = self._precision.loss_scale
            scaled = scale.state_dict() if scale is not None else {}
            verdict = self._update(ready, lr)
            if before is not None and self._undo_if_broken(due, before) and scale is not None:
                scale.load_state_dict(scaled)
            if measures:
                self.layers.end({one.objective.name: one.norms for one in ready})
            for objective in due:
                for parameter in objective.parameters:
                    parameter.grad = None
        return verdict | {"diverged": self.guard.latch.clone()} | _merge(ready, self._world.size > 1)

    def _copy(self, due: Sequence[Trained]) -> Before:
        return copy_before([p for o in due for p in o.parameters], [x for o in due for x in o.optimizers])

    def _undo_if_broken(self, due: Sequence[Trained], before: Before) -> bool:
        """An armed update that made weights or moments non-finite is taken back. Here the host waits.

        What was not finite before (a mask that is kept as a parameter) is not the update's doing.
        """
        parameters, optimizers = [p for o in due for p in o.parameters], [x for o in due for x in o.optimizers]
        bad = not_finite([p.detach() for p in parameters])
        if bad:
            odd = not_finite(before.weights)
            bad = [number for number in bad if number not in odd]
        if not bad and not not_finite(moments_of(optimizers)):
            return False
        self.broken = self.layers.names_of([parameters[number] for number in bad]) or ["optimizer state"]
        bring_back(before, parameters, optimizers)
        self.guard.latch.fill_(1.0)
        return True

    def _backward(self, objective: Trained, micros: Sequence[Micro], measures: bool = False) -> Sums:
        """Gradients of sum / nominal in .grad, and the sums and counts of this rank."""
        sums = Sums(self._world.device)
        loss_scale = self._precision.loss_scale
        for number, micro in enumerate(micros):
            seed_torch(objective.name, micro.draw)
            with self._precision.autocast():
                loss = objective.loss(dict(micro.batch), micro.draw)  # its own dict: a loss may pop from it
            scaled = loss.sum / self._nominal
            if loss_scale is not None:
                scaled = scaled * loss_scale.scale
            # Only this objective's parameters: a generator's loss flows through the discriminator and leaves it alone.
            torch.autograd.backward(scaled, inputs=objective.parameters if len(self.objectives) > 1 else None)
            sums.add(loss)
            if measures and number == 0 and len(micros) > 1:
                per_target = self._nominal / sums.packed(["loss"])[0, 1].clamp(min=1.0)
                if loss_scale is not None:
                    per_target = per_target / loss_scale.scale
                self.layers.note_first(objective, per_target)
        return sums

    def _finish(self, objective: Trained, sums: Sums) -> Ready:
        """Adds over the ranks, divides by the count, clips."""
        if self._world.size > 1:  # every rank must send the same tensors, whether its rows used them or not
            for parameter in objective.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in objective.parameters if p.grad is not None]
        self._world.sum_all_(gradients)
        packed = self._world.sum_(sums.packed(sums.names))
        count = packed[0, 1]
        factor = (self._nominal / torch.where(count > 0, count, 1.0)).float()
        if self._precision.loss_scale is not None:
            factor = factor / self._precision.loss_scale.scale
        norms = _norms(gradients) if gradients else torch.zeros(0, device=self._world.device)
        norm = torch.linalg.vector_norm(norms) * factor
        shrink = torch.ones_like(norm)
        if self._grad_clip > 0:
            shrink = (self._grad_clip / (norm + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_(gradients, factor * shrink)
        return Ready(objective, norm, norm * shrink, norms * factor, sums.names, packed, sums.micros)

    def _update(self, ready: Sequence[Ready], lr: float) -> dict[str, Tensor]:
        """Applies the step, unless it is bad; says so in `skipped` and, when training cannot go on, in `diverged`."""
        bad_loss = torch.stack([~torch.isfinite(r.packed[0, 0]) for r in ready]).any()
        is_bad = bad_loss | torch.stack([~torch.isfinite(r.norm) for r in ready]).any()
        is_fatal, signals = is_bad, {}
        loss_scale = self._precision.loss_scale
        if loss_scale is not None:  # an overflow of gradients is calibration, as long as there is room below
            is_fatal = bad_loss | (is_bad & (loss_scale.scale < 1.0))
            signals["scale"] = loss_scale.scale
        skip = self.guard.judge(is_bad, is_fatal)
        if loss_scale is not None:
            loss_scale.update(is_bad, self.guard.latch)
        for one in ready:
            set_lr(one.objective.optimizers, lr * one.objective.lr_scale)
            is_empty = (one.packed[0, 1] == 0).to(skip.dtype)  # no target, no update: not even the decay
            self.guard.apply(one.objective.optimizers, torch.maximum(skip, is_empty))
        return signals | {"skipped": skip}


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    """(gradients,) the norm of each, on one device."""
    norms = torch._foreach_norm(list(gradients))
    return torch.stack([norm.to(norms[0].device) for norm in norms])


def _merge(ready: Sequence[Ready], is_shared: bool) -> dict[str, Tensor]:
    """The signals of all objectives; the first one's loss is the loss of the run and has no prefix."""
    merged: dict[str, Tensor] = {}
    for number, one in enumerate(ready):
        prefix = "" if number == 0 else f"{one.objective.name}/"
        for name, value in one.signals(is_shared).items():
            if prefix + name in merged:
                raise RecipeError(f"two objectives have a signal {prefix + name!r}; rename a part or an objective")
            merged[prefix + name] = value
    return merged


def seed_torch(name: str, draw: Draw) -> None:
    """Dropout and whatever else a model draws from torch depends on the step and the place, not on the past."""
    first = int(draw.rows[0]) if len(draw.rows) else 0
    torch.manual_seed(draw.key(f"{name}/forward/{first}"))
