"""A record that never raises: in somebody else's loop, training is worth more than a row.

What could not be done is told once, on stderr and where possible in the run's events, and the next row is tried again.
Without a record, on ranks other than the first, nothing is done and nothing is told.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from rung.runs.record import Record
from rung.text import printable

P = ParamSpec("P")
T = TypeVar("T")


def never_raise(act: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T | None]:
    """A method of a run that tells what went wrong in it, once for each kind, and returns None then."""

    @functools.wraps(act)
    def call(run: Any, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return act(run, *args, **kwargs)
        except Exception as error:  # an argument of any kind may fail in any way
            said = " ".join(str(error).split())[:300]
            run.tell(f"{act.__name__}() did nothing: {type(error).__name__}: {said}", f"{act.__name__} {type(error)}")
            return None

    return call


class NeverRaise:
    def __init__(self, record: Record | None) -> None:
        self.record = record
        self._said: set[str] = set()
        self.num_done = 0  # what a script does with its run, for whoever asks whether it goes on

    def do(self, act: Callable[Concatenate[Record, P], object], /, *args: P.args, **kwargs: P.kwargs) -> bool:
        """`act` with the record, such as Record.log; whether it could be done."""
        if self.record is None:
            return False
        self.num_done += 1
        try:
            act(self.record, *args, **kwargs)
        except Exception as error:  # a disk, and whoever follows the record
            if "disk" not in self._said:
                self._said.add("disk")
                say(f"{self.record.id}: {error} Training continues, and what comes next is tried again.")
            return False
        return True

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        self.do(Record.event, kind, step, **fields)

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
