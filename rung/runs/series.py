"""One recorded value by step, as numpy arrays; the only module under runs that imports numpy when it is loaded.

A series holds only the rows that have the value, so that absent and NaN stay different things. Values that are not
finite are counted and never averaged.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rung.robust import SIGMA

WINDOW = 100  # steps over which a state of a run is judged


class Series(NamedTuple):
    """One recorded value by step."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> Series:
        good = np.isfinite(self.values)
        return Series(self.steps[good], self.values[good])

    @property
    def num_bad(self) -> int:
        return int((~np.isfinite(self.values)).sum())

    def last(self, num_rows: int = WINDOW) -> Series:
        return Series(self.steps[-num_rows:], self.values[-num_rows:])

    def between(self, first: int, end: int) -> Series:
        """Steps in [first, end)."""
        a, b = np.searchsorted(self.steps, [first, end])
        return Series(self.steps[a:b], self.values[a:b])

    @property
    def median(self) -> float:
        """Of the finite values; NaN where there is none."""
        values = self.finite.values
        return float(np.median(values)) if len(values) else float("nan")

    @property
    def sigma(self) -> float:
        """Robust: 1.4826 times the median distance from the median."""
        values = self.finite.values
        return float(SIGMA * np.median(np.abs(values - np.median(values)))) if len(values) else float("nan")

    @property
    def jumps(self) -> Series:
        """From each value to the next; their sigma says how rough a curve is, whichever way it goes."""
        return Series(self.steps[1:], np.diff(self.values))


EMPTY = Series(np.zeros(0, np.int64), np.zeros(0))
