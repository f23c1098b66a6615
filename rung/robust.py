"""Statistics that one wild value cannot move: medians and deviations from them, never means and sigmas.

Non-finite values are counted by whoever calls, and never reach these functions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
BEFORE, RESIDUALS = 16, 64  # steps that say what was expected, and residuals that say how far one strays


def median(values: Sequence[float]) -> float:
    """The middle; NaN of nothing."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if not ordered:
        return math.nan
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def sigma(values: Sequence[float]) -> float:
    """The spread of values around their median, as a standard deviation would be without outliers."""
    middle = median(values)
    return SIGMA * median([abs(value - middle) for value in values])


class Spikes:
    """How far each value lies above what the sixteen before it let expect, in robust sigmas of such surprises.

    A loss that falls has large mean and sigma over a long window, in which a jump from 1.2 to 3.7 hides. Against the
    median of the last few it stands out by 40 sigmas, where healthy curves reach 4.
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=BEFORE)
        self._residuals: deque[float] = deque(maxlen=RESIDUALS)
        self._scale, self._centre, self._age = 0.0, 0.0, 0

    def score(self, value: float) -> float:
        """0 while there is too little to compare with; a value that is not finite is not remembered."""
        if not math.isfinite(value):
            return math.inf
        if len(self._values) < BEFORE:
            self._values.append(value)
            return 0.0
        residual = value - median(self._values)
        score = self._of(residual)
        self._values.append(value)
        self._residuals.append(residual)
        return score

    def _of(self, residual: float) -> float:
        if len(self._residuals) < RESIDUALS // 2:
            return 0.0
        if self._age % 8 == 0 or residual - self._centre > 4 * self._scale:  # medians cost 20 us: not at every step
            self._centre, self._scale = median(self._residuals), sigma(self._residuals)
        self._age += 1
        return (residual - self._centre) / max(self._scale, 1e-12)
