"""The keys of the piano recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rung.config import key, section
from rung.errors import ConfigError
from rung.recipes.piano.tasks import parse


@dataclass
class Model:
    n_layer: int = key(4, "Transformer layers.", low=1)
    n_head: int = key(4, "Attention heads in each.", low=1)
    n_embd: int = key(128, "Width of the residual stream; a multiple of n_head.", low=1)
    dropout: float = key(0.0, "Share of activations dropped in training; more for small data.", low=0, high=0.99)
    bias: bool = key(False, "Biases in linear layers and norms.")
    context_size: int = key("${data.context_size}", "Positions the model has; must equal data.context_size.", low=2)
    mlp: Literal["gelu_tanh", "gelu"] = key(
        "gelu_tanh", "Activation in the MLPs: gelu_tanh as in the GPT-2 of Hugging Face, or the exact gelu of nanoGPT."
    )
    init: Literal["normal", "xavier", "depth_scaled"] = key(
        "normal", "How weights begin: normal (GPT-2's 0.02), xavier with true fans, or depth_scaled (xavier / sqrt 2L)."
    )
    positions: Literal["learned", "rotary"] = key(
        "learned", "How the model knows where a token is: learned embeddings, as in GPT-2, or rotary."
    )
    sounding_keys: bool = key(
        False, "Also give the model which keys sound after each token and for how long; 176 x n_embd parameters."
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
    notes_per_record: int = key(128, "Notes in a row of piano_task; unused where rows are cut by tokens.", low=2)
    prefix_tokens: bool = key(False, "Tell the model the data set and the composer, as two tokens before each row.")
    end_token: bool = key(
        False, "End each record with <EOGENAI>, so that samples end by themselves; rows of piano_task have it anyway."
    )
    moving_cuts: bool = key(
        False,
        "Cut the records at other places each time a row is read, in training; rows of piano_task are cut by notes.",
    )


@dataclass
class Augmentation:
    speed_change_factors: list[float] = key(
        [], "Also train on these speeds: 1.05 is 5 % faster; each row draws one of them or its own.", low=0.25, high=4
    )
    max_pitch_shift: int = key(
        0, "Also train on rows transposed by up to this many semitones either way, as far as the keyboard allows.",
        low=0, high=12,
    )  # fmt: skip


@dataclass
class Dataset:
    base_dataset_name: str = key(
        "piano",
        "The prepared data to validate on: a name under ./data (or $RUNG_DATA), or a path. Its train split is used "
        "only where extra_datasets is empty.",
    )
    extra_datasets: list[str] = key([], "The data sets to train on, prepared too; only their train splits are used.")
    pause_detection_threshold: float = key(4.0, "Silence in seconds that ends a record; 0 splits nowhere.", low=0)
    sustain: bool | None = key(
        None, "Whether notes sound as long as the pedal holds them; decided when data is prepared, null = as it is."
    )
    eval_composers: list[str] = key(
        ["Bach", "Chopin", "Mozart"], "Composers that get an eval set of their own, where the base data has them."
    )
    augmentation: Augmentation = section(Augmentation, "Changes drawn anew for each row, of training only.")


@dataclass
class Evaluation:
    completed: float = key(
        0.0, "Share of the rows of each eval set that the model also completes, to compare notes with what was played.",
        low=0, high=1,
    )  # fmt: skip
    ngram: bool = key(False, "Let a 3-gram model, fitted to the training data, complete the same rows.")
    samples: int = key(
        0, "Pieces to make from nothing and compare with held-out ones (voices, dissonance, ..); 0 = none.", low=0
    )


@dataclass
class Sampling:
    num_samples: int = key(1, "Pieces to make each time.", low=1)
    num_tokens: int = key(768, "Length of each, in tokens; a note takes about five.", low=1)
    temperature: float = key(1.0, "Below 1 is safer, above 1 wilder; 0 takes the likeliest token each time.", low=0)
    top_k: int = key(0, "Choose among the k likeliest tokens only; 0 = all.", low=0)
    top_p: float = key(0.98, "Choose among the likeliest tokens of this joint probability; 1 = all.", low=0.01, high=1)
    grammar: bool = key(True, "Allow only tokens that make sense: only notes that sound end, and all of them do.")
    prompt: str = key("", "A MIDI file to begin with; empty: from nothing, or rows of the eval set in piano_task.")
    task: str = key("", "What to do with the prompt, such as top_line; empty: continue it.")
    parameters: list[int] = key([], "Of the task, such as its percentage; empty: the middle of its range.")
    composer: str = key("", "The composer to name before the prompt; for runs of data.prefix_tokens=true.")


@dataclass
class Config:
    """The root of the piano keys."""

    stage: Literal["next_token_pretraining", "piano_task"] = key(
        "next_token_pretraining", "What is learned: the next token of a performance, or to answer a prompt (tasks)."
    )
    loss_masking: Literal["pretraining", "finetuning"] = key(
        "pretraining", "Which targets count: all that are not padding, or only those of the answer, after <GENAI>."
    )
    loss_grammar: bool = key(
        False,
        "Compare only tokens that can come next, as in sampling: a key that sounds can end, one that is silent cannot.",
    )
    tasks: Any = key(
        "all",
        "What piano_task asks for: a list of names, or of {name, weight, and the range of each parameter}; "
        "all = each with its own range.",
    )
    model: Model = section(Model, "The network.")
    data: Data = section(Data, "Rows.")
    dataset: Dataset = section(Dataset, "Where the music comes from.")
    evaluation: Evaluation = section(Evaluation, "What an eval measures besides the loss.")
    sampling: Sampling = section(Sampling, "Samples during and after training.", is_late=True)

    def check(self) -> Iterator[str]:
        if self.model.context_size != self.data.context_size:
            yield (
                f"model.context_size={self.model.context_size} and data.context_size={self.data.context_size} differ; "
                "set data.context_size alone, the model follows"
            )
        if self.stage == "next_token_pretraining" and self.loss_masking == "finetuning":
            yield (
                "loss_masking=finetuning counts what comes after <GENAI>, which stage=next_token_pretraining never "
                "has; set stage=piano_task, or loss_masking=pretraining"
            )
        try:
            parse(self.tasks)
        except ConfigError as error:
            yield str(error)
