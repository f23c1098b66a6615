"""Ends a run whose ranks wait for one that does not come, and says where each of them stands.

A rank that hangs, in its data or in a deadlock, leaves the others waiting in a collective. A thread on each rank looks
at how long this rank has been waiting. After the limit it writes the stacks of all its threads into the run's folder
and asks the other ranks, through the store that connected them, to do the same; then every rank ends. A rank that
fails leaves word in the same store, for those that wait for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rung import parse
from rung.text import write

LOOK_S = 0.5
ANSWER_S = 10.0  # in which a rank that is asked where it stands answers, if it can
FOLLOW_S = 10.0  # in which a rank notices by itself that another one has failed


def store_of(attempt: str, store: dist.Store) -> dist.Store:
    """The part of the store where words are left; a restart by torchrun begins without any."""
    return dist.PrefixStore(f"rung/{attempt}", store)


def tell_of_killed(store: dist.Store, rank: int, text: str) -> None:
    """Leaves word for a rank that cannot; for whoever started the ranks."""
    words = store_of("0", store)
    words.compare_set("failed", "", json.dumps({"rank": rank, "text": text, "code": ""}))
    words.set(f"gone/{rank}", "")


class Watchdog:
    def __init__(self, rank: int, size: int, store: dist.Store, limit_s: float | None) -> None:
        """`store` is a connection of its own: one that waits for a key keeps others from asking."""
        self._rank, self._size, self._limit_s = rank, size, limit_s
        self._store = store
        self._waits: list[tuple[float, str]] = []  # since when and for what the main thread waits, the outermost first
        self._folder: Path | None = None
        self._end: Callable[[str, int], None] | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()
        self.broken_in = ""  # what the main thread waited for when that raised

    @property
    def is_broken(self) -> bool:
        """Whether an exception came out of waiting for another rank."""
        return bool(self.broken_in)

    @contextlib.contextmanager
    def waiting(self, what: str, exchanges: bool = True) -> Iterator[None]:
        """Around the main thread's waiting; what it raises is of the connection if it exchanges anything here."""
        self._waits.append((time.monotonic(), what))
        try:
            yield
        except RuntimeError:
            if exchanges:
                self.broken_in = self.broken_in or what
            raise
        finally:
            self._waits.pop()

    def start(self, folder: Path, end: Callable[[str, int], None]) -> None:
        """Watches from now on. `end` is called with a sentence and the exit code, from another thread, right before the
        process ends."""
        self._folder, self._end = folder, end
        self._thread = threading.Thread(target=self._watch, name="rung-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def leave_word(self, text: str, code: str) -> None:
        """Of why this rank ends; the first word counts."""
        with contextlib.suppress(RuntimeError):  # nobody is there any more
            word = {"rank": self._rank, "text": text, "code": code}
            self._store.compare_set("failed", "", json.dumps(word))

    def word_of_other(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """Why another rank has ended."""
        end_s = time.monotonic() + wait_s
        with contextlib.suppress(RuntimeError):
            while not (is_there := self._store.check(["failed"])) and time.monotonic() < end_s:
                time.sleep(0.1)
            if is_there:
                word: dict[str, Any] = parse.loose_json(self._store.get("failed"))
                return word if word["rank"] != self._rank else None
        return None

    def say_gone(self) -> None:
        """The last this rank does, after whatever it had to print."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"gone/{self._rank}", "")

    def wait_until_gone(self, rank: int, wait_s: float) -> None:
        """Whoever started the ranks ends all when one has ended; a rank that failed has more to say than the others."""
        end_s = time.monotonic() + wait_s
        with contextlib.suppress(RuntimeError):
            while not self._store.check([f"gone/{rank}"]) and time.monotonic() < end_s:
                time.sleep(0.1)

    def _watch(self) -> None:
        try:
            while not self._is_over.wait(LOOK_S):
                waits = self._waits[:1]
                waited_s = time.monotonic() - waits[0][0] if waits else 0.0
                if self._store.check(["stalled"]):
                    self._answer()
                elif self._limit_s is not None and waited_s > self._limit_s:
                    self._stall(waited_s, waits[0][1])
                elif waited_s > FOLLOW_S and (word := self.word_of_other()) is not None:
                    # (a broken connection has told a rank under gloo long before; under NCCL nothing does)
                    is_told = bool(word["code"])  # a user's mistake, with its remedy
                    text = word["text"] if is_told else f"rank {word['rank']} failed: {word['text']}"
                    self._finish(text, 2 if is_told else 1)
        except RuntimeError:  # the store is gone, and with it whoever started the ranks
            return

    def _stall(self, waited_s: float, what: str) -> None:
        mine = json.dumps({"rank": self._rank})
        first = parse.loose_json(self._store.compare_set("stalled", "", mine))["rank"]
        if first != self._rank:
            return self._answer()
        here = {self._rank: self._stacks()}
        end_s = time.monotonic() + ANSWER_S
        others = [rank for rank in range(self._size) if rank != self._rank]
        while len(here) < self._size and time.monotonic() < end_s:
            for rank in others:
                if rank not in here and self._store.check([f"at/{rank}"]):
                    here[rank] = self._store.get(f"at/{rank}").decode()
            time.sleep(0.1)
        # A rank that waits as well is not to blame.
        missing = [r for r in others if not here.get(r, "").startswith("waits")]
        told = [f"rank {r} {here.get(r, 'does not answer')}" for r in (missing or others)[:4]]
        text = (
            f"rank {self._rank} has waited {waited_s / 60:.3g} minutes for {what} (ddp.timeout_minutes="
            f"{(self._limit_s or 0) / 60:g}); {'; '.join(told)}; the stacks of all threads are in {self._folder}"
        )
        self._store.set("verdict", text)
        if 0 not in here:  # it would have said so
            write(sys.stderr, f"rung: {text} [stalled]\n")
        self._finish(text)

    def _answer(self) -> None:
        """Says where this rank stands, and ends as the rank that asked has found."""
        self._store.set(f"at/{self._rank}", self._stacks())
        end_s = time.monotonic() + 2 * ANSWER_S
        while not self._store.check(["verdict"]) and time.monotonic() < end_s:
            time.sleep(0.1)
        self._finish(
            self._store.get("verdict").decode() if self._store.check(["verdict"]) else "another rank has stalled"
        )

    def _stacks(self) -> str:
        """Writes the stacks of all threads; returns in a few words what the main thread does."""
        assert self._folder is not None
        frame = sys._current_frames().get(self._main)
        place = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        with contextlib.suppress(OSError):  # a full disk may be why it hangs
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"rank-{self._rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        waits = self._waits[:1]
        return f"waits for {waits[0][1]}" if waits else f"is at {place}"

    def _finish(self, text: str, code: int = 1) -> None:
        if self._is_over.is_set():  # it has come back after all, and is ending
            return
        assert self._end is not None
        try:
            self._end(text, code)
        finally:
            os._exit(code)
