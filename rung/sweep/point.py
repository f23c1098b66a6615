"""Everything for one point of a sweep: claim it, train or resume it, evaluate it, record the outcome.

Launchers only place this process, here or on another machine. It may be killed at any time; started again, it continues
where things stand. Training writes to logs/<key>.log and dies with this process: it gets SIGTERM even when this process
is killed outright, so it still saves, and whoever takes the point over waits for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rung.errors import UserError
from rung.runs.files import refused
from rung.runs.process import BEAT_S
from rung.runs.query import Run
from rung.runs.record import utc_now
from rung.sweep import state
from rung.sweep.plan import load
from rung.sweep.space import Point, Sweep
from rung.text import printable, visible

FINISHED, FAILED, STOPPED = 0, 1, 3  # exit codes
MISTAKE = 2  # exit code of a verb whose user can fix it
INTERRUPTED = (130, 143, 129, -2, -15, -1)  # exit codes of a training that was told to stop
LOST = -1000  # what follow() returns where no exit code counts
POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_NUM_TAIL_BYTES = 8192


class PointResult(NamedTuple):
    """What came of a point: an exit code, the outcome that its claim keeps, and a sentence."""

    code: int
    outcome: str
    text: str = ""


class Step(NamedTuple):
    """The next thing to do for a point: train, resume or eval, and the words after `rung`."""

    what: str
    words: tuple[str, ...]


def command_of(sweep: Sweep, point: Point) -> list[str]:
    """The command that a launcher starts."""
    return [sys.executable, "-m", "rung", "sweep", "point", str(sweep.folder), point.key]


def run_point(folder: Path, key_or_index: str) -> PointResult:
    """Trains and evaluates a point as far as that is still needed; the process exits with the code of the result."""
    sweep = load(folder, with_retired=True)
    point = sweep.point(key_or_index)
    stop = StopRequest(sweep)
    with handling(stop.on_signal, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        while (claim := state.take(sweep, point.key)) is None:
            if stop.times():
                return PointResult(STOPPED, "stopped", "another process works on it")
            time.sleep(POLL_S)
        ended = PointResult(STOPPED, "stopped", "its process ended early")
        try:
            ended = _run_steps(sweep, point, stop, claim)
        except UserError as error:
            ended = PointResult(FAILED, "refused", visible(str(error)))
        finally:
            run = state.run_of(sweep, point.key)
            claim.release(ended.outcome, ended.text, run.id if run else None)
    return ended


def _run_steps(sweep: Sweep, point: Point, stop: StopRequest, claim: state.Claim) -> PointResult:
    if claim.after.get("outcome") == "failed":
        # For good, until somebody asks for another try.
        return PointResult(FAILED, "failed", str(claim.after.get("text")))
    done: Step | None = None
    num_crashes, log = 0, log_of(sweep, point.key)
    while True:
        run = state.run_of(sweep, point.key)
        if run is not None and run.status == "running":  # resumed by hand, or still saving after its point was killed
            if stop.times():
                return PointResult(STOPPED, "stopped", f"{run.id} is {run.status_text}")
            claim.beat()
            time.sleep(POLL_S)
            continue
        if run is not None and state.is_hopeless(run, claim):
            return PointResult(FAILED, "failed", f"{run.id} diverged: {_reason(run)}")
        step = next_step(sweep, point, run)
        if step is None:
            return PointResult(FINISHED, "finished")
        if stop.times():
            return PointResult(STOPPED, "stopped")
        if step == done:
            return PointResult(FAILED, "failed", f"`rung {step.what}` ended with 0 and left nothing; see {log}")
        code = follow(_command(sweep, step), log, stop, claim)
        done = step if code == 0 else None
        if code == 0:
            continue
        run, printed = state.run_of(sweep, point.key), _tail(log)
        status = run.status if run is not None else None
        if status != "diverged":  # that is reported where the loop begins
            # The last message of rung about a mistake of the user, if its last command printed one.
            last_command = printed.rpartition("\n--- ")[2]
            said = re.findall(r"^(?:\[rank\d+\]: ?)?rung: (.*?)(?=\n\S|\Z)", last_command, re.M | re.S)
            mistake = visible(said[-1].strip())[:1500] if said else ""
            if code == MISTAKE or (sweep.ranks > 1 and mistake and not stop.times()):  # torchrun has codes of its own
                return PointResult(FAILED, "refused", mistake or f"exit code {code}")
            if stop.times() or code in INTERRUPTED or code == LOST or status == "stopped":
                return PointResult(STOPPED, "stopped", "another process took it over" if code == LOST else "")
        num_crashes += 1
        if num_crashes > sweep.retries:
            lines = [line for line in printed.splitlines() if line.strip() and not line.startswith("--- ")]
            last = printable(lines[-1].strip()) if lines else "nothing was printed"
            if run is not None and status == "crashed":  # what it recorded says more than its last line
                last = _reason(run)
            times = "" if num_crashes == 1 else f"{num_crashes} times, at last "
            see = f"`rung sweep log {sweep.name} {point.key}`"
            return PointResult(FAILED, "failed", f"crashed {times}with exit code {code}: {last[:300]} ({see})")


def next_step(sweep: Sweep, point: Point, run: Run | None) -> Step | None:
    """The next step of a point whose run has come this far; None: nothing is left to do."""
    where = ("--runs", str(sweep.runs))
    if run is None or (run.status != "finished" and (run.status == "diverged" or not run.checkpoints())):
        why = ("--why", sweep.why) if sweep.why else ()
        of = ("--experiment", sweep.experiment, "--sweep", f"{sweep.name}:{point.key}")
        return Step("train", ("train", sweep.recipe, *point.words, *why, *of, *where))
    if run.status != "finished":
        return Step("resume", ("resume", str(run.path), *where))
    if not state.is_evaluated(run, sweep.eval_split):
        return Step("eval", ("eval", str(run.path), "--split", str(sweep.eval_split), *where))
    return None


def _command(sweep: Sweep, step: Step) -> list[str]:
    if sweep.ranks == 1 or step.what == "eval":
        return [sys.executable, "-m", "rung", *step.words]
    ranks = ("--standalone", "--nproc-per-node", str(sweep.ranks))
    return [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "rung", *step.words]


class StopRequest:
    """Whether the point is to stop: asked by SIGTERM, SIGINT or SIGHUP to this process, or by the sweep's stop file."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._num_asked, self._next_look_s = sweep, 0, 0.0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        # A second SIGTERM may only say that the driver is gone too; a second SIGINT comes from somebody in a hurry.
        self._num_asked = 2 if self._num_asked and number == signal.SIGINT else max(1, self._num_asked)

    def times(self) -> int:
        """How often a stop was asked for; twice means at once."""
        now = time.monotonic()
        if not self._num_asked and now >= self._next_look_s:
            self._next_look_s = now + BEAT_S
            self._num_asked = int(state.is_asked_to_stop(self._sweep))
        return self._num_asked


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Within it, these signals go to `handler`; outside of the main thread, where none arrives, it does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    before = [(number, signal.signal(number, handler)) for number in numbers if is_main]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


def follow(command: Sequence[str], log: Path, stop: StopRequest, claim: state.Claim) -> int:
    """Runs a command to its end, with its output in `log`; returns its exit code, or LOST where it lost its claim."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            out.write(f"--- {utc_now()}  {shlex.join(command)}\n".encode("utf-8", "backslashreplace"))
            out.flush()
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,  # or Ctrl-C would reach it twice, once through us
                preexec_fn=dies_with_parent(),
            )
    except OSError as error:
        raise refused(str(log), error) from error
    num_sent, next_beat_s = 0, 0.0
    while (code := child.poll()) is None:
        if time.monotonic() >= next_beat_s:
            next_beat_s = time.monotonic() + BEAT_S
            if not claim.beat():
                pids = [child.pid]
                for file in Path(f"/proc/{child.pid}/task").glob("*/children"):  # ranks of torchrun would outlive it
                    with contextlib.suppress(OSError):
                        pids += map(int, file.read_text().split())
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                child.wait()
                return LOST
        while num_sent < stop.times():  # asked twice, it gets what a second Ctrl-C is: stop at once
            child.send_signal(signal.SIGTERM if num_sent == 0 else signal.SIGINT)
            num_sent += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
    return code


def dies_with_parent() -> Callable[[], None] | None:
    """For Popen's preexec_fn: the child gets SIGTERM when this thread ends, however it ends. Linux only."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError):
        return None
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it ended before it could be asked
            os.kill(os.getpid(), signal.SIGTERM)

    return in_child


def log_of(sweep: Sweep, key: str) -> Path:
    """The file that holds all that was printed for a point."""
    return sweep.folder / "logs" / f"{key}.log"


def _reason(run: Run) -> str:
    return printable(str(run.document.get("reason") or "no reason is recorded"))


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _NUM_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
