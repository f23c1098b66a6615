"""Where the time of a run goes: waiting for data, forward and backward, update, eval, save, samples, the rest.

Host time. On a GPU the host runs ahead of the device, so the phases of one step say what the host did; their sum over
steps is still the time that passed, because the host can only run ahead so far.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("wait", "forward_backward", "update", "eval", "save", "sample", "other")


class Clock:
    def __init__(self) -> None:
        self.step_s = dict.fromkeys(PHASES, 0.0)
        self._lap = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.step_s[name] += time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap, with what no phase claimed under `other`; begins the next one."""
        now = time.perf_counter()
        spent, self.step_s = self.step_s, dict.fromkeys(PHASES, 0.0)
        spent["other"] = max(0.0, now - self._lap - sum(spent.values()))
        self._lap = now
        return spent
