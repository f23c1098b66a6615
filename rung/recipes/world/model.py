"""The two networks of a world: a generator of the next frame, and a discriminator that tells frames apart.

The generator is an asymmetric U-Net without normalisation. Each scale of the memory enters the encoder at its own size;
controls steer every cell and, times a learned map, every scale, since what a turn does to a pixel depends on where it
is; noise enters the decoder. Beside colours, the head predicts for each pixel where in the last frame to look and how
much to trust that, since a moving camera mostly shows what it showed before; `model.warp=none` turns that off.

Bilinear resampling of its own last frame, again and again, blurs all by itself: after 16 steps real frames have 8 % of
their gradient energy left. With `model.warp=keyframe` the flows of the steps are composed, and what is still in view of
the keyframe is taken from there, resampled once; only the rest comes from the last frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.recipes.world.config import Scale

# B rows, C channels, H x W pixels, E embedding, U controls; everything in [-1, 1] that is a picture
EMBEDDING = 128
MAPS = 8  # channels of controls times a learned map
SLOPE = 0.2
LARGEST_FLOW = 0.5  # in half pictures: pixels come from at most a quarter of the picture away


class Standard(nn.Module):
    """Brings controls to mean 0 and deviation 1 with the statistics of the data the weights were trained on.

    The last channel says whether the others are known; where they are not, they are at their mean, not at a zero that
    may lie far outside of what they ever are.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, controls_BU: Tensor) -> Tensor:
        scaled = (controls_BU - self.mean) / self.std
        return torch.cat([scaled[..., :-1] * controls_BU[..., -1:], scaled[..., -1:]], dim=-1)


class Cell(nn.Module):
    """Two convolutions around a residual, the first steered by the controls."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.steer = nn.Linear(EMBEDDING, 2 * channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.second.weight)  # every cell begins as the identity, so depth costs no stability
        nn.init.zeros_(self.second.bias)  # type: ignore[arg-type]

    def forward(self, x_BCHW: Tensor, e_BE: Tensor) -> Tensor:
        scale, shift = self.steer(e_BE)[:, :, None, None].chunk(2, dim=1)
        y = F.leaky_relu(self.first(x_BCHW) * (1 + scale) + shift, SLOPE)
        return x_BCHW + self.second(y)


class Place(nn.Module):
    """Controls times a learned map of the picture: channels that differ from pixel to pixel."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(EMBEDDING, MAPS)
        y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        known = torch.stack([torch.ones_like(x), x, y, x * y, x * x, y * y])  # what a camera motion is made of
        self.num_known = len(known)
        self.map = nn.Parameter(torch.cat([known, torch.empty(MAPS - len(known), height, width)]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.map[self.num_known :], std=0.1)

    def forward(self, e_BE: Tensor) -> Tensor:
        return self.mix(e_BE)[:, :, None, None] * self.map


class Stage(nn.Module):
    """Joins maps and refines them to the features of one scale."""

    def __init__(self, num_inputs: int, channels: int, size: tuple[int, int], kernel: int, num_cells: int) -> None:
        super().__init__()
        self.place = Place(*size)
        self.mix = nn.Conv2d(num_inputs + MAPS, channels, kernel, padding=kernel // 2)
        self.cells = nn.ModuleList(Cell(channels) for _ in range(num_cells))

    def refine(self, maps: Sequence[Tensor | None], e_BE: Tensor) -> Tensor:
        x = F.leaky_relu(self.mix(torch.cat([each for each in maps if each is not None], dim=1)), SLOPE)
        for cell in self.cells:
            x = cell(x, e_BE)
        return x


class Enter(Stage):
    """On the way down: the memory of this scale, and what came from the finer one."""

    def forward(self, past: Tensor, finer: Tensor | None, e_BE: Tensor) -> Tensor:
        return self.refine([past, self.place(e_BE), finer], e_BE)


class Leave(Stage):
    """On the way up: what comes from the coarser scale, the features of the way down, and noise."""

    def forward(self, coarser: Tensor | None, skip: Tensor, noise: Tensor, e_BE: Tensor) -> Tensor:
        return self.refine([skip, noise, self.place(e_BE), coarser], e_BE)


class Anchor(NamedTuple):
    """An older frame, and where in it the pixels of the last frame come from."""

    frame_B3HW: Tensor
    flow_B2HW: Tensor  # in half pictures, x before y
    known_B1HW: Tensor  # 1 where a pixel does come from there, 0 where it was made since


def new_anchor(frame_B3HW: Tensor) -> Anchor:
    """The last frame itself."""
    still = torch.zeros_like(frame_B3HW[:, :2])
    return Anchor(frame_B3HW, still, torch.ones_like(still[:, :1]))


class Generator(nn.Module):
    """From what is remembered and a control to the next frame."""

    def __init__(
        self, scales: Sequence[Scale], num_controls: int, width: int, depth: int, noise: float, warp: str
    ) -> None:
        super().__init__()
        self.noise, self.warp = noise, warp
        # Features have half the size of their frames, where halves are whole.
        self._packed = [1 if scale.height % 2 or scale.width % 2 else 2 for scale in scales]
        self.sizes = [(scale.height // n, scale.width // n) for scale, n in zip(scales, self._packed)]
        self._ratios = [a[1] // b[1] for a, b in zip(self.sizes, self.sizes[1:])]
        channels = [width * min(2**i, 8) for i in range(len(scales))]
        self.embed = nn.Sequential(
            nn.Linear(num_controls + 1, EMBEDDING), nn.SiLU(), nn.Linear(EMBEDDING, EMBEDDING), nn.SiLU()
        )
        self.enter, self.leave, self.down, self.up = (nn.ModuleList() for _ in range(4))
        for i, (scale, size, wide) in enumerate(zip(scales, self.sizes, channels)):
            past = scale.frames * 3 * self._packed[i] ** 2
            self.enter.append(Enter(past + (wide if i else 0), wide, size, 3, (depth + 1) // 2))
            self.leave.append(Leave(wide + 1 + (wide if i + 1 < len(scales) else 0), wide, size, 1, depth))
        for i, ratio in enumerate(self._ratios):
            self.down.append(nn.Conv2d(channels[i] * ratio**2, channels[i + 1], 1))
            self.up.append(nn.Conv2d(channels[i + 1], channels[i] * ratio**2, 1))
        num_outputs = {"none": 3, "last": 6, "keyframe": 9}[warp]
        self.head = nn.Conv2d(channels[0], num_outputs * self._packed[0] ** 2, 3, padding=1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """With a warp the first prediction is nearly the last frame: the baseline to beat, not a grey field."""
        assert self.head.bias is not None
        nn.init.zeros_(self.head.bias)
        if self.warp != "none":
            trust = slice(5 * self._packed[0] ** 2, 6 * self._packed[0] ** 2)
            with torch.no_grad():
                self.head.weight.mul_(0.1)
                self.head.bias[trust] = 2.0

    @property
    def noise_size(self) -> int:
        """Numbers of noise that one frame takes."""
        return sum(height * width for height, width in self.sizes)

    def forward(
        self,
        seen: Sequence[Tensor],
        controls_BU: Tensor,
        level_B: Tensor,
        noise_BN: Tensor,
        anchor: Anchor | None = None,
    ) -> tuple[Tensor, Anchor | None]:
        """The frame, and the anchor of the next one.

        `seen` has a B 3N H W per scale, finest first; `level` is how noisy it is; `noise` lies in [0, 1). Without an
        anchor pixels are taken from the last frame.
        """
        e_BE = self.embed(torch.cat([controls_BU, level_B[:, None]], dim=1))
        parts = (noise_BN - 0.5).mul(2 * self.noise).split([h * w for h, w in self.sizes], dim=1)
        planes = [part.reshape(-1, 1, *size) for part, size in zip(parts, self.sizes)]  # a channel per scale, around 0
        skips: list[Tensor] = []
        for i, enter in enumerate(self.enter):
            past = F.pixel_unshuffle(seen[i], self._packed[i])
            finer = self.down[i - 1](F.pixel_unshuffle(skips[-1], self._ratios[i - 1])) if i else None
            skips.append(enter(past, finer, e_BE))
        x: Tensor | None = None
        for i in reversed(range(len(skips))):
            if x is not None:
                x = F.pixel_shuffle(self.up[i](x), self._ratios[i])
            x = self.leave[i](x, skips[i], planes[i], e_BE)
        assert x is not None
        # float32: a hundredth of a pixel is too fine a place for bfloat16
        made_BCHW = F.pixel_shuffle(self.head(x), self._packed[0]).float()
        colours = torch.tanh(made_BCHW[:, :3])
        if self.warp == "none":
            return colours, None
        flow, trust = torch.tanh(made_BCHW[:, 3:5]) * LARGEST_FLOW, torch.sigmoid(made_BCHW[:, 5:6])
        moved = move(seen[0][:, -3:].float(), flow, "bicubic" if self.warp == "keyframe" else "bilinear")
        if anchor is not None:
            carried = flow + move(anchor.flow_B2HW, flow)
            known = move(anchor.known_B1HW, flow) * inside(carried)  # beyond its border the keyframe is one smear
            moved = known * move(anchor.frame_B3HW, carried, "bicubic") + (1 - known) * moved
            # Trusted or not: a share of 0.97, carried on, would leave 14 % of the keyframe after 64 steps.
            anchor = Anchor(anchor.frame_B3HW, carried.detach(), (known * (trust > 0.5)).detach())
        mixed = trust * moved + (1 - trust) * colours
        if self.warp == "last":
            return mixed, None
        return (mixed + torch.tanh(made_BCHW[:, 6:])).clamp(-1, 1), anchor


class Discriminator(nn.Module):
    """One score per patch: does this frame follow the last one under this control? Real above 0, made below."""

    def __init__(self, num_controls: int, width: int, side: int, is_trained: bool = True) -> None:
        super().__init__()
        self._is_trained = is_trained
        num_layers = min(4, max(1, side.bit_length() - 2))  # each halves the picture, down to three patches or more
        wide = [width * min(2**i, 8) for i in range(num_layers)]
        self.layers = nn.ModuleList(
            nn.Conv2d(6 if i == 0 else wide[i - 1], wide[i], 4, stride=2, padding=1) for i in range(num_layers)
        )
        self.score = nn.Conv2d(wide[-1], 1, 1)
        self.embed = nn.Sequential(nn.Linear(num_controls, EMBEDDING), nn.SiLU(), nn.Linear(EMBEDDING, wide[-1]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """He's: with torch's own the deviation of activations falls from 0.24 to 0.008 over four layers, and a real
        frame and its blurred copy score 0.0007 apart, under a margin of 1. Where nobody trains it, torch's own stay:
        saves hold the hash of weights that are frozen, and older ones that of these."""
        if not self._is_trained:
            return
        for layer in [*self.layers, self.score]:
            assert isinstance(layer, nn.Conv2d)
            nn.init.kaiming_normal_(layer.weight, a=SLOPE)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
        first = self.layers[0]
        assert isinstance(first, nn.Conv2d)
        with torch.no_grad():
            first.weight.mul_(2)  # pictures in [-1, 1] have a deviation of about a half

    def forward(self, frame_B3HW: Tensor, last_B3HW: Tensor, controls_BU: Tensor) -> Tensor:
        x = torch.cat([frame_B3HW, last_B3HW], dim=1)
        for layer in self.layers:
            x = F.leaky_relu(layer(x), SLOPE)
        agreement = (x * self.embed(controls_BU)[:, :, None, None]).mean(1, keepdim=True)
        return self.score(x) + agreement


class World(nn.Module):
    """Both networks and what their inputs are measured in. The generator is made first, whatever comes after."""

    mean_frame: Tensor

    def __init__(self, generator: Generator, discriminator: Discriminator, standard: Standard, mean_frame: Tensor):
        super().__init__()
        self.generator, self.discriminator, self.standard = generator, discriminator, standard
        self.register_buffer("mean_frame", mean_frame, persistent=False)  # a baseline of the data, not of the model


def move(picture_BCHW: Tensor, flow_B2HW: Tensor, mode: str = "bilinear") -> Tensor:
    """Each pixel is taken from `flow` away, in half pictures, x before y; past the border its colours repeat.

    Bicubic keeps more detail and overshoots at edges.
    """
    where = _places(flow_B2HW)
    if where.device.type == "cpu" and where.requires_grad:
        where = where.nan_to_num()  # at NaN the backward of grid_sample ends the process there (torch 2.11 to 2.13)
    return F.grid_sample(picture_BCHW, where, mode=mode, padding_mode="border", align_corners=False)


def inside(flow_B2HW: Tensor) -> Tensor:
    """B 1 H W: 1 where a flow leads to a place in the picture, 0 where beyond its border."""
    return (_places(flow_B2HW).abs() <= 1).all(dim=-1).float()[:, None]


def _places(flow_B2HW: Tensor) -> Tensor:
    """B H W 2: where each pixel is taken from, x before y, from -1 to 1."""
    height, width = flow_B2HW.shape[-2:]
    y = torch.linspace(-1 + 1 / height, 1 - 1 / height, height, device=flow_B2HW.device)
    x = torch.linspace(-1 + 1 / width, 1 - 1 / width, width, device=flow_B2HW.device)
    grid_HW2 = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], dim=-1)
    return grid_HW2 + flow_B2HW.permute(0, 2, 3, 1)
