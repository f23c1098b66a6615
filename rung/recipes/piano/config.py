"""The keys of the piano recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rung.config import key, section


@dataclass
class Model:
    n_layer: int = key(4, "Transformer layers.", low=1)
    n_head: int = key(4, "Attention heads in each.", low=1)
    n_embd: int = key(128, "Width of the residual stream; a multiple of n_head.", low=1)
    dropout: float = key(0.0, "Share of activations dropped in training; more for small data.", low=0, high=0.99)
    bias: bool = key(False, "Biases in linear layers and norms.")
    context_size: int = key("${data.context_size}", "Positions the model has; must equal data.context_size.", low=2)
    init: Literal["normal", "xavier", "depth_scaled"] = key(
        "normal", "How weights begin: normal (GPT-2's 0.02), xavier with true fans, or depth_scaled (xavier / sqrt 2L)."
    )

    def check(self) -> Iterator[str]:
        if self.n_embd % self.n_head:
            yield (
                f"model.n_embd={self.n_embd} cannot be shared by model.n_head={self.n_head} heads; "
                f"{self.n_head * -(-self.n_embd // self.n_head)} can"
            )


@dataclass
class Data:
    context_size: int = key(256, "Tokens in a row that are predicted; a note takes about five.", low=2)


@dataclass
class Dataset:
    base_dataset_name: str = key("piano", "The prepared data: a name under ./data (or $RUNG_DATA), or a path.")
    pause_detection_threshold: float = key(4.0, "Silence in seconds that ends a record; 0 splits nowhere.", low=0)


@dataclass
class Sampling:
    num_samples: int = key(1, "Pieces to make each time.", low=1)
    num_tokens: int = key(768, "Length of each, in tokens; a note takes about five.", low=1)
    temperature: float = key(1.0, "Below 1 is safer, above 1 wilder; 0 takes the likeliest token each time.", low=0)
    top_k: int = key(0, "Choose among the k likeliest tokens only; 0 = all.", low=0)
    top_p: float = key(0.98, "Choose among the likeliest tokens of this joint probability; 1 = all.", low=0.01, high=1)


@dataclass
class Config:
    """The root of the piano keys."""

    stage: Literal["next_token_pretraining"] = key("next_token_pretraining", "What is learned: the next token.")
    loss_masking: Literal["pretraining"] = key("pretraining", "Which targets count: all that are not padding.")
    model: Model = section(Model, "The network.")
    data: Data = section(Data, "Rows.")
    dataset: Dataset = section(Dataset, "Where the music comes from.")
    sampling: Sampling = section(Sampling, "Samples during and after training.")

    def check(self) -> Iterator[str]:
        if self.model.context_size != self.data.context_size:
            yield (
                f"model.context_size={self.model.context_size} and data.context_size={self.data.context_size} differ; "
                "set data.context_size alone, the model follows"
            )
