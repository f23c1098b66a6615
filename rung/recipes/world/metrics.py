"""What is measured of a world besides its loss, always on recorded, held-out moments.

Of next frames and of rollouts after 1, 2, 4 .. frames: the error beside that of two models that learn nothing (copy the
last frame; show the mean frame), drift of brightness and contrast, and whether the controls matter: how much worse it
gets with another moment's, and whether opposite ones move the picture opposite ways, with the right sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rung.random import Draw
from rung.recipe import Batch, Part
from rung.recipes.world.dream import Dreamer, memory_of
from rung.recipes.world.losses import l1, last_of
from rung.recipes.world.memory import to_signal

COARSE_HEIGHT = 24
Intents = Mapping[str, tuple[int, float, float]]  # what a visitor wants -> channel, sign and size of a brisk move


def next_frame(dreamer: Dreamer, batch: Batch, draw: Draw) -> dict[str, Part]:
    """PSNR of the first frame, and what copying and averaging reach on the same rows."""
    memory, real, valid = memory_of(batch), to_signal(batch["frames"][:, 0]), batch["valid"][:, 0]
    made = dreamer.make(memory, batch["controls"][:, 0], draw, 0)
    error = ((made.float() - real) / 2).square().mean(dim=(1, 2, 3))
    psnr = -10 * torch.log10(error.clamp(min=1e-10))
    mean = dreamer.world.mean_frame
    return _parts(valid, psnr=psnr, persistence=l1(last_of(memory), real), mean_frame=l1(mean[None], real))


def rollout(dreamer: Dreamer, batch: Batch, draw: Draw, horizons: Sequence[int]) -> dict[str, Part]:
    memory, real, valid = memory_of(batch), to_signal(batch["frames"]), batch["valid"]
    last, mean = last_of(memory), dreamer.world.mean_frame
    after: dict[str, dict[int, Part]] = {"l1": {}, "persistence": {}, "mean_frame": {}}
    is_last = valid * (1 - F.pad(valid[:, 1:], (0, 1)))  # 1 at the last valid frame of each row
    drift = torch.zeros(2, len(valid), device=valid.device)
    for t, (_, made) in enumerate(dreamer.roll(memory, batch["controls"], draw)):
        if t + 1 in horizons:
            for name, guess in (("l1", made), ("persistence", last), ("mean_frame", mean[None])):
                after[name][t + 1] = _part(l1(guess, real[:, t]), valid[:, t])
        gaps = [of(made.float(), dim=(1, 2, 3)) - of(real[:, t], dim=(1, 2, 3)) for of in (torch.mean, torch.std)]
        drift += is_last[:, t] * torch.stack(gaps).abs()
    all_rows = torch.ones_like(valid[:, 0])
    parts = {f"{name}@{h}": part for name, by_horizon in after.items() for h, part in by_horizon.items()}
    return parts | _parts(all_rows, drift_mean=drift[0], drift_std=drift[1])


def response(dreamer: Dreamer, batch: Batch, draw: Draw, intents: Intents) -> dict[str, Part]:
    """Whether the controls matter, from one memory and with the same noise each time."""
    memory, controls, real = memory_of(batch), batch["controls"][:, 0], to_signal(batch["frames"][:, 0])
    all_rows = torch.ones(len(controls), device=controls.device)
    own = l1(dreamer.make(memory, controls, draw, 0), real)
    other = l1(dreamer.make(memory, batch["other_controls"], draw, 0), real)
    parts = _parts(all_rows, controls_own=own, controls_other=other)
    for intent, (index, axis) in {"turn": (0, -1.0), "forward": (2, 1.0), "look": (1, 1.0)}.items():
        if intent not in intents:
            continue
        at_rest = controls.clone()
        at_rest[:, [channel for channel, _, _ in intents.values()]] = 0.0
        channel, sign, brisk = intents[intent]
        moved = []
        for way in (1.0, -1.0):  # the next frame if this one channel were at a brisk move one way
            changed = at_rest.clone()
            changed[:, channel] = way * sign * brisk
            moved.append(motion(last_of(memory), dreamer.make(memory, changed, draw, 0))[index])
        answer = axis * (moved[0] - moved[1])  # content moves left when the camera turns right, and grows ahead
        parts |= _parts(all_rows, **{f"{intent}_response": answer, f"{intent}_right": (answer > 0).float()})
    return parts


def motion(before_B3HW: Tensor, after_B3HW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B,) each: by how many coarse pixels the picture moved right and down, and how much it grew.

    Without a model: what best explains the difference of the two, to first order, on a coarse picture.
    """
    before, after = _coarse(before_B3HW), _coarse(after_B3HW)
    middle = (before + after) / 2
    down, right = torch.gradient(middle, dim=(-2, -1))
    height, width = middle.shape[-2:]
    y = torch.arange(height, device=middle.device) - (height - 1) / 2
    x = torch.arange(width, device=middle.device) - (width - 1) / 2
    outward = right * x + down * y[:, None]
    # after - before = -(right * dx + down * dy + outward * grown): three numbers, least squares
    system = torch.stack([right, down, outward], dim=-1).flatten(1, -2)
    change = (before - after).flatten(1)
    # Sums rather than products of matrices, which autocast would make in 8 bits of precision.
    normal = (system[..., :, None] * system[..., None, :]).sum(1) + 1e-4 * torch.eye(3, device=middle.device)
    solved = torch.linalg.solve(normal, (system * change[..., None]).sum(1))
    return solved[:, 0], solved[:, 1], solved[:, 2]


def _coarse(picture_B3HW: Tensor) -> Tensor:
    """Grey, small and smooth."""
    grey = picture_B3HW.float().mean(1, keepdim=True)
    small = F.avg_pool2d(grey, max(1, grey.shape[-2] // COARSE_HEIGHT))
    return F.avg_pool2d(F.pad(small, (1, 1, 1, 1), mode="replicate"), 3, stride=1)[:, 0]


def _part(value_B: Tensor, weight_B: Tensor) -> Part:
    return (value_B * weight_B).sum(), weight_B.sum()


def _parts(weight_B: Tensor, **values: Tensor) -> dict[str, Part]:
    return {name: _part(value, weight_B) for name, value in values.items()}
