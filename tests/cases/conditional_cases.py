"""Models that are steered, roll out, or play against each other: real runs of recipes of a few hundred weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.config import key, section
from rung.random import Draw
from rung.recipe import Batch, Input, Loss, Objective, ParameterGroup, Part, Recipe, Stream
from tests.cases import statistics as stat
from tests.cases.case import Case, trained
from tests.cases.statistics import FACT
from tests.cases.tiny import Rows

HORIZONS = (1, 2, 4, 8, 16)


def turn(angle: float) -> np.ndarray:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def mlp(num_in: int, num_out: int, width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, width), nn.GELU(), nn.Linear(width, num_out))


@dataclass
class SteeredConfig:
    gain: float = key(1.0, "What the control is multiplied by on its way into the model.")


class Steered(Recipe):
    """The next state from this one and a control; with a gain of 0 the control never arrives."""

    Config = SteeredConfig
    cfg: SteeredConfig

    def streams(self) -> Mapping[str, Stream]:
        def rows(name: str, num_rows: int, seed: int) -> Rows:
            rng = np.random.default_rng(seed)
            state, control = rng.normal(size=(2, num_rows, 2)).astype(np.float32)
            after = (state @ turn(0.3).T + 0.5 * control + rng.normal(0, 0.1, (num_rows, 2))).astype(np.float32)
            return Rows(f"steered/{name}", 2, state=state, control=control, after=after)

        return {"train": rows("train", 2000, 1), "val": rows("val", 64, 2)}

    def model(self) -> nn.Module:
        return mlp(4, 2)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def squared(batch: Batch, draw: Draw) -> Loss:
            given = torch.cat([batch["state"], self.cfg.gain * batch["control"]], dim=1)
            return Loss(F.mse_loss(model(given), batch["after"], reduction="sum"), _count(batch["after"]))

        return [Objective("next_state", [ParameterGroup("all", model.parameters())], squared)]

    def inputs(self) -> Sequence[Input]:
        return [Input("control", ["control"]), Input("state", ["state"])]


@dataclass
class RollingConfig:
    gain: float = key(1.0, "How far the model's own steps go, in units of what it predicts.")


class Rolling(Recipe):
    """A point that goes round in circles. One step ahead is easy; what a wrong gain does shows after some of them."""

    Config = RollingConfig
    cfg: RollingConfig

    def streams(self) -> Mapping[str, Stream]:
        def rows(name: str, num_rows: int, seed: int) -> Rows:
            rng = np.random.default_rng(seed)
            start = rng.normal(size=(num_rows, 2))
            path = np.stack([start @ turn(0.3 * t).T for t in range(HORIZONS[-1] + 1)], axis=1)
            path += rng.normal(0, 0.05, path.shape)
            return Rows(f"rolling/{name}", 2, path=path.astype(np.float32))

        return {"train": rows("train", 2000, 1), "val": rows("val", 64, 2)}

    def model(self) -> nn.Module:
        return mlp(2, 2)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def one_step(batch: Batch, draw: Draw) -> Loss:
            path = batch["path"]
            at = draw.integers("at", HORIZONS[-1]) if not draw.is_eval else np.zeros(len(path), np.int64)
            rows = torch.arange(len(path))
            before, after = path[rows, torch.from_numpy(at)], path[rows, torch.from_numpy(at) + 1]
            return Loss(F.l1_loss(before + model(before), after, reduction="sum"), _count(after))

        return [Objective("one_step", [ParameterGroup("all", model.parameters())], one_step)]

    def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> Mapping[str, Part]:
        path, parts = batch["path"], dict[str, Part]()
        made = path[:, 0]
        for t in range(1, HORIZONS[-1] + 1):
            made = made + self.cfg.gain * model(made)
            if t in HORIZONS:
                for name, guess in (("l1", made), ("persistence", path[:, 0]), ("mean_frame", torch.zeros_like(made))):
                    parts[f"{name}@{t}"] = (F.l1_loss(guess, path[:, t], reduction="sum"), _count(made))
        return parts


@dataclass
class Adversarial:
    weight: float = key(0.05, "Weight of fooling the discriminator.", low=0)
    lr_scale: float = key(1.0, "Learning rate of the discriminator over that of the generator.", low=0)
    detached: bool = key(False, "Whether the gradient is cut between score and what was made.")


@dataclass
class DuelConfig:
    adversarial: Adversarial = section(Adversarial, "The game.")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(6, 4), mlp(8, 1)


class Duel(Recipe):
    """A point for a condition: by L1, and by fooling a discriminator that sees both."""

    Config = DuelConfig
    cfg: DuelConfig

    def streams(self) -> Mapping[str, Stream]:
        def rows(name: str, num_rows: int, seed: int) -> Rows:
            rng = np.random.default_rng(seed)
            given = rng.normal(size=(num_rows, 4))
            real = np.tanh(given) + rng.normal(0, 0.3, (num_rows, 4))
            return Rows(f"duel/{name}", 1, given=given.astype(np.float32), real=real.astype(np.float32))

        return {"train": rows("train", 2000, 1), "val": rows("val", 64, 2)}

    def model(self) -> nn.Module:
        return Pair()

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        assert isinstance(model, Pair)
        game = self.cfg.adversarial

        def made(batch: Batch, draw: Draw) -> Tensor:
            noise = draw.noise("z", (2,)) - 0.5
            out: Tensor = model.generator(torch.cat([batch["given"], noise], dim=1))
            return out

        def score(batch: Batch, points: Tensor) -> Tensor:
            out: Tensor = model.discriminator(torch.cat([points, batch["given"]], dim=1))[:, 0]
            return out

        def generator(batch: Batch, draw: Draw) -> Loss:
            points, count = made(batch, draw), torch.tensor(float(len(batch["given"])))
            near = F.l1_loss(points, batch["real"], reduction="sum") / 4
            if draw.is_eval:
                return Loss(near, count)
            fooling = F.softplus(-score(batch, points.detach() if game.detached else points)).sum()
            pulls = [torch.zeros_like(points)]
            if not game.detached and torch.is_grad_enabled():
                pulls = list(torch.autograd.grad(fooling, points, retain_graph=True))
            ratio = game.weight * pulls[0].norm(dim=1).sum() / 0.5  # of L1: 1/4 in each of four directions
            return Loss(near + game.weight * fooling, count, {"grad_ratio": (ratio, count)})

        def discriminator(batch: Batch, draw: Draw) -> Loss:
            with torch.no_grad():
                points = made(batch, draw)
            on_real, on_made = score(batch, batch["real"]), score(batch, points)
            right = ((on_real > 0).float() + (on_made < 0).float()) / 2
            count = torch.tensor(float(len(points)))
            parts = {"accuracy": (right.sum(), count), "gap": ((on_real - on_made).sum(), count)}
            return Loss((F.softplus(-on_real) + F.softplus(on_made)).sum(), count, parts)

        return [
            Objective("generator", [ParameterGroup("all", model.generator.parameters())], generator),
            Objective(
                "discriminator", [ParameterGroup("all", model.discriminator.parameters(), game.lr_scale)], discriminator
            ),
        ]


class Lost(Duel):
    """The generator starts far away, and hardly moves: the discriminator has an easy time."""

    def model(self) -> nn.Module:
        pair = Pair()
        with torch.no_grad():
            pair.generator[-1].bias.fill_(3.0)
        return pair


def _count(values: Tensor) -> Tensor:
    return torch.tensor(float(values.numel()))


GAME = ("optimizer.max_iters=300", "eval_interval=50", "lr.learning_rate=1e-3")

CASES = [
    Case("C1", "control-times-0", trained(Steered, "gain=0"), trained(Steered), is_quick=True,
         statistic=stat.of(stat.input_used)),
    Case("C3", "gain-1.6", trained(Rolling, "gain=1.6"), trained(Rolling), is_quick=True,
         statistic=stat.of(stat.rollout)),
    Case("G1", "fast-discriminator",
         trained(Lost, *GAME, "lr.learning_rate=1e-4", "adversarial.lr_scale=100"), trained(Duel, *GAME),
         statistic=stat.held("G1", stat.dominates(spread=(0.01, 0.1)))),
    Case("G2", "weight-1e-5", trained(Duel, *GAME, "adversarial.weight=1e-5"), trained(Duel, *GAME),
         statistic=stat.held("G2", stat.pull)),
    Case("G2", "detached", trained(Duel, *GAME, "adversarial.detached=true"), trained(Duel, *GAME), severity="sick",
         statistic=FACT),
    Case("G2", "rate-0", trained(Duel, *GAME, "adversarial.lr_scale=0"), trained(Duel, *GAME), severity="sick",
         statistic=FACT),
]  # fmt: skip
