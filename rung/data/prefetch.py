"""Brings the micros of each step to the device ahead of time.

Gathering runs in threads: the work is numpy's and lets go of the interpreter, and moving tensors between processes
costs more than gathering them. A batch is a function of its step, so a feed can start anywhere, drop what it has
gathered ahead, and needs no state of its own.

On CUDA the arrays go through pinned memory and their copy overlaps the step before. A pinned block is not handed out
again before the copy out of it is done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rung.data.buffers import is_own, page_locked
from rung.recipe import Arrays, Batch, Draw, Stream

TASK_S = 0.001  # work that is worth handing to a thread
TASK_STEPS = 16


class Micro(NamedTuple):
    """Part of a step: which rows of the data, their places in the global batch, and their tensors."""

    ids: np.ndarray
    draw: Draw
    batch: Batch
    copied: torch.cuda.Event | None = None
    copy_s: float = 0.0  # host time of sending it to the device, in the gathering thread


@dataclass(frozen=True)
class Cut:
    """How the global batch of a step is shared: this rank's rows, in micros of at most `micro_rows`."""

    rows_per_step: int
    micro_rows: int
    rank: int = 0
    num_ranks: int = 1

    def micros(self) -> list[np.ndarray]:
        """Places in the global batch, one array per micro."""
        share = self.rows_per_step // self.num_ranks
        first = self.rank * share
        return [
            np.arange(start, min(start + self.micro_rows, first + share))
            for start in range(first, first + share, self.micro_rows)
        ]


@dataclass(frozen=True)
class Origin:
    """Where counting began: the rows seen when step `step` was about to start."""

    step: int = 0
    position: int = 0


class _Ahead(NamedTuple):
    """Some steps in a row that a worker gathers as one task."""

    steps: range
    micros: Future[list[list[Micro] | Exception]]


class Feed:
    """`take(step)` returns the micros of that step; steps after it are already being gathered."""

    def __init__(
        self, stream: Stream, cut: Cut, seed: int, device: torch.device, workers: int, origin: Origin = Origin()
    ) -> None:
        self._stream, self._cut, self._seed, self._device, self._origin = stream, cut, seed, device, origin
        self._places = cut.micros()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="rung-feed") if workers else None
        self._depth = workers + 1
        self._ahead: deque[_Ahead] = deque()
        self._step_s = TASK_S  # what gathering a step takes at best, as far as we know
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sending: list[tuple[Arrays, torch.cuda.Event]] = []
        self._sending_lock = threading.Lock()

    def position(self, step: int) -> int:
        """Rows seen before this step."""
        return self._origin.position + (step - self._origin.step) * self._cut.rows_per_step

    def take(self, step: int, last_step: int | None = None) -> list[Micro]:
        if self._pool is None:
            return self._arrive(self._gather(step))
        while self._ahead and step not in self._ahead[0].steps:
            self._ahead.popleft().micros.cancel()
        next_step = self._ahead[-1].steps.stop if self._ahead else step
        while len(self._ahead) <= self._depth and (last_step is None or next_step < last_step or next_step == step):
            steps = self._task(next_step, last_step)
            self._ahead.append(_Ahead(steps, self._pool.submit(self._gather_all, steps)))
            next_step = steps.stop
        first = self._ahead[0]
        micros = first.micros.result()[step - first.steps.start]
        if isinstance(micros, Exception):
            raise micros
        if step + 1 == first.steps.stop:
            self._ahead.popleft()
        return self._arrive(micros)

    def close(self) -> None:
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _task(self, step: int, last_step: int | None) -> range:
        """Handing a task over takes about 75 us: quick steps go together, up to TASK_S of work, slow ones alone."""
        stop = step + max(1, min(TASK_STEPS, int(TASK_S / self._step_s)))
        return range(step, max(step + 1, stop if last_step is None else min(stop, last_step)))

    def _gather_all(self, steps: range) -> list[list[Micro] | Exception]:
        begun = time.perf_counter()
        micros = [self._gather_or_fail(step) for step in steps]
        self._step_s = min(self._step_s, (time.perf_counter() - begun) / len(steps))
        return micros

    def _gather_or_fail(self, step: int) -> list[Micro] | Exception:
        """A failure belongs to its own step: those before it, gathered in the same task, are sound."""
        try:
            return self._gather(step)
        except Exception as error:
            return error

    def _gather(self, step: int) -> list[Micro]:
        ids = self._stream.ids(self.position(step), self._cut.rows_per_step, self._seed)
        micros = []
        for places in self._places:
            rows, draw = ids[places], Draw(self._seed, step, places)
            with page_locked() if self._copy_stream is not None else nullcontext():
                arrays = self._stream.gather(rows, draw)
            begun = time.perf_counter()
            batch, copied = to_device(arrays, self._device, self._copy_stream)
            self._hold(arrays, copied)
            micros.append(Micro(rows, draw, batch, copied, time.perf_counter() - begun))
        return micros

    def _hold(self, arrays: Arrays, copied: torch.cuda.Event | None) -> None:
        """Page-locked arrays live until their copy is done, or they would be handed out again and overwritten."""
        if copied is not None:
            with self._sending_lock:
                self._sending = [pair for pair in self._sending if not pair[1].query()] + [(arrays, copied)]

    def _arrive(self, micros: Sequence[Micro]) -> list[Micro]:
        """Makes the device wait for the copies, not the host."""
        for micro in micros:
            if micro.copied is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(micro.copied)
                for tensor in micro.batch.values():
                    tensor.record_stream(current)
        return list(micros)


def to_device(
    arrays: dict[str, np.ndarray], device: torch.device, copy_stream: torch.cuda.Stream | None = None
) -> tuple[Batch, torch.cuda.Event | None]:
    # A view of the data set itself must not reach a loss that may write into it.
    own = {name: a if is_own(a) and a.flags.c_contiguous else a.copy() for name, a in arrays.items()}
    tensors = {name: torch.from_numpy(array) for name, array in own.items()}
    if device.type == "cpu":
        return tensors, None
    if copy_stream is None:
        return {name: tensor.to(device) for name, tensor in tensors.items()}, None
    with torch.cuda.stream(copy_stream):
        # (what is page-locked already is not copied again)
        batch = {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
        copied = torch.cuda.Event()
        copied.record(copy_stream)
    return batch, copied
