"""If this fails, noise can pass for music."""

from __future__ import annotations

import numpy as np
import pytest

from rung.recipes.music.metrics import chroma_statistics, compare, frechet, onset_statistics, spectra

RATE = 24000


def melody(seed: int, seconds: float = 4.0, beat_s: float = 0.25) -> np.ndarray:
    """Plucked notes of a major scale on a beat."""
    chance, time = np.random.default_rng(seed), np.arange(int(beat_s * RATE)) / RATE
    notes = []
    for _ in range(int(seconds / beat_s)):
        pitch = 220 * 2 ** (chance.choice([0, 2, 4, 5, 7, 9, 11, 12]) / 12)
        notes.append(np.exp(-8 * time) * sum(np.sin(2 * np.pi * k * pitch * time) / k for k in (1, 2, 3)))
    return (0.3 * np.concatenate(notes)).astype(np.float32)


def test_music_is_nearer_to_music_than_noise_is() -> None:
    chance = np.random.default_rng(0)
    reference = [melody(n) for n in range(8)]
    other = compare([melody(n) for n in range(8, 16)], reference, RATE)
    noise = compare([0.1 * chance.standard_normal(4 * RATE) for _ in range(8)], reference, RATE)
    assert all(3 * a < b for a, b in zip(other, noise))
    assert compare(reference, reference, RATE) == pytest.approx((0, 0, 0), abs=1e-3)


def test_another_beat_is_seen_by_onsets_and_another_scale_by_chroma() -> None:
    reference = [melody(n) for n in range(8)]
    same, slow = (compare([melody(n, beat_s=beat) for n in range(8, 16)], reference, RATE) for beat in (0.25, 0.5))
    assert slow.onset > 3 * same.onset


def test_onsets_are_counted() -> None:
    log = np.log(np.maximum(spectra(melody(1), 1024, 256), 1e-3))
    per_s, gap, *_ = onset_statistics(log, RATE / 256)
    assert per_s == pytest.approx(4, abs=0.8)
    assert gap == pytest.approx(0.25, abs=0.02)


def test_chroma_does_not_depend_on_the_key() -> None:
    a = melody(3)
    b = np.interp(np.arange(0, len(a) - 1, 2 ** (2 / 12)), np.arange(len(a)), a).astype(np.float32)  # two semitones up
    np.testing.assert_allclose(chroma_statistics(a, RATE)[3:], chroma_statistics(b, RATE)[3:], atol=0.15)


def test_frechet_of_known_distributions() -> None:
    chance = np.random.default_rng(0)
    a, b = chance.standard_normal((50000, 3)), 2 * chance.standard_normal((50000, 3)) + 1
    assert frechet(a, b) == pytest.approx(3 * 1 + 3 * (2 - 1) ** 2, rel=0.03)
