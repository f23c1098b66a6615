"""The keys of the speech recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rung.config import key, section

SPEECH = "<SpeechHere>"  # where the sound goes in a prompt


@dataclass
class Encoder:
    name: Literal["mel", "moonshine", "whisper"] = key(
        "moonshine",
        "What hears, frozen: moonshine (weights out of a pip package), whisper (from path), or mel, plain log-mel "
        "spectra, for model.audio to learn from.",
    )
    path: str = key("", "The folder of a Whisper model, as transformers saves it.")


@dataclass
class SecondEncoder:
    name: Literal["none", "mel", "moonshine", "whisper"] = key(
        "none", "A second one, whose features are put beside those of the first at the same moments."
    )
    path: str = key("", "The folder of a Whisper model, as transformers saves it.")


@dataclass
class Audio:
    n_layer: int = key(0, "Trained layers between the encoder and the windows; 0 = none. mel needs some.", low=0)
    n_head: int = key(4, "Attention heads in each.", low=1)
    n_embd: int = key(128, "Their width.", low=1)
    stack: int = key(1, "Frames that are put side by side before them; 4 turns mel's 100 a second into 25.", low=1)


@dataclass
class QFormer:
    n_layer: int = key(2, "Layers of the Q-Former.", low=1)
    n_head: int = key(4, "Attention heads in each.", low=1)
    n_embd: int = key(128, "Its width.", low=1)
    queries: int = key(1, "Vectors that the language model is given for each window.", low=1)
    window_s: float = key(0.333333, "Seconds of sound in a window.", low=0.01)
    stride_s: float = key(0.333333, "Seconds from one window to the next; less than window_s makes them overlap.",
                          low=0.01)  # fmt: skip
    remainder: Literal["pad", "drop"] = key(
        "pad", "What becomes of frames after the last whole window: a window of their own (pad), or nothing (drop)."
    )


@dataclass
class Lm:
    name: Literal["bytes", "smollm2", "folder"] = key(
        "smollm2",
        "Who answers: smollm2 (135M, out of a pip package), any causal model of transformers from path, or bytes, a "
        "small one from scratch that writes bytes and is trained along.",
    )
    path: str = key("", "The folder of a model, as transformers saves it; a text run becomes one by `rung export`.")
    n_layer: int = key(4, "Layers of bytes.", low=1)
    n_head: int = key(4, "Attention heads of bytes.", low=1)
    n_embd: int = key(128, "Width of bytes.", low=1)
    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "Type of its frozen weights.")
    load_in_8bit: bool = key(False, "Keep its linear weights in 8 bits (bitsandbytes); for models that are too large.")


@dataclass
class Lora:
    rank: int = key(8, "Rank of what LoRA adds to the frozen weights; 0 = nothing is added.", low=0)
    alpha: float = key(32.0, "What it adds is multiplied by alpha / rank.", low=0)
    dropout: float = key(0.1, "Share of its inputs dropped in training.", low=0, high=0.99)
    modules: list[str] = key([], "Linear layers that get one, by the end of their names; empty = those of queries and "
                             "values.")  # fmt: skip
    lr_scale: float = key(1.0, "Learning rate of LoRA over that of the rest.", low=0)


@dataclass
class Model:
    audio: Audio = section(Audio, "Trained layers over the encoder's features.")
    qformer: QFormer = section(QFormer, "The bridge from sound to words.")
    lm: Lm = section(Lm, "The language model.")
    lora: Lora = section(Lora, "What is trained of a frozen language model.")
    dropout: float = key(0.0, "Share of activations dropped in the trained parts but LoRA.", low=0, high=0.99)
    qformer_lr_scale: float = key(1.0, "Learning rate of the Q-Former over that of the rest.", low=0)


@dataclass
class Data:
    max_seconds: float = key(30.0, "Longer sounds are cut, as they are read.", low=0.1)
    text_length: int = key(300, "Tokens of an answer, its end included; longer ones are cut and lose their end.", low=2)
    bucket: int = key(256, "Rows among which those of like length are put together, so that less is padded; 1 = none.",
                      low=1)  # fmt: skip
    cached: bool = key(True, "Read features of the encoder from the store; false runs the encoder at every step.")


@dataclass
class Dataset:
    base_dataset_name: str = key(
        "speech", "The prepared data to train and validate on: a name under ./data (or $RUNG_DATA), or a path."
    )
    extra_datasets: list[str] = key([], "Further prepared data to train on; only their train splits are used.")
    sentences: Literal["digits", "sentences"] = key(
        "sentences", "What the embedded voices say: rows of spoken digits, or sentences out of docstrings."
    )
    utterances: int = key(4000, "How many they say.", low=20)
    held_out: float = key(0.005, "Share of the data for validation, and again for test.", low=0.0001, high=0.3)
    normalise: bool = key(True, "Scale each sound to the same peak.")
    silence_s: float = key(0.4, "Silence put before and after each sound; helps with clips of a word.", low=0)
    speeds: list[float] = key(
        [],
        "Also train on each sound at these speeds, made with the data; 1.1 is 10 % faster and higher.",
        low=0.5,
        high=2,
    )


@dataclass
class Evaluation:
    wer_rows: int = key(32, "Rows of the first eval set that are transcribed for the word error rate; 0 = none.", low=0)
    beams: int = key(1, "Answers followed at the same time for it; 1 is greedy.", low=1)
    num_tokens: int = key(100, "Tokens of an answer at most.", low=1)
    ablations: bool = key(True, "Evaluate also with the sounds of other rows, and with features of nothing.")


@dataclass
class Sampling:
    num_samples: int = key(2, "Sounds to answer each time.", low=1)
    prompt: str = key("", "A sound file; empty takes held-out utterances.")
    question: str = key("", "What to ask about it; empty asks for a transcript.")
    beams: int = key(1, "Answers followed at the same time; 1 is greedy.", low=1)
    num_tokens: int = key(200, "Tokens of an answer at most.", low=1)


@dataclass
class Config:
    """The root of the speech keys."""

    prompts: dict[str, list[str]] = key(
        {"asr": [f"{SPEECH} Write down what is said."], "qa": [f"{SPEECH} {{}}"]},
        "What is said to the language model, by task, each with <SpeechHere>; {} is the question. Training draws one "
        "of a task, an eval takes the first.",
    )
    template: str = key("USER: {}\nASSISTANT: ", "What goes around every prompt, in place of {}.")
    encoder: Encoder = section(Encoder, "What hears; decided when data is prepared.")
    second_encoder: SecondEncoder = section(SecondEncoder, "A second one; decided when data is prepared.")
    model: Model = section(Model, "The network.")
    data: Data = section(Data, "Rows.")
    dataset: Dataset = section(Dataset, "Where speech comes from.")
    evaluation: Evaluation = section(Evaluation, "What an eval looks at besides the loss.", is_late=True)
    sampling: Sampling = section(Sampling, "Samples during and after training.", is_late=True)

    def check(self) -> Iterator[str]:
        for name, one in (("encoder", self.encoder), ("second_encoder", self.second_encoder)):
            if one.name == "whisper" and not one.path:
                yield f"{name}.name=whisper needs {name}.path, the folder of its weights"
        if self.model.lm.name == "folder" and not self.model.lm.path:
            yield "model.lm.name=folder needs model.lm.path, the folder of a causal language model"
        for part in ("audio", "qformer", "lm"):
            width, heads = getattr(self.model, part).n_embd, getattr(self.model, part).n_head
            if width % heads:
                yield (
                    f"model.{part}.n_embd={width} cannot be shared by model.{part}.n_head={heads} heads; "
                    f"{heads * -(-width // heads)} can"
                )
        if self.encoder.name == "mel" and not self.model.audio.n_layer:
            yield "encoder.name=mel gives plain spectra: set model.audio.n_layer=4 or so to learn from them"
        if self.template.count("{}") != 1:
            yield f"template={self.template!r} must hold {{}} once, where the prompt goes"
        if "asr" not in self.prompts:
            yield "prompts has no asr, the task of utterances that name none; add prompts.asr"
        for task, texts in self.prompts.items():
            if not texts or any(text.count(SPEECH) != 1 for text in texts):
                yield f"prompts.{task} must be a list of texts that hold {SPEECH} once each"
