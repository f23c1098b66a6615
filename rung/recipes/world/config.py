"""The keys of the world recipe. Imports no torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rung.config import key, section


class Scale(NamedTuple):
    """Some past frames at one size, written as 16@64x48: frames, width, height."""

    frames: int
    width: int
    height: int


def parse_scale(text: str) -> Scale:
    found = re.fullmatch(r"(\d+)@(\d+)x(\d+)", text.strip())
    if found is None or not all(int(number) for number in found.groups()):
        raise ValueError(f"{text!r} is not a scale of memory; write frames@widthxheight, as in 8@64x48")
    return Scale(*map(int, found.groups()))


@dataclass
class Model:
    memory: list[str] = key(
        ["4@128x96", "8@64x48", "16@16x12", "32@4x3"],
        "Past frames the model sees, finest first, as frames@widthxheight; the finest has the size of what it makes.",
    )
    width: int = key(24, "Channels at the finest scale; each coarser one has twice as many, up to 8 times.", low=4)
    depth: int = key(2, "Residual cells at each scale of the decoder; the encoder has half as many.", low=1)
    noise: float = key(1.0, "Scale of the noise that enters at each scale; 0 makes the model deterministic.", low=0)
    warp: Literal["none", "last", "keyframe"] = key(
        "keyframe",
        "Where a pixel can be copied from: none (all colours anew), last (the frame before, so what stays in view is "
        "resampled at every step), keyframe (an older frame by the sum of all motion since, resampled once).",
    )
    keyframe_every: int = key(64, "Frames of a rollout between keyframes; with model.warp=keyframe.", low=1)
    discriminator_width: int = key(32, "Channels of the discriminator's first layer.", low=4)

    def scales(self) -> list[Scale]:
        return [parse_scale(text) for text in self.memory]

    def check(self) -> Iterator[str]:
        try:
            scales = self.scales()
        except ValueError as error:
            yield f"model.memory: {error}"
            return
        if not scales:
            yield "model.memory=[] remembers nothing; give one scale or more"
        for fine, coarse in itertools.pairwise(scales):
            ratio = fine.width // coarse.width
            if ratio < 2 or ratio & (ratio - 1) or (coarse.width * ratio, coarse.height * ratio) != fine[1:]:
                yield (
                    f"model.memory: {coarse.width}x{coarse.height} after {fine.width}x{fine.height}; each scale must "
                    "be smaller than the one before by a power of two, in both directions"
                )
        if scales and (scales[0].width % 2 or scales[0].height % 2):
            yield f"model.memory: the finest scale, {scales[0].width}x{scales[0].height}, must have even sides"


@dataclass
class Adversarial:
    weight: float = key(0.0, "Weight of fooling the discriminator beside the L1 loss; 0 is L1 alone.", low=0)
    r1: float = key(1.0, "Penalty on the discriminator's gradient at real frames (R1); 0 = none.", low=0)
    r1_every: int = key(4, "Updates of the discriminator between penalties, each then this much stronger.", low=1)
    lr_scale: float = key(0.5, "Learning rate of the discriminator over that of the generator.", low=0)
    beta1: float = key(0.5, "First moment's decay of the discriminator's optimizer.", low=0, high=0.999)
    every: int = key(1, "Train the discriminator at every n-th step.", low=1)


@dataclass
class Contrast:
    weight: float = key(
        0.0, "Weight of the error of local contrast beside the L1 loss, which alone prefers blur; 0 = none.", low=0
    )
    size: int = key(8, "Side of the squares that contrast is measured in, in pixels.", low=1)


@dataclass
class ClosedLoop:
    steps: int = key(8, "Frames the model makes of its own before a target, at the end of the curriculum.", low=0)
    rise: int = key(2000, "Optimizer steps over which the rollout grows from `start` to `steps`; 0 = at once.", low=0)
    start: float = key(1.0, "Length of the rollout at step 0.", low=0)
    share: float = key(
        0.75, "Share of the optimizer steps that roll out; the others start from real frames.", low=0, high=1
    )


@dataclass
class Context:
    noise: float = key(
        0.0, "Largest noise on remembered frames, in units of [-1, 1]; drawn per row, told to the model.", low=0
    )


@dataclass
class Dataset:
    base_dataset_name: str = key("world", "The prepared data: a name under ./data (or $RUNG_DATA), or a path.")
    width: int = key(128, "Width of a stored frame; sources are cropped to the shape and scaled down to it.", low=8)
    height: int = key(96, "Height of a stored frame.", low=8)
    controls: Literal["auto", "pose", "recorded"] = key(
        "auto",
        "What moves the world: pose (6-DoF between frames), recorded (as the file has them); auto: poses if any.",
    )
    control_lag: int = key(
        1,
        "Frames from a recorded control to the frame it leads to: 1 = acts after its own frame, 0 = led to it.",
        low=0,
    )
    axes: Literal["opencv", "opengl"] = key(
        "opencv", "Camera axes of pose matrices: opencv (x right, y down, z ahead), opengl (y up, -z ahead; ARKit's)."
    )
    max_gap: float = key(
        0.1, "Largest distance in seconds from a frame to its pose or control; beyond it: not valid.", low=0
    )
    episode_gap: float = key(1.0, "A pause in seconds between frames that ends an episode.", low=0)
    every: int = key(1, "Keep every n-th frame of a source.", low=1)
    split: Literal["auto", "episode", "time"] = key(
        "auto", "Held-out data: whole episodes, or blocks of time; auto: episodes where there are four or more."
    )
    validation: float = key(0.1, "Share held out to evaluate on.", low=0, high=0.9)
    test: float = key(0.0, "Share set aside and never looked at.", low=0, high=0.9)
    split_gap: float = key(
        2.0, "Seconds thrown away between blocks of time, so that no neighbours are on both sides.", low=0
    )
    maps: list[str] = key([], "Freedoom maps of the embedded walks, such as [map01, E1M1]; [] = one fixed map.")
    unseen_maps: list[str] = key(
        [],
        "Maps that are walked for the eval set `unseen` alone; [] = one fixed map if `maps` is [] too, else none.",
    )
    num_frames: int = key(12_000, "Frames of the embedded walks, over all maps.", low=100)


@dataclass
class Evaluation:
    horizon: int = key(32, "Longest rollout that is evaluated, in frames.", low=2)
    num_rollouts: int = key(64, "Rollouts to evaluate, spread over the held-out data; 0 = as many as fit.", low=0)


@dataclass
class Sampling:
    num_rows: int = key(4, "Moments shown on the contact sheet.", low=1)
    num_frames: int = key(64, "Length of the dreamed film beside the real one.", low=1)


@dataclass
class Config:
    """The root of the world keys."""

    stage: Literal["open_loop", "closed_loop"] = key(
        "open_loop", "open_loop predicts from real frames; closed_loop, from an open_loop run, also from its own."
    )
    model: Model = section(Model, "The networks.")
    contrast: Contrast = section(Contrast, "Contrast beside L1.")
    adversarial: Adversarial = section(Adversarial, "The discriminator.")
    closed_loop: ClosedLoop = section(ClosedLoop, "The second stage: learning from its own frames.")
    context: Context = section(Context, "Remembered frames.")
    dataset: Dataset = section(Dataset, "Where the frames come from.")
    evaluation: Evaluation = section(Evaluation, "What is measured besides the loss.")
    sampling: Sampling = section(Sampling, "Pictures during and after training.", is_late=True)
