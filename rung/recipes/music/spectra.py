"""Mel spectra, and the two figures by which sounds are compared: SI-SDR and the distance of log-mel spectra.

A log-mel spectrum is the natural logarithm of magnitudes (not powers) in triangular bands of peak one, spaced evenly on
the HTK mel scale from 0 Hz to half the sample rate. Frames are 43 ms long (1024 samples at 24 kHz) and four to a
frame's length, the first one centred on the first sample; Hann window. Magnitudes under FLOOR count as FLOOR, which is
about what rounding to 16 bits adds (2e-4 in the low bands, 3e-3 in the highest).

Shapes: N samples, T frames, F bins of the Fourier transform, M mel bands.
"""

from __future__ import annotations

import functools

import numpy as np

from rung.errors import DataError

FRAME_S = 1024 / 24000
FLOOR = 1e-3
_BLOCK_FRAMES = 4096  # one hour at 24 kHz has 338,000 frames, 1.4 GB of complex numbers


def log_mel(sound_N: np.ndarray, sample_rate: int, num_bands: int = 80) -> np.ndarray:
    """(T, M) float32, T = N // hop + 1, where the hop is a quarter of a frame: 256 samples at 24 kHz."""
    if sound_N.ndim != 1:
        problem = f"a log-mel spectrum is of one channel, not of shape {sound_N.shape}"
        raise DataError(f"{problem}; mix the channels first", code="bad-shape")
    size, hop = frame_size(sample_rate)
    padded = np.pad(sound_N.astype(np.float32), size // 2)
    frames_TN = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop]
    window_N = np.hanning(size + 1)[:-1].astype(np.float32)
    filters_FM = mel_filters(size, sample_rate, num_bands)
    blocks = []
    for first in range(0, len(frames_TN), _BLOCK_FRAMES):
        magnitudes_TF = np.abs(np.fft.rfft(frames_TN[first : first + _BLOCK_FRAMES] * window_N))
        blocks.append(np.log(np.maximum(magnitudes_TF.astype(np.float32) @ filters_FM, FLOOR)))
    return np.concatenate(blocks)


def frame_size(sample_rate: int) -> tuple[int, int]:
    """Samples in a frame (the power of two nearest to 43 ms) and from one frame to the next."""
    size = 2 ** max(4, round(float(np.log2(FRAME_S * sample_rate))))
    return size, size // 4


@functools.lru_cache(maxsize=8)
def mel_filters(size: int, sample_rate: int, num_bands: int) -> np.ndarray:
    """(F, M) float32: how much each bin of a transform of `size` samples adds to each band."""
    top = 2595.0 * np.log10(1 + sample_rate / 2 / 700)
    corners = 700 * (10 ** (np.linspace(0, top, num_bands + 2) / 2595.0) - 1)
    bins_F = np.linspace(0, sample_rate / 2, size // 2 + 1)[:, None]
    low, peak, high = corners[:-2], corners[1:-1], corners[2:]
    filters_FM = np.maximum(np.minimum((bins_F - low) / (peak - low), (high - bins_F) / (high - peak)), 0)
    return filters_FM.astype(np.float32)


def log_mel_distance(a_N: np.ndarray, b_N: np.ndarray, sample_rate: int = 24000) -> float:
    """Mean absolute difference of two log-mel spectra of 80 bands; 0.69 is a factor of two everywhere."""
    _check_alike(a_N, b_N)
    return float(np.abs(log_mel(a_N, sample_rate) - log_mel(b_N, sample_rate)).mean())


def si_sdr(reference_N: np.ndarray, estimate_N: np.ndarray) -> float:
    """Scale-invariant signal to distortion ratio in dB (Le Roux et al. 2019, without their removal of the mean).

    Infinite for a scaled copy, -inf for a silent estimate or one that has nothing of the reference.
    """
    _check_alike(reference_N, estimate_N)
    reference, estimate = reference_N.astype(np.float64), estimate_N.astype(np.float64)
    energy = float(reference @ reference)
    if energy == 0:
        raise DataError("SI-SDR is not defined for a silent reference; leave such sounds out", code="silent")
    signal = reference * (float(reference @ estimate) / energy)
    kept, lost = float(signal @ signal), float(np.square(estimate - signal).sum())
    if kept == 0:
        return -np.inf
    # What double precision cannot tell from a scaled copy is one.
    return np.inf if lost <= 1e-28 * kept else float(10 * np.log10(kept / lost))


def _check_alike(a_N: np.ndarray, b_N: np.ndarray) -> None:
    if a_N.shape != b_N.shape or a_N.ndim != 1 or not len(a_N):
        problem = f"sounds of shapes {a_N.shape} and {b_N.shape} cannot be compared"
        raise DataError(f"{problem}; give two of one channel and equal length", code="bad-shape")
