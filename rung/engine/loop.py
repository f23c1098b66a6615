"""The loop that trains any recipe. Read `fit` top to bottom.

At state t, before update t, whatever is due is done: save, then eval (so that an eval that fails cannot cost the save),
then samples. None of these changes what is learned. Then comes step t. What a step leaves behind is read when it has
arrived, written to the record and shown.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from types import FrameType
from typing import Any, NamedTuple

from rung.engine.budget import Agenda
from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.keeper import Display, Diverged, Keeper
from rung.engine.signals import Signals
from rung.engine.state import set_training
from rung.runs.record import Record


class Outcome(NamedTuple):
    status: str  # finished, stopped, diverged
    reason: str = ""
    signal: int = 0  # what stopped it


def fit(setup: Setup, record: Record | None, show: Display) -> Outcome:
    """Trains until the budget is spent or somebody stops it. Only the first rank has a record."""
    state, progress = setup.state, setup.state.progress
    clock, signals = Clock(), Signals(fixed_lag=setup.world.size > 1)
    keeper = Keeper(setup, record, show, clock)
    agenda = Agenda(setup.cfg, setup.rate, setup.num_steps, progress.elapsed_s, setup.world.agreed, setup.redo_eval_at)
    begun_s = time.monotonic() - progress.elapsed_s
    feed = setup.feed()
    set_training(state.model)
    with StopRequest() as stop, QuietCollector() as collector:
        try:
            while True:
                progress.elapsed_s = time.monotonic() - begun_s
                due = agenda.at(progress.step, progress.elapsed_s, bool(stop.name))
                if due.anything:
                    # A row that is still on its way may say that the updates stopped some steps ago, and what is in no
                    # row before a save would be missing from the record after a resume.
                    keeper.log(signals.ready(wait=True))
                if due.save:
                    keeper.save()
                if due.eval:
                    keeper.evaluate()
                    collector.collect()
                if due.sample:
                    keeper.sample()
                if due.end:
                    return Outcome("finished")
                if due.stop:
                    reason = f"{stop.name or 'another rank was stopped'} at step {progress.step}"
                    return Outcome("stopped", reason, stop.number)

                step = progress.step
                with clock.phase("wait"):
                    micros = feed.take(step, setup.num_steps)
                lr = setup.schedule.lr(step, progress.evals)
                on_device = setup.stepper.step(step, micros, lr, clock)
                progress.step += 1
                progress.position += setup.cut.rows_per_step
                signals.push(step, keeper.host_row(lr, micros), on_device)
                keeper.log(signals.ready())
                collector.after_step(step)
        except Diverged as error:
            return Outcome("diverged", str(error))
        finally:
            feed.close()


class StopRequest:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request that the loop honours at the next step boundary."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else ""

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # as under nohup
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread, where signals cannot be caught: somebody else decides
                break
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once
        self.number = number
        if number == signal.SIGINT:  # straight to the descriptor: a display must not be entered from a signal
            os.write(2, b"\nstopping at the next step, after a save; Ctrl-C again stops at once\n")

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class QuietCollector:
    """Keeps Python's garbage collector from pausing steps: young objects now and then, all after evals."""

    EVERY_STEPS = 200

    def __enter__(self) -> QuietCollector:
        self._was_on = gc.isenabled()
        self._is_frozen = False
        return self

    def after_step(self, step: int) -> None:
        if not self._is_frozen:
            gc.collect()
            gc.freeze()
            gc.disable()
            self._is_frozen = True
        elif step % self.EVERY_STEPS == 0:
            gc.collect(1)

    def collect(self) -> None:
        gc.collect()

    def __exit__(self, *error: object) -> None:
        if self._is_frozen:
            gc.unfreeze()
        if self._was_on:
            gc.enable()
