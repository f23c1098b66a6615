"""What the networks of a world are trained for. A target is a frame, and its error a mean over its colours in [-1, 1].

The generator: L1 and, each with a weight, local contrast and fooling the discriminator. The discriminator: the hinge
loss and R1, a penalty on its gradient at real frames. With a weight of 0 nothing of the discriminator is computed.
Evals are always L1 alone: a loss that contains the opinion of a network that moves cannot be compared between two
steps.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rung.random import Draw
from rung.recipe import Batch, Loss, Part
from rung.recipes.world.config import Adversarial, Contrast
from rung.recipes.world.dream import Dreamer, memory_of
from rung.recipes.world.memory import Memory, to_signal

RATIO_EVERY = 10  # steps between looks at the balance of the two gradients: each costs a backward of the discriminator


def l1(made_B3HW: Tensor, real_B3HW: Tensor) -> Tensor:
    """(B,) mean absolute error of each frame."""
    return (made_B3HW.float() - real_B3HW).abs().mean(dim=(1, 2, 3))


def contrast_error(made_B3HW: Tensor, real_B3HW: Tensor, size: int) -> Tensor:
    """(B,) by how much the strength of edges in squares of this side differs, wherever in the square they are.

    L1 prefers grey to an edge that is a pixel off; this does not care about the pixel and sees the grey.
    """

    def strength(picture: Tensor) -> Tensor:
        squares = gradient_energy(picture)
        side = min(size, *squares.shape[-2:])
        return (F.avg_pool2d(squares, side, stride=max(1, side // 2)) + 1e-4).sqrt()

    return (strength(made_B3HW.float()) - strength(real_B3HW)).abs().mean(dim=(1, 2, 3))


def gradient_energy(picture_B3HW: Tensor) -> Tensor:
    """(B, 3, H - 1, W - 1): the squared differences to the neighbours on the right and below."""
    right = picture_B3HW[..., :-1, 1:] - picture_B3HW[..., :-1, :-1]
    below = picture_B3HW[..., 1:, :-1] - picture_B3HW[..., :-1, :-1]
    return right.square() + below.square()


class GeneratorLoss:
    """Rolls out as many frames as the batch has. The first is made from real frames, the others from its own."""

    def __init__(self, dreamer: Dreamer, cfg: Adversarial, contrast: Contrast, has_rollouts: bool) -> None:
        self._dreamer, self._weight, self._has_rollouts = dreamer, cfg.weight, has_rollouts
        self._contrast, self._contrast_size = contrast.weight, contrast.size

    def __call__(self, batch: Batch, draw: Draw) -> Loss:
        if batch["valid"].ndim == 3:  # a group of moments, of which this is about the first frames
            num_moments = batch["valid"].shape[1]
            draw = Draw(draw.seed, draw.step, np.arange(len(batch["valid"]) * num_moments))
            batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
            batch |= {name: batch[name][:, :1] for name in ("frames", "controls", "valid")}
        real, valid, world = to_signal(batch["frames"]), batch["valid"], self._dreamer.world
        has_opponent = self._weight > 0 and not draw.is_eval
        has_contrast = self._contrast > 0 and not draw.is_eval
        errors, flat, fooled, ratios = [], [], [], []
        for t, (memory, made) in enumerate(self._dreamer.roll(memory_of(batch), batch["controls"], draw)):
            errors.append(l1(made, real[:, t]))
            if has_contrast:
                flat.append(contrast_error(made, real[:, t], self._contrast_size))
            if has_opponent:
                condition = world.standard(batch["controls"][:, t])
                scores = world.discriminator(made, last_of(memory), condition).float().mean(dim=(1, 2, 3))
                fooled.append(-scores)
                if draw.step % RATIO_EVERY == 0:
                    ratios.append(self._ratio(scores, made, real[:, t], valid[:, t]))
        error_BT, count = torch.stack(errors, dim=1) * valid, valid.sum()
        total = error_BT.sum()
        parts: dict[str, Part] = {}
        if self._has_rollouts:
            parts["from_real"] = (error_BT[:, 0].sum(), valid[:, 0].sum())
            parts["from_own"] = (error_BT[:, 1:].sum(), valid[:, 1:].sum())
        if has_contrast or has_opponent:
            parts["l1"] = (total, count)
        if has_contrast:
            contrast = (torch.stack(flat, dim=1) * valid).sum()
            parts["contrast"] = (contrast, count)
            total = total + self._contrast * contrast
        if has_opponent:
            fooling = (torch.stack(fooled, dim=1) * valid).sum()
            no_ratio = (total.new_zeros(()), total.new_zeros(()))
            parts["fooling"] = (fooling, count)
            parts["grad_ratio"] = (torch.stack(ratios, dim=1).sum(), count) if ratios else no_ratio
            total = total + self._weight * fooling
        return Loss(total, count, parts)

    def _ratio(self, scores_B: Tensor, made: Tensor, real: Tensor, valid_B: Tensor) -> Tensor:
        """(B,) how hard the discriminator pulls at a frame, over how hard L1 does; about 0.05 to 0.1 is healthy."""
        (pull,) = torch.autograd.grad((scores_B * valid_B).sum(), made, retain_graph=True)
        differs = (made.detach() != real).float()
        of_l1 = differs.flatten(1).norm(dim=1) / differs[0].numel()
        return self._weight * pull.float().flatten(1).norm(dim=1) / of_l1.clamp(min=1e-12)


class DiscriminatorLoss:
    """Tells real frames under the control that led to them from made ones, and from real ones under another control.

    The second kind is there because without it the control can be ignored: a generator that follows its controls
    leaves nothing to be found in them, and the discriminator never learns to look.
    """

    def __init__(self, dreamer: Dreamer, cfg: Adversarial) -> None:
        self._dreamer, self._r1, self._r1_every, self._every = dreamer, cfg.r1, cfg.r1_every, cfg.every

    def __call__(self, batch: Batch, draw: Draw) -> Loss:
        real, valid, controls = to_signal(batch["frames"]), batch["valid"], batch["controls"]
        world = self._dreamer.world
        with torch.no_grad():
            steps = [(last_of(m), made) for m, made in self._dreamer.roll(memory_of(batch), controls, draw)]
        other = world.standard(batch["other_controls"])
        penalises = bool(self._r1) and draw.step // self._every % self._r1_every == 0  # of its own updates
        sums = {name: valid.new_zeros(()) for name in ("hinge", "accuracy", "gap", "control_gap", "r1")}
        for t, (last, made) in enumerate(steps):
            condition, counted = world.standard(controls[:, t]), valid[:, t]
            frame = real[:, t].requires_grad_(penalises and torch.is_grad_enabled())
            on_real = world.discriminator(frame, last, condition).float().flatten(1)
            on_made = world.discriminator(made, last, condition).float().flatten(1)
            on_other = world.discriminator(frame.detach(), last, other).float().flatten(1)
            false = (F.relu(1 + on_made) + F.relu(1 + on_other)) / 2
            sums["hinge"] += ((F.relu(1 - on_real) + false).mean(1) * counted).sum()
            right = (on_real > 0).float().mean(1) + (on_made < 0).float().mean(1)
            sums["accuracy"] += (right / 2 * counted).sum()
            sums["gap"] += ((on_real.mean(1) - on_made.mean(1)) * counted).sum()
            sums["control_gap"] += ((on_real.mean(1) - on_other.mean(1)) * counted).sum()
            if frame.requires_grad:
                (slope,) = torch.autograd.grad((on_real.mean(1) * counted).sum(), frame, create_graph=True)
                sums["r1"] += slope.float().square().sum()
        count = valid.sum()
        total = sums["hinge"] + 0.5 * self._r1 * self._r1_every * sums["r1"]
        parts = {name: (value, count) for name, value in sums.items()}
        if not penalises:
            parts["r1"] = (sums["r1"], valid.new_zeros(()))
        return Loss(total, count, parts)


def last_of(memory: Memory) -> Tensor:
    """The newest remembered frame, B 3 H W."""
    return to_signal(memory[0][:, -1])
