"""Speed and transposition, drawn for each row of training: the same row at the same step is changed alike, always."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rung.recipe import Draw
from rung.recipes.piano.notes import HIGHEST, LOWEST, in_order, quantise


@dataclass(frozen=True)
class Augment:
    """A row keeps its own speed as often as it gets each of `speeds`; so it is with its own pitch and each shift."""

    speeds: tuple[float, ...] = ()
    max_shift: int = 0

    def __bool__(self) -> bool:
        return bool(self.speeds or self.max_shift)

    @property
    def name(self) -> str:
        """What tells rows made with it from others, in a fingerprint."""
        return f"/speeds-{','.join(f'{s:g}' for s in self.speeds)}/shift-{self.max_shift}" if self else ""

    def draw_speeds(self, draw: Draw) -> np.ndarray:
        """(rows,) factors; 2 is twice as fast."""
        return np.array([1.0, *self.speeds])[draw.integers("speed", 1 + len(self.speeds))]

    def draw_shifts(self, draw: Draw, lowest: np.ndarray, highest: np.ndarray) -> np.ndarray:
        """(rows,) semitones, evenly among all that keep a row with these pitches on the keyboard."""
        least = np.maximum(-self.max_shift, np.minimum(LOWEST - lowest, 0))
        most = np.minimum(self.max_shift, np.maximum(HIGHEST - highest, 0))
        return least + draw.integers("shift", most - least + 1)


def changed(notes: np.ndarray, speed: float, shift: int) -> np.ndarray:
    """The notes `speed` times as fast and `shift` semitones higher, on the grid again."""
    notes = in_order(notes)
    notes["start"] /= speed
    notes["end"] /= speed
    notes["pitch"] = (notes["pitch"].astype(np.int64) + shift).astype(np.uint8)
    return quantise(notes)
