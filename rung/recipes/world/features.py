"""A small network that looks at frames, to measure how far dreamed ones are from real ones, and whether the two can be
told apart.

`rung data world` trains it on the training frames, to say from which part of the recording a crop is, and keeps it in
the manifest: so every run on a store is measured alike. It is not among the hashed files, since its weights differ in
the last digits from one kind of CPU to another, and the data does not.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.random import key_of
from rung.recipe import Report

WIDTHS = (16, 32, 32)  # channels; each layer halves the picture
HEIGHT = 48  # of the frames it looks at, about: at 64x48 it has 48 places of 32 features each
NUM_PARTS = 32  # of the recording, to be told apart
STEPS, ROWS = 300, 64
ENOUGH = 16  # frames for each step; a few hundred frames are no reason to train for seconds


class Features(nn.Module):
    """(B, places, features) of frames in [-1, 1], each with mean 0 and deviation 1 over the real training frames."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, *WIDTHS]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in pairwise(sizes))

    def forward(self, frames_B3HW: Tensor) -> Tensor:
        x = frames_B3HW
        for number, layer in enumerate(self.layers):
            x = layer(x) if number == 0 else layer(F.leaky_relu(x, 0.2))
        return x.flatten(2).transpose(1, 2)


def divisor_for(height: int, divisors: Sequence[int]) -> int:
    """By what stored frames are shrunk before the network looks at them."""
    return max((d for d in divisors if height // d >= min(HEIGHT, height)), default=1)


def train(frames: np.ndarray, train_rows: np.ndarray, divisor: int, seed: int, report: Report) -> dict[str, Any]:
    """What the manifest keeps: the weights, their fingerprint and the size of frames they are for.

    On one thread, and with random numbers of its own: the same seed gives the same weights on one machine.
    """
    num_steps = max(1, min(STEPS, len(train_rows) // ENOUGH))
    height, width = frames.shape[1:3]
    side_y, side_x = max(8, height * 3 // 4 // 8 * 8), max(8, width * 3 // 4 // 8 * 8)  # of a crop
    side_y, side_x = min(side_y, height), min(side_x, width)
    rng, num_threads = np.random.default_rng(key_of(seed, "features")), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(key_of(seed, "features"))
            net, head = Features(), nn.Linear(WIDTHS[-1], NUM_PARTS)
            for layer in net.layers:
                assert isinstance(layer, nn.Conv2d)
                nn.init.kaiming_normal_(layer.weight, a=0.2)
            optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=3e-3)
            for step in range(num_steps):
                picked = np.sort(rng.integers(len(train_rows), size=ROWS))
                y, x = rng.integers(height - side_y + 1), rng.integers(width - side_x + 1)
                crop = frames[train_rows[picked], y : y + side_y, x : x + side_x]
                found = head(F.leaky_relu(net(_signal(crop)), 0.2).mean(1))
                loss = F.cross_entropy(found, torch.from_numpy(picked * NUM_PARTS // len(train_rows)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 20 == 0:
                    report("training the features", step, num_steps)
            with torch.no_grad():
                some = train_rows[np.linspace(0, len(train_rows) - 1, min(512, len(train_rows))).astype(int)]
                seen = net(_signal(frames[some])).flatten(0, 1)
                std, mean = torch.std_mean(seen, dim=0, correction=0)
                last = net.layers[-1]
                assert isinstance(last, nn.Conv2d)
                assert last.bias is not None
                last.weight.div_(std.clamp(min=1e-4)[:, None, None, None])
                last.bias.sub_(mean).div_(std.clamp(min=1e-4))
    finally:
        torch.set_num_threads(num_threads)
    weights = torch.cat([value.flatten() for value in net.state_dict().values()]).numpy().astype("<f2").tobytes()
    return {
        "divisor": divisor,
        "weights": base64.b64encode(weights).decode(),
        "fingerprint": hashlib.sha256(weights).hexdigest()[:16],
    }


def load(kept: dict[str, Any]) -> Features:
    values = torch.from_numpy(np.frombuffer(base64.b64decode(kept["weights"]), "<f2").astype(np.float32))
    net, at = Features(), 0
    for parameter in net.state_dict().values():
        parameter.copy_(values[at : at + parameter.numel()].reshape(parameter.shape))
        at += parameter.numel()
    return net.eval().requires_grad_(False)


def frechet(one_ND: Tensor, other_ND: Tensor) -> Tensor:
    """The squared Frechet distance of two sets of features, each taken for a normal distribution."""
    one, other = one_ND.double(), other_ND.double()
    cov_1, cov_2 = (torch.cov(x.T, correction=0) for x in (one, other))
    # The trace of the root of cov_1 cov_2, which has the eigenvalues of a symmetric matrix.
    values, vectors = torch.linalg.eigh(cov_1)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    both = torch.linalg.eigvalsh(root @ cov_2 @ root).clamp(min=0).sqrt().sum()
    distance = (one.mean(0) - other.mean(0)).square().sum() + cov_1.trace() + cov_2.trace() - 2 * both
    return distance.clamp(min=0)


def told_apart(real_NPD: Tensor, made_NPD: Tensor) -> Tensor:
    """(N / 2,) 1 where a classifier, trained on every other frame, is right about the rest; 0.5 is chance.

    A linear one, of the features at all places of a frame and their squares, from means and a shared covariance; a
    frame's score is the mean over its places.
    """
    real, made = (torch.cat([x, x.square()], dim=-1).double() for x in (real_NPD, made_NPD))
    one, other = real[0::2].flatten(0, 1), made[0::2].flatten(0, 1)
    shared = (torch.cov(one.T, correction=0) + torch.cov(other.T, correction=0)) / 2
    shared = shared + 1e-2 * torch.eye(len(shared), dtype=shared.dtype, device=shared.device)
    axis = torch.linalg.solve(shared, one.mean(0) - other.mean(0))
    middle = axis @ (one.mean(0) + other.mean(0)) / 2
    return ((real[1::2].mean(1) @ axis > middle).double() + (made[1::2].mean(1) @ axis < middle).double()) / 2


def _signal(frames_BHW3: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(frames_BHW3)).permute(0, 3, 1, 2).float().sub_(127.5).div_(127.5)
