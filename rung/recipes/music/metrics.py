"""How alike two sets of clips are, as figures that need no trained judge.

Three looks: the timbre (Fréchet distance of log-mel frames), the rhythm (onsets: how many, how far apart, how strong)
and the harmony (chroma: how clear, how changing, which intervals sound together). Each of the latter two is a mean over
statistics of the first Wasserstein distance between the two sets, in units of the reference's own spread. A distance
means something only beside that of other real clips and that of noise.

Shapes: N samples, T frames, K bands or statistics, P clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rung.recipes.music.spectra import frame_size, log_mel

CHROMA_FFT = 4096  # 6 Hz a bin at 24 kHz: two notes a semitone apart differ from 100 Hz on


class Likeness(NamedTuple):
    """Distances, 0 for the same clips."""

    mel: float
    onset: float
    chroma: float


class Features(NamedTuple):
    mel_TK: np.ndarray
    onset_PK: np.ndarray
    chroma_PK: np.ndarray


def compare(clips: Sequence[np.ndarray], reference: Sequence[np.ndarray], sample_rate: int) -> Likeness:
    """Of mono clips, (N,) each; put about as much in one set as in the other."""
    return distance(features(clips, sample_rate), features(reference, sample_rate))


def features(clips: Sequence[np.ndarray], sample_rate: int) -> Features:
    logs = [log_mel(clip, sample_rate) for clip in clips]
    onset = np.stack([onset_statistics(log, sample_rate / frame_size(sample_rate)[1]) for log in logs])
    chroma = np.stack([chroma_statistics(clip, sample_rate) for clip in clips])
    return Features(np.concatenate(logs), onset, chroma)


def distance(a: Features, b: Features) -> Likeness:
    return Likeness(
        frechet(a.mel_TK, b.mel_TK), _wasserstein(a.onset_PK, b.onset_PK), _wasserstein(a.chroma_PK, b.chroma_PK)
    )


def spectra(clip: np.ndarray, size: int, hop: int) -> np.ndarray:
    """Magnitudes (T, bins) under a Hann window; a clip shorter than the window is filled up."""
    clip = np.pad(clip.astype(np.float32), (0, max(0, size - len(clip))))
    frames = np.lib.stride_tricks.sliding_window_view(clip, size)[::hop]
    return np.abs(np.fft.rfft(frames * np.hanning(size + 1)[:-1].astype(np.float32))).astype(np.float32)


def onset_statistics(log_TK: np.ndarray, frames_per_s: float) -> np.ndarray:
    """Onsets a second, median distance of two and its spread, how far the strongest stand out, how regular they are.

    An onset is a frame where the rise of the log-mel spectrum, summed over bands, is the largest within 60 ms and half
    a spread above its own mean.
    """
    rise = np.maximum(np.diff(log_TK, axis=0), 0).sum(axis=1)
    reach = max(1, round(0.06 * frames_per_s))
    padded = np.pad(rise, reach, constant_values=-np.inf)
    highest = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1).max(axis=1)
    places = np.flatnonzero((rise == highest) & (rise > rise.mean() + 0.5 * rise.std()))
    gaps = np.diff(places) / frames_per_s
    if not len(gaps):
        gaps = np.array([len(rise) / frames_per_s])
    centred = rise - rise.mean()
    power = np.correlate(centred, centred, "full")[len(centred) - 1 :]
    fast, slow = round(frames_per_s * 0.2), round(frames_per_s * 2.0)  # 300 to 30 beats a minute
    pulse = power[fast:slow].max(initial=0.0) / max(power[0], 1e-9)
    return np.array(
        [
            len(places) * frames_per_s / max(1, len(rise)), np.median(gaps), gaps.std(),
            np.percentile(rise, 98) / max(rise.mean(), 1e-9), pulse,
        ]
    )  # fmt: skip


def chroma_statistics(clip: np.ndarray, sample_rate: int) -> np.ndarray:
    """How much of the sound is in the three strongest pitch classes, how fast they change, and which intervals sound.

    Intervals are the circular autocorrelation of the mean chroma: they do not depend on the key.
    """
    power = spectra(clip, CHROMA_FFT, CHROMA_FFT // 4) ** 2
    bins = np.fft.rfftfreq(CHROMA_FFT, 1 / sample_rate)
    heard = (bins > 80) & (bins < 2500)
    pitch_class = np.rint(12 * np.log2(bins[heard] / 440)).astype(int) % 12
    chroma = np.zeros((len(power), 12))
    for k in range(12):
        chroma[:, k] = power[:, heard][:, pitch_class == k].sum(axis=1)
    loud = chroma.sum(axis=1) > 1e-6 * max(chroma.sum(axis=1).max(initial=0.0), 1e-12)
    chroma = chroma[loud] / chroma[loud].sum(axis=1, keepdims=True) if loud.any() else np.full((1, 12), 1 / 12)
    clear = np.sort(chroma, axis=1)[:, -3:].sum(axis=1).mean()
    change = np.abs(np.diff(chroma, axis=0)).sum(axis=1).mean() if len(chroma) > 1 else 0.0
    mean = chroma.mean(axis=0)
    intervals = [float((mean * np.roll(mean, k)).sum() / (mean * mean).sum()) for k in range(1, 7)]
    entropy = -(mean * np.log(np.maximum(mean, 1e-12))).sum()
    return np.array([clear, change, entropy, *intervals])


def frechet(a_TK: np.ndarray, b_TK: np.ndarray) -> float:
    """Between normal distributions of the same means and covariances."""
    (mean_a, cov_a), (mean_b, cov_b) = ((x.mean(axis=0), np.cov(x.astype(np.float64).T)) for x in (a_TK, b_TK))
    values, vectors = np.linalg.eigh(cov_a)
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ cov_b @ root), 0)).sum()
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * cross)


def _wasserstein(a_PK: np.ndarray, b_PK: np.ndarray) -> float:
    """Mean over statistics of the distance between their distributions, in spreads of the second set."""
    shares = np.linspace(0, 1, 101)
    a, b = (np.quantile(x, shares, axis=0) for x in (a_PK, b_PK))
    return float((np.abs(a - b).mean(axis=0) / np.maximum(b_PK.std(axis=0), 1e-6)).mean())
