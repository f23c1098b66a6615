"""The summary of one metric of one run, computed as its values come, in chunks of any size.

Values that are not finite are counted and never compared, so a NaN neither hides a minimum nor becomes one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rung.runs.files import NON_FINITE

_EXACT = 2**53  # whole numbers up to here are floats without loss


class Summary(msgspec.Struct, frozen=True):
    """min and max are of the finite values, None where there is none; of equal values the first."""

    count: int = 0
    last: float = math.nan
    last_step: int = 0
    min: float | None = None
    min_step: int | None = None
    max: float | None = None
    max_step: int | None = None
    num_non_finite: int = 0
    is_whole: bool = True  # every value was written as a whole number


class IndexedMetric(msgspec.Struct):
    """A metric in the index: its summary, the number of its files, and how many stretches its rows form."""

    summary: Summary
    number: int
    num_stretches: int


class Column:
    """One metric while rows are taken: what came since the last flush, and the summary before that."""

    def __init__(self, held: IndexedMetric) -> None:
        self.held = held
        self.values = array("d")
        self.stretches = array("q")

    def take(self, values: Sequence[Any], first_row: int) -> None:
        """Values of consecutive rows. What is no number is absent."""
        is_whole = True
        try:
            numbers = array("d", values)
        except (TypeError, OverflowError):  # a NaN by its name, a null, a huge whole number
            for offset, value in enumerate(values):
                number = number_of(value)
                if number is not None:
                    is_whole = is_whole and _is_whole(value)
                    self._add(array("d", [number]), first_row + offset)
        else:
            is_whole = all(map(_is_whole, values))
            self._add(numbers, first_row)
        if not is_whole and self.held.summary.is_whole:
            self.held.summary = replace(self.held.summary, is_whole=False)

    def _add(self, numbers: array[float], first_row: int) -> None:
        if self.stretches and self.stretches[-1] == first_row:
            self.stretches[-1] += len(numbers)
        else:
            self.stretches.extend((first_row, first_row + len(numbers)))
        self.values.extend(numbers)

    def sum_up(self, steps: array[int], first_row: int) -> None:
        """Takes what was gathered into the summary, and begins anew."""
        old, values = self.held.summary, self.values
        finite = values if all(map(math.isfinite, values)) else list(filter(math.isfinite, values))
        new = replace(
            old,
            count=old.count + len(values),
            last=values[-1],
            last_step=self._step(len(values) - 1, steps, first_row),
            num_non_finite=old.num_non_finite + len(values) - len(finite),
        )
        if finite:
            low, high = min(finite), max(finite)
            if new.min is None or low < new.min:
                new = replace(new, min=low, min_step=self._step(values.index(low), steps, first_row))
            if new.max is None or high > new.max:
                new = replace(new, max=high, max_step=self._step(values.index(high), steps, first_row))
        self.held.summary = new
        self.held.num_stretches += len(self.stretches) // 2
        self.values, self.stretches = array("d"), array("q")

    def _step(self, at: int, steps: array[int], first_row: int) -> int:
        """The step of the value at this place of the chunk."""
        for start, stop in zip(self.stretches[::2], self.stretches[1::2]):
            if at < stop - start:
                return steps[start + at - first_row]
            at -= stop - start
        raise IndexError(at)


def number_of(value: Any) -> float | None:
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_EXACT <= value <= _EXACT
