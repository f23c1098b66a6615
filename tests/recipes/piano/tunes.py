"""Made-up tunes, and small stores of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rung.recipes.piano import data, midi, notes
from rung.recipes.piano.tokenizer import BIN_WIDTH, EOGENAI, TOKENIZER

SPLIT_SEED = 1  # puts a piece of each composer into validation


def from_units(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    """start and length in units, pitch, velocity"""
    if not rows:
        return np.empty(0, dtype=notes.NOTE)
    start, length, pitch, velocity = np.array(rows).T
    return notes.make(start * 0.01, (start + length) * 0.01, pitch, velocity)


def to_midpoints(some: np.ndarray) -> np.ndarray:
    """The same notes with the velocities that decoding gives."""
    some = notes.in_order(some)
    some["velocity"] = some["velocity"].clip(0, 127) // BIN_WIDTH * BIN_WIDTH + BIN_WIDTH // 2
    return some


def answer(target: np.ndarray, origin_s: float) -> np.ndarray:
    """What a model is to say: the target from `origin_s` on, and <EOGENAI>."""
    return np.append(TOKENIZER.encode(notes.moved(target, -origin_s)), np.uint16(EOGENAI))


def notes_of_tune(number: int, num_notes: int = 12, at: float = 0.0) -> np.ndarray:
    """A tune that no other number has."""
    rng = np.random.default_rng(number)
    start = at + np.arange(num_notes) * 0.25
    return notes.make(start, start + 0.2, rng.integers(40, 90, num_notes), rng.integers(1, 128, num_notes))


def tune(seed: int, num_notes: int = 24) -> bytes:
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.choice([0.1, 0.2, 0.4], size=num_notes))
    return midi.write_midi(notes.make(starts, starts + 0.2, 50 + rng.integers(0, 24, num_notes), 64))


def write_store(out: Path, tunes: dict[str, int] | None = None) -> Path:
    """Tunes by path, where the same seed is the same tune; without any, twenty pieces each of Bach and Chopin."""
    if tunes is None:
        names = [f"{composer}/piece{n}/a.mid" for composer in ("Bach", "Chopin") for n in range(20)]
        tunes = {name: seed for seed, name in enumerate(names)}
    folder = out.parent / f"{out.name}-midi"
    for name, seed in tunes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tune(seed))
    out.parent.mkdir(parents=True, exist_ok=True)
    data.prepare(folder, out, seed=SPLIT_SEED)
    return out
