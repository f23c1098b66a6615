"""A record that never raises: in somebody else's loop, training is worth more than a row.

What a disk has no room for is told once and kept in memory, in order, until there is room again; the record says then
what came late, and how much was too much to keep. Without a record, on ranks other than the first, nothing is done and
nothing is told.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from rung.errors import RunError
from rung.runs.record import Record
from rung.text import printable

P = ParamSpec("P")
T = TypeVar("T")
MOST_KEPT = 100_000  # rows and events that wait for a disk; a row of 30 numbers takes 3 kB in memory


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
        self._waiting: deque[Callable[[Record], object]] = deque()
        self._num_lost = 0
        self.num_done = 0  # what a script does with its run, for whoever asks whether it goes on

    def do(self, act: Callable[Concatenate[Record, P], object], /, *args: P.args, **kwargs: P.kwargs) -> bool:
        """`act` with the record, such as Record.log, after all that waits; whether it could be done by now."""
        if self.record is None:
            return False
        self.num_done += 1
        if self._waiting and not self._catch_up(self.record):
            self._wait(functools.partial(_called, act, args, kwargs))
            return False
        try:
            act(self.record, *args, **kwargs)
        except (RunError, OSError) as error:  # the disk
            self._tell_disk(f"{error} Training continues; what is logged is kept in memory until there is room.")
            self._wait(functools.partial(_called, act, args, kwargs))
            return False
        except Exception as error:  # whoever follows the record
            self._tell_disk(f"{error} Training continues, and what comes next is tried again.")
            return False
        return True

    def _wait(self, act: Callable[[Record], object]) -> None:
        if len(self._waiting) < MOST_KEPT:
            self._waiting.append(act)
        else:  # the earliest are kept, so that the gap is one
            self._num_lost += 1

    def _catch_up(self, record: Record) -> bool:
        """Does what waits, in order; whether all of it could be done."""
        num_waiting = len(self._waiting)
        while self._waiting:
            try:
                self._waiting[0](record)
            except (RunError, OSError):
                return False
            except Exception as error:
                self._tell_disk(f"{error} Training continues, and what comes next is tried again.")
            self._waiting.popleft()
        with contextlib.suppress(Exception):
            record.event("disk_was_full", step=record.last_step, num_late=num_waiting, num_lost=self._num_lost)
        lost = f", {self._num_lost} were too many to keep" if self._num_lost else ""
        say(f"{record.id}: there is room again: {num_waiting} rows and events were written late{lost}.")
        self._num_lost = 0
        self._said.discard("disk")
        return True

    def close(self) -> None:
        """Says what never reached the disk."""
        if self._waiting and self.record is not None:
            num = len(self._waiting) + self._num_lost
            say(f"{self.record.id}: the disk stayed full: {num} rows and events were not written.")

    def _tell_disk(self, text: str) -> None:
        if "disk" not in self._said and self.record is not None:
            self._said.add("disk")
            say(f"{self.record.id}: {text}")

    def event(self, kind: str, step: int | None = None, **fields: Any) -> None:
        self.do(Record.event, kind, step, **fields)

    def tell(self, text: str, about: str | None = None) -> None:
        """Once for each thing that it is `about`."""
        if self.record is None or (about or text) in self._said:
            return
        self._said.add(about or text)
        say(f"{self.record.id}: {text}")
        self.event("warning", text=text)


def _called(act: Callable[..., object], args: Any, kwargs: Any, record: Record) -> object:
    return act(record, *args, **kwargs)


def say(text: str) -> None:
    """To people, and never to the output of the script; a stream that is gone must not end it either."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"rung: {printable(text)}\n")
        sys.stderr.flush()
