"""Brings the micros of each step to the device ahead of time.

Gathering runs in threads: the work is numpy's and lets go of the interpreter, and moving tensors between processes
costs more than gathering them. A stream that decodes in Python asks for processes; then threads wait for those. A batch
is a function of its step, so a prefetcher can start anywhere and needs no state of its own. On CUDA the arrays go
through pinned memory and their copy overlaps the step before.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import NamedTuple

import numpy as np
import torch

from rung.data.buffers import is_own, page_locked
from rung.engine.contract import bad_arrays, gather
from rung.errors import DataError, RecipeError, UserError
from rung.random import Draw
from rung.recipe import Arrays, Batch, Stream
from rung.text import error_text

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
class BatchLayout:
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


class Prefetcher:
    """`take(step)` returns the micros of that step; steps after it are already being gathered."""

    uses_processes = True  # for a stream that asks for them

    def __init__(
        self,
        stream: Stream,
        layout: BatchLayout,
        seed: int,
        device: torch.device,
        workers: int,
        origin: Origin = Origin(),
    ) -> None:
        self._stream, self._layout, self._seed, self._device, self._origin = stream, layout, seed, device, origin
        self._places = layout.micros()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="rung-prefetcher") if workers else None
        wants_processes = workers > 0 and self.uses_processes and stream.gathers_in == "process"
        self._processes = Processes(stream, workers) if wants_processes else None
        self._depth = workers + 1
        # Steps in a row that a worker gathers as one task; one that fails does not spoil those before it.
        self._ahead: deque[tuple[range, Future[list[list[Micro] | Exception]]]] = deque()
        self._step_s = TASK_S  # what gathering a step takes at best, as far as we know
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sending: list[tuple[Arrays, torch.cuda.Event]] = []
        self._sending_lock = threading.Lock()

    def position(self, step: int) -> int:
        """Rows seen before this step."""
        return self._origin.position + (step - self._origin.step) * self._layout.rows_per_step

    def take(self, step: int, last_step: int | None = None) -> list[Micro]:
        if self._pool is None:
            return self._arrive(self._gather(step))
        while self._ahead and step not in self._ahead[0][0]:
            self._ahead.popleft()[1].cancel()
        next_step = self._ahead[-1][0].stop if self._ahead else step
        while len(self._ahead) <= self._depth and (last_step is None or next_step < last_step or next_step == step):
            # Handing a task over takes about 75 us: quick steps go together, up to TASK_S of work, slow ones alone.
            stop = next_step + max(1, min(TASK_STEPS, int(TASK_S / self._step_s)))
            steps = range(next_step, max(next_step + 1, stop if last_step is None else min(stop, last_step)))
            self._ahead.append((steps, self._pool.submit(self._gather_all, steps)))
            next_step = steps.stop
        steps, task = self._ahead[0]
        micros = task.result()[step - steps.start]
        if isinstance(micros, Exception):
            raise micros
        if step + 1 == steps.stop:
            self._ahead.popleft()
        return self._arrive(micros)

    def close(self) -> None:
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    def _gather_all(self, steps: range) -> list[list[Micro] | Exception]:
        begun = time.perf_counter()
        gathered: list[list[Micro] | Exception] = []
        for step in steps:
            try:
                gathered.append(self._gather(step))
            except Exception as error:
                gathered.append(error)
        self._step_s = min(self._step_s, (time.perf_counter() - begun) / len(steps))
        return gathered

    def _rows(self, step: int) -> list[tuple[np.ndarray, Draw]]:
        """Ids and draw of each micro."""
        ids = self._stream.ids(self.position(step), self._layout.rows_per_step, self._seed)
        return [(ids[places], Draw(self._seed, step, places)) for places in self._places]

    def _gather(self, step: int) -> list[Micro]:
        micros = []
        for rows, draw in self._rows(step):
            with page_locked() if self._copy_stream is not None else nullcontext():
                arrays = gather(self._stream, rows, draw, self._processes)
            begun = time.perf_counter()
            try:
                batch, copied = to_device(arrays, self._device, self._copy_stream)
            except (TypeError, AttributeError) as error:
                raise bad_arrays(self._stream, arrays) or error from None
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


class EvalPrefetcher(Prefetcher):
    """The same for a fixed list of batches, one micro each; `take` counts them from 0."""

    uses_processes = False  # they take longer to start than most evals to gather

    def __init__(
        self, stream: Stream, batches: Sequence[tuple[np.ndarray, Draw]], device: torch.device, workers: int
    ) -> None:
        super().__init__(stream, BatchLayout(1, 1), 0, device, workers)
        self._batches = batches

    def _rows(self, step: int) -> list[tuple[np.ndarray, Draw]]:
        return [self._batches[step]]

    def __iter__(self) -> Generator[Micro]:
        try:
            for number in range(len(self._batches)):
                yield self.take(number, len(self._batches))[0]
        finally:
            self.close()


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


class Processes:
    """`gather` as the stream has it, in whichever process is free; each has a copy of the stream, sent once.

    Arrays come back pickled through a pipe: on two busy cores a batch of 1 MB took 2.3 ms and one of 16 MB 76 ms, where
    the two copies through shared memory alone took 0.7 and 78 ms. So there is no shared memory, whose blocks would need
    an owner; rows worth a process take far longer to decode than to send.
    """

    def __init__(self, stream: Stream, num_processes: int) -> None:
        self._name = type(stream).__name__
        try:
            pickled = pickle.dumps(stream)
        except Exception as error:
            raise RecipeError(
                f"{self._name} has gathers_in = 'process', but cannot be pickled ({error_text(error)}); "
                "open files and locks in __setstate__ or at the first gather, or set gathers_in = 'thread'",
                code="bad-stream",
            ) from error
        # Not forked: a copy of a process with threads, or with CUDA in it, may hang at any lock they held.
        self._pool = ProcessPoolExecutor(
            num_processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(pickled,)
        )
        resource_tracker.ensure_running()  # which would undo the next line
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            for _ in range(num_processes):  # each starts a process, which inherits that it is not interrupted
                self._pool.submit(int)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        try:
            return self._pool.submit(_gather, ids, draw).result()
        except BrokenProcessPool as error:
            raise DataError(
                f"a process that gathers rows of {self._name} has ended: killed for its memory, or unable to start, as "
                "it is where a script trains outside of `if __name__ == '__main__':`; set system.data_workers=0 to "
                "gather in this process",
                code="worker-died",
            ) from error

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


_stream: Stream  # in a process of the pool, which serves one stream


def _begin(pickled: bytes) -> None:
    """In a process of the pool: leaves Ctrl-C to the loop, and ends with the loop's process, however that ends."""
    global _stream
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)  # a parent that was killed cannot close the pool

    threading.Thread(target=end_with_parent, daemon=True).start()
    _stream = pickle.loads(pickled)


def _gather(ids: np.ndarray, draw: Draw) -> Arrays:
    try:
        return gather(_stream, ids, draw)
    except UserError as error:  # of the stream; all else has become one of ours
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # it would end the pool in place of the step
            raise DataError(str(error), code=error.code) from None
        raise
