"""The text recipe: a language model on text by category, for scaling studies.

Data, networks and text are imported when they are used, so that the keys of the recipe can be listed without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rung.errors import ConfigError, DataError
from rung.random import Draw
from rung.recipe import (
    Answers,
    Exports,
    Identity,
    Input,
    Objective,
    ParameterGroup,
    Plays,
    Prepares,
    Pretrained,
    Recipe,
    Report,
    Sample,
    Stream,
)
from rung.recipes.text import config as keys

if TYPE_CHECKING:
    from torch import nn

    from rung.data.store import Store
    from rung.data.tokenizer import Tokenizer
    from rung.nn.transformer import Transformer
    from rung.recipes.text.components import Pool
    from rung.recipes.text.samples import Prompt

# Keys that `rung data` reads, as the settings of a store call them.
PREPARED = {
    **{name: name for name in ("tokenizer", "vocab_size", "max_examples_per_split", "min_tokens", "strip_names")},
    "held_out": "held_out", "hub_config": "config",
}  # fmt: skip


class Text(Recipe, Prepares, Pretrained, Exports, Plays):
    Config = keys.Config
    cfg: keys.Config

    # Data

    @cached_property
    def store(self) -> Store:
        from rung.data.store import Store, missing, place

        path = place(name := self.cfg.dataset.base_dataset_name)
        if not path.exists():
            raise missing("text", name)
        store = Store.open(path, kind="text")
        # A key of `rung data` that is set and differs from how the data was prepared would silently do nothing.
        was = store.info.get("settings", {})
        for name, setting in PREPARED.items():
            asked = getattr(self.cfg.dataset, name)
            if setting in was and asked not in (None, was[setting]):
                problem = f"dataset.{name}={asked}, but {store.path} was prepared with {was[setting]}"
                remedy = "prepare it again with `rung data text --replace`, or leave the key out"
                raise DataError(f"{problem}; {remedy}", code="data-mismatch")
        return store

    @cached_property
    def components(self) -> list[str]:
        """The categories of this run, in order."""
        from rung.recipes.text.components import check_names, choose, labels_of

        cfg = self.cfg.dataset
        if cfg.components:
            return check_names(cfg.components, self.store.info["categories"])
        # A category that is only held out cannot be trained on, so that "all" does not mean it.
        return choose(sorted(set(labels_of(self.store, "train"))), cfg.num_components, cfg.component_seed)

    def _pool(self, split: str) -> Pool:
        from rung.recipes.text.components import pool_of

        cfg = self.cfg.dataset
        return pool_of(self.store, split, self.components, cfg.component_seed if cfg.shuffle_labels else None)

    def streams(self, split: str | None = None) -> Mapping[str, Stream]:
        from rung.recipes.text.stream import eval_rows, training_rows

        streams: dict[str, Stream] = {}
        data = self.cfg.data
        if split is None:
            unique = self.cfg.dataset.max_unique_tokens, self.cfg.dataset.component_seed
            is_packed = data.windows == "packed"
            streams["train"] = training_rows(self._pool("train"), data.context_size, data.sampling, is_packed, *unique)
            if self.cfg.sampling.prompt:
                self._given_prompt()  # a prompt that cannot be encoded is found now, not when the first sample is due
        held_out = split or "validation"
        if split is not None or held_out in self.store.splits:
            streams[held_out] = eval_rows(self._pool(held_out), data.context_size, data.eval_windows)
        return streams

    # Model and loss

    @property
    def vocab_size(self) -> int:
        return int(self.store.info["vocab_size"])

    def model(self) -> nn.Module:
        from rung.nn.transformer import Transformer

        return Transformer(self.cfg.model.shape(self.vocab_size), self.seed)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        from rung.nn.transformer import Transformer
        from rung.recipes.text.model import NextToken

        loss = NextToken(model, self.vocab_size, self.components)
        if not isinstance(model, Transformer):  # of others: evaluated, never trained
            return [Objective("next_token", [ParameterGroup("model", list(model.parameters()))], loss)]
        return [Objective("next_token", model.parameter_groups(), loss, blocks=list(model.blocks))]

    def load_external(self, folder: Path) -> nn.Module:
        from rung.recipes.text.weights import load_external_model

        return load_external_model(folder, self.store, self.cfg.data.context_size)

    @classmethod
    def config_from_pretrained(cls, source: Path) -> Mapping[str, Any]:
        from rung.recipes.text.weights import config_from_pretrained

        return config_from_pretrained(source)

    def load_pretrained(self, model: nn.Module, source: Path) -> str:
        from rung.recipes.text.weights import load_pretrained_weights

        return load_pretrained_weights(cast("Transformer", model), source, self.store)

    def export_hf(self, model: nn.Module, folder: Path) -> Sequence[str]:
        from rung.recipes.text.weights import export_hf

        return export_hf(cast("Transformer", model), folder, self.tokenizer)

    def inputs(self) -> Sequence[Input]:
        # With the component, which no model sees, this is all of a batch: so its order is taken away and nothing else.
        return [Input("context", ["tokens", "component"] if len(self.components) > 1 else ["tokens"], "permute")]

    def identity(self) -> Identity:
        return Identity(
            {"vocab_size": self.vocab_size, "tokenizer": self.store.info["tokenizer"]["hash"]},
            {"loss": "cross entropy in nats", "mask": "pretraining", "ignored_ids": [self.vocab_size]},
        )

    # Samples

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from rung.data.tokenizer import Tokenizer

        return Tokenizer.of_store(self.store)

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        from rung.nn.generate import SamplingParams
        from rung.recipes.text.samples import samples

        keys = self.cfg.sampling
        prompts = [self._given_prompt()] * keys.num_samples if keys.prompt else self._held_out_prompts()
        top_p = keys.top_p if keys.top_p < 1 else None
        params = SamplingParams(keys.num_tokens, keys.temperature, keys.top_k or None, top_p)
        return samples(cast("Transformer", model), self.tokenizer, prompts, params, draw)

    def _given_prompt(self) -> Prompt:
        from rung.recipes.text.samples import Prompt

        ids = self.tokenizer.encode(self.cfg.sampling.prompt)
        if not len(ids):
            problem = f"sampling.prompt={self.cfg.sampling.prompt!r} has no token"
            raise ConfigError(f"{problem}; give some text, or leave it out", code="bad-value")
        return Prompt(ids, "the given prompt")

    def _held_out_prompts(self) -> list[Prompt]:
        """Beginnings of held-out documents, the same ones every time, of one component after the other."""
        from rung.recipes.text.samples import PROMPT_TOKENS, Prompt

        split = "validation" if "validation" in self.store.splits else "train"
        pool = self._pool(split)
        filled = [n for n in range(len(pool.names)) if pool.bounds[n + 1] > pool.bounds[n]]
        prompts = []
        for number in range(self.cfg.sampling.num_samples):
            turn, which = divmod(number, len(filled))
            first, last = pool.bounds[filled[which]], pool.bounds[filled[which] + 1]
            document = first + turn % (last - first)
            length = int(min(PROMPT_TOKENS, max(1, pool.lengths[document] // 2)))
            start, record = pool.starts[document], self.store.index[pool.records[document]]
            origin = f"the beginning of {record['id']} ({record['category']})"
            prompts.append(Prompt(self.store.arrays["tokens"][start : start + length], origin))
        return prompts

    def player(self, model: nn.Module) -> Answers:
        from rung.recipes.text.player import TextPlayer

        examples = [self.tokenizer.decode(prompt.ids) for prompt in self._held_out_prompts()]
        return TextPlayer(cast("Transformer", model), self.tokenizer, self.cfg.sampling, examples)

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
        from rung.recipes.text.data import Settings, prepare

        out, dataset = place(name or cfg.dataset.base_dataset_name), cfg.dataset
        given = {setting: getattr(dataset, name) for name, setting in PREPARED.items()}
        settings = Settings(seed=seed, **{name: value for name, value in given.items() if value is not None})
        return out, prepare(source, out, settings, name=out.name, replace=replace, report=report)
