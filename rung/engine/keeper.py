"""What is done between steps: log, save, evaluate, sample."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from rung.data.prefetch import Micro
from rung.engine.build import Setup, row_shapes
from rung.engine.checkpoint import Checkpoints
from rung.engine.clock import Clock
from rung.recipe import Draw
from rung.runs.record import Record


class Display(Protocol):
    """What a run shows while it goes on. It is told, and cannot answer."""

    def step(self, step: int, row: Mapping[str, float]) -> None: ...
    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...


class Diverged(Exception):
    """A step was not finite and was not applied; the message has the numbers."""


class Keeper:
    """Changes nothing that is learned. Without a record, on ranks other than the first, it only takes part in evals."""

    def __init__(self, setup: Setup, record: Record | None, show: Display, clock: Clock) -> None:
        self._setup, self._record, self._show, self._clock = setup, record, show, clock
        self._saves = Checkpoints(record.path / "checkpoints") if record is not None else None
        self._reported_unread = False
        self._keep, self._saves_best = setup.cfg.checkpoint.keep, setup.cfg.checkpoint.best
        step = setup.state.progress.step  # a resumed run begins with what was read from its save
        self._saved = step if self._saves is not None and step in self._saves.steps() else None

    def host_row(self, lr: float, micros: Sequence[Micro]) -> dict[str, float]:
        """What the host knows of the step that was just taken. Copying was done beside it, not in it."""
        spent = self._clock.lap()
        train_s = sum(spent.values()) - spent["eval"] - spent["save"] - spent["sample"]
        row = {"lr": lr, "step_s": train_s, "copy_s": sum(micro.copy_s for micro in micros)}
        row |= {f"{name}_s": seconds for name, seconds in spent.items()}
        setup = self._setup
        # Rows that grow with the step (a curriculum) take other arithmetic than the one that was counted.
        is_counted = all(row_shapes(micro.batch) == setup.counted_shapes for micro in micros)
        if setup.peak_flops is not None and train_s > 0 and is_counted:
            flops = setup.flops_per_row * setup.cut.rows_per_step
            row["mfu"] = flops / (train_s * setup.peak_flops * setup.world.size)
        return row

    def log(self, rows: Iterable[tuple[int, dict[str, float]]]) -> None:
        """Writes rows as they arrive; raises Diverged at the first whose step could not be applied and ends the run."""
        progress = self._setup.state.progress
        for step, row in rows:
            has_diverged = row.pop("diverged") > 0
            if not has_diverged:
                progress.targets += int(row["targets"])
                progress.skipped += int(row["skipped"])
            if self._record is not None:
                self._record.log(step, row)
                self._show.step(step, row)
            if has_diverged:  # no update was made since: the weights are those before this step
                progress.position -= (progress.step - step) * self._setup.cut.rows_per_step
                progress.step = step
                bad = ", ".join(f"{name} {value:g}" for name, value in row.items() if not math.isfinite(value))
                raise Diverged(
                    f"{bad or 'float16 overflowed at every scale'} at step {step}; the update was not applied"
                )

    def save(self) -> None:
        if self._record is None or self._saves is None:
            return
        state = self._setup.state
        if state.progress.step == self._saved:
            return
        with self._clock.phase("save"):
            self._saves.save(state, self._setup.save_extra())
            self._saves.clean(self._keep)
        self._saved = state.progress.step
        self._record.event("save", step=state.progress.step)

    def evaluate(self) -> None:
        state, progress = self._setup.state, self._setup.state.progress
        if progress.eval_steps and progress.eval_steps[-1] == progress.step:
            return
        with self._clock.phase("eval"):
            results = self._setup.evaluator.run(state.model)
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
            if self._saves_best:
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
                for sample in setup.samples(Draw(setup.cfg.seed, step, np.arange(1))):
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
