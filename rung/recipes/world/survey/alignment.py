"""Checks before training whether controls and pictures belong together at the same moment.

The motion between two frames is estimated from the pictures alone, and each control is predicted from it by least
squares, with the controls taken some frames earlier or later: R2 should peak at lag 0. Lag n: the picture follows n
frames after the row of its control. The raw difference of two frames would not do: it explains at most 2 % of recorded
controls, the motion 70 % (yaw of a ViZDoom walk) and 60 % (steering of a model car).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LAGS = np.arange(-5, 6)
NOW = 5  # the place of lag 0
MOTIONS = ("sideways", "down", "growth", "roll")
LEAST_ROWS = 100  # fewer cannot tell one lag from another
LEAST_R2 = 0.05  # a control below this at every lag cannot be seen in the pictures
LEAST_GAIN = 0.02  # of the peak: smooth controls differ little from one frame to the next
AGREEMENT = 0.95  # of the resampled films
ODD_R2, ODD_GAIN = 0.2, 0.05  # a stretch that fits this well at its own lag, and so much better than at that of most
NUM_RESAMPLED = 1000
NUM_STRETCHES = 12  # at least about as many, to resample


class Span(NamedTuple):
    """Rows of one record: frames, controls and nothing of its neighbours."""

    label: str
    start: int
    length: int


@dataclass(frozen=True)
class Stretch:
    """One piece of a record, and the lag at which its controls fit best."""

    label: str
    start: int  # the row of the store
    length: int
    lag: int
    is_odd: bool


@dataclass(frozen=True)
class Alignment:
    """`verdict`: aligned, misaligned, unsure (a peak elsewhere that could be chance), unseen (no control can be read
    off the pictures) or short (too few rows)."""

    verdict: str
    num_rows: int = 0
    lag: int = 0
    gain: float = 0.0  # R2 at the peak over that at lag 0, less 1
    agreement: float = 0.0  # share of resampled films with the same peak
    half_width: float = 0.0  # lags from the peak to where R2 is half; large for smooth controls
    overall: tuple[float, ...] = ()  # mean R2 per lag, each channel with the weight of its peak
    low: tuple[float, ...] = ()  # of 95 % of the resampled films
    high: tuple[float, ...] = ()
    channels: dict[str, tuple[float, ...]] | None = None  # R2 per lag, all channels
    stretches: tuple[Stretch, ...] = ()


def align(
    motion: np.ndarray,  # (N, 4): how the picture came from the one before, NaN in the first row of a record
    controls: np.ndarray,  # (N, C)
    is_valid: np.ndarray,  # (N,) whether the control is known
    names: Sequence[str],
    spans: Sequence[Span],
) -> Alignment:
    rows = [_usable_rows(span, motion, is_valid) for span in spans]
    num_rows = sum(map(len, rows))
    if num_rows < LEAST_ROWS:
        return Alignment("short", num_rows)
    motion = np.clip(motion, *np.nanpercentile(motion, (1, 99), axis=0))  # a failed estimate is far off
    scale = controls[is_valid].std(0)
    u = np.where(is_valid[:, None], controls - controls[is_valid].mean(0), 0) / np.where(scale > 0, scale, 1)
    size = int(np.clip(num_rows // NUM_STRETCHES, 40, 400))
    cut = [
        (span, part)
        for span, own in zip(spans, rows)
        if len(own)
        for part in np.array_split(own, max(1, round(len(own) / size)))
    ]
    parts = []
    for _, part in cut:
        x, y = np.column_stack([np.ones(len(part)), motion[part]]), np.stack([u[part - lag] for lag in LAGS])
        parts.append(Sums(x.T @ x, x.T @ y, (y**2).sum(1)))
    sums = Sums.over(parts)
    r2_LC = sums.total().r2()
    peak_C = r2_LC.max(0)
    weight_C = np.where(peak_C >= LEAST_R2, peak_C, 0)  # what can hardly be seen hardly counts
    curves = {name: tuple(map(float, r2_LC[:, c])) for c, name in enumerate(names)}
    if not weight_C.any():
        return Alignment("unseen", num_rows, channels=curves)
    weight_C = weight_C / weight_C.sum()
    overall = r2_LC @ weight_C
    best = int(overall.argmax())
    shares = np.random.default_rng(0).multinomial(len(cut), np.full(len(cut), 1 / len(cut)), NUM_RESAMPLED)
    resampled = sums.weighted(shares).r2() @ weight_C
    agreement = float((resampled.argmax(1) == best).mean())
    gain = float(overall[best] / max(overall[NOW], 1e-9) - 1)
    is_sure = gain > LEAST_GAIN and agreement >= AGREEMENT
    return Alignment(
        "aligned" if best == NOW else "misaligned" if is_sure else "unsure",
        num_rows,
        int(LAGS[best]),
        gain,
        agreement,
        half_width(overall, best),
        tuple(map(float, overall)),
        tuple(map(float, np.percentile(resampled, 2.5, axis=0))),
        tuple(map(float, np.percentile(resampled, 97.5, axis=0))),
        curves,
        tuple(_stretches(cut, sums, weight_C, best)),
    )


def _usable_rows(span: Span, motion: np.ndarray, is_valid: np.ndarray) -> np.ndarray:
    """Rows whose motion is known and whose controls are at every lag: all lags are judged on the same rows."""
    reach = int(np.abs(LAGS).max())
    rows = np.arange(span.start + reach, span.start + span.length - reach)
    known = np.isfinite(motion[rows]).all(1)
    for lag in LAGS:
        known &= is_valid[rows - lag]
    return rows[known]


class Sums(NamedTuple):
    """All that least squares needs to know of a stretch; those of several stretches add up."""

    xx: np.ndarray  # (..., 5, 5) of [1, motion]
    xy: np.ndarray  # (..., L, 5, C) with the controls at each lag
    yy: np.ndarray  # (..., L, C)

    @classmethod
    def over(cls, stretches: Sequence[Sums]) -> Sums:
        return cls(*(np.stack(parts) for parts in zip(*stretches)))

    def total(self) -> Sums:
        return Sums(*(part.sum(0) for part in self))

    def weighted(self, weights: np.ndarray) -> Sums:
        return Sums(*(np.tensordot(weights, part, 1) for part in self))

    def readout(self) -> np.ndarray:
        """(..., L, 5, C): what to multiply the motion by to get the control."""
        ridge = 1e-9 * np.trace(self.xx, axis1=-2, axis2=-1)[..., None, None] * np.eye(self.xx.shape[-1])
        return np.linalg.solve((self.xx + ridge)[..., None, :, :], self.xy)

    def r2(self) -> np.ndarray:
        """(..., L, C): the share of each control's variance that the motion explains."""
        num_rows = self.xx[..., 0, 0][..., None, None]
        mean = self.xy[..., 0, :] ** 2 / num_rows
        explained = (self.readout() * self.xy).sum(-2) - mean
        variance = self.yy - mean
        return np.where(variance > 1e-9 * num_rows, explained / np.maximum(variance, 1e-12), 0).clip(0, 1)


def _stretches(cut: Sequence[tuple[Span, np.ndarray]], sums: Sums, weight_C: np.ndarray, best: int) -> list[Stretch]:
    """Each stretch by itself, with the readout of the whole film: it has too few rows to fit one of its own."""
    readout = sums.total().readout()[best]  # (5, C)
    curves = np.stack([_correlation(readout, *each) @ weight_C for each in zip(sums.xx, sums.xy, sums.yy)])
    own = curves.argmax(1)
    # What most rows say, which need not be the lag that fits all of them best together
    usual = int(np.bincount(own, [len(rows) for _, rows in cut], len(LAGS)).argmax())
    is_odd = (own != usual) & (curves.max(1) > ODD_R2) & (curves.max(1) > (1 + ODD_GAIN) * curves[:, usual])
    return [
        Stretch(span.label, int(rows[0]), int(rows[-1] - rows[0] + 1), int(LAGS[lag]), bool(odd))
        for (span, rows), lag, odd in zip(cut, own, is_odd)
    ]


def _correlation(readout: np.ndarray, xx: np.ndarray, xy: np.ndarray, yy: np.ndarray) -> np.ndarray:
    """(L, C): squared correlation of what is read off and what was recorded; 0 where they are opposed."""
    number = xx[0, 0]
    mean_read, mean = xx[0] @ readout / number, xy[:, 0] / number
    covariance = (xy * readout).sum(1) / number - mean_read * mean
    variance_read = np.einsum("ic,ij,jc->c", readout, xx, readout) / number - mean_read**2
    variances = np.maximum(variance_read * (yy / number - mean**2), 1e-12)
    correlation: np.ndarray = np.maximum(covariance, 0) ** 2 / variances
    return correlation


def half_width(curve: np.ndarray, best: int) -> float:
    """Lags from the peak to where the curve is half as high, on the steeper side."""
    widths = []
    for side in (1, -1):
        at = best
        while 0 <= at + side < len(curve) and curve[at + side] > curve[best] / 2:
            at += side
        if 0 <= at + side < len(curve):
            widths.append(abs(at - best) + (curve[at] - curve[best] / 2) / (curve[at] - curve[at + side]))
    return float(min(widths)) if widths else float(len(curve))


def film_motion(levels: Sequence[np.ndarray], spans: Sequence[Span], report: Callable[[int], None]) -> np.ndarray:
    """(N, 4), NaN outside of the spans and at their beginnings; `levels` are the same frames, ever finer.

    `report` gets the number of frames that are done.
    """
    motion, done = np.full((len(levels[0]), len(MOTIONS)), np.nan), 0
    for span in spans:
        for first in range(span.start + 1, span.start + span.length, 512):
            stop = min(first + 512, span.start + span.length)
            motion[first:stop] = frame_motion([level[first - 1 : stop] for level in levels])
            done += stop - first
            report(done)
    return motion


def frame_motion(levels: Sequence[np.ndarray]) -> np.ndarray:
    """(n, 4) from each of n + 1 frames to the next, in pixels of the last level; the coarsest level begins."""
    found = np.zeros((len(levels[0]) - 1, len(MOTIONS)))
    for number, frames in enumerate(levels):
        grey = np.asarray(frames, np.float64).mean(-1) / 127.5 - 1
        if number:
            found = found * (grey.shape[2] / (np.asarray(levels[number - 1]).shape[2]))
        for _ in range(3):
            found = _refine(grey, found)
    return found


def _refine(grey: np.ndarray, found: np.ndarray) -> np.ndarray:
    """One Gauss-Newton step: move the earlier picture as found so far, explain what is left by its gradients."""
    n, height, width = len(grey) - 1, *grey.shape[1:]
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    x, y, reach = x - (width - 1) / 2, y - (height - 1) / 2, width / 2
    right, down, growth, roll = found.T[:, :, None, None] / np.array([1, 1, reach, reach])[:, None, None, None]
    from_x, from_y = x - right - growth * x + roll * y, y - down - growth * y - roll * x
    slope_y, slope_x = np.gradient(grey, axis=(1, 2))
    before, is_inside = _look_up(np.stack([grey[:-1], slope_x[:-1], slope_y[:-1]], -1), from_x, from_y)
    dx, dy = (before[..., 1] + slope_x[1:]) / 2, (before[..., 2] + slope_y[1:]) / 2
    # Beside the four motions, contrast and brightness may change: a lamp is not a movement.
    causes = [-dx, -dy, -(x * dx + y * dy) / reach, -(x * dy - y * dx) / reach, before[..., 0], np.ones_like(dx)]
    a = (np.stack(causes, -1) * is_inside[..., None]).reshape(n, height * width, -1)
    rest = ((grey[1:] - before[..., 0]) * is_inside).reshape(n, -1, 1)
    square = a.transpose(0, 2, 1) @ a
    size = np.trace(square[:, :4, :4], axis1=1, axis2=2)[:, None, None] / 4
    step = np.linalg.solve(square + (1e-3 * size + 1e-6) * np.eye(a.shape[-1]), a.transpose(0, 2, 1) @ rest)[:, :4, 0]
    return np.clip(found + np.clip(step, -2, 2), -width / 3, width / 3)


def _look_up(pictures: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear, at places counted from the middle; and which places lie inside."""
    n, height, width, _ = pictures.shape
    x, y = x + (width - 1) / 2, y + (height - 1) / 2
    is_inside = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
    left = np.clip(np.floor(x).astype(np.int64), 0, width - 2)
    top = np.clip(np.floor(y).astype(np.int64), 0, height - 2)
    fx, fy = np.clip(x - left, 0, 1)[..., None], np.clip(y - top, 0, 1)[..., None]
    k = np.arange(n)[:, None, None]
    upper = pictures[k, top, left] * (1 - fx) + pictures[k, top, left + 1] * fx
    lower = pictures[k, top + 1, left] * (1 - fx) + pictures[k, top + 1, left + 1] * fx
    return upper * (1 - fy) + lower * fy, is_inside
