"""The music recipe: a text-conditioned decoder over the codes of an audio codec.

Data, model and sound are imported when they are used, so that the keys of the recipe can be listed without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rung.errors import ConfigError, DataError, UserError
from rung.random import Draw
from rung.recipe import (
    Answers,
    Identity,
    Input,
    Notes,
    Objective,
    Plays,
    Prepares,
    Pretrained,
    Recipe,
    Report,
    Reports,
    Sample,
    Stream,
)
from rung.recipes.music import config as keys
from rung.recipes.music.delay import DelayPattern, Specials, parse_delays
from rung.units import plural

if TYPE_CHECKING:
    from torch import nn

    from rung.data.store import Store
    from rung.recipes.music.data import TrainedOn
    from rung.recipes.music.model import MusicModel
    from rung.recipes.music.samples import Heard


class Music(Recipe, Prepares, Reports, Pretrained, Plays):
    Config = keys.Config
    cfg: keys.Config

    def __init__(self, cfg: keys.Config, seed: int) -> None:
        super().__init__(cfg, seed)
        self._masking, self._weights = cfg.loss_masking, list(cfg.channel_weights)
        self._data, self._delay, self._has_eos = cfg.data, cfg.delay, cfg.data.eos

    # Data

    @cached_property
    def store(self) -> Store:
        from rung.recipes.music.data import open_store

        return open_store(self.cfg.dataset.base_dataset_name)

    @cached_property
    def extra(self) -> list[TrainedOn]:
        """Further data to train on, without what the base holds out; refused where its codes mean something else."""
        from rung.recipes.music.data import TrainedOn, open_store

        stores = []
        for name in self.cfg.dataset.extra_datasets:
            store = open_store(name, "extra_datasets")
            base = self.cfg.dataset.base_dataset_name
            for what, ours, theirs in (
                ("codec", self.store.info["codec"]["hash"], store.info["codec"]["hash"]),
                ("stereo", self.store.info["stereo"], store.info["stereo"]),
            ):
                if ours != theirs:
                    ours, theirs = (one[:8] if isinstance(one, str) else one for one in (ours, theirs))
                    problem = f"{name} has {what} {theirs}, {base} has {ours}: their codes do not mean the same"
                    remedy = f"prepare it again with codec.path={base} dataset.stereo={self.store.info['stereo']}"
                    raise DataError(f"{problem}; {remedy}", code="data-mismatch")
            stores.append(TrainedOn(store, self.store))
        return stores

    @property
    def num_sides(self) -> int:
        return 2 if self.store.info["stereo"] else 1

    @cached_property
    def num_codebooks(self) -> int:
        """Of a side, that are learned."""
        has, wanted = self.store.info["codec"]["num_codebooks"], self._data.codebooks
        if wanted > has:
            raise ConfigError(f"data.codebooks={wanted}, but the codec has {has}; set {has} or less", code="bad-range")
        return wanted or has

    @cached_property
    def channels(self) -> list[int]:
        """Columns of the store that are learned: the first codebooks of each side."""
        has = self.store.info["codec"]["num_codebooks"]
        return [side * has + book for side in range(self.num_sides) for book in range(self.num_codebooks)]

    @cached_property
    def names(self) -> list[str]:
        sides = ("left ", "right ") if self.num_sides == 2 else ("",)
        return [f"{side}{book}" for side in sides for book in range(self.num_codebooks)]

    @cached_property
    def delays(self) -> tuple[int, ...]:
        return parse_delays(self._delay.pattern, self.num_codebooks, self.num_sides)

    @cached_property
    def specials(self) -> Specials:
        return Specials.of(self.store.info["codec"]["codebook_size"])

    @cached_property
    def pattern(self) -> DelayPattern:
        is_full = self._delay.form == "full"
        return DelayPattern(self.delays, self._data.context_size, self.specials, is_full=is_full, has_end=self._has_eos)

    def streams(self, split: str | None = None) -> Mapping[str, Stream]:
        from rung.data.stream import Joined
        from rung.recipes.music.stream import Clips, TextRules

        data = self._data
        given = TextRules(data.text_length, limit=data.tag_limit)
        learned = replace(
            given, unconditional=data.unconditional_frac, shuffle=data.tag_shuffle, dropout=data.tag_dropout
        )
        streams: dict[str, Stream] = {}
        if split is None:
            parts = [
                Clips(store, "train", self.pattern, self.channels, learned, random_crop=data.random_crop)
                for store in (self.store, *(store for store in self.extra if len(store.split("train"))))
            ]
            streams["train"] = parts[0] if len(parts) == 1 else Joined(parts)
            if "validation" not in self.store.splits:
                return streams
        elif split not in self.store.splits:
            problem = f"{self.store.path} has no split {split!r}, only {', '.join(self.store.splits)}"
            raise UserError(problem, code="no-split")
        # The same rows with their texts and without any, always both.
        without = TextRules(data.text_length, unconditional=1.0)
        for name, rules in ((split or "validation", given), ("unconditional", without)):
            one = Clips(self.store, split or "validation", self.pattern, self.channels, rules)
            known = self.store.info["baselines"].get(split or "validation", {})
            if self._masking == "codes" and not self._weights and self._delay.form == "full":
                one.baselines = {what: float(np.mean([by[c] for c in self.channels])) for what, by in known.items()}
            streams[name] = one
        return streams

    @cached_property
    def has_texts(self) -> bool:
        """Whether any piece that is trained on has one."""
        stores = (self.store, *self.extra)
        return any(store.index[number].get("text") for store in stores for number in store.split("train").tolist())

    def inputs(self) -> Sequence[Input]:
        return [Input("text", ["text", "text_length"])] if self.has_texts else []

    # Model and loss

    def model(self) -> nn.Module:
        from rung.recipes.music.model import MusicModel

        return MusicModel(
            self.cfg.model, num_channels=len(self.channels), vocab_size=self.specials.vocab_size,
            num_steps=self._data.context_size + max(self.delays) + 1, text_length=self._data.text_length,
            seed=self.seed,
        )  # fmt: skip

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        from rung.recipes.music.model import MusicLoss

        music = cast("MusicModel", model)
        weights = self._weights * (self.num_sides if len(self._weights) == self.num_codebooks else 1)
        if weights and len(weights) != len(self.channels):
            problem = f"channel_weights has {len(self._weights)} numbers; give {self.num_codebooks}, one per codebook"
            raise ConfigError(problem, code="bad-value")
        loss = MusicLoss(music, self.specials, self._masking, weights, self.names)
        groups = music.parameter_groups(self.cfg.model.text_lr_scale)
        return [Objective("next_code", groups, loss, blocks=[*music.encoder.blocks, *music.decoder.blocks])]

    def identity(self) -> Identity:
        codec, rows = self.store.info["codec"], f"{self._delay.form}, {self._data.context_size} frames"
        every_code = {"loss": "cross entropy in nats", "mask": "codes", "rows": rows}  # whatever the run's own mask is
        return Identity(
            {
                "vocab_size": self.specials.vocab_size, "codec": f"{codec['name']} {codec['hash']}",
                "channels": self.names, "delays": list(self.delays),
            },
            {
                "loss": "cross entropy in nats", "mask": self._masking, "channel_weights": self._weights,
                "rows": rows,
            },
            dict.fromkeys(["codes_only", *(f"codebook/{name}" for name in self.names)], every_code),
        )  # fmt: skip

    def describe(self, init_from: str) -> Notes:
        codec, data = self.store.info["codec"], self._data
        rate = codec["sample_rate"] / codec["hop"]
        lines = [
            f"{len(self.channels)} channels of {codec['codebook_size']} codes, delays {list(self.delays)}; a row is "
            f"{data.context_size / rate:.3g} s in {self.pattern.num_steps} steps; codec {codec['name']} "
            f"{codec['hash'][:8]}"
        ]
        if not self.has_texts:
            lines.append("no track has a text: the model learns without")
        for name, store in zip(self.cfg.dataset.extra_datasets, self.extra):
            if store.num_left_out:
                number = f"{store.num_left_out} of {plural(store.num_before, 'training record')}"
                base = self.cfg.dataset.base_dataset_name
                lines.append(f"{number} of {name} left out, as {base} holds out their pieces")
        # Keys of preparation that differ from how it was done would silently do nothing.
        was = {f"codec.{one}": value for one, value in self.store.info["settings"]["codec"].items()}
        was |= {f"dataset.{one}": value for one, value in self.store.info["settings"].items()}
        here = {f"codec.{one.name}": getattr(self.cfg.codec, one.name) for one in fields(keys.Codec)}
        here |= {f"dataset.{one}": getattr(self.cfg.dataset, one) for one in ("minutes", "stereo")}
        if differing := [
            f"{name} is {was[name]}, not {value}" for name, value in here.items() if was.get(name, value) != value
        ]:
            lines.append(f"decided when the data was prepared: {'; '.join(differing)}")
        return Notes((), lines)

    # Samples

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        from rung.recipes.music.samples import heard_in

        cfg = self.cfg.sampling
        heard = heard_in(cfg.audio, self.store.info["codec"]["sample_rate"]) if cfg.audio else None
        return self._sample(model, cfg, heard, draw)

    def _sample(
        self, model: nn.Module, cfg: keys.Sampling, heard: Heard | None, draw: Draw, has_pictures: bool = True
    ) -> Sequence[Sample]:
        from rung.recipes.music.data import codec_of
        from rung.recipes.music.generate import SamplingParams
        from rung.recipes.music.samples import Sound, samples

        codec, most, late = codec_of(self.store), self._most_frames, max(self.delays)
        num_frames = max(1, round(cfg.seconds * codec.frames_per_s)) if cfg.seconds else most
        if num_frames > most:
            longest = most / codec.frames_per_s
            problem = f"sampling.seconds={cfg.seconds:g} is more than a row of training, {longest:.4g} s"
            raise ConfigError(f"{problem}; ask for less, or train with a larger data.context_size", code="too-large")
        # The channels that are ahead go on as far as in training: they have never seen a clip that stops earlier.
        params = SamplingParams(
            num_frames, cfg.temperature, cfg.top_k or None, cfg.top_p, cfg.guidance, cfg.guidance_scale,
            can_end=self._has_eos and self._masking != "codes",
            num_beyond=max(0, min(late, self._data.context_size - num_frames)),
        )  # fmt: skip
        sound = Sound(codec, self.num_codebooks, self.num_sides)
        texts = [cfg.prompt] * cfg.num_samples if cfg.prompt else self._held_out_texts(cfg.num_samples)
        return samples(
            cast("MusicModel", model), sound, texts, heard, params, self.delays, self.specials, draw,
            knows_texts=self.has_texts, has_pictures=has_pictures,
        )  # fmt: skip

    @property
    def _most_frames(self) -> int:
        """That a row of training holds in all channels."""
        size = self._data.context_size
        return size if self._delay.form == "full" else max(1, size - max(self.delays))

    def player(self, model: nn.Module) -> Answers:
        from rung.recipes.music.player import MusicPlayer

        codec = self.store.info["codec"]
        about = {
            "sample_rate": codec["sample_rate"],
            "most_seconds": self._most_frames * codec["hop"] / codec["sample_rate"],
            "knows_texts": self.has_texts,
            "examples": sorted({text for text in self._held_out_texts(8) if text}),
        }

        def make(cfg: keys.Sampling, heard: Heard | None, draw: Draw) -> Sample:
            return self._sample(model, cfg, heard, draw, has_pictures=False)[0]

        return MusicPlayer(make, self.cfg.sampling, about)

    def _held_out_texts(self, num: int) -> list[str]:
        split = "validation" if "validation" in self.store.splits else "train"
        texts = [str(self.store.index[number].get("text") or "") for number in self.store.split(split).tolist()]
        return [texts[number * len(texts) // num] for number in range(num)]

    # Weights of others

    @classmethod
    def config_from_pretrained(cls, source: Path) -> Mapping[str, Any]:
        from rung.recipes.music.weights import config_from_dia

        return config_from_dia(source)

    def load_pretrained(self, model: nn.Module, source: Path) -> str:
        from rung.recipes.music.weights import load_dia

        return load_dia(cast("MusicModel", model), source)

    # Preparation

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
        from rung.recipes.music.data import prepare

        name = name or cfg.dataset.base_dataset_name
        out = place(name)
        return out, prepare(source, out, cfg, seed=seed, name=name, replace=replace, report=report, device=device)

    @classmethod
    def survey(cls, cfg: keys.Config, path: Path, out: Path, report: Report) -> str:
        from rung.data.store import Store
        from rung.recipes.music.data import codec_of, original_of
        from rung.recipes.music.survey import survey

        store = Store.open(path, kind="music")
        return survey(store, codec_of(store), out, report, original_of(store))
