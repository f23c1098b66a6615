"""Points on this machine: as many at a time as there are slots, in the order of the plan.

A slot is a share of the CPUs, or one GPU for each rank. A point that another process works on is left to it, and looked
at again when nothing else is to be done. Ctrl-C tells every point to save and stop, and waits for it; a second one does
not let them save.

The surprising thing: points do not belong to the terminal's process group. Ctrl-C reaches this process alone, which
tells each point once; a training that heard of it twice would not save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from rung.errors import ConfigError
from rung.runs.files import refused
from rung.sweep import state
from rung.sweep.launch import Told
from rung.sweep.launch.needs import whole
from rung.sweep.point import FINISHED, INTERRUPTED, STOPPED, command_of, dies_with_parent
from rung.sweep.space import Point, Sweep
from rung.text import one_line

POLL_S = 0.1
LOOK_S = 1.0  # between looks at points that others hold
MOST_LOST = 5  # what was killed more often than this is not killed by chance


class Slot(NamedTuple):
    """A place for one point; its environment is what the point gets on top of ours."""

    name: str
    env: dict[str, str]


class Going(NamedTuple):
    """A point that is being worked on."""

    point: Point
    slot: Slot
    child: subprocess.Popen[bytes]


@dataclass
class Local:
    """The launcher of this machine."""

    slots: list[Slot]

    @classmethod
    def of(cls, sweep: Sweep) -> Local:
        """As many slots as the sweep file asks for, or as the machine has room for."""
        threads = whole(sweep, "threads", 1)
        env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        gpus = sweep.launch.get("gpus")
        if gpus:
            return cls(_gpu_slots(sweep, gpus, env))
        wanted = sweep.launch.get("slots")
        room = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num = max(1, room // (threads * sweep.ranks)) if wanted in (None, "auto") else whole(sweep, "slots", 1)
        return cls([Slot(f"slot {i}", env) for i in range(num)])

    def run(self, sweep: Sweep, points: Sequence[Point], told: Told) -> None:
        work = _Work(sweep, told, list(points), list(self.slots))
        with work.listening():
            try:
                while work.is_left():
                    work.collect()
                    work.start()
                    time.sleep(POLL_S)
            except BaseException:
                work.stop()
                raise
        if work.is_interrupted:
            raise KeyboardInterrupt


@dataclass
class _Work:
    """The points that are waiting, and those that are going on."""

    sweep: Sweep
    told: Told
    waiting: list[Point]
    free: list[Slot]
    going: list[Going] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    held: dict[str, float] = field(default_factory=dict)  # key -> when to look again at what another process holds
    num_asked: int = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Turns the signals that stop us into a wish that the points are told of."""
        before: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, self._ask)
        try:
            yield
        finally:
            for stopped_by, handler in before.items():
                signal.signal(stopped_by, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.num_asked and number != signal.SIGINT:
            return  # a terminal that closes says so twice; only Ctrl-C comes from somebody in a hurry
        self.num_asked += 1
        if self.num_asked == 1:  # straight to the descriptor: a display must not be entered from a signal
            with contextlib.suppress(OSError):  # of a terminal that is gone
                os.write(2, b"\nstopping: the trainings save first; Ctrl-C again does not let them\n")
        self._signal(signal.SIGTERM if self.num_asked == 1 else signal.SIGINT)

    def _signal(self, number: signal.Signals) -> None:
        for one in self.going:
            one.child.send_signal(number)

    @property
    def is_interrupted(self) -> bool:
        return self.num_asked > 0

    def may_start(self) -> bool:
        return not self.is_interrupted and not state.is_asked_to_stop(self.sweep)

    def is_left(self) -> bool:
        return bool(self.going) or (bool(self.waiting) and self.may_start())

    def start(self) -> None:
        """Fills the free slots with points that nobody else works on."""
        for point in list(self.waiting):
            if not self.free or not self.may_start():
                return
            if not self._is_ours(point):
                continue
            slot = self.free.pop(0)
            self.waiting.remove(point)
            self.going.append(Going(point, slot, _started(self.sweep, point, slot)))
            self.told(point.key, "running", slot.name)
            if self.is_interrupted:  # between the look and the start
                self.going[-1].child.send_signal(signal.SIGTERM)

    def _is_ours(self, point: Point) -> bool:
        """False while another process works on the point; when that has finished it, nothing is left to do."""
        now = time.monotonic()
        if self.held.get(point.key, 0.0) > now:
            return False
        claim = state.last_claim(self.sweep, point.key)
        if claim is None or not claim.is_held:
            if point.key in self.held and claim is not None and claim.outcome in ("finished", "failed"):
                self.waiting.remove(point)
                self.told(point.key, claim.outcome, claim.text or claim.where)
                return False
            return True
        if point.key not in self.held:
            self.told(point.key, "running", claim.where)
        self.held[point.key] = now + LOOK_S
        return False

    def collect(self) -> None:
        """Takes note of the points that have ended."""
        for one in list(self.going):
            code = one.child.poll()
            if code is not None:
                self.going.remove(one)
                self.free.append(one.slot)
                self._ended(one.point, code)

    def _ended(self, point: Point, code: int) -> None:
        claim = state.last_claim(self.sweep, point.key)
        if code == FINISHED:
            self.told(point.key, "finished", "")
        elif code == STOPPED or (code in INTERRUPTED and self.is_interrupted):
            self.told(point.key, "stopped", "")
            self.waiting.insert(0, point)
        elif code < 0:
            self.lost[point.key] += 1
            is_again = self.lost[point.key] <= MOST_LOST
            name = signal.Signals(-code).name
            self.told(point.key, "lost" if is_again else "failed", f"its process was ended by {name}")
            if is_again:
                self.waiting.insert(0, point)
        else:
            self.told(point.key, "failed", claim.text if claim is not None and claim.outcome else f"exit code {code}")

    def stop(self) -> None:
        """After an error of our own: tells the points to save, and waits for them."""
        self._signal(signal.SIGTERM)
        for one in self.going:
            one.child.wait()


def _started(sweep: Sweep, point: Point, slot: Slot) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command_of(sweep, point),
            env={**os.environ, **slot.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what it prints lies in the log, and what came of it in the claim
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
    except OSError as error:
        raise refused(f"a process for point {point.key}", error) from error


def _gpu_slots(sweep: Sweep, gpus: Any, env: dict[str, str]) -> list[Slot]:
    if not isinstance(gpus, list) or not all(isinstance(one, int | str) for one in gpus):
        raise ConfigError(f"launch: gpus={one_line(gpus)} must be a list of GPUs of this machine, such as [0, 1].")
    if len(set(map(str, gpus))) < len(gpus):
        raise ConfigError(f"launch: gpus={one_line(gpus)} names a GPU twice; each takes one point at a time.")
    if len(gpus) < sweep.ranks:
        raise ConfigError(f"launch: a run of ranks={sweep.ranks} needs as many GPUs, and gpus names {len(gpus)}.")
    groups = [gpus[i : i + sweep.ranks] for i in range(0, len(gpus) - sweep.ranks + 1, sweep.ranks)]
    named = [",".join(map(str, group)) for group in groups]
    return [Slot(f"gpu {name}", {**env, "CUDA_VISIBLE_DEVICES": name}) for name in named]
