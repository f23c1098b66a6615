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
from rung.engine.keeper import Display, Keeper, Watch
from rung.engine.rescue import Diverged, Rescue
from rung.engine.signals import Signals
from rung.engine.state import set_training
from rung.runs.record import Record

BUFFER_STEPS = 3  # after which it is known which buffers a forward writes into


class Outcome(NamedTuple):
    status: str  # finished, stopped, diverged
    reason: str = ""
    signal: int = 0  # what stopped it


def fit(setup: Setup, record: Record | None, show: Display, watch: Watch | None = None) -> Outcome:
    """Trains until the budget is spent or somebody stops it. Only the first rank has a record."""
    state, progress = setup.state, setup.state.progress
    clock, signals = Clock(), Signals(fixed_lag=setup.world.size > 1)
    keeper, rescue = Keeper(setup, record, show, clock, watch), Rescue(setup, record)
    agenda = Agenda(setup.cfg, setup.rate, setup.num_steps, progress.elapsed_s, setup.world.agreed, setup.redo_eval_at)
    begun_s = time.monotonic() - progress.elapsed_s
    feed = setup.feed()
    set_training(state.model)
    first_step = progress.step
    setup.stepper.guard.arm(first_step)
    with StopRequest() as stop, QuietCollector() as collector:
        keeper.begin()
        while True:
            try:
                progress = state.progress
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
                is_tired = not due.end and due.eval and keeper.is_out_of_patience()
                if is_tired:
                    keeper.save()
                    if not due.sample:
                        keeper.sample()
                if due.end or is_tired:
                    keeper.finish()
                    feed.close()
                    return Outcome("finished", "no new lowest eval loss" if is_tired else "")
                if due.stop:
                    feed.close()
                    reason = f"{stop.name or 'another rank was stopped'} at step {progress.step}"
                    return Outcome("stopped", reason, stop.number)

                step = progress.step
                with clock.phase("wait"):
                    micros = feed.take(step, setup.num_steps)
                lr = setup.schedule.lr(step, progress.evals)
                rescue.remember(step, micros, lr)
                scalars, tables = keeper.look(step, micros)
                measures = keeper.measures(step)
                scalars |= setup.stepper.step(step, micros, lr, clock, measures)
                if measures:
                    first, layers = keeper.layers()
                    scalars, tables = scalars | first, tables | layers
                host = keeper.host_row(step, lr, micros)
                progress.step += 1
                progress.position += setup.cut.rows_per_step
                signals.push(step, host, scalars, tables)
                keeper.log(signals.ready())
                keeper.compare_ranks(progress.step)
                collector.after_step(step)
                if step == first_step + BUFFER_STEPS:
                    setup.stepper.guard.forget_still_buffers()
            except Diverged as error:
                feed.close()
                signals.drop()
                told = rescue.after(error)
                if not told:
                    keeper.finish()
                    return Outcome("diverged", str(error))
                show.say(told)
                if state.progress.step < error.step:
                    keeper.rewound()
                feed = setup.feed()
            except BaseException as error:
                feed.close()
                if isinstance(error, Exception):
                    rescue.after_raise(error)
                raise


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
