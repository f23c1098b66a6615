"""What is measured of a world besides its loss, always on recorded, held-out moments.

Of next frames and of rollouts after 1, 2, 4 .. frames: the error beside that of two models that learn nothing (copy the
last frame; show the mean frame), drift of brightness and contrast, and whether the controls matter: how much worse it
gets with another moment's, and whether opposite ones move the picture opposite ways, with the right sign.

The error rewards blur, and a blurred picture still moves the right way. So beside it: how sharp a dream is against real
frames, how far its frames are from real ones in the features of a network that knows those, and whether a classifier
can tell the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rung.random import Draw
from rung.recipe import Batch, Part
from rung.recipes.world.dream import Dreamer, memory_of
from rung.recipes.world.features import Features, frechet, told_apart
from rung.recipes.world.losses import gradient_energy, l1, last_of
from rung.recipes.world.memory import Memory, push, shrink, to_frame, to_signal

COARSE_HEIGHT = 24
SHARP_AT = (1, 8, 16, 32, 64)  # dreamed steps, and the last one
AXES = {"turn": (0, -1.0), "forward": (2, 1.0), "look": (1, 1.0)}  # of `motion`, and which way the picture goes
LATE = 8  # last steps of a rollout
AT_ONCE = 16  # moments of a group that are dreamed together
Intents = Mapping[str, tuple[int, float, float]]  # what a visitor wants -> channel, sign and size of a brisk move


def next_frame(dreamer: Dreamer, batch: Batch, draw: Draw) -> dict[str, Part]:
    """PSNR of the first frame, and what copying and averaging reach on the same rows."""
    memory, real, valid = memory_of(batch), to_signal(batch["frames"][:, 0]), batch["valid"][:, 0]
    made = dreamer.make(memory, batch["controls"][:, 0], draw, 0)
    error = ((made.float() - real) / 2).square().mean(dim=(1, 2, 3))
    psnr = -10 * torch.log10(error.clamp(min=1e-10))
    mean = dreamer.world.mean_frame
    return _parts(valid, psnr=psnr, persistence=l1(last_of(memory), real), mean_frame=l1(mean[None], real))


def rollout(dreamer: Dreamer, batch: Batch, draw: Draw, horizons: Sequence[int], intents: Intents) -> dict[str, Part]:
    memory, real, valid = memory_of(batch), to_signal(batch["frames"]), batch["valid"]
    last, mean = last_of(memory), dreamer.world.mean_frame
    after: dict[str, dict[int, Part]] = {"l1": {}, "persistence": {}, "mean_frame": {}, "sharpness": {}}
    num_steps = real.shape[1]
    followed: dict[str, list[Part]] = {
        f"{intent}_followed{kind}": [] for intent in AXES if intent in intents for kind in ("_late", "_real")
    }
    is_last = valid * (1 - F.pad(valid[:, 1:], (0, 1)))  # 1 at the last valid frame of each row
    drift = torch.zeros(2, len(valid), device=valid.device)
    for t, (before, made) in enumerate(dreamer.roll(memory, batch["controls"], draw)):
        if t + 1 in horizons and (t + 1 in SHARP_AT or t + 1 == num_steps):
            energy = [gradient_energy(x.float()).mean(dim=(1, 2, 3)) for x in (made, real[:, t])]
            after["sharpness"][t + 1] = (energy[0] * valid[:, t]).sum(), (energy[1] * valid[:, t]).sum()
        if t + 1 > num_steps - LATE:
            last_real = real[:, t - 1] if t else last
            moved = {"_late": motion(last_of(before), made), "_real": motion(last_real, real[:, t])}
            for intent, (index, axis) in AXES.items():
                if intent in intents:
                    channel, sign, brisk = intents[intent]
                    asked = sign * batch["controls"][:, t, channel]
                    clear = valid[:, t] * (asked.abs() > brisk / 2)
                    for kind, answer in moved.items():
                        right = (axis * answer[index] * asked > 0).float()
                        followed[f"{intent}_followed{kind}"].append(_part(right, clear))
        if t + 1 in horizons:
            for name, guess in (("l1", made), ("persistence", last), ("mean_frame", mean[None])):
                after[name][t + 1] = _part(l1(guess, real[:, t]), valid[:, t])
        gaps = [of(made.float(), dim=(1, 2, 3)) - of(real[:, t], dim=(1, 2, 3)) for of in (torch.mean, torch.std)]
        drift += is_last[:, t] * torch.stack(gaps).abs()
    all_rows = torch.ones_like(valid[:, 0])
    parts = {f"{name}@{h}": part for name, by_horizon in after.items() for h, part in by_horizon.items()}
    parts |= {name: _sum(some) for name, some in followed.items()}
    parts |= _parts(all_rows, drift_mean=drift[0], drift_std=drift[1])
    # Where the dream has come to, opposite controls again.
    end = push(before, to_frame(made))
    late = answers(dreamer, end, batch["controls"][:, -1], valid[:, -1], draw, num_steps, intents)
    return parts | {f"{name}_late": part for name, part in late.items()}


def response(dreamer: Dreamer, batch: Batch, draw: Draw, intents: Intents) -> dict[str, Part]:
    """Whether the controls matter, from one memory and with the same noise each time."""
    memory, controls, real = memory_of(batch), batch["controls"][:, 0], to_signal(batch["frames"][:, 0])
    all_rows = torch.ones(len(controls), device=controls.device)
    own = l1(dreamer.make(memory, controls, draw, 0), real)
    other = l1(dreamer.make(memory, batch["other_controls"], draw, 0), real)
    parts = _parts(all_rows, controls_own=own, controls_other=other)
    return parts | answers(dreamer, memory, controls, all_rows, draw, 0, intents)


def answers(
    dreamer: Dreamer, memory: Memory, controls: Tensor, weight_B: Tensor, draw: Draw, number: int, intents: Intents
) -> dict[str, Part]:
    """By how much opposite brisk controls move the picture apart, and how often the right way."""
    parts: dict[str, Part] = {}
    for intent, (index, axis) in AXES.items():
        if intent not in intents:
            continue
        at_rest = controls.clone()
        at_rest[:, [channel for channel, _, _ in intents.values()]] = 0.0
        channel, sign, brisk = intents[intent]
        moved = []
        for way in (1.0, -1.0):  # the next frame if this one channel were at a brisk move one way
            changed = at_rest.clone()
            changed[:, channel] = way * sign * brisk
            moved.append(motion(last_of(memory), dreamer.make(memory, changed, draw, number))[index])
        answer = axis * (moved[0] - moved[1])  # content moves left when the camera turns right, and grows ahead
        parts |= _parts(weight_B, **{f"{intent}_response": answer, f"{intent}_right": (answer > 0).float()})
    return parts


def distance(
    dreamer: Dreamer, batch: Batch, draw: Draw, horizons: Sequence[int], net: Features, shrink_by: int
) -> dict[str, Part]:
    """Of the dreamed frames of a group against the real ones of the same moments: how far their features lie apart,
    and how often a classifier tells which is which. `shrink_by` brings frames to the size of the network."""
    parts: dict[str, list[Tensor]] = {}
    for row in range(len(batch["valid"])):
        group = {name: tensor[row] for name, tensor in batch.items()}
        of_real = torch.stack([_features(net, group["frames"][:, i], shrink_by) for i in range(len(horizons))])
        made: list[list[Tensor]] = []
        for first in range(0, len(group["valid"]), AT_ONCE):
            some = {name: tensor[first : first + AT_ONCE] for name, tensor in group.items()}
            numbers = Draw(draw.seed, draw.step, first + np.arange(len(some["valid"])))
            rolled = enumerate(dreamer.roll(memory_of(some), some["controls"], numbers))
            made.append([_features(net, to_frame(m), shrink_by) for t, (_, m) in rolled if t + 1 in horizons])
        for i, horizon in enumerate(horizons):
            of_made = torch.cat([each[i] for each in made])
            parts.setdefault(f"feature_distance@{horizon}", []).append(
                frechet(of_real[i].flatten(0, 1), of_made.flatten(0, 1))[None]
            )
            if len(of_made) > 1:
                parts.setdefault(f"told_apart@{horizon}", []).append(told_apart(of_real[i], of_made))
    sums = {name: torch.cat(values) for name, values in parts.items()}
    return {name: (values.sum(), torch.ones_like(values).sum()) for name, values in sums.items()}


def _features(net: Features, frames_BHW3: Tensor, shrink_by: int) -> Tensor:
    with torch.autocast(frames_BHW3.device.type, enabled=False):
        found: Tensor = net(to_signal(shrink(frames_BHW3, shrink_by)))
    return found


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


def _sum(parts: Sequence[Part]) -> Part:
    return torch.stack([value for value, _ in parts]).sum(), torch.stack([count for _, count in parts]).sum()


def _part(value_B: Tensor, weight_B: Tensor) -> Part:
    return (value_B * weight_B).sum(), weight_B.sum()


def _parts(weight_B: Tensor, **values: Tensor) -> dict[str, Part]:
    return {name: _part(value, weight_B) for name, value in values.items()}
