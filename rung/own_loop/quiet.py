"""A record that never raises: in somebody else's loop, training is worth more than a row.

What could not be done is told once, on stderr and where possible in the run's events, and the next row is tried again.
Without a record, on ranks other than the first, nothing is done and nothing is told.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rung.errors import UserError
from rung.runs.record import Record


class Quiet:
    def __init__(self, record: Record | None) -> None:
        self.record = record
        self._said: set[str] = set()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """At each step, so not by way of `do`."""
        if self.record is None:
            return
        try:
            self.record.log(step, values)
        except (OSError, UserError) as error:
            self._refused(self.record, error)

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        self.do(lambda record: record.event(kind, step=step, **fields))

    def do(self, act: Callable[[Record], object]) -> bool:
        """Whether it could be done."""
        if self.record is None:
            return False
        try:
            act(self.record)
        except (OSError, UserError) as error:
            self._refused(self.record, error)
            return False
        return True

    def _refused(self, record: Record, error: Exception) -> None:
        if "disk" not in self._said:
            self._said.add("disk")
            say(f"{record.id}: {error} Training goes on, and what comes next is tried again.")

    def tell(self, text: str, about: str | None = None) -> None:
        """Once for each thing that it is `about`."""
        if self.record is None or (about or text) in self._said:
            return
        self._said.add(about or text)
        say(f"{self.record.id}: {text}")
        self.event("warning", text=text)


def say(text: str) -> None:
    """To people, and never to the output of the script; a stream that is gone must not end it either."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"rung: {text}\n")
        sys.stderr.flush()
