"""Starts the processes of one training on this machine, as torchrun does, and ends as their first one ends.

What torchrun leaves to the user is done here: a terminal that shows one rank and, where another one fails, what that
had to say; Ctrl-C and SIGTERM that give the ranks the time a save takes; the exit code of the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rung.errors import ConfigError, UserError
from rung.text import write

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import SubprocessContext

    from rung.engine.config import Engine

LAUNCHER = "RUNG_LAUNCHER"  # the process that started the ranks
LOOK_S = 0.1
GRACE_S = 300.0  # in which ranks notice that another one has failed, and end: rank 0 may have a capture to write
PR_SET_PDEATHSIG = 1
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # which nobody sends
MOST_LINES = 40  # of what a rank that failed had printed


def is_started() -> bool:
    """Whether this process is a rank that `run_ranks` started; it ends when that process does."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or os.getppid() != int(launcher):
        return False
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):  # it ended before it could be asked
        sys.exit(128 + signal.SIGTERM)
    return True


def check_nproc(nproc: int, device: str) -> None:
    """Raises UserError where so many processes cannot be started here."""
    if "RANK" in os.environ:
        message = (
            f"--nproc {nproc} starts processes, and this is one of {os.environ.get('WORLD_SIZE')} that torchrun started"
        )
        raise UserError(f"{message}; leave --nproc out", code="options-conflict")
    if device.startswith("cuda:"):
        raise ConfigError(
            f"system.device={device} names one GPU, and --nproc {nproc} gives each process its own; use "
            f"system.device=cuda, and CUDA_VISIBLE_DEVICES to choose among them",
            code="options-conflict",
        )
    import torch

    num_gpus = torch.cuda.device_count()
    if nproc > num_gpus and (device == "cuda" or (device == "auto" and num_gpus)):
        raise ConfigError(
            f"--nproc {nproc} needs as many GPUs, and this machine shows {num_gpus} to torch; use --nproc {num_gpus}"
            if num_gpus
            else f"--nproc {nproc} with system.device=cuda needs as many GPUs, and torch finds none here; use "
            "system.device=cpu",
            code="no-device",
        )


def check_rows(nproc: int, cfg: Engine) -> None:
    """Raises UserError where the rows of a step cannot be shared, or nothing is trained."""
    import torch

    from rung.engine.parallel import World, share

    if cfg.eval_only:
        raise UserError("eval_only=true runs in one process; leave --nproc out", code="options-conflict")
    share(cfg.data.batch_size, cfg.optimizer.gradient_accumulation_steps, World(0, nproc, torch.device("cpu")))


def run_ranks(nproc: int, words: Sequence[str]) -> int:
    """Runs `rung WORDS` in `nproc` processes that know each other; returns the exit code of the run."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext, start_processes

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where they meet
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks connect to it, also the first
        "TORCHELASTIC_RESTART_COUNT": "0",
        LAUNCHER: str(os.getpid()),
    }
    if "OMP_NUM_THREADS" not in os.environ:  # or each rank would take all cores
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // nproc))
    envs = {rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)}
    args = {rank: ("-m", "rung", *words) for rank in range(nproc)}
    with tempfile.TemporaryDirectory(prefix="rung-ranks-") as folder, quiet_logs():
        hidden = {rank: Std.ALL if rank else Std.NONE for rank in range(nproc)}
        logs = DefaultLogsSpecs(log_dir=folder, redirects=hidden)
        context = start_processes("rung", sys.executable, args, envs, logs)
        assert isinstance(context, SubprocessContext)
        try:
            with forwarding(context):
                codes = _codes(context, store)
        finally:
            context.close(signal.SIGKILL)
        failed = {rank: code for rank, code in codes.items() if code}
        if not failed:
            return 0
        first = next(iter(failed))
        killed = [rank for rank, code in failed.items() if code < 0 and (rank == first or -code in CRASHES)]
        # 1 is a bug, and 2 in other ranks only its consequence; so it is of a rank that was killed.
        worst = min(failed, key=lambda rank: (failed[rank] != 1, rank not in killed, failed[rank] < 0, rank))
        for rank in dict.fromkeys([*killed, worst]):
            if rank in killed or (rank and (failed[rank] == 1 or failed.get(0, -1) < 0)):
                write(sys.stderr, _said(rank, failed[rank], Path(context.stderrs[rank]) if rank else None))
        return failed[worst] if failed[worst] > 0 else 128 - failed[worst]


def _codes(context: SubprocessContext, store: TCPStore) -> dict[int, int]:
    """Exit codes by rank, in the order in which ranks ended; after a failure the others have some time to do so too."""
    from rung.engine.watchdog import tell_of_killed

    codes: dict[int, int] = {}
    last_s: float | None = None
    while len(codes) < context.nprocs:
        for rank, handler in context.subprocess_handlers.items():
            if rank not in codes and (code := handler.proc.poll()) is not None:
                codes[rank] = code
                if code < 0:  # it could leave no word to those that wait for it
                    tell_of_killed(store, rank, f"it was ended by {signal.Signals(-code).name}")
        if last_s is None and any(codes.values()):
            last_s = time.monotonic() + GRACE_S
        if last_s is not None and time.monotonic() > last_s:
            context.close(signal.SIGTERM)  # and SIGKILL, after half a minute
        time.sleep(LOOK_S)
    return codes


def _said(rank: int, code: int, log: Path | None) -> str:
    """How a rank ended, and its last lines, where nobody has seen them."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if log is None:
        return f"rung: rank {rank} {how}\n"
    lines = log.read_text("utf-8", "replace").splitlines()[-MOST_LINES:]
    said = "its last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else "it had printed nothing"
    return f"rung: rank {rank} {how}; {said}\n"


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """torch's launcher logs each signal it sends; what matters of them is said here."""
    import logging

    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def forwarding(context: SubprocessContext) -> Iterator[None]:
    """Hands signals on to the ranks, which save and stop; a third Ctrl-C ends them at once."""
    num_asked = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal num_asked
        num_asked += number == signal.SIGINT
        for pid in context.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number if num_asked < 3 else signal.SIGKILL)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
