"""Budgets and cadences in whatever unit the user gave, as steps.

What is due at step t does not depend on how the run got there. Only time is asked of the clock, and it can end a run or
ask for a save, an eval or samples: none of these changes what is learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rung.engine.config import Engine
from rung.units import Budget


@dataclass(frozen=True)
class Rate:
    """What one step uses up."""

    rows_per_step: int
    epoch_rows: int
    targets_per_row: float

    def steps(self, budget: Budget) -> int | None:
        """The first of the budget's limits that can be counted, in whole steps; None when it gives only a time."""
        found = []
        if budget.steps is not None:
            found.append(budget.steps)
        if budget.targets is not None:  # never more than the user allowed
            found.append(int(budget.targets / (self.rows_per_step * self.targets_per_row)))
        if budget.epochs is not None:  # the last epoch is finished, so that every row is seen
            found.append(-(-round(budget.epochs * self.epoch_rows) // self.rows_per_step))
        return min(found) if found else None


class Cadence:
    """Whether something that recurs is due at a step, by count or by clock."""

    def __init__(self, budget: Budget, rate: Rate, elapsed_s: float) -> None:
        self._every = None if budget.is_never else rate.steps(budget)
        if self._every is not None:
            self._every = max(1, self._every)
        # Whole epochs drift by up to a step each where an epoch is not a whole number of steps: they go by rows.
        self._rows = (0, 0)
        if budget.epochs and self._every == rate.steps(Budget(epochs=budget.epochs)):
            self._rows = rate.rows_per_step, round(budget.epochs * rate.epoch_rows)
        self._every_s = None if budget.is_never else budget.seconds
        self._times_due = self._times(elapsed_s)

    def due(self, step: int, elapsed_s: float) -> bool:
        if self._times(elapsed_s) > self._times_due:
            self._times_due = self._times(elapsed_s)
            return True
        rows_per_step, every_rows = self._rows
        if every_rows >= rows_per_step > 0:
            return step > 0 and step * rows_per_step // every_rows > (step - 1) * rows_per_step // every_rows
        return self._every is not None and step > 0 and step % self._every == 0

    def _times(self, elapsed_s: float) -> int:
        """How often it was due by now, over all attempts: a run that is stopped every hour still gets its evals."""
        return int(elapsed_s // self._every_s) if self._every_s else 0


class Actions(NamedTuple):
    """What is to be done at a state, in this order."""

    save: bool
    eval: bool
    sample: bool
    end: bool
    stop: bool


class Due:
    """Says what is due at each state, the same on every rank."""

    def __init__(
        self,
        cfg: Engine,
        rate: Rate,
        num_steps: int | None,
        elapsed_s: float,
        agreed: Callable[[bool, int], bool],
        redo_eval_at: int | None = None,
    ) -> None:
        self._num_steps, self._max_s = num_steps, cfg.optimizer.max_iters.seconds
        self._agreed, self._redo_eval_at = agreed, redo_eval_at
        budgets = (cfg.checkpoint.every, cfg.eval_interval, cfg.sample_interval)
        self._save, self._eval, self._sample = (Cadence(budget, rate, elapsed_s) for budget in budgets)

    def at(self, step: int, elapsed_s: float, is_asked_to_stop: bool) -> Actions:
        end = self._num_steps is not None and step >= self._num_steps
        # Clocks and signals differ between ranks, so what they say is agreed on.
        if self._max_s is not None and not end:
            end = self._agreed(elapsed_s >= self._max_s, step)
        stop = not end and self._agreed(is_asked_to_stop, step)
        return Actions(
            save=self._save.due(step, elapsed_s) or end or stop,
            eval=self._eval.due(step, elapsed_s) or end or step == self._redo_eval_at,
            sample=self._sample.due(step, elapsed_s) or end,
            end=end,
            stop=stop,
        )
