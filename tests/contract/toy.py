"""A recipe unlike the piano: frames and controls, two objectives, a frozen part, draws inside stream and loss.

It stands for what is to come. If the engine needs to know more than recipe.py says to train it, the engine is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rung.config import key, section
from rung.random import Draw
from rung.recipe import Arrays, Batch, Input, Loss, Objective, ParameterGroup, Part, Recipe, Sample, Stream


@dataclass
class Model:
    width: int = key(8, "Channels.", low=1)
    dropout: float = key(0.1, "Before the generator.", low=0)
    adversarial: float = key(0.1, "Weight of the discriminator in the generator's loss.", low=0)


@dataclass
class Config:
    model: Model = section(Model, "Both networks.")
    num_frames: int = key(40, "Frames in the made-up film.", low=4)


class Film(Stream):
    def __init__(self, first: int, num_rows: int) -> None:
        self.first, self.num_rows = first, num_rows
        self.targets_per_row = 64.0
        self.fingerprint = f"film/{first}/{num_rows}"

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        t = (self.first + ids)[:, None, None, None]
        y, x = np.mgrid[0:8, 0:8]
        frames = ((x + y * 2 + 3 * (t + np.arange(2)[None, :, None, None])) % 16 * 16).astype(np.uint8)
        noise = draw.uniform("jitter", 3).astype(np.float32) * 0.1
        valid = (np.arange(64)[None] < 64 - (ids % 3)[:, None] * 8).astype(np.float32)  # rows count unequally
        return {"frames": frames, "controls": noise, "valid": valid}


class Nets(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.eye = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.Dropout(0.5))  # frozen
        self.generator = nn.Sequential(nn.Conv2d(width + 3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))
        self.discriminator = nn.Sequential(nn.Conv2d(2, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))
        self.drop = nn.Dropout(dropout)
        self.eye.requires_grad_(False)

    def dream(self, last: torch.Tensor, controls: torch.Tensor) -> torch.Tensor:
        planes = controls[:, :, None, None].expand(-1, -1, 8, 8)
        return torch.tanh(self.generator(torch.cat([self.drop(self.eye(last)), planes], 1)))


def frames_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    frames = batch["frames"].float() / 127.5 - 1
    return frames[:, :1], frames[:, 1:]


class Toy(Recipe):
    Config = Config
    cfg: Config

    def streams(self) -> Mapping[str, Stream]:
        return {"train": Film(0, self.cfg.num_frames), "held_out": Film(100, 7)}

    def model(self) -> nn.Module:
        return Nets(self.cfg.model.width, self.cfg.model.dropout)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        assert isinstance(model, Nets)
        weight = self.cfg.model.adversarial

        def generator(batch: Batch, draw: Draw) -> Loss:
            last, real = frames_of(batch)
            fake = model.dream(last, batch["controls"])
            l1 = (F.l1_loss(fake, real, reduction="none").flatten(1) * batch["valid"]).sum()
            fooled = -(model.discriminator(torch.cat([last, fake], 1)).flatten(1) * batch["valid"]).sum()
            count = batch["valid"].sum()
            return Loss(l1 + weight * fooled, count, {"l1": (l1, count), "fooled": (fooled, count)})

        def discriminator(batch: Batch, draw: Draw) -> Loss:
            last, real = frames_of(batch)
            with torch.no_grad():
                fake = model.dream(last, batch["controls"])
            on_real, on_fake = (model.discriminator(torch.cat([last, f], 1)).flatten(1) for f in (real, fake))
            hinge = (F.relu(1 - on_real) + F.relu(1 + on_fake)) * batch["valid"]
            return Loss(hinge.sum(), batch["valid"].sum())

        return [
            Objective("generator", [ParameterGroup("g", model.generator.parameters())], generator),
            Objective("discriminator", [ParameterGroup("d", model.discriminator.parameters())], discriminator, every=2),
        ]

    def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> Mapping[str, Part]:
        last, real = frames_of(batch)
        return {"persistence": ((last - real).abs().sum(), torch.tensor(float(real.numel())))}

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        assert isinstance(model, Nets)
        frame = torch.rand((1, 1, 8, 8), generator=draw.generator("first"))
        for _ in range(3):  # a rollout
            frame = model.dream(frame, torch.rand(1, 3))
        return [Sample("dream.bin", frame.numpy().tobytes(), "three steps")]

    def inputs(self) -> Sequence[Input]:
        return [Input("controls", ["controls"])]
