"""The loop that trains any recipe. Read `fit` top to bottom.

At state t, before update t, whatever is due is done: save, then eval (so that an eval that fails cannot cost the save),
then samples. None of these changes what is learned. Then comes step t. What a step leaves behind is read when it has
arrived, written to the record and shown.
"""

from __future__ import annotations

import gc
import math
import signal
import time
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np

from rung.engine.budget import Cadence
from rung.engine.build import Setup
from rung.engine.checkpoint import Checkpoints
from rung.engine.clock import Clock
from rung.engine.evaluate import eval_mode
from rung.engine.signals import Signals
from rung.engine.state import set_training
from rung.recipe import Draw
from rung.runs.record import Record

SYNC_STEPS = 10  # with several ranks, how often they agree on whether to stop


class Display(Protocol):
    """What a run shows while it goes on. It is told, and cannot answer."""

    def step(self, step: int, row: Mapping[str, float]) -> None: ...
    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...


class Outcome(NamedTuple):
    status: str  # finished, stopped, diverged
    reason: str = ""


def fit(setup: Setup, record: Record | None, show: Display) -> Outcome:
    """Trains until the budget is spent or somebody stops it. Only the first rank has a record."""
    cfg, world, state = setup.cfg, setup.world, setup.state
    progress = state.progress
    clock, signals = Clock(), Signals()
    saves, evals, samples = (
        Cadence(budget, setup.rate, progress.elapsed_s)
        for budget in (cfg.checkpoint.every, cfg.eval_interval, cfg.sample_interval)
    )
    max_s = cfg.optimizer.max_iters.seconds
    keeper = Keeper(setup, record, show, clock)
    feed = setup.feed()
    set_training(state.model)
    outcome = Outcome("finished")
    begun_s = time.monotonic() - progress.elapsed_s
    with StopRequest() as stop, QuietCollector() as collector:
        try:
            while True:
                step = progress.step
                progress.elapsed_s = time.monotonic() - begun_s
                is_out_of_time = max_s is not None and progress.elapsed_s >= max_s
                must_stop = bool(stop.name)
                if world.size > 1:  # clocks and signals differ between ranks: they must agree, and not at every step
                    agree = step % SYNC_STEPS == 0
                    is_out_of_time, must_stop = agree and world.any(is_out_of_time), agree and world.any(must_stop)
                is_end = is_out_of_time or (setup.num_steps is not None and step >= setup.num_steps)
                shared_s = progress.elapsed_s if world.size == 1 else 0.0  # ranks keep no common clock for cadences

                is_save_due = saves.due(step, shared_s) or is_end or must_stop
                is_eval_due, is_sample_due = evals.due(step, shared_s) or is_end, samples.due(step, shared_s) or is_end
                if is_save_due or is_eval_due or is_sample_due:
                    # A row that is still on its way may say that the updates stopped some steps ago, and what is in
                    # no row before a save would be missing from the record after a resume.
                    bad = keeper.log(signals.ready(wait=True))
                    if bad is not None:
                        outcome = Outcome("diverged", bad)
                        break
                if is_save_due:
                    keeper.save()
                if is_eval_due:
                    keeper.evaluate()
                    collector.collect()
                if is_sample_due:
                    keeper.sample()
                if is_end:
                    break
                if must_stop:
                    outcome = Outcome("stopped", f"{stop.name} at step {step}")
                    break

                with clock.phase("wait"):
                    micros = feed.take(step, setup.num_steps)
                lr = setup.schedule.lr(step, progress.evals)
                on_device = setup.stepper.step(step, micros, lr, clock)
                progress.step += 1
                progress.position += setup.cut.rows_per_step
                signals.push(step, keeper.host_row(lr), on_device)
                collector.after_first_step()

                bad = keeper.log(signals.ready())
                if bad is not None:
                    outcome = Outcome("diverged", bad)
                    break
            bad = keeper.log(signals.ready(wait=True))
            if bad is not None and outcome.status != "diverged":
                outcome = Outcome("diverged", bad)
        finally:
            feed.close()
    return outcome


class Keeper:
    """What is done between steps: log, save, evaluate, sample. Changes only the counts of `Progress`."""

    def __init__(self, setup: Setup, record: Record | None, show: Display, clock: Clock) -> None:
        self._setup, self._record, self._show, self._clock = setup, record, show, clock
        self._saves = Checkpoints(record.path / "checkpoints") if record is not None else None
        self._reported_unread = False
        step = setup.state.progress.step  # a resumed run begins with what was read from its save
        self._saved = step if self._saves is not None and step in self._saves.steps() else None

    def host_row(self, lr: float) -> dict[str, float]:
        """What the host knows of the step that was just taken."""
        spent = self._clock.lap()
        train_s = sum(spent.values()) - spent["eval"] - spent["save"] - spent["sample"]
        row = {"lr": lr, "step_s": train_s, **{f"{name}_s": seconds for name, seconds in spent.items()}}
        peak = self._setup.peak_flops
        if peak is not None and train_s > 0:
            share = (
                self._setup.flops_per_row * self._setup.cut.rows_per_step / (train_s * peak * self._setup.world.size)
            )
            row["mfu"] = share
        return row

    def log(self, rows: Any) -> str | None:
        """Writes rows as they arrive; returns what is wrong with the first that is not finite."""
        progress = self._setup.state.progress
        for step, row in rows:
            progress.targets += int(row["targets"]) if math.isfinite(row["targets"]) else 0
            is_finite = math.isfinite(row["loss"]) and math.isfinite(row["norm"])
            scaled = self._setup.precision.scaler is not None
            if not is_finite and scaled:
                progress.skipped += 1
                row["skipped"] = 1.0
            if self._record is not None:
                self._record.log(step, row)
                self._show.step(step, row)
            if not is_finite and (not scaled or not math.isfinite(row["loss"])):
                progress.step = step  # no update was made since: the weights are those before this step
                return f"loss {row['loss']:g}, norm {row['norm']:g} at step {step}; the update was not applied"
        return None

    def save(self) -> None:
        if self._record is None or self._saves is None:
            return
        state = self._setup.state
        if state.progress.step == self._saved:
            return
        with self._clock.phase("save"):
            self._saves.save(state, self._setup.save_extra())
            self._saves.clean(self._setup.cfg.checkpoint.keep, up_to=state.progress.step)
        self._saved = state.progress.step
        self._record.event("save", step=state.progress.step)

    def evaluate(self) -> None:
        state, progress = self._setup.state, self._setup.state.progress
        if progress.eval_steps and progress.eval_steps[-1] == progress.step:
            return
        with self._clock.phase("eval"):
            results = self._setup.evaluator.run(state.model)
        set_training(state.model)
        if not results:
            return
        first = next(iter(results))
        loss = results[first]["loss"]
        progress.evals.append(loss)
        progress.eval_steps.append(progress.step)
        is_best = math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss)
        if is_best:
            progress.best_loss, progress.best_step = loss, progress.step
        if self._record is None or self._saves is None:
            return
        self._record.log(
            progress.step, {f"eval/{s}/{name}": v for s, values in results.items() for name, v in values.items()}
        )
        self._record.event("eval", step=progress.step, results=results)
        self._show.eval(progress.step, results, is_best)
        if is_best:
            if self._setup.cfg.checkpoint.best:
                self.save()
                self._saves.mark_best(progress.step)
            self._record.update(best={"step": progress.step, "set": first, "loss": loss})
        self._report_unread()

    def sample(self) -> None:
        """A failing sample is an event, not the end of the run."""
        if self._record is None:
            return
        setup, step = self._setup, self._setup.state.progress.step
        with self._clock.phase("sample"):
            try:
                with eval_mode(setup.state.model), setup.precision.autocast():
                    made = setup.recipe.sample(setup.state.model, Draw(setup.cfg.seed, step, np.arange(1)))
                for sample in made:
                    self._record.add_sample(step, sample.name, sample.data, sample.caption)
            except Exception as error:
                self._record.event("sample_failed", step=step, error=str(error), traceback=traceback.format_exc())
                self._show.say(f"samples at step {step} failed: {error} (training goes on; see events.ndjson)")

    def _report_unread(self) -> None:
        unread = self._setup.config.unread()
        if unread and not self._reported_unread and self._record is not None:
            self._record.event("unread_keys", keys=unread)
            self._show.say(f"set, but read by nothing so far: {', '.join(unread)}")
        self._reported_unread = True


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request that the loop honours at the next step boundary."""

    def __init__(self) -> None:
        self.name = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread, where signals cannot be caught: somebody else decides
                break
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: at once
        self.name = signal.Signals(number).name

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class QuietCollector:
    """Keeps Python's garbage collector from pausing a step: it runs when asked, after evals."""

    def __enter__(self) -> QuietCollector:
        self._was_on = gc.isenabled()
        self._is_frozen = False
        return self

    def after_first_step(self) -> None:
        if not self._is_frozen:
            gc.collect()
            gc.freeze()
            gc.disable()
            self._is_frozen = True

    def collect(self) -> None:
        gc.collect()

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        if self._was_on:
            gc.enable()
