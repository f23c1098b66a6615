"""If this fails, rows that processes gather are other rows, an error has lost its place, or processes stay behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rung.engine.prefetch import BatchLayout, EvalPrefetcher, Prefetcher
from rung.errors import DataError
from rung.random import Draw
from rung.recipe import Arrays, Stream
from tests.contract.cases import Case
from tests.contract.test_contract import losses, train
from tests.contract.toy import Film, Toy
from tests.errors import raises_code

CPU = torch.device("cpu")


class Decoding(Stream):
    fingerprint, num_rows, gathers_in = "decoding", 37, "process"

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        if draw.step == self.broken:
            read_row(draw.step)
        turned = np.stack([ids, ids], 1)[:, ::-1]
        return {"noise": draw.uniform("noise", 2), "turned": turned, "who": np.full(len(ids), os.getpid())}


class InThreads(Decoding):
    gathers_in = "thread"


class Picky(DataError):
    """Cannot be made again from its arguments, so that it breaks a pipe in place of passing it."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")


class Difficult(Decoding):
    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        if draw.step == 1:
            raise Picky(draw.step, "no such row")
        return super().gather(ids, draw)


class Dying(Decoding):
    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        os._exit(3)


def read_row(step: int) -> None:
    raise DataError(f"row of step {step} is damaged")


@contextmanager
def feeding(stream: Stream, workers: int, rows: int = 6, micro_rows: int = 4) -> Iterator[Prefetcher]:
    prefetcher = Prefetcher(stream, BatchLayout(rows, micro_rows), 3, CPU, workers)
    try:
        yield prefetcher
    finally:
        prefetcher.close()


def test_rows_are_those_that_threads_gather() -> None:
    with feeding(Decoding(), 2) as processes, feeding(InThreads(), 2) as threads:
        who = set()
        for step in range(8):
            for a, b in zip(processes.take(step), threads.take(step), strict=True):
                who |= set(a.batch.pop("who").tolist())
                assert set(b.batch.pop("who").tolist()) == {os.getpid()}
                assert a.ids.tolist() == b.ids.tolist()
                assert a.batch.keys() == b.batch.keys()
                assert all(torch.equal(a.batch[name], b.batch[name]) for name in a.batch)
    assert who
    assert os.getpid() not in who
    assert multiprocessing.active_children() == []


class Decoded(Film):
    gathers_in = "process"


class OfProcesses(Toy):
    def streams(self) -> Mapping[str, Stream]:
        return {"train": Decoded(0, self.cfg.num_frames), "held_out": Decoded(100, 7)}


def test_a_run_is_the_same_to_the_last_digit(tmp_path: Path) -> None:
    words = ("optimizer.max_iters=6", "system.data_workers=2")
    one, two = (train(Case("toy", recipe, ()).setup(*words), tmp_path) for recipe in (Toy, OfProcesses))
    assert losses(one) == losses(two)
    assert [e["loss"] for e in one.evals()] == [e["loss"] for e in two.evals()]
    assert multiprocessing.active_children() == []


def test_an_error_comes_with_its_type_and_the_place_where_it_was_raised() -> None:
    with feeding(Decoding(broken=2), 1) as prefetcher:
        prefetcher.take(0), prefetcher.take(1)
        with pytest.raises(DataError) as caught:
            prefetcher.take(2)
        assert "step 2" in str(caught.value)
        assert "in read_row" in str(caught.value.__cause__)
        assert prefetcher.take(3)  # the pool is whole


def test_an_error_that_cannot_be_sent_is_told_and_breaks_nothing() -> None:
    with feeding(Difficult(), 1) as prefetcher:
        prefetcher.take(0)
        with pytest.raises(DataError) as caught:
            prefetcher.take(1)
        assert "step 1" in str(caught.value)
        assert prefetcher.take(2)


def test_a_process_that_dies_is_told_with_the_remedy() -> None:
    with feeding(Dying(), 1) as prefetcher, raises_code("worker-died") as error:
        prefetcher.take(0)
    assert "system.data_workers=0" in str(error.value)
    assert multiprocessing.active_children() == []


def test_a_stream_that_cannot_be_sent_is_refused() -> None:
    stream = Decoding()
    stream.lock = threading.Lock()  # type: ignore[attr-defined]
    with raises_code("bad-stream"):
        Prefetcher(stream, BatchLayout(4, 4), 0, CPU, 1)


def test_without_workers_and_in_evals_no_process_is_started() -> None:
    with feeding(Decoding(), 0) as prefetcher:
        assert set(prefetcher.take(0)[0].batch["who"].tolist()) == {os.getpid()}
    batches = [(np.arange(3), Draw(0, -1, np.arange(3)))]
    [micro] = EvalPrefetcher(Decoding(), batches, CPU, 2)
    assert set(micro.batch["who"].tolist()) == {os.getpid()}


SCRIPT = """
import json, signal, sys
import numpy as np
from tests.engine.test_processes import Decoding, feeding

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # as the loop does: it goes on to the next step
    with feeding(Decoding(), 2) as prefetcher:
        who = sorted({int(pid) for step in range(20) for m in prefetcher.take(step) for pid in m.batch["who"]})
        for word in ["ready", "went on"]:
            print(json.dumps({"who": who, "word": word}), flush=True)
            sys.stdin.readline()
            prefetcher.take(200)
    print(json.dumps({"who": [], "word": "closed"}), flush=True)
"""


class Script:
    """Somebody's training, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        file = folder / "script.py"
        file.write_text(SCRIPT)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip
        self.ends = [os.pidfd_open(pid) for pid in self.read()["who"]]

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def num_ended(self, timeout_s: float) -> int:
        """Waits until all workers have ended, if they do."""
        waiting = list(self.ends)
        while waiting:
            ended, _, _ = select.select(waiting, [], [], timeout_s)
            if not ended:
                break
            waiting = [end for end in waiting if end not in ended]
        return len(self.ends) - len(waiting)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for end in self.ends:
            os.close(end)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    if not hasattr(os, "pidfd_open"):
        pytest.skip("processes cannot be waited for here")
    found = Script(tmp_path)
    yield found
    found.close()


def test_ctrl_c_is_not_for_the_workers_and_they_end_with_the_loop(script: Script) -> None:
    assert script.ends
    os.killpg(script.process.pid, signal.SIGINT)  # as a terminal does: to all of them
    script.go_on()
    assert script.read()["word"] == "went on"
    script.go_on()
    assert script.read()["word"] == "closed"
    assert script.num_ended(60) == len(script.ends)


def test_workers_of_a_loop_that_was_killed_end_too(script: Script) -> None:
    assert script.ends
    assert script.num_ended(0) == 0
    script.process.kill()
    assert script.num_ended(60) == len(script.ends)
