"""One step: from a global batch to new weights.

For each objective that is due: forward and backward of every micro with summed losses, one exchange over the ranks, one
division by the count of targets of the whole step, the norm, clipping, the update. Nothing is averaged before the end,
so the result does not depend on how the batch was cut.

The surprising thing: backward runs on sum / `nominal`, a constant near the real count, and the gradients are brought to
sum / count together with clipping, in one pass. So the count need not be known before the first backward, float16 sees
numbers of the usual size, and no extra pass over the gradients is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rung.data.prefetch import Micro
from rung.engine.clock import Clock
from rung.engine.guard import Guard
from rung.engine.optim import set_lr
from rung.engine.parallel import World
from rung.engine.precision import Precision
from rung.recipe import Batch, Draw, Loss, Part


@dataclass
class Trained:
    """An objective with what training it needs."""

    name: str
    loss: Callable[[Batch, Draw], Loss]  # compiled, if the user asked for it
    parameters: list[nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    guard: Guard
    every: int = 1


class Stepper:
    """Takes steps; holds nothing that changes but what it was given."""

    def __init__(
        self, objectives: Sequence[Trained], precision: Precision, world: World, nominal: float, grad_clip: float
    ) -> None:
        self.objectives = objectives
        self._precision, self._world = precision, world
        self._nominal, self._grad_clip = nominal, grad_clip

    def step(self, step: int, micros: Sequence[Micro], lr: float, clock: Clock) -> dict[str, Tensor]:
        """Updates the weights in place; returns the signals of the step as tensors that nobody has waited for."""
        signals: dict[str, Tensor] = {}
        for number, objective in enumerate(self.objectives):
            if step % objective.every:
                continue
            prefix = "" if number == 0 else f"{objective.name}/"  # the first objective's loss is the loss of the run
            for name, value in self._train(objective, micros, lr, clock).items():
                signals[prefix + name] = value
        if self._precision.scaler is not None and signals:
            self._precision.scaler.update()
        return signals

    def _train(self, objective: Trained, micros: Sequence[Micro], lr: float, clock: Clock) -> dict[str, Tensor]:
        with clock.phase("forward_backward"):
            sums = self._accumulate(objective, micros)
        with clock.phase("update"):
            gradients = [p.grad for p in objective.parameters if p.grad is not None]
            self._world.sum_all_(gradients)
            names = list(sums)
            packed = self._world.sum_(torch.stack([value for pair in sums.values() for value in pair]))
            loss_sum, count = packed[0], packed[1]
            scale = self._precision.scale()
            norm, clipped = self._scale(objective, gradients, self._nominal / count.clamp(min=1.0))
            self._update(objective, loss_sum, norm, lr)
            for parameter in objective.parameters:
                parameter.grad = None
        signals = {"norm": norm, "norm_clipped": clipped}
        if scale is not None:
            signals["scale"] = scale
        for i, name in enumerate(names):
            signals[f"{name}/sum"], signals[f"{name}/count"] = packed[2 * i], packed[2 * i + 1]
        return signals

    def _accumulate(self, objective: Trained, micros: Sequence[Micro]) -> dict[str, Part]:
        """Gradients of sum / nominal in .grad, and the summed loss, count and parts of this rank."""
        totals: dict[str, Part] = {}
        scaler = self._precision.scaler
        for micro in micros:
            seed_torch(objective.name, micro.draw)
            with self._precision.autocast():
                loss = objective.loss(micro.batch, micro.draw)
            scaled = loss.sum / self._nominal
            scaled = scaler.scale(scaled) if scaler is not None else scaled
            # Only this objective's parameters: a generator's loss flows through the discriminator and leaves it alone.
            torch.autograd.backward(scaled, inputs=objective.parameters if len(self.objectives) > 1 else None)
            for name, (value, count) in {"loss": (loss.sum, loss.count), **loss.parts}.items():
                pair = value.detach().float(), count.detach().to(value.device).float()
                totals[name] = pair if name not in totals else (totals[name][0] + pair[0], totals[name][1] + pair[1])
        return totals

    def _scale(self, objective: Trained, gradients: list[Tensor], factor: Tensor) -> tuple[Tensor, Tensor]:
        """Brings the gradients to sum / count and clips them; returns the norm before and after clipping."""
        if self._precision.scaler is not None:
            for optimizer in objective.optimizers:
                self._precision.scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm(gradients) * factor
        shrink = torch.ones_like(norm)
        if self._grad_clip > 0:
            shrink = (self._grad_clip / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor * shrink)
        return norm, norm * shrink

    def _update(self, objective: Trained, loss_sum: Tensor, norm: Tensor, lr: float) -> None:
        set_lr(objective.optimizers, lr)
        scaler = self._precision.scaler
        if scaler is None:
            objective.guard.update(objective.optimizers, loss_sum, norm)
            return
        for optimizer in objective.optimizers:
            scaler.step(optimizer)


def seed_torch(name: str, draw: Draw) -> None:
    """Dropout and whatever else a model draws from torch depends on the step and the place, not on the past."""
    first = int(draw.rows[0]) if len(draw.rows) else 0
    torch.manual_seed(draw.key(f"{name}/forward/{first}"))
