"""The next state of a small vehicle from its states so far and the two controls; states are noisy floats."""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rung.config import key
from rung.recipe import Input, Loss, Objective, ParameterGroup, Recipe, Stream


@dataclass
class Config:
    width: int = key(32, "Channels.", low=1)
    length: int = key(12, "States that are predicted in a row.", low=1)


def drives(count, length, seed):
    rng = np.random.default_rng(seed)
    turn = np.array([[0.95, 0.2, 0, 0], [-0.2, 0.95, 0, 0], [0, 0, 0.9, 0.3], [0, 0, -0.3, 0.9]])
    push = np.array([[0.3, 0.0], [0.0, 0.3], [0.3, 0.3], [-0.3, 0.3]])
    controls = rng.choice([-1.0, 0.0, 1.0], size=(count, length + 1, 2))
    states = np.zeros((count, length + 1, 4))
    states[:, 0] = rng.normal(size=(count, 4))
    for t in range(length):
        states[:, t + 1] = states[:, t] @ turn.T + controls[:, t] @ push.T + 0.05 * rng.normal(size=(count, 4))
    return states.astype(np.float32), controls.astype(np.float32)


class Drives(Stream):
    def __init__(self, states, controls):
        self.states, self.controls = states, controls
        self.num_rows, self.targets_per_row = len(states), float(states.shape[1] - 1)
        self.fingerprint = hashlib.sha256(states.tobytes() + controls.tobytes()).hexdigest()[:16]
        self.baselines = {"copy": float(((states[:, 1:] - states[:, :-1]) ** 2).mean())}

    def gather(self, ids, draw):
        return {"states": self.states[ids], "controls": self.controls[ids]}


class Predictor(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.state_in, self.control_in = nn.Linear(4, width), nn.Linear(2, width)
        self.mix = nn.Conv1d(width, width, 3)
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, states, controls):
        hidden = self.state_in(states) + self.control_in(controls)
        past = nn.functional.pad(hidden.transpose(1, 2), (2, 0))
        return states + self.out(hidden + self.mix(past).transpose(1, 2))


class Steering(Recipe):
    Config = Config

    def streams(self):
        length = self.cfg.length
        return {
            "train": Drives(*drives(3000, length, self.seed)),
            "val": Drives(*drives(300, length, self.seed + 1)),
        }

    def model(self):
        return Predictor(self.cfg.width)

    def objectives(self, model):
        def loss(batch, draw):
            states, controls = batch["states"].float(), batch["controls"].float()
            found = model(states[:, :-1], controls[:, :-1])
            each = (found - states[:, 1:]).pow(2).mean(-1)
            return Loss(each.sum(), torch.tensor(float(each.numel()), device=each.device))

        return [Objective("next_state", [ParameterGroup("all", model.parameters())], loss)]

    def inputs(self):
        return [Input("controls", ["controls"], "permute")]
