"""Made-up songs for tests, as a user's folder has them, and a store of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rung.config import Layer, parse_overrides
from rung.data.audio import wav_bytes
from rung.recipes.music.data import prepare
from rung.recipes.music.recipe import Music
from rung.resolve import schema_of

RATE = 8000
SMALL_CODEC = (
    "codec.sample_rate=8000", "codec.hop=200", "codec.num_codebooks=3", "codec.codebook_size=24", "codec.steps=2",
    "codec.fit_minutes=0.2",
)  # fmt: skip


def song(seed: int, seconds: float) -> np.ndarray:
    """(samples, 2): plucked notes, each side with its own level."""
    chance, beat = np.random.default_rng(seed), np.arange(RATE // 5) / RATE
    notes = [
        np.exp(-9 * beat) * np.sin(2 * np.pi * 110 * 2 ** (chance.integers(0, 24) / 12) * beat)
        for _ in range(int(seconds * 5))
    ]
    return np.stack([0.6 * np.concatenate(notes), 0.3 * np.concatenate(notes)], axis=1).astype(np.float32)


def write_songs(folder: Path, num: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num):
        (folder / f"song-{number}.wav").write_bytes(wav_bytes(song(number, (1.2, 7.0, 4.4, 4.8)[number % 4]), RATE))
        text = ["low, slow", "a high note", "plucked, dense, C minor"][number % 3]
        (folder / f"song-{number}_prompt.txt").write_text(text)
    return folder


def write_store(out: Path, folder: Path, *words: str, seed: int = 0) -> Path:
    merged = {word.partition("=")[0]: word for word in (*SMALL_CODEC, *words)}
    layer = Layer("command line", parse_overrides(merged.values()))
    cfg = schema_of("music", Music).resolve([layer]).view("recipe")
    prepare(
        folder, out, cfg, seed=seed, name=out.name, replace=True, report=lambda what, done, total: None, device="cpu"
    )  # fmt: skip
    return out
