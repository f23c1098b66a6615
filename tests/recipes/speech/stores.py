"""Small stores of speech for tests: tones whose pitch spells the text, encoded by plain log-mel spectra."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rung.data.audio import wav_bytes
from rung.resolve import schema_of

WORDS = ("low", "mid", "high", "peak")
PITCHES = (220.0, 440.0, 880.0, 1760.0)
# What makes the recipe small enough for a test, whatever the preset.
SMALL = """
encoder.name=mel model.audio.n_layer=1 model.audio.n_head=2 model.audio.n_embd=16 model.audio.stack=4
model.qformer.n_layer=1 model.qformer.n_head=2 model.qformer.n_embd=16 model.qformer.window_s=0.16
model.qformer.stride_s=0.16 model.lm.name=bytes model.lm.n_layer=2 model.lm.n_head=2 model.lm.n_embd=32
model.dropout=0.1 dataset.silence_s=0.02 data.text_length=24 data.bucket=16 evaluation.wer_rows=4
evaluation.num_tokens=12 sampling.num_tokens=12
""".split()  # noqa: SIM905 (as one writes them on a command line)
PROMPTS = 'prompts={asr: ["hear <SpeechHere> ", "<SpeechHere>: "], qa: ["<SpeechHere> {} "]}'


def write_tones(folder: Path, num: int = 24, seed: int = 0) -> Path:
    """WAV files of one to three tones by six speakers, every fifth with a question, and their annotation."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num):
        which = rng.integers(0, len(WORDS), 1 + number % 3)
        places = np.arange(3200) / 16000
        tones = [np.sin(2 * np.pi * PITCHES[one] * places) * np.hanning(3200) for one in which]
        sound = 0.3 * np.concatenate(tones) + 1e-4 * rng.standard_normal(3200 * len(which))
        (folder / f"{number:03d}.wav").write_bytes(wav_bytes(sound.astype(np.float32), 16000))
        row = {"path": f"{number:03d}.wav", "text": " ".join(WORDS[one] for one in which), "speaker": f"s{number % 6}"}
        if number % 5 == 4:
            row |= {"task": "qa", "Q": "how many?", "text": str(len(which))}
        rows.append(row)
    (folder / "annotation.json").write_text(json.dumps({"annotation": rows}), "utf-8")
    return folder / "annotation.json"


def make_store(folder: Path, *words: str, num: int = 24) -> Path:
    """Prepares such tones as `rung data speech` does."""
    from rung.config import Layer, parse_overrides
    from rung.recipes.speech.recipe import Speech

    merged = {word.partition("=")[0]: word for word in (*SMALL, "dataset.held_out=0.2", *words)}
    overrides = parse_overrides(merged.values())
    config = schema_of("speech", Speech).resolve([Layer("command line", overrides)])
    annotation = write_tones(folder / "tones", num)
    path, _ = Speech.prepare(
        config.view("recipe"), 1, annotation, str(folder / "store"), True, lambda what, done, total: None, "cpu"
    )
    return path


def write_lm(folder: Path) -> Path:
    """A small causal model of bytes, as `rung export --hf` writes a text run, with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rung.data.tokenizer import Bytes

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, attention_dropout=0.1, initializer_range=0.3)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "vocabulary.json").write_text(json.dumps({"tokenizer": Bytes().description}), "utf-8")
    return folder
