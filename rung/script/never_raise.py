"""A record that never raises: in somebody else's loop, training is worth more than a row.

What could not be done is told once, on stderr and where possible in the run's events, and the next row is tried again.
Without a record, on ranks other than the first, nothing is done and nothing is told.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from rung.runs.record import Record
from rung.text import printable

P = ParamSpec("P")
T = TypeVar("T")


def never_raise(act: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T | None]:
    """A method of a run that tells what went wrong in it, once for each kind, and returns None then."""

    @functools.wraps(act)
    def call(run: Any, *words: P.args, **named: P.kwargs) -> T | None:
        try:
            return act(run, *words, **named)
        except Exception as error:  # an argument of any kind may fail in any way
            said = " ".join(str(error).split())[:300]
            run.tell(f"{act.__name__}() did nothing: {type(error).__name__}: {said}", f"{act.__name__} {type(error)}")
            return None

    return call


class NeverRaise:
    def __init__(self, record: Record | None) -> None:
        self.record = record
        self._said: set[str] = set()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """At each step, so not by way of `do`."""
        if self.record is None:
            return
        try:
            self.record.log(step, values)
        except Exception as error:  # a disk, and whoever follows the record
            self._refused(self.record, error)

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        self.do(lambda record: record.event(kind, step=step, **fields))

    def do(self, act: Callable[[Record], object]) -> bool:
        """Whether it could be done."""
        if self.record is None:
            return False
        try:
            act(self.record)
        except Exception as error:
            self._refused(self.record, error)
            return False
        return True

    def _refused(self, record: Record, error: Exception) -> None:
        if "disk" not in self._said:
            self._said.add("disk")
            say(f"{record.id}: {error} Training continues, and what comes next is tried again.")

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
        sys.stderr.write(f"rung: {printable(text)}\n")
        sys.stderr.flush()
