"""Which row of a script belongs to which update of its optimizer.

Somebody who watches an optimizer learns of an update when it happens, and of the script's number for it when the script
logs, before or after it, at each step or at every tenth. Where the numbers of rows and updates agree, each update gets
the number that the script would have given it. Where they do not, the row has the last update and nothing is made up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MOST = 10_000  # updates without a row; a script that logs none needs no more of them


@dataclass
class Update:
    """What was measured around one update: numbers, possibly still on a device, and tables by kind."""

    values: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)


class Pairing:
    def __init__(self) -> None:
        self.num_updates = 0  # in all
        self._waiting: deque[Update] = deque(maxlen=MOST)
        self._comes_first: bool | None = None  # the row before its update; known with the first row
        self._last_row: int | None = None
        self.is_watched = False  # somebody would know of an update

    def add(self, update: Update) -> None:
        self.num_updates += 1
        self._waiting.append(update)

    def rows(self, step: int) -> tuple[list[tuple[int, Update]], Update]:
        """At a row of training: updates that are rows of their own, by step, and the one that belongs into the row."""
        before, self._last_row = self._last_row, step
        if self._comes_first is False and len(self._waiting) == 1:  # as in most loops
            return [], self._waiting.popleft()
        waiting = list(self._waiting)
        self._waiting.clear()
        if self._comes_first is None:
            self._comes_first = not waiting
        if not waiting or (self._comes_first and before is None):
            return [], Update()
        if self._comes_first:
            assert before is not None
            own = list(self._numbered(waiting, before)) if len(waiting) == step - before else [(before, waiting[0])]
            return own, Update()
        is_exact = len(waiting) == (step + 1 if before is None else step - before)
        own = list(self._numbered(waiting[:-1], step - len(waiting) + 1)) if is_exact else []
        return own, waiting[-1]

    def rest(self) -> list[tuple[int, Update]]:
        """At the end: updates after the last row, of a script that logs rows first."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return [(self._last_row, waiting[0])] if waiting and self._comes_first and self._last_row is not None else []

    def has_none(self) -> bool:
        """Whether it is known that no update was made since the last row."""
        return self.is_watched and not self._waiting and not self._comes_first

    def skipped(self, step: int) -> None:
        """This row belongs to a step that was not applied."""
        self._last_row = step

    @staticmethod
    def _numbered(updates: list[Update], first: int) -> Iterator[tuple[int, Update]]:
        yield from enumerate(updates, first)
