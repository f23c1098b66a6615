"""The text recipe: a language model on text by category, for scaling studies.

Data, networks and text are imported when they are used, so that the keys of the recipe can be listed without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rung.errors import ConfigError, DataError, UserError
from rung.recipe import Batch, Draw, Input, Objective, Recipe, Report, Sample, Stream
from rung.recipes.text import config as keys

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rung.data.store import Store
    from rung.nn.transformer import Transformer
    from rung.recipes.text.components import Pool
    from rung.recipes.text.samples import Prompt
    from rung.recipes.text.tokenizer import Tokenizer

# Keys of preparation, as the settings of a store call them.
PREPARED = {
    **{name: name for name in ("tokenizer", "vocab_size", "max_examples_per_split", "min_tokens", "strip_names")},
    "held_out": "held_out",
    "hub_config": "config",
}


class Text(Recipe):
    Config = keys.Config
    cfg: keys.Config

    def __init__(self, cfg: keys.Config, seed: int) -> None:
        super().__init__(cfg, seed)
        # One choice each so far, and samples come late: read here, they do not look unused after the first eval.
        self._what = (cfg.stage, cfg.loss_masking)
        how = cfg.sampling
        self._sampling = (how.num_tokens, how.temperature, how.top_k or None, how.top_p if how.top_p < 1 else None)
        self._num_samples, self._prompt = how.num_samples, how.prompt
        data = cfg.data
        self._context, self._eval_windows = data.context_size, data.eval_windows
        self._how = (data.sampling, data.windows == "packed")

    # Data

    @cached_property
    def store(self) -> Store:
        from rung.data.store import Store, place

        path = place(self.cfg.dataset.base_dataset_name)
        if not path.exists():
            raise DataError(
                f"no data at {path}; prepare it with `rung data text`, or name another with dataset.base_dataset_name"
            )
        store = Store.open(path, kind="text")
        self._check_settings(store)
        return store

    def _check_settings(self, store: Store) -> None:
        """A key of preparation that is set and differs from how the data was prepared would silently do nothing."""
        was = store.info.get("settings", {})
        for name, setting in PREPARED.items():
            asked = getattr(self.cfg.dataset, name)
            if setting in was and asked not in (None, was[setting]):
                raise DataError(
                    f"dataset.{name}={asked}, but {store.path} was prepared with {was[setting]}; prepare it again with "
                    "`rung data text --replace`, or leave the key out"
                )

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

    def streams(self) -> Mapping[str, Stream]:
        from rung.recipes.text.stream import Unique, training_rows

        unique = Unique(self.cfg.dataset.max_unique_tokens, self.cfg.dataset.component_seed)
        streams: dict[str, Stream] = {"train": training_rows(self._pool("train"), self._context, *self._how, unique)}
        if "validation" in self.store.splits:
            streams |= self.held_out("validation")
        if self._prompt:
            self._given_prompt()  # a prompt that cannot be encoded is found now, not when the first sample is due
        return streams

    def held_out(self, split: str) -> Mapping[str, Stream]:
        from rung.recipes.text.stream import eval_rows

        if split not in self.store.splits:
            raise UserError(f"{self.store.path} has no split {split!r}, only {', '.join(self.store.splits)}")
        return {split: eval_rows(self._pool(split), self._context, self._eval_windows)}

    # Model and loss

    @property
    def vocab_size(self) -> int:
        return int(self.store.info["vocab_size"])

    def model(self) -> nn.Module:
        from rung.recipes.text.model import build_model

        return build_model(self.cfg.model, self.vocab_size, self.seed)

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        from rung.recipes.text.model import NextToken

        loss = NextToken(model, self.vocab_size, self.components)
        hidden = cast("Transformer", model).hidden_matrices()
        return [Objective("next_token", list(model.parameters()), loss, hidden=hidden)]

    def target_losses(self, model: nn.Module, batch: Batch, draw: Draw) -> tuple[Tensor, Tensor]:
        from rung.recipes.text.model import next_token_losses

        return next_token_losses(model, batch, self.vocab_size)

    def foreign(self, folder: Path) -> nn.Module:
        from rung.recipes.text.foreign import load_foreign

        return load_foreign(folder, self.store, self._context)

    @classmethod
    def keys_of(cls, source: Path) -> Mapping[str, Any]:
        from rung.recipes.text.weights import keys_of

        return keys_of(source)

    def adopt(self, model: nn.Module, source: Path) -> str:
        from rung.recipes.text.weights import adopt_weights

        return adopt_weights(cast("Transformer", model), source, self.store)

    def export_hf(self, model: nn.Module, folder: Path) -> Sequence[str]:
        from rung.recipes.text.weights import export_hf

        return export_hf(cast("Transformer", model), folder, self.tokenizer)

    def inputs(self) -> Sequence[Input]:
        # With the component, which no model sees, this is all of a batch: so its order is taken away and nothing else.
        return [Input("context", ["tokens", "component"] if len(self.components) > 1 else ["tokens"], "permute")]

    def definition(self) -> Mapping[str, Any]:
        return {"loss": "cross entropy in nats", "mask": self.cfg.loss_masking, "ignored_ids": [self.vocab_size]}

    def identity(self) -> Mapping[str, Any]:
        return {"vocab_size": self.vocab_size, "tokenizer": self.store.info["tokenizer"]["hash"]}

    # Samples

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from rung.recipes.text.tokenizer import Tokenizer

        return Tokenizer.of_store(self.store)

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        from rung.nn.generate import How
        from rung.recipes.text.samples import samples

        prompts = [self._given_prompt()] * self._num_samples if self._prompt else self._beginnings()
        return samples(cast("Transformer", model), self.tokenizer, prompts, How(*self._sampling), draw)

    def _given_prompt(self) -> Prompt:
        from rung.recipes.text.samples import Prompt

        ids = self.tokenizer.encode(self._prompt)
        if not len(ids):
            raise ConfigError(f"sampling.prompt={self._prompt!r} has no token; give some text, or leave it out")
        return Prompt(ids, "the given prompt")

    def _beginnings(self) -> list[Prompt]:
        """Of held-out documents, the same ones every time, of one component after the other."""
        from rung.recipes.text.samples import PROMPT_TOKENS, Prompt

        split = "validation" if "validation" in self.store.splits else "train"
        pool = self._pool(split)
        filled = [n for n in range(len(pool.names)) if pool.bounds[n + 1] > pool.bounds[n]]
        prompts = []
        for number in range(self._num_samples):
            turn, which = divmod(number, len(filled))
            first, last = pool.bounds[filled[which]], pool.bounds[filled[which] + 1]
            document = first + turn % (last - first)
            length = int(min(PROMPT_TOKENS, max(1, pool.lengths[document] // 2)))
            start, record = pool.starts[document], self.store.index[pool.records[document]]
            origin = f"the beginning of {record['id']} ({record['category']})"
            prompts.append(Prompt(self.store.arrays["tokens"][start : start + length], origin))
        return prompts

    # Preparation

    @classmethod
    def prepare(
        cls, cfg: keys.Config, seed: int, source: Path | None, name: str | None, replace: bool, report: Report
    ) -> tuple[Path, str]:
        from rung.data.store import place
        from rung.recipes.text.data import Settings, prepare

        out, dataset = place(name or cfg.dataset.base_dataset_name), cfg.dataset
        given = {setting: getattr(dataset, name) for name, setting in PREPARED.items()}
        settings = Settings(seed=seed, **{name: value for name, value in given.items() if value is not None})
        return out, prepare(source, out, settings, name=out.name, replace=replace, report=report)
