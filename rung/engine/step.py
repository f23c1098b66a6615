"""One step of the engine: from a global batch to new weights, or none.

For each objective that is due: forward and backward of every micro with summed losses, at the weights before the step.
With several ranks the last backward also sums the gradients over them. Then comes the guarded step of guarded.py.
Nothing is averaged before the end, so the result does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rung.engine.buckets import GradientBuckets
from rung.engine.clock import PHASES, Clock
from rung.engine.contract import read_loss
from rung.engine.guarded import Gradients, GuardedStep, ObjectiveState
from rung.engine.parallel import World
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.errors import RecipeError
from rung.random import Draw
from rung.recipe import Loss, Part

# What the engine itself writes into a row; a part of that name would hide it.
TAKEN = {"loss", "norm", "norm_clipped", "scale", "skipped", "diverged", "lr", "mfu", "targets", "step", "unix_s",
         "step_s", "copy_s", "targets_min", "bad_micro", "norm_first", "rows_first", "follows", "fresh", "batch_hash",
         "memory_mb", "reserved_mb", "rss_mb", "gpu_load_ratio", "gpu_temperature_c",
         *(f"{phase}_s" for phase in PHASES)}  # fmt: skip


class Sums:
    """Named sums and counts, added up on the device and divided once, at the end.

    Training and eval add with the same code, so that a loss means the same in both. float64, because a count of targets
    outgrows the whole numbers of float32.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
        self._pairs: dict[str, Tensor] = {}
        self.micros: list[Tensor] = []  # sum and count of the loss, of each

    def add(self, loss: Loss, measured: Mapping[str, Part] = {}) -> None:
        parts = [*loss.parts.items(), *measured.items()]
        for name, _ in parts:
            if name in TAKEN or name.endswith(("/sum", "/count")) or name.startswith(("logits/", "probe/")):
                raise RecipeError(
                    f"a part or measure of the loss is called {name!r}, a name the engine uses; rename it",
                    code="bad-loss",
                )
        if len({name for name, _ in parts}) < len(parts):
            raise RecipeError("measure() returns a name that the loss has as a part; rename it", code="bad-loss")
        for name, pair in [("loss", (loss.sum, loss.count)), *parts]:
            tensors = [torch.as_tensor(x, device=self._device).detach() for x in pair]
            value = torch.stack([tensor.to(self._dtype).reshape(()) for tensor in tensors])
            if name == "loss":
                self.micros.append(value)
            self._pairs[name] = self._pairs[name] + value if name in self._pairs else value

    @property
    def names(self) -> list[str]:
        return list(self._pairs)

    def packed(self, names: list[str]) -> Tensor:
        """(names, 2): sum and count of each; nothing was added to a name that is not known here."""
        nothing = torch.zeros(2, dtype=self._dtype, device=self._device)
        return torch.stack([self._pairs.get(name, nothing) for name in names])


class Stepper:
    """Takes steps. Besides what it was given it holds the guarded step, which remembers that one was bad."""

    def __init__(
        self,
        model: nn.Module,
        objectives: Sequence[ObjectiveState],
        precision: Precision,
        world: World,
        nominal: float,
        grad_clip: float,
        armed_steps: int = 0,
        layers_every: int = 0,
    ) -> None:
        self.objectives = objectives
        self.guarded = GuardedStep(
            model, objectives, world.device, num_ranks=world.size, armed_steps=armed_steps,
            layers_every=layers_every, scaling=precision.loss_scale,
        )  # fmt: skip
        self.guard, self.layers = self.guarded.guard, self.guarded.layers
        self.is_own = False  # whether a step is in its forward or backward: nothing applied
        self._precision, self._world = precision, world
        self.buckets = {o.name: GradientBuckets(o.parameters, world) for o in objectives} if world.size > 1 else {}
        self._nominal, self._grad_clip = nominal, grad_clip

    def step(
        self, step: int, micros: Sequence[Micro], lr: float, clock: Clock, measures: bool = False
    ) -> dict[str, Tensor]:
        """Updates the weights in place; returns the signals of the step as tensors, still on the device.

        Backward runs on sum / `nominal`, a constant near the real count, and the gradients are scaled to sum / count
        together with clipping, in one pass: the count need not be known before the first backward, and float16 sees
        numbers of the usual size. With `measures` the norms of each tensor are left in `layers.measured`.
        """
        due = [objective for objective in self.objectives if step % objective.every == 0]
        self.is_own = True
        with clock.phase("forward_backward"):
            self.guard.keep_buffers()
            sums = [self._backward(objective, micros, measures and n == 0) for n, objective in enumerate(due)]
        self.is_own = False
        with clock.phase("update"):
            gradients = []
            for objective, added in zip(due, sums, strict=True):
                packed = added.packed(added.names)
                if self.buckets:
                    packed = self.buckets[objective.name].finish(packed)
                count = packed[0, 1]
                factor = (self._nominal / torch.where(count > 0, count, 1.0)).float()
                if self._precision.loss_scale is not None:
                    factor = factor / self._precision.loss_scale.scale
                gradients.append(Gradients(objective, added.names, packed, added.micros, factor, self._grad_clip))
            with self._world.waiting("the numbers of this step", exchanges=False):  # some optimizers ask the device
                signals = self.guarded.update(step, gradients, lr, measures)
            for objective in due:
                for parameter in objective.parameters:
                    parameter.grad = None
        return signals

    def _backward(self, objective: ObjectiveState, micros: Sequence[Micro], measures: bool = False) -> Sums:
        """Gradients of sum / nominal in .grad, and the sums and counts of this rank."""
        sums = Sums(self._world.device)
        loss_scale = self._precision.loss_scale
        for number, micro in enumerate(micros):
            seed_torch(objective.name, micro.draw)
            with self._precision.autocast():
                loss = objective.loss(dict(micro.batch), micro.draw)  # its own dict: a loss may pop from it
            if type(loss) is not Loss:  # at another step than the one looked at before the start
                read_loss(objective.plain_loss, loss)
            scaled = loss.sum / self._nominal
            if loss_scale is not None:
                scaled = scaled * loss_scale.scale
            if self.buckets and number == len(micros) - 1:
                self.buckets[objective.name].begin()
            # Only this objective's parameters: a generator's loss flows through the discriminator and leaves it alone.
            torch.autograd.backward(scaled, inputs=objective.parameters if len(self.objectives) > 1 else None)
            sums.add(loss)
            if measures and number == 0 and len(micros) > 1:
                per_target = self._nominal / sums.packed(["loss"])[0, 1].clamp(min=1.0)
                if loss_scale is not None:
                    per_target = per_target / loss_scale.scale
                self.layers.note_first(objective, per_target)
        if self.buckets:
            self.buckets[objective.name].end()
        return sums


def seed_torch(name: str, draw: Draw) -> None:
    """Dropout and whatever else a model draws from torch depends on the step and the place, not on the past."""
    first = int(draw.rows[0]) if len(draw.rows) else 0
    torch.manual_seed(draw.key(f"{name}/forward/{first}"))
