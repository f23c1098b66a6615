"""The learning rate, as a function of the step over the declared horizon.

Nothing here remembers anything: the rate of step t is the same before and after a resume, for any accumulation and any
number of ranks. `plateau` also looks at the evals so far, which are part of a run's state. Stopping early does not move
the curve, because its horizon is declared, not observed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    shape: str  # cosine, linear, wsd, plateau, constant
    peak: float
    floor: float
    start: float
    warmup_steps: int
    decay_steps: int  # where the fall ends, counted from step 0
    wsd_decay_fraction: float = 0.2
    plateau_factor: float = 0.5
    plateau_patience: int = 3

    def lr(self, step: int, evals: Sequence[float] = ()) -> float:
        """The rate of the update from state `step` to the next; `evals` are the eval losses so far, oldest first."""
        if step < self.warmup_steps:
            return self.start + (self.peak - self.start) * step / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        if self.shape == "plateau":
            best, waited, drops = math.inf, 0, 0
            for loss in evals:  # the rate drops each time that `patience` evals in a row brought no new best
                waited = 0 if loss < best else waited + 1
                best = loss if loss < best else best  # a NaN is never the best
                if waited >= self.plateau_patience:
                    waited, drops = 0, drops + 1
            return max(self.floor, self.peak * self.plateau_factor**drops)
        if step >= self.decay_steps:
            return self.floor
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        if self.shape == "linear":
            return self.peak + (self.floor - self.peak) * done
        if self.shape == "wsd":
            falling = min(self.decay_steps * self.wsd_decay_fraction, self.decay_steps - self.warmup_steps)
            left = self.decay_steps - step
            return self.peak if left >= falling else self.floor + (self.peak - self.floor) * left / falling
        return self.floor + 0.5 * (1.0 + math.cos(math.pi * done)) * (self.peak - self.floor)
