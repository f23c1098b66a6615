"""The world recipe: learn a place from video and controls, then walk in it.

Data, networks and pictures are imported when they are used, so that the keys of the recipe can be listed without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rung.errors import DataError
from rung.random import Draw, key_of
from rung.recipe import (
    Batch,
    Compile,
    Exported,
    Exports,
    Identity,
    Input,
    Objective,
    ParameterGroup,
    Part,
    Plays,
    Prepares,
    Recipe,
    Report,
    Reports,
    Sample,
    Stream,
    Walkable,
)
from rung.recipes.world import config as keys

if TYPE_CHECKING:
    from torch import nn

    from rung.data.store import Store
    from rung.recipes.world.dream import Dreamer
    from rung.recipes.world.features import Features
    from rung.recipes.world.model import World as Networks

SIZE = ("base_dataset_name", "width", "height")  # a store serves every size its frames can be halved to


class World(Recipe, Prepares, Reports, Exports, Plays):
    Config = keys.Config
    cfg: keys.Config

    def __init__(self, cfg: keys.Config, seed: int) -> None:
        super().__init__(cfg, seed)
        self.scales = cfg.model.scales()
        self._is_closed = cfg.stage == "closed_loop"
        self._curriculum = Curriculum(cfg.closed_loop, seed) if self._is_closed else None
        longest = cfg.evaluation.horizon
        self._horizons = sorted({longest, *(2**i for i in range(10) if 2**i < longest)})
        self._sampling = cfg.sampling.num_rows, cfg.sampling.num_frames

    @cached_property
    def store(self) -> Store:
        from rung.data.store import Store, missing, place

        path = place(name := self.cfg.dataset.base_dataset_name)
        if not path.exists():
            raise missing("world", name)
        store = Store.open(path, kind="world")
        # A key of preparation that is set and differs from how the data was prepared would silently do nothing.
        prepared = store.info["settings"]
        for field in fields(keys.Dataset):
            asked, was = getattr(self.cfg.dataset, field.name), prepared.get(field.name)
            usual = field.default_factory() if callable(field.default_factory) else field.default
            if field.name not in SIZE and field.name in prepared and asked not in (usual, was):
                raise DataError(
                    f"dataset.{field.name}={asked}, but {path} was prepared with {was}; prepare it again with "
                    "`rung data world --replace`, or leave the key out",
                    code="data-mismatch",
                )
        return store

    def streams(self, split: str | None = None) -> Mapping[str, Stream]:
        from rung.recipes.world.stream import Dreams, Moments

        streams: dict[str, Stream] = {}
        if split is None:
            length = self._curriculum.length if self._curriculum is not None else lambda step: 1
            streams["train"] = Moments(self.store, "train", self.scales, length)
            if self._curriculum is not None:
                streams["train"].targets_per_row = self._curriculum.mean_length
            if "validation" not in self.store.splits:
                return streams
            split = "validation"

        horizon, wanted = self.cfg.evaluation.horizon, self.cfg.evaluation.num_rollouts
        next_frames = Moments(self.store, split, self.scales)
        next_frames.baselines = next_frames.trivial(self.store.arrays["mean_frame"][0])
        every = max(1, next_frames.num_rows // wanted) if wanted else horizon
        rollouts = Moments(self.store, split, self.scales, lambda step: horizon, every)
        if self._is_closed:  # the first set chooses the best save, and this stage is trained for rollouts
            streams |= {"rollout": rollouts, split: next_frames}
        else:
            streams |= {split: next_frames, "rollout": rollouts}
        if split != "unseen" and "unseen" in self.store.splits:
            unseen = Moments(self.store, "unseen", self.scales)
            every = max(1, unseen.num_rows // wanted) if wanted else horizon
            streams["unseen"] = Moments(self.store, "unseen", self.scales, lambda step: horizon, every)
        if self._feature_divisor:
            dreams = Dreams(self.store, split, self.scales, self._horizons, wanted)
            streams |= {"dreams": dreams} if dreams.num_rows else {}
        return streams

    @property
    def _feature_divisor(self) -> int:
        """By what the model's frames are shrunk for the network of features; 0 where there is none for them."""
        from rung.recipes.world.stream import divisor_of

        kept = self.store.info.get("features")  # stores made before have none
        return kept["divisor"] // divisor_of(self.store, self.scales) if kept else 0

    def model(self) -> nn.Module:
        import torch

        from rung.nn.init import reset_by_name
        from rung.recipes.world import model as nets
        from rung.recipes.world.memory import shrink, to_signal
        from rung.recipes.world.stream import divisor_of

        cfg, info = self.cfg.model, self.store.info
        num_controls = len(info["controls"])
        generator = nets.Generator(self.scales, num_controls, cfg.width, cfg.depth, cfg.noise, cfg.warp)
        is_trained = self.cfg.adversarial.weight > 0
        discriminator = nets.Discriminator(
            num_controls, cfg.discriminator_width, min(self.scales[0][1:]), is_trained=is_trained
        )
        standard = nets.Standard(info["statistics"]["mean"], info["statistics"]["std"])
        mean_frame = torch.tensor(self.store.arrays["mean_frame"][0])
        mean_frame = to_signal(shrink(mean_frame, divisor_of(self.store, self.scales)))
        world = nets.World(generator, discriminator, standard, mean_frame)
        reset_by_name(world, self.seed)
        return world

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        from rung.recipes.world.losses import DiscriminatorLoss, GeneratorLoss

        world, cfg, dreamer = cast("Networks", model), self.cfg.adversarial, self._dreamer(model)
        in_place = Compile([world.generator])  # not the discriminator: R1 differentiates it twice
        group = ParameterGroup("generator", world.generator.parameters())
        loss = GeneratorLoss(dreamer, cfg, self.cfg.contrast, self._is_closed)
        generator = Objective("generator", [group], loss, compile=in_place)
        betas = (cfg.beta1, 0.999)
        group = ParameterGroup("discriminator", world.discriminator.parameters(), lr_scale=cfg.lr_scale, betas=betas)
        discriminator = Objective(
            "discriminator", [group], DiscriminatorLoss(dreamer, cfg), every=cfg.every, compile=in_place
        )
        if cfg.weight:
            return [generator, discriminator]
        world.discriminator.requires_grad_(False)  # nobody trains it
        return [generator]

    def _dreamer(self, model: nn.Module) -> Dreamer:
        from rung.recipes.world.dream import Dreamer

        return Dreamer(cast("Networks", model), self.cfg.context.noise, self.cfg.model.keyframe_every)

    def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> Mapping[str, Part]:
        from rung.recipes.world import metrics

        dreamer = self._dreamer(model)
        if batch["valid"].ndim == 3:
            net = self._features.to(batch["valid"].device)
            return metrics.distance(dreamer, batch, draw, self._horizons, net, self._feature_divisor)
        if batch["frames"].shape[1] == 1:
            return metrics.next_frame(dreamer, batch, draw)
        measured = metrics.rollout(dreamer, batch, draw, self._horizons, self.intents)
        return measured | metrics.response(dreamer, batch, draw, self.intents)

    @cached_property
    def _features(self) -> Features:
        from rung.recipes.world.features import load

        return load(self.store.info["features"])

    @property
    def intents(self) -> dict[str, tuple[int, float, float]]:
        """What a visitor can want -> channel of the controls, sign, and size of a brisk move."""
        info = self.store.info
        brisk, names = info["statistics"]["brisk"], info["controls"]
        return {
            intent: (names.index(channel), float(sign), float(brisk[names.index(channel)]))
            for intent, (channel, sign) in info["intents"].items()
        }

    def identity(self) -> Identity:
        metrics = {"loss": "L1 of the next frame, colours in [-1, 1]", "mask": "none"}
        kept = self.store.info.get("features")
        measured = [f"{name}@{at}" for name in ("feature_distance", "told_apart") for at in self._horizons]
        return Identity(
            {"controls": self.store.info["controls"], "memory": self.cfg.model.memory},
            metrics,
            {name: metrics | {"features": kept["fingerprint"]} for name in measured} if kept else {},
        )

    def inputs(self) -> Sequence[Input]:
        levels = [f"memory_{i}" for i in range(len(self.scales))]
        inputs = [Input("controls", ["controls"]), Input("memory", levels)]
        # One next frame can be made from the last ones. What is older is learned last of all (in 1500 steps on the
        # embedded walk the loss rises by 0.01, 0.25 and 2.0 % without it), and needed where frames follow own frames.
        return [*inputs, Input("long_memory", levels[1:])] if self._is_closed else inputs

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        from rung.recipes.world.pictures import samples

        num_rows, num_frames = self._sampling
        return samples(self._dreamer(model), self.store, self.scales, num_rows, num_frames, draw)

    def player(self, model: nn.Module) -> Walkable:
        from rung.recipes.world.player import WorldPlayer

        return WorldPlayer(self._dreamer(model), self.store, self.scales, self.intents, self.seed)

    def export(self, model: nn.Module) -> Exported:
        from rung.recipes.world.dream import exported

        every = self.cfg.model.keyframe_every
        return exported(cast("Networks", model), self.scales, self.store.info["controls"], every)

    @classmethod
    def prepare(
        cls,
        cfg: keys.Config,
        seed: int,
        source: Path | None,
        name: str | None,
        replace: bool,
        report: Report,
        device: str = "auto",
    ) -> tuple[Path, str]:
        from rung.data.store import place
        from rung.recipes.world.data import prepare

        out = place(name or cfg.dataset.base_dataset_name)
        return out, prepare(source, out, cfg.dataset, seed, replace, report)

    @classmethod
    def survey(cls, cfg: keys.Config, path: Path, out: Path, report: Report) -> str:
        from rung.data.store import Store
        from rung.recipes.world.survey.survey import survey

        return survey(Store.open(path, kind="world"), out, report)


class Curriculum:
    """How many frames a step predicts: one, and as many of its own before it as the curriculum has come to.

    The length grows in a straight line. Between two whole lengths each step takes the longer one with the probability
    that makes the mean right, so nothing jumps. All rows of a step share it, which keeps shapes whole.
    """

    def __init__(self, cfg: keys.ClosedLoop, seed: int) -> None:
        self._start, self._steps, self._rise, self._share = min(cfg.start, cfg.steps), cfg.steps, cfg.rise, cfg.share
        self._seed = seed
        self.mean_length = 1 + cfg.share * cfg.steps  # frames that count in a row, on average at the end

    def mean(self, step: int) -> float:
        """Frames of its own that a step which rolls out makes, on average."""
        grown = min(1.0, step / self._rise) if self._rise else 1.0
        return self._start + (self._steps - self._start) * grown

    def length(self, step: int) -> int:
        rolls, longer = (key_of(self._seed, step, "curriculum", name) / 2.0**63 for name in ("rolls", "longer"))
        return 1 if step < 0 or rolls >= self._share else 1 + int(self.mean(step) + longer)
