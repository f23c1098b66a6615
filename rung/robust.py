"""Statistics that one wild value cannot move: medians and deviations from them, never means and sigmas.

Non-finite values are counted by whoever calls, and never reach these functions.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
BEFORE = 16  # steps that say what was expected
LATELY, MEMORY = 64, 256  # residuals that say how far one strays, and those whose largest is remembered
RISE = 8  # steps in which a jump may grow: it is not compared with its own beginning
LEAST = 32  # residuals, before anything is a jump
FLOOR = 1e-3  # of the first values, and of what was expected: eight times that, about 1 %, is the least jump


def median(values: Sequence[float]) -> float:
    """The middle; NaN of nothing."""
    return statistics.median(values) if len(values) else math.nan


def sigma(values: Sequence[float]) -> float:
    """The spread of values around their median, as a standard deviation would be without outliers."""
    middle = median(values)
    return SIGMA * median([abs(value - middle) for value in values])


def theil_sen(steps: np.ndarray, values: np.ndarray, most: int = 120, continuity: int = 1) -> tuple[float, float]:
    """The median of all slopes between two points, and the p value of so clear a rise or fall (Kendall, two-sided).

    Of a longer series `most` points are taken, spread evenly: all pairs of a thousand say no more. With so many, the
    correction for `continuity` can be left out.
    """
    if len(steps) > most:
        kept = np.linspace(0, len(steps) - 1, most).astype(int)
        steps, values = steps[kept], values[kept]
    num = len(steps)
    _, ties = np.unique(values, return_counts=True)
    variance = (num * (num - 1) * (2 * num + 5) - float(np.sum(ties * (ties - 1) * (2 * ties + 5)))) / 18
    if num < 3 or variance <= 0:
        return 0.0, 1.0
    i, j = np.triu_indices(num, 1)
    rises = values[j] - values[i]
    z = max(abs(float(np.sign(rises).sum())) - continuity, 0.0) / math.sqrt(variance)
    return float(np.median(rises / (steps[j] - steps[i]))), math.erfc(z / math.sqrt(2))


def surprise(residual: float, earlier: Sequence[float], floor: float) -> float:
    """How far a value lies above expectation, in spreads of earlier such residuals; 0 below twice the largest of them.

    A median absolute deviation sees only the middle, and losses of healthy runs have long tails: one wrong label in a
    batch of sixteen is a jump of 30 such sigmas, at every tenth batch. So the tail counts too. Of 98 recorded healthy
    runs none reaches 8; a batch of one repeated token reaches 72, a step at 30 times the rate 22, at 100 times 86.
    """
    if residual <= max(floor, 2 * max(earlier)):
        return 0.0
    lately = sorted(earlier[-LATELY:])
    centre = max(median(lately), 0.0)  # below 0 while a loss falls: that it stops falling is no jump
    tail = lately[int(0.95 * len(lately))] - centre
    spread = max(sigma(lately), tail / 2, floor)
    return (residual - centre) / spread if spread > 0 else 0.0


class Spikes:
    """How far each value lies above what the sixteen before it let expect, as they come; see `surprise`.

    A loss that falls has large mean and sigma over a long window, in which a jump from 1.2 to 3.7 hides. Against the
    median of the last few it stands out. The newest residuals are not compared with: a jump may take steps to rise.
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=BEFORE)
        self._residuals: deque[float] = deque(maxlen=MEMORY + RISE)
        self._first = 0.0

    def score(self, value: float) -> float:
        """0 while there is too little to compare with; a value that is not finite is not remembered."""
        if not math.isfinite(value):
            return math.inf
        if len(self._values) < BEFORE:
            self._values.append(value)
            self._first = abs(median(self._values))
            return 0.0
        expected = median(self._values)
        residual, floor = value - expected, FLOOR * max(self._first, abs(expected))
        is_asked = residual > floor and len(self._residuals) >= LEAST + RISE
        score = surprise(residual, list(self._residuals)[:-RISE], floor) if is_asked else 0.0
        self._values.append(value)
        self._residuals.append(residual)
        return score
