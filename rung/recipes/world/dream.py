"""Making frames, one after the other: the same few lines for training, eval, samples and play.

A frame that was made is remembered as a recorded one would be (8 bits, no gradient), and the next is made from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rung.recipe import Batch, Draw
from rung.recipes.world.memory import Memory, push, to_frame, to_signal
from rung.recipes.world.model import World

Make = Callable[[Memory, int], Tensor]  # what is remembered, and how many frames were made before: B 3 H W


def roll(make: Make, memory: Memory, num_frames: int) -> Iterator[tuple[Memory, Tensor]]:
    """What was remembered before each frame, and the frame that was made of it."""
    for number in range(num_frames):
        signal = make(memory, number)
        yield memory, signal
        if number + 1 < num_frames:
            memory = push(memory, to_frame(signal))


def see(memory: Memory) -> list[Tensor]:
    """A memory as the generator takes it: B 3N H W per scale."""
    return [to_signal(level).flatten(1, 2) for level in memory]


@dataclass(frozen=True)
class Dreamer:
    """Calls the generator with all it needs. In training, what it sees is noisy by a level that it is told."""

    world: World
    context_noise: float = 0.0

    def make(self, memory: Memory, controls_BU: Tensor, draw: Draw, number: int) -> Tensor:
        """The frame after `memory`; `number` keeps the noise of one rollout's frames apart."""
        device = controls_BU.device
        seen, level = see(memory), torch.zeros(len(controls_BU), device=device)
        if self.context_noise and not draw.is_eval:
            level = draw.noise("context_level", (), device)
            shake = self.context_noise * level[:, None, None, None]
            for i, picture in enumerate(seen):
                name = f"context/{number}/{i}"
                seen[i] = picture + shake * _normal(draw, name, tuple(picture.shape[1:]), device)
        noise = draw.noise(f"noise/{number}", (self.world.generator.noise_size,), device)
        return self.world.generator(seen, self.world.standard(controls_BU), level, noise)

    def roll(self, memory: Memory, controls_BTU: Tensor, draw: Draw) -> Iterator[tuple[Memory, Tensor]]:
        """Frames under these controls, each made from those before it."""
        return roll(lambda m, t: self.make(m, controls_BTU[:, t], draw, t), memory, controls_BTU.shape[1])


def memory_of(batch: Batch) -> Memory:
    return [batch[name] for name in sorted(batch) if name.startswith("memory_")]


def _normal(draw: Draw, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Nearly normal numbers of deviation 1: the sum of three uniform ones is close enough to shake a picture."""
    total = sum(draw.noise(f"{name}/{k}", shape, device) for k in range(3))
    assert isinstance(total, Tensor)
    return (total - 1.5) * 2.0
