"""The loop that trains any recipe. Read `fit` top to bottom.

At state t, before update t, whatever is due is done: save, then eval (so that an eval that fails cannot cost the save),
then samples. None of these changes what is learned: what code of a recipe changes all the same is told and undone. Then
comes step t. What a step leaves behind is read when it has arrived; the loop decides whether the run continues, and the
recorder writes it down.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

from rung.engine.budget import Due
from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.datacheck import DataCheck
from rung.engine.divergence import DivergenceHandler
from rung.engine.guarded import Diverged, Row
from rung.engine.purity import pure
from rung.engine.recorder import Display, Recorder, Watch
from rung.engine.state import set_training
from rung.errors import DataError
from rung.runs.record import Record

COMPARE_STEPS = 500  # between looks, besides those at saves, at whether all ranks have the same weights
BUFFER_STEPS = 3  # after which it is known which buffers a forward writes into


class Outcome(NamedTuple):
    status: str  # finished, stopped, diverged
    reason: str = ""
    signal: int = 0  # what stopped it


def fit(
    setup: Setup,
    record: Record | None,
    show: Display,
    watch: Watch | None = None,
    asked: StopRequest | None = None,
) -> Outcome:
    """Trains until the budget is spent or a signal stops it. Only the first rank has a record.

    asked: a stop request that is already listening, so that a signal which came before the first step counts.
    """
    state, progress = setup.state, setup.state.progress
    clock, guarded, patience = Clock(), setup.stepper.guarded, setup.cfg.eval_patience
    recorder, divergence = Recorder(setup, record, show, clock, watch), DivergenceHandler(setup, record)
    due = Due(setup.cfg, setup.rate, setup.num_steps, progress.elapsed_s, setup.world.agreed, state.redo_eval_at)
    saves_best, geometric = setup.cfg.checkpoint.best, setup.cfg.checkpoint.geometric
    begun_s = time.monotonic() - progress.elapsed_s
    prefetcher = setup.prefetcher()
    data = DataCheck(setup.streams.values() if setup.world.is_first else ())
    set_training(state.model)
    first_step = progress.step
    guarded.start(first_step)

    def read(rows: Iterable[Row]) -> None:
        """Counts and records what has arrived; a step that could not be applied ends here."""
        for row in rows:
            if row.failure is None:
                state.progress.targets += int(row.values["targets"])
                state.progress.skipped += int(row.values["skipped"])
            recorder.row(row)
            if row.failure is not None:
                raise row.failure
        recorder.ask_the_doctor(state.progress.step)

    def save(for_good: bool = False, is_best: bool = False) -> None:
        """Weights that are not finite are never saved over good ones."""
        if names := divergence.broken_weights():
            step = state.progress.step
            recorder.event("weights_broken", step=step, tensors=names, gradients_finite=None)
            why = f"weights are not finite at step {step} ({', '.join(names[:3])}); they were not saved"
            raise Diverged(step, why, is_broken=True, tensors=names)
        recorder.save(for_good, is_best)

    def close_data() -> None:
        if (looked_at := data.close())["num_bytes"]:
            recorder.event("data_checked", step=state.progress.step, **looked_at)

    listening = StopRequest() if asked is None else contextlib.nullcontext(asked)
    with listening as stop, QuietCollector() as collector:
        if setup.cfg.checkpoint.initial and progress.step == 0:
            save(for_good=True)
        while True:
            try:
                progress = state.progress
                progress.elapsed_s = time.monotonic() - begun_s
                now = due.at(progress.step, progress.elapsed_s, bool(stop.name or data.problem))
                if any(now):
                    # A row that is still on its way may say that the updates stopped some steps ago, and what is in no
                    # row before a save would be missing from the record after a resume.
                    with setup.world.waiting("the numbers of earlier steps", exchanges=False):
                        read(guarded.rows(wait=True))
                if now.save:
                    save()
                if now.eval and progress.step not in progress.eval_steps[-1:]:
                    with clock.phase("eval"), pure(state) as changes:
                        results = setup.evaluator.run(state.model)
                    recorder.impure("an eval", changes)
                    if results:
                        is_best = progress.add_eval(results)
                        recorder.eval(results, is_best)
                        if is_best and saves_best:
                            save(is_best=True)
                        if is_milestone(progress.evals, geometric):
                            save(for_good=True)
                        recorder.report_unread_keys()
                        recorder.probe()
                    gc.collect()
                if now.sample:
                    recorder.sample()
                early_stop = not now.end and now.eval and 0 < patience <= since_best(progress.evals)
                if early_stop:
                    save()
                    if not now.sample:
                        recorder.sample()
                if now.end or early_stop:
                    recorder.ask_the_doctor(progress.step, is_end=True)
                    prefetcher.close()
                    close_data()
                    return Outcome("finished", "no new lowest eval loss" if early_stop else "")
                if now.stop:
                    prefetcher.close()
                    close_data()
                    if data.problem:
                        raise DataError(
                            f"{data.problem}; steps up to {progress.step} were trained on it: prepare the data again, "
                            "and train anew",
                            code="data-damaged",
                        )
                    reason = f"{stop.name or 'another rank was stopped'} at step {progress.step}"
                    return Outcome("stopped", reason, stop.number)

                step = progress.step
                with clock.phase("wait"):
                    micros = prefetcher.take(step, setup.num_steps)
                lr = setup.schedule.lr(step, progress.evals)
                divergence.remember(step, micros, lr)
                scalars, tables = recorder.activation_stats(step, micros)
                measures = guarded.measures(step)
                scalars |= setup.stepper.step(step, micros, lr, clock, measures)
                if measures:
                    first, layers = guarded.tables()
                    scalars, tables = scalars | first, tables | layers
                host = recorder.host_row(step, lr, micros, measures)
                progress.step += 1
                progress.position += setup.layout.rows_per_step
                guarded.push(step, host, scalars, tables)
                # The device may be waiting for other ranks.
                with setup.world.waiting("the numbers of earlier steps", exchanges=False):
                    read(guarded.rows())
                if progress.step % COMPARE_STEPS == 0 or step == first_step:
                    recorder.compare_ranks()
                collector.after_step(step)
                if step == first_step + BUFFER_STEPS:
                    guarded.guard.forget_still_buffers()
            except Diverged as error:
                prefetcher.close()
                guarded.drop()
                message = divergence.after(error)
                if not message:
                    close_data()
                    recorder.ask_the_doctor(state.progress.step, is_end=True)
                    return Outcome("diverged", str(error))
                show.say(message)
                if state.progress.step < error.step:
                    guarded.rewound()
                    recorder.rewound()
                prefetcher = setup.prefetcher()
            except BaseException as error:
                prefetcher.close()
                data.close()
                if isinstance(error, Exception):
                    divergence.after_raise(error)
                raise


def since_best(evals: list[float]) -> int:
    """How many evals came after the one with the lowest loss; the same on every rank, and after a resume."""
    best, place = math.inf, 0
    for number, loss in enumerate(evals, start=1):
        if loss < best:
            best, place = loss, number
    return len(evals) - place


def is_milestone(evals: list[float], share: float) -> bool:
    """Whether the last eval is below `share` of the loss at the last one that was; the first one sets the mark."""
    mark, is_below = math.inf, False
    for loss in evals:
        is_below = share > 0 and math.isfinite(mark) and loss < share * mark
        if is_below or (math.isinf(mark) and math.isfinite(loss)):
            mark = loss
    return is_below


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
            except ValueError:  # not in the main thread, where signals cannot be caught
                break
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once
        self.number = number
        if number == signal.SIGINT:  # straight to the descriptor: a display must not be entered from a signal
            os.write(2, b"\nstopping at the next step, after a save; Ctrl-C again stops at once\n")

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Gives the signals back to whoever had them before."""
        while self._before:
            signal.signal(*self._before.popitem())


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

    def __exit__(self, *error: object) -> None:
        if self._is_frozen:
            gc.unfreeze()
        if self._was_on:
            gc.enable()
