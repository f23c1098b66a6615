"""The generator as other programs can run it: frames in, frame out, all in the units of a camera.

What training does around the network (colours to [-1, 1], controls to deviation 1, 8 bits at the end) is inside, so a
player in another language only keeps the memory and shows what comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rung.recipe import Exported
from rung.recipes.world.config import Scale
from rung.recipes.world.dream import see
from rung.recipes.world.model import World


class Portable(nn.Module):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.generator, self.standard = world.generator, world.standard

    def forward(self, controls_BU: Tensor, noise_BN: Tensor, *memory: Tensor) -> Tensor:
        level = torch.zeros_like(controls_BU[:, 0])
        signal = self.generator(see(list(memory)), self.standard(controls_BU), level, noise_BN)
        return (signal * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def exported(world: World, scales: Sequence[Scale], names: Sequence[str]) -> Exported:
    device = next(world.parameters()).device
    inputs = {
        "controls": torch.zeros(1, len(names), device=device),
        "noise": torch.full((1, world.generator.noise_size), 0.5, device=device),
    }
    notes = {
        "controls": f"in the units of the data: {', '.join(names)}",
        "noise": "numbers in [0, 1); 0.5 everywhere is the middle",
        "frame": "the next frame, height x width x RGB",
    }
    for i, scale in enumerate(scales):
        inputs[f"memory_{i}"] = torch.zeros(
            1, scale.frames, scale.height, scale.width, 3, dtype=torch.uint8, device=device
        )
        notes[f"memory_{i}"] = f"the last {scale.frames} frames at {scale.width}x{scale.height}, newest last"
    return Exported(Portable(world).eval(), inputs, ["frame"], notes)
