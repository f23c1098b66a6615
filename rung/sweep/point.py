"""All there is to do for one point of a sweep: claim it, train it or go on with it, evaluate it, say what came of it.

Every launcher only places this process, on this machine or on another. Started again it goes on where things stand, so
it may be killed at any time. What it trains writes to logs/<key>.log and dies with it.

The surprising thing: SIGTERM is also what a training gets when the process above it is killed outright, so that even
then it saves; whoever takes the point over waits for that.
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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rung.errors import UserError
from rung.runs.files import refused
from rung.runs.query import Run
from rung.runs.record import utc_now
from rung.sweep import state
from rung.sweep.plan import load
from rung.sweep.space import Point, Sweep
from rung.text import printable, visible

FINISHED, FAILED, STOPPED = 0, 1, 3  # exit codes
MISTAKE = 2  # exit code of a verb whose user can mend it
INTERRUPTED = (130, 143, 129, -2, -15, -1)  # exit codes of a training that was told to stop
LOST = -1000  # what follow() returns where no exit code counts
POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_NUM_TAIL_BYTES = 8192


class Ended(NamedTuple):
    """What came of a point: an exit code, the outcome that its claim keeps, and a sentence."""

    code: int
    outcome: str
    text: str = ""


class Step(NamedTuple):
    """The next thing to do for a point: train, resume or eval, and the words after `rung`."""

    what: str
    words: tuple[str, ...]


def command_of(sweep: Sweep, point: Point) -> list[str]:
    """What a launcher starts."""
    return [sys.executable, "-m", "rung", "sweep", "point", str(sweep.folder), point.key]


def run_point(folder: Path, key_or_index: str) -> Ended:
    """Does what is to be done for a point; the exit code of the process is that of what came of it."""
    sweep = load(folder, with_retired=True)
    point = sweep.point(key_or_index)
    with Wish(sweep) as wish:
        while (claim := state.take(sweep, point.key)) is None:
            if wish.times():
                return Ended(STOPPED, "stopped", "another process works on it")
            time.sleep(POLL_S)
        ended = Ended(STOPPED, "stopped", "its process ended early")
        try:
            ended = _carry_out(sweep, point, wish, claim)
        except UserError as error:
            ended = Ended(FAILED, "refused", visible(str(error)))
        finally:
            run = _run_of(sweep, point)
            claim.release(ended.outcome, ended.text, run.id if run else None)
    return ended


def _carry_out(sweep: Sweep, point: Point, wish: Wish, claim: state.Claim) -> Ended:
    if claim.after.get("outcome") == "failed":
        return Ended(FAILED, "failed", str(claim.after.get("text")))  # for good, until somebody asks for another try
    done: Step | None = None
    num_crashes = 0
    while True:
        run = _run_of(sweep, point)
        if run is not None and run.status == "running":  # resumed by hand, or still saving after its point was killed
            if wish.times():
                return Ended(STOPPED, "stopped", f"{run.id} is {run.status_text}")
            claim.beat()
            time.sleep(POLL_S)
            continue
        if run is not None and state.is_hopeless(run, claim):
            return Ended(FAILED, "failed", f"{run.id} diverged: {_reason(run)}")
        step = next_step(sweep, point, run)
        if step is None:
            return Ended(FINISHED, "finished")
        if wish.times():
            return Ended(STOPPED, "stopped")
        if step == done:
            return Ended(
                FAILED, "failed", f"`rung {step.what}` ended with 0 and left nothing; see {_log(sweep, point)}"
            )
        code = follow(_command(sweep, step), _log(sweep, point), wish, claim)
        done = step if code == 0 else None
        if code == 0:
            continue
        ended = _after(code, sweep, point, wish)
        num_crashes += 1
        if ended is not None or num_crashes > sweep.retries:
            return ended or Ended(FAILED, "failed", _crashed(sweep, point, code, num_crashes))


def _after(code: int, sweep: Sweep, point: Point, wish: Wish) -> Ended | None:
    """What an exit code other than 0 means for the point; None: a crash, to be tried again."""
    run = _run_of(sweep, point)
    if run is not None and run.status == "diverged":
        return None  # told where the loop begins
    said = _sentence(_log(sweep, point))
    if code == MISTAKE or (sweep.ranks > 1 and said and not wish.times()):  # torchrun has exit codes of its own
        return Ended(FAILED, "refused", said or f"exit code {code}")
    if wish.times() or code in INTERRUPTED or code == LOST or (run is not None and run.status == "stopped"):
        return Ended(STOPPED, "stopped", "another process took it over" if code == LOST else "")
    return None


def next_step(sweep: Sweep, point: Point, run: Run | None) -> Step | None:
    """What is to be done for a point that has come as far as this run; None: nothing more."""
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


class Wish:
    """That the point be stopped: by SIGTERM, SIGINT or SIGHUP to this process, or by the sweep's stop file."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._num_asked, self._next_look_s = sweep, 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Wish:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A second SIGTERM may only say that the driver is gone too; a second SIGINT comes from somebody in a hurry.
        self._num_asked = 2 if self._num_asked and number == signal.SIGINT else max(1, self._num_asked)

    def times(self) -> int:
        """How often it was asked for; twice means at once."""
        now = time.monotonic()
        if not self._num_asked and now >= self._next_look_s:
            self._next_look_s = now + state.BEAT_S
            self._num_asked = int(state.is_asked_to_stop(self._sweep))
        return self._num_asked


def follow(command: Sequence[str], log: Path, wish: Wish, claim: state.Claim) -> int:
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
    num_told, next_beat_s = 0, 0.0
    while (code := child.poll()) is None:
        if time.monotonic() >= next_beat_s:
            next_beat_s = time.monotonic() + state.BEAT_S
            if not claim.beat():
                for pid in [child.pid, *_children(child.pid)]:  # the ranks of torchrun would outlive it
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                child.wait()
                return LOST
        while num_told < wish.times():  # asked twice, it gets what a second Ctrl-C is: stop at once
            child.send_signal(signal.SIGTERM if num_told == 0 else signal.SIGINT)
            num_told += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
    return code


def _children(pid: int) -> list[int]:
    """Processes that this one has started; none where there is no /proc."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


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


def _run_of(sweep: Sweep, point: Point) -> Run | None:
    return state.best_of(state.runs_of(sweep).get(point.key, []))


def _log(sweep: Sweep, point: Point) -> Path:
    return log_of(sweep, point.key)


def log_of(sweep: Sweep, key: str) -> Path:
    """Where everything lies that was printed for a point."""
    return sweep.folder / "logs" / f"{key}.log"


def _reason(run: Run) -> str:
    return printable(str(run.document.get("reason") or "no reason is recorded"))


def _crashed(sweep: Sweep, point: Point, code: int, num_crashes: int) -> str:
    lines = [line for line in _tail(_log(sweep, point)).splitlines() if line.strip() and not line.startswith("--- ")]
    run = _run_of(sweep, point)
    if run is not None and run.status == "crashed":  # what it recorded says more than its last line
        last = _reason(run)[:300]
    else:
        last = printable(lines[-1].strip())[:300] if lines else "nothing was printed"
    times = "" if num_crashes == 1 else f"{num_crashes} times, at last "
    return f"crashed {times}with exit code {code}: {last} (`rung sweep log {sweep.name} {point.key}`)"


def _sentence(log: Path) -> str:
    """What rung said last about a mistake of the user; empty where the last command said nothing of the kind."""
    last = _tail(log).rpartition("\n--- ")[2]
    found = re.findall(r"^(?:\[rank\d+\]: ?)?rung: (.*?)(?=\n\S|\Z)", last, re.M | re.S)
    return visible(found[-1].strip())[:1500] if found else ""


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _NUM_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
