"""If this fails, the figures by which codecs and samples are judged mean something else than they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rung.errors import DataError
from rung.recipes.music.spectra import FLOOR, frame_size, log_mel, log_mel_distance, mel_filters, si_sdr


def noise(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, num).astype(np.float32)


@pytest.mark.parametrize(("sample_rate", "size"), [(24000, 1024), (44100, 2048), (16000, 512)])
def test_filters_are_those_of_transformers(sample_rate: int, size: int) -> None:
    audio_utils = pytest.importorskip("transformers.audio_utils")
    theirs = audio_utils.mel_filter_bank(size // 2 + 1, 40, 0, sample_rate / 2, sample_rate, norm=None, mel_scale="htk")
    np.testing.assert_allclose(mel_filters(size, sample_rate, 40), theirs, atol=1e-5)


def test_every_one_of_eighty_bands_hears_something() -> None:
    assert (mel_filters(*(frame_size(24000)[0], 24000, 80)).sum(0) > 0).all()


def test_log_mel_is_that_of_torch() -> None:
    sound = noise(10_001)
    window = torch.hann_window(1024)
    bins = torch.stft(torch.from_numpy(sound), 1024, 256, window=window, return_complex=True, pad_mode="constant")
    theirs = torch.log((bins.abs().T @ torch.from_numpy(mel_filters(1024, 24000, 80))).clamp(min=FLOOR))
    ours = log_mel(sound, 24000)
    assert ours.shape == (10_001 // 256 + 1, 80)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


def test_a_tone_is_heard_in_its_band() -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(24000) / 24000).astype(np.float32)
    mels = 2595 * np.log10(1 + np.array([1000, 12000]) / 700)
    assert log_mel(tone, 24000)[40].argmax() == round(mels[0] / mels[1] * 81) - 1


def test_log_mel_distance_of_a_gain_is_its_logarithm() -> None:
    sound = noise(24000)
    assert log_mel_distance(sound, sound) == 0
    assert log_mel_distance(sound, sound * np.float32(2)) == pytest.approx(np.log(2), abs=1e-4)
    assert log_mel(np.zeros(1, np.float32), 24000) == pytest.approx(np.log(FLOOR))


def test_si_sdr_of_a_scaled_copy_is_infinite() -> None:
    sound = noise(5000)
    assert si_sdr(sound, sound) == np.inf
    assert si_sdr(sound, sound * np.float32(-0.5)) == np.inf
    assert si_sdr(sound, np.zeros_like(sound)) == -np.inf


@pytest.mark.parametrize("db", [-5.0, 0.0, 17.0])
def test_si_sdr_of_known_noise_is_known(db: float) -> None:
    sound, other = noise(5000).astype(np.float64), noise(5000, 1).astype(np.float64)
    other -= sound * (sound @ other) / (sound @ sound)  # nothing of the reference in it
    other *= np.sqrt((sound @ sound) / (other @ other)) * 10 ** (-db / 20)
    assert si_sdr(sound, 3 * (sound + other)) == pytest.approx(db, abs=1e-6)


def test_what_cannot_be_compared_is_refused() -> None:
    for a, b in ((noise(5), noise(6)), (noise(6).reshape(3, 2), noise(6).reshape(3, 2)), (noise(0), noise(0))):
        with pytest.raises(DataError) as caught:
            log_mel_distance(a, b)
        assert caught.value.code == "bad-shape"
    with pytest.raises(DataError) as caught:
        si_sdr(np.zeros(4), np.ones(4))
    assert caught.value.code == "silent"
