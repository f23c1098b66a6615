"""The keys of the music recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rung.config import key, section
from rung.errors import ConfigError
from rung.recipes.music.delay import parse_delays

Init = Literal["normal", "xavier", "depth_scaled"]


@dataclass
class TextModel:
    n_layer: int = key(2, "Layers of the text encoder.", low=1)
    n_head: int = key(4, "Attention heads in each.", low=1)
    n_embd: int = key(64, "Width of the text encoder.", low=1)
    head_dim: int = key(0, "Width of a head; 0 = n_embd / n_head.", low=0)
    n_hidden: int = key(0, "Width inside its MLPs; 0 = 8/3 of n_embd.", low=0)


@dataclass
class Model:
    n_layer: int = key(4, "Layers of the decoder.", low=1)
    n_head: int = key(4, "Query heads in each.", low=1)
    n_kv_head: int = key(2, "Heads of keys and values; fewer than n_head share them.", low=1)
    n_embd: int = key(128, "Width of the decoder.", low=1)
    head_dim: int = key(0, "Width of a head; 0 = n_embd / n_head.", low=0)
    n_hidden: int = key(0, "Width inside the MLPs; 0 = 8/3 of n_embd.", low=0)
    dropout: float = key(0.0, "Share of activations dropped in training; more for small data.", low=0, high=0.99)
    attention_scale: float = key(
        0.0, "What attention logits are multiplied by; 0 = 1 / sqrt(head_dim), Dia's weights expect 1.", low=0
    )
    init: Init = key(
        "xavier", "How weights begin: normal (0.02), xavier with true fans, or depth_scaled (xavier / sqrt 2L)."
    )
    text: TextModel = section(TextModel, "The encoder of the text, which reads bytes.")
    text_lr_scale: float = key(1.0, "Learning rate of the text encoder over that of the decoder.", low=0)

    def check(self) -> Iterator[str]:
        for name, one in (("model", self), ("model.text", self.text)):
            if not one.head_dim and one.n_embd % one.n_head:
                yield (
                    f"{name}.n_embd={one.n_embd} cannot be shared by {name}.n_head={one.n_head} heads; "
                    f"{one.n_head * -(-one.n_embd // one.n_head)} can"
                )
        if self.n_head % self.n_kv_head:
            yield f"model.n_head={self.n_head} is not a multiple of model.n_kv_head={self.n_kv_head}; groups are equal"


@dataclass
class Data:
    context_size: int = key(500, "Frames in a row that are predicted; the codec's rate says how long that is.", low=2)
    text_length: int = key(96, "Bytes of text that the model reads; longer texts are cut.", low=1)
    codebooks: int = key(0, "How many codebooks of each side to learn, the coarsest first; 0 = all.", low=0)
    random_crop: bool = key(True, "Train on stretches that begin anywhere; false cuts each piece the same way always.")
    eos: bool = key(True, "Mark the end of a piece in every channel, so that the model can learn to end one.")
    unconditional_frac: float = key(0.1, "Share of training rows whose text is withheld.", low=0, high=1)
    tag_shuffle: bool = key(False, "Train on the comma-separated parts of a text in any order.")
    tag_dropout: float = key(0.0, "Share of these parts that is left out in training.", low=0, high=1)
    tag_limit: int = key(0, "At most so many of these parts, in training and eval; 0 = all.", low=0)


@dataclass
class Delay:
    pattern: Any = key(
        "musicgen",
        "By how many steps each channel comes later: musicgen (0, 1, 2, ..), dia (0, 8, 9, ..), parallel (all 0), or "
        "a list with one number per codebook of a side, or per channel.",
    )
    form: Literal["full", "valid"] = key(
        "full", "full predicts every code of a row; valid ends with the row, and loses the last codes of late channels."
    )

    def check(self) -> Iterator[str]:
        try:
            parse_delays(self.pattern, 0)
        except ConfigError as error:
            yield str(error)


@dataclass
class Dataset:
    base_dataset_name: str = key(
        "music",
        "The prepared data to train and validate on: a name under ./data (or $RUNG_DATA), or a path.",
    )
    extra_datasets: list[str] = key(
        [], "Further prepared data to train on, of the same codec; only their train splits are used."
    )
    minutes: float = key(12.0, "How much of the embedded music to render; 0 = all.", low=0)
    stereo: bool = key(False, "Left and right, each with codebooks of its own; false mixes both to one.")


@dataclass
class Codec:
    name: Literal["rvq", "dac", "encodec", "mimi"] = key(
        "rvq", "Who turns sound into codes: rvq, fitted to your data, or a model of transformers from codec.path."
    )
    path: str = key("", "A folder with the codec's weights, or the name of prepared data whose codec to take.")
    fit: bool = key(False, "Fit the codec anew, even if the data that is replaced has one.")
    sample_rate: int = key(24000, "Samples a second of rvq.", low=4000, high=48000)
    hop: int = key(480, "Samples of a frame of rvq; an even number.", low=64)
    num_codebooks: int = key(4, "Codebooks of rvq, each for what the ones before left over.", low=1, high=32)
    codebook_size: int = key(256, "Codes in each.", low=2, high=60000)
    steps: int = key(300, "Steps of fitting the network of its decoder.", low=1)
    fit_minutes: float = key(6.0, "Minutes of training music to fit it to.", low=0.01)


@dataclass
class Sampling:
    num_samples: int = key(1, "Clips to make each time.", low=1)
    seconds: float = key(0.0, "Length of each; 0 = as long as a row of training.", low=0)
    temperature: float = key(1.0, "Below 1 is safer, above 1 wilder; 0 takes the likeliest code each time.", low=0)
    top_k: int = key(64, "Choose among the k likeliest codes only; 0 = all.", low=0)
    top_p: float = key(1.0, "Choose among the likeliest codes of this joint probability; 1 = all.", low=0.01, high=1)
    guidance: Literal["musicgen", "dia"] = key(
        "musicgen",
        "How the text is stressed: musicgen moves all predictions away from those without text; dia only chooses by "
        "that which top_k codes may be drawn.",
    )
    guidance_scale: float = key(
        3.0, "How much: in musicgen 1 is none, in dia 0 is none; both then need one forward instead of two.", low=0,
        high=100,
    )  # fmt: skip
    prompt: str = key("", "What it should sound like; empty takes texts of held-out pieces.")
    audio: str = key("", "A sound file to continue; empty begins from nothing.")


@dataclass
class Config:
    """The root of the music keys."""

    loss_masking: Literal["codes", "codes_eos", "all"] = key(
        "codes",
        "Which targets count, in training and eval alike: codes, also the end of a piece, or all special tokens too.",
    )
    channel_weights: list[float] = key(
        [], "Weight of each channel in the loss; empty counts all alike. One per codebook of a side, or per channel.",
        low=0,
    )  # fmt: skip
    model: Model = section(Model, "The network.")
    data: Data = section(Data, "Rows.")
    delay: Delay = section(Delay, "Which channel comes when.")
    dataset: Dataset = section(Dataset, "Where the music comes from.")
    codec: Codec = section(Codec, "How sound becomes codes; decided when data is prepared.")
    sampling: Sampling = section(Sampling, "Samples during and after training.", is_late=True)

    def check(self) -> Iterator[str]:
        if self.loss_masking == "codes_eos" and not self.data.eos:
            yield "loss_masking=codes_eos counts the end of a piece, which data.eos=false leaves out; set one of them"
        if self.codec.name != "rvq" and not self.codec.path:
            yield f"codec.name={self.codec.name} needs codec.path, the folder of its weights"
        if self.channel_weights and not any(self.channel_weights):
            yield "channel_weights are all 0: nothing would be learned; give one above 0"
