"""Makes frames, one after the other: the same few lines for training, eval, samples, play and export.

A frame that was made is remembered as a recorded one would be (8 bits, no gradient), and the next is made from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rung.random import Draw
from rung.recipe import Batch, Exported
from rung.recipes.world.config import Scale
from rung.recipes.world.memory import Memory, push, to_frame, to_signal
from rung.recipes.world.model import Anchor, World, new_anchor

# What is remembered, the anchor and how many frames were made before -> B 3 H W and the next anchor
Make = Callable[[Memory, Anchor | None, int], tuple[Tensor, Anchor | None]]


def roll(make: Make, memory: Memory, num_frames: int) -> Iterator[tuple[Memory, Tensor]]:
    """What was remembered before each frame, and the frame that was made of it."""
    anchor: Anchor | None = None
    for number in range(num_frames):
        signal, anchor = make(memory, anchor, number)
        yield memory, signal
        if number + 1 < num_frames:
            memory = push(memory, to_frame(signal))


def see(memory: Memory) -> list[Tensor]:
    """A memory as the generator takes it: B 3N H W per scale."""
    return [to_signal(level).flatten(1, 2) for level in memory]


@dataclass(frozen=True)
class Dreamer:
    """Calls the generator with all it needs. In training, what it sees is noisy by a level that it gets as an input."""

    world: World
    context_noise: float = 0.0
    keyframe_every: int = 64

    def make(self, memory: Memory, controls_BU: Tensor, draw: Draw, number: int) -> Tensor:
        """The frame after `memory`; `number` keeps the noise of one rollout's frames apart."""
        return self.step(memory, None, controls_BU, draw, number)[0]

    def step(
        self, memory: Memory, anchor: Anchor | None, controls_BU: Tensor, draw: Draw, number: int
    ) -> tuple[Tensor, Anchor | None]:
        """The frame after `memory`, and the anchor for the step after it."""
        device = controls_BU.device
        seen, level = see(memory), torch.zeros(len(controls_BU), device=device)
        if self.context_noise and not draw.is_eval:
            level = draw.noise("context_level", (), device)
            shake = self.context_noise * level[:, None, None, None]
            for i, picture in enumerate(seen):
                # Nearly normal, of deviation 1: the sum of three uniform numbers is close enough to shake a picture.
                a, b, c = (draw.noise(f"context/{number}/{i}/{k}", tuple(picture.shape[1:]), device) for k in range(3))
                seen[i] = picture + shake * ((a + b + c - 1.5) * 2.0)
        if self.world.generator.warp == "keyframe" and (anchor is None or number % self.keyframe_every == 0):
            anchor = new_anchor(seen[0][:, -3:])  # as noisy as what it sees
        noise = draw.noise(f"noise/{number}", (self.world.generator.noise_size,), device)
        made: tuple[Tensor, Anchor | None] = self.world.generator(
            seen, self.world.standard(controls_BU), level, noise, anchor
        )
        return made

    def roll(self, memory: Memory, controls_BTU: Tensor, draw: Draw) -> Iterator[tuple[Memory, Tensor]]:
        """Frames under these controls, each made from those before it."""
        return roll(lambda m, a, t: self.step(m, a, controls_BTU[:, t], draw, t), memory, controls_BTU.shape[1])


def memory_of(batch: Batch) -> Memory:
    return [batch[name] for name in sorted(batch) if name.startswith("memory_")]


class Portable(nn.Module):
    """The generator as other programs can run it: frames in, frame out, all in the units of a camera.

    What training does around the network (colours to [-1, 1], controls to deviation 1, 8 bits at the end) is inside, so
    a player in another language only keeps the memory and shows what comes.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.generator, self.standard = world.generator, world.standard

    def forward(self, controls_BU: Tensor, noise_BN: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """`rest` is the memory and, for a model that copies from a keyframe, its anchor."""
        memory, anchor = list(rest), None
        if self.generator.warp == "keyframe":
            *memory, keyframe, flow, known = rest
            anchor = Anchor(to_signal(keyframe), flow, known)
        level = torch.zeros_like(controls_BU[:, 0])
        signal, after = self.generator(see(memory), self.standard(controls_BU), level, noise_BN, anchor)
        frame = (signal * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        return frame if after is None else (frame, after.flow_B2HW, after.known_B1HW)


def exported(world: World, scales: Sequence[Scale], names: Sequence[str], keyframe_every: int) -> Exported:
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
    for i, (num_frames, width, height) in enumerate(scales):
        inputs[f"memory_{i}"] = torch.zeros(1, num_frames, height, width, 3, dtype=torch.uint8, device=device)
        notes[f"memory_{i}"] = f"the last {num_frames} frames at {width}x{height}, newest last"
    if world.generator.warp != "keyframe":
        return Exported(Portable(world).eval(), inputs, ["frame"], notes)
    _, width, height = scales[0]
    inputs["keyframe"] = torch.zeros(1, height, width, 3, dtype=torch.uint8, device=device)
    inputs["flow"] = torch.zeros(1, 2, height, width, device=device)
    inputs["known"] = torch.ones(1, 1, height, width, device=device)
    notes["keyframe"] = f"the newest frame of memory_0, taken anew every {keyframe_every} frames and kept between"
    notes["flow"] = "0 with a new keyframe, else next_flow of the frame before"
    notes["known"] = "1 with a new keyframe, else next_known of the frame before"
    return Exported(Portable(world).eval(), inputs, ["frame", "next_flow", "next_known"], notes)
