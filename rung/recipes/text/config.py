"""The keys of the text recipe. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rung.config import key, section
from rung.errors import ConfigError
from rung.nn.shape import Shape


@dataclass
class Model:
    architecture: Literal["gpt2", "gpt_neox", "llama"] = key(
        "gpt_neox",
        "What a layer is: gpt2 (learned positions), gpt_neox (rotary, parallel), llama (rotary, rmsnorm, swiglu).",
    )
    n_layer: int = key(2, "Transformer layers.", low=1)
    n_head: int = key(4, "Attention heads in each.", low=1)
    n_embd: int = key(64, "Width of the residual stream; a multiple of n_head.", low=1)
    n_hidden: int = key(0, "Width inside the MLP; 0 = 4 n_embd, or 8/3 n_embd for llama.", low=0)
    mlp: Literal["gelu", "gelu_tanh"] | None = key(
        None, "Activation function of the MLP; null = gelu_tanh for gpt2, gelu for gpt_neox; nanoGPT's gpt2 has gelu."
    )
    dropout: float = key(0.0, "Share of activations dropped in training; more for small data.", low=0, high=0.99)
    bias: bool | None = key(None, "Biases in linear layers and norms; null = yes, but not for llama.")
    context_size: int = key("${data.context_size}", "Positions the model has; must equal data.context_size.", low=1)
    rotary_fraction: float | None = key(
        None, "Part of each head that is rotated; null = 0.25 for gpt_neox, 1 for llama.", low=0.01, high=1
    )
    tied_head: bool | None = key(None, "Whether the token embedding also makes the logits; null = for gpt2 only.")
    qk_norm: bool = key(False, "Normalise queries and keys; such a model cannot be exported to Hugging Face.")
    init: Literal["normal", "xavier", "depth_scaled"] = key(
        "normal", "Initial weights: normal (GPT-2's 0.02), xavier with true fans, or depth_scaled (xavier / sqrt 2L)."
    )
    vocab_multiple: int = key(
        0, "Pad the token table to a multiple of this, for speed; 64 makes 50304 of Pythia's; 0 = exact.", low=0
    )

    def shape(self, vocab_size: int) -> Shape:
        """The transformer of these keys; what is left at null is as the architecture has it."""
        is_llama, is_gpt2 = self.architecture == "llama", self.architecture == "gpt2"
        fraction = self.rotary_fraction or (1.0 if is_llama or is_gpt2 else 0.25)
        multiple = self.vocab_multiple or 1
        return Shape(
            vocab_size=math.ceil(vocab_size / multiple) * multiple,
            context_size=self.context_size,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            n_hidden=self.n_hidden or None,
            norm="rmsnorm" if is_llama else "layernorm",
            mlp=self.mlp or {"gpt2": "gelu_tanh", "gpt_neox": "gelu", "llama": "swiglu"}[self.architecture],
            positions="learned" if is_gpt2 else "rotary",
            rotary_fraction=fraction,
            parallel_residual=self.architecture == "gpt_neox",
            bias=not is_llama if self.bias is None else self.bias,
            tied_head=is_gpt2 if self.tied_head is None else self.tied_head,
            qk_norm=self.qk_norm,
            dropout=self.dropout,
            init=self.init,
        )

    def check(self) -> Iterator[str]:
        if self.architecture == "gpt2" and self.rotary_fraction is not None:
            yield (
                f"model.rotary_fraction={self.rotary_fraction:g} contradicts model.architecture=gpt2, whose positions "
                "are learned; leave it out, or take gpt_neox or llama"
            )
        if self.architecture == "llama" and self.mlp is not None:
            yield f"model.mlp={self.mlp} contradicts model.architecture=llama, whose MLP is swiglu; leave it out"
        try:
            self.shape(vocab_size=1)
        except ConfigError as error:
            yield f"model: {error}"


@dataclass
class Data:
    context_size: int = key(100, "Predictions in a row; a row holds one token more.", low=1)
    sampling: Literal["component_uniform", "paper_uniform", "token_uniform"] = key(
        "component_uniform",
        "Where a training row comes from: a component, then a document, then a place in it; or a document, then a "
        "place; or any place.",
    )
    windows: Literal["within_documents", "packed"] = key(
        "within_documents",
        "A training row lies within one document, and shorter ones are left out; or it runs on into the next one.",
    )
    eval_windows: int = key(
        256, "Fixed rows per component in an eval set; 0 = the whole split, each token predicted once.", low=0
    )


@dataclass
class Dataset:
    base_dataset_name: str = key("text", "The prepared data: a name under ./data (or $RUNG_DATA), or a path.")
    # For `rung data`; null where the data decides: what is set and differs from the data is an error in a run.
    tokenizer: str | None = key(
        None,
        "For `rung data`: bytes, characters, bpe (trained on the data), or a folder with a tokenizer.json; null = bpe.",
    )
    vocab_size: int | None = key(
        None, "For `rung data`: ids of a bpe that is trained on the data; null = 4096.", low=257
    )
    max_examples_per_split: int | None = key(
        None, "For `rung data`: documents of each split at most; 0 or null = all.", low=0
    )
    min_tokens: int | None = key(None, "For `rung data`: shorter documents are left out; null = 2.", low=2)
    strip_names: bool | None = key(
        None, "For `rung data`: take the names of arXiv's categories out of the text; null = no."
    )
    held_out: float | None = key(
        None,
        "For `rung data`: share of the data for validation, and again for test, where none is published; null = 0.05.",
        low=0.001, high=0.45,
    )  # fmt: skip
    hub_config: str | None = key(
        None, "For `rung data`: which configuration of a data set of the Hugging Face hub; null = no_ref."
    )
    num_components: int = key(0, "How many categories to train and evaluate on (K), chosen by seed; 0 = all.", low=0)
    components: list[str] = key([], "Which categories, by name; instead of num_components.")
    component_seed: int = key("${seed}", "Chooses the components; with one seed, fewer are among more.", low=0)
    shuffle_labels: bool = key(
        False, "A control: give documents each other's categories at random, then choose components."
    )
    max_unique_tokens: int = key(
        0, "Tokens of training text in all, shared equally by the components: the same for every K; 0 = all.", low=0
    )

    def check(self) -> Iterator[str]:
        if self.components and self.num_components not in (0, len(self.components)):
            yield (
                f"dataset.num_components={self.num_components} contradicts dataset.components, which names "
                f"{len(self.components)}; set one of them"
            )
        if len(set(self.components)) < len(self.components):
            twice = next(name for name in self.components if self.components.count(name) > 1)
            yield f"dataset.components names {twice!r} twice; name each once"


@dataclass
class Sampling:
    num_samples: int = key(2, "Texts to make each time.", low=1)
    num_tokens: int = key(200, "Length of each continuation, in tokens; it ends earlier where the text does.", low=1)
    temperature: float = key(1.0, "Below 1 is safer, above 1 wilder; 0 takes the likeliest token each time.", low=0)
    top_k: int = key(0, "Choose among the k likeliest tokens only; 0 = all.", low=0)
    top_p: float = key(0.95, "Choose among the likeliest tokens of this joint probability; 1 = all.", low=0.01, high=1)
    prompt: str = key("", "The text to continue; without one, the beginnings of held-out documents.")


@dataclass
class Config:
    """The root of the text keys."""

    model: Model = section(Model, "The network.")
    data: Data = section(Data, "Rows.")
    dataset: Dataset = section(Dataset, "Where the text comes from, and which parts of it are used.")
    sampling: Sampling = section(Sampling, "Samples during and after training.", is_late=True)

    def check(self) -> Iterator[str]:
        if self.model.context_size != self.data.context_size:
            yield (
                f"model.context_size={self.model.context_size} and data.context_size={self.data.context_size} differ; "
                "set data.context_size alone, the model follows"
            )
