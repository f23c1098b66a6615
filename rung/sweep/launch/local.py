"""Runs points on this machine: as many at a time as there are slots, in the order of the plan.

A slot is a share of the CPUs, or one GPU for each rank. Points that another process works on are checked again when
nothing else is left to do. Ctrl-C asks every point to save and stop, and waits; a second one does not let them save.
Points are not in the terminal's process group: Ctrl-C must reach each training once, because at a second signal it
would not save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

from rung.errors import ConfigError
from rung.runs.files import refused
from rung.sweep import state
from rung.sweep.launch import ReportState, int_option
from rung.sweep.point import FINISHED, INTERRUPTED, STOPPED, command_of, dies_with_parent, handling
from rung.sweep.space import Point, Sweep
from rung.text import one_line

POLL_S = 0.1
LOOK_S = 1.0  # between looks at points that others hold
MOST_LOST = 5  # what was killed more often than this is not killed by chance


class Slot(NamedTuple):
    """A place for one point; its environment is what the point gets on top of ours."""

    name: str
    env: dict[str, str]


class RunningPoint(NamedTuple):
    """A point that is being worked on."""

    point: Point
    slot: Slot
    child: subprocess.Popen[bytes]


@dataclass
class LocalLauncher:
    """The launcher of this machine."""

    slots: list[Slot]

    @classmethod
    def of(cls, sweep: Sweep) -> LocalLauncher:
        """As many slots as the sweep file asks for, or as the machine has room for."""
        threads = int_option(sweep, "threads", 1)
        env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        gpus = sweep.launch.get("gpus")
        if gpus:
            if not isinstance(gpus, list) or not all(isinstance(one, int | str) for one in gpus):
                message = f"launch: gpus={one_line(gpus)} must be a list of GPUs of this machine, such as [0, 1]."
                raise ConfigError(message, code="bad-value")
            if len(set(map(str, gpus))) < len(gpus):
                message = f"launch: gpus={one_line(gpus)} names a GPU twice; each takes one point at a time."
                raise ConfigError(message, code="bad-value")
            if len(gpus) < sweep.ranks:
                message = f"launch: a run of ranks={sweep.ranks} needs as many GPUs, and gpus names {len(gpus)}."
                raise ConfigError(message, code="too-few")
            groups = [gpus[i : i + sweep.ranks] for i in range(0, len(gpus) - sweep.ranks + 1, sweep.ranks)]
            names = [",".join(map(str, group)) for group in groups]
            return cls([Slot(f"gpu {name}", {**env, "CUDA_VISIBLE_DEVICES": name}) for name in names])
        wanted = sweep.launch.get("slots")
        room = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num = max(1, room // (threads * sweep.ranks)) if wanted in (None, "auto") else int_option(sweep, "slots", 1)
        return cls([Slot(f"slot {i}", env) for i in range(num)])

    def run(self, sweep: Sweep, points: Sequence[Point], report: ReportState) -> None:
        work = _Scheduler(sweep, report, list(points), list(self.slots))
        with handling(work.on_signal, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            try:
                while work.going or (work.waiting and work.may_start()):
                    work.collect()
                    work.start()
                    time.sleep(POLL_S)
            except BaseException:  # an error of our own: the points save, and we wait for them
                for one in work.going:
                    one.child.send_signal(signal.SIGTERM)
                for one in work.going:
                    one.child.wait()
                raise
        if work.num_asked:
            raise KeyboardInterrupt


@dataclass
class _Scheduler:
    """The points that are waiting, and those that are running."""

    sweep: Sweep
    report: ReportState
    waiting: list[Point]
    free: list[Slot]
    going: list[RunningPoint] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    held: dict[str, float] = field(default_factory=dict)  # key -> when to look again at what another process holds
    num_asked: int = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Turns the signals that stop us into a stop request for the points."""
        if self.num_asked and number != signal.SIGINT:
            return  # a terminal that closes says so twice; only Ctrl-C comes from somebody in a hurry
        self.num_asked += 1
        if self.num_asked == 1:  # straight to the descriptor: a display must not be entered from a signal
            with contextlib.suppress(OSError):  # of a terminal that is gone
                os.write(2, b"\nstopping: the trainings save first; Ctrl-C again does not let them\n")
        for one in self.going:
            one.child.send_signal(signal.SIGTERM if self.num_asked == 1 else signal.SIGINT)

    def may_start(self) -> bool:
        return not self.num_asked and not state.is_asked_to_stop(self.sweep)

    def start(self) -> None:
        """Fills the free slots with points that nobody else works on."""
        for point in list(self.waiting):
            if not self.free or not self.may_start():
                return
            # One that another process works on is looked at again later; one that has ended there is done.
            now = time.monotonic()
            if self.held.get(point.key, 0.0) > now:
                continue
            claim = state.last_claim(self.sweep, point.key)
            if claim is not None and claim.is_held:
                if point.key not in self.held:
                    self.report(point.key, "running", claim.where)
                self.held[point.key] = now + LOOK_S
                continue
            self.waiting.remove(point)
            if point.key in self.held and claim is not None and claim.outcome in ("finished", "failed"):
                self.report(point.key, claim.outcome, claim.text or claim.where)
                continue
            slot = self.free.pop(0)
            try:
                child = subprocess.Popen(
                    command_of(self.sweep, point),
                    env={**os.environ, **slot.env},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # what it prints lies in the log, and what came of it in the claim
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=dies_with_parent(),
                )
            except OSError as error:
                raise refused(f"a process for point {point.key}", error) from error
            self.going.append(RunningPoint(point, slot, child))
            self.report(point.key, "running", slot.name)
            if self.num_asked:  # between the look and the start
                self.going[-1].child.send_signal(signal.SIGTERM)

    def collect(self) -> None:
        """Reports points that have ended, and queues those that are to continue."""
        for one in list(self.going):
            code = one.child.poll()
            if code is None:
                continue
            self.going.remove(one)
            self.free.append(one.slot)
            point, key = one.point, one.point.key
            if code == FINISHED:
                self.report(key, "finished", "")
            elif code == STOPPED or (code in INTERRUPTED and self.num_asked):
                self.report(key, "stopped", "")
                self.waiting.insert(0, point)
            elif code < 0:
                self.lost[key] += 1
                is_again = self.lost[key] <= MOST_LOST
                name = signal.Signals(-code).name
                self.report(key, "lost" if is_again else "failed", f"its process was ended by {name}")
                if is_again:
                    self.waiting.insert(0, point)
            else:
                claim = state.last_claim(self.sweep, key)
                self.report(key, "failed", claim.text if claim is not None and claim.outcome else f"exit code {code}")
