"""Several transfers at a time, and their progress.

The threads are daemons rather than those of concurrent.futures, which Python waits for at exit: a training that has
ended must not hang on a server that does not answer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
Report = Callable[[str, int, int], None]  # what, done, total


def each(work: Callable[[T], None], items: Iterable[T], num_threads: int = 8) -> None:
    """Calls `work` on every item, several at a time; the first error ends the rest and is raised."""
    waiting, errors = deque(items), list[BaseException]()

    def loop() -> None:
        while not errors:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(min(num_threads, len(waiting)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C
        errors.append(error)
        raise
    if errors:
        raise errors[0]


def apart(work: Callable[[T], R], item: T) -> R:
    """Calls `work` in a thread of its own if this is the main one, which otherwise could not be interrupted before
    a server answers."""
    if threading.current_thread() is not threading.main_thread():
        return work(item)
    results: list[R] = []
    each(lambda one: results.append(work(one)), [item])
    return results[0]


class Meter:
    """Counts transferred bytes and reports them; may be called from any thread."""

    def __init__(self, what: str, total: int, report: Report | None) -> None:
        self.done = 0
        self._what, self._total, self._report = what, total, report
        self._lock = threading.Lock()
        self.add(0)

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            if self._report is not None:
                self._report(self._what, self.done, self._total)
