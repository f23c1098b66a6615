"""The course of a run of somebody's own loop: which step a logged row is of, its evals, and the best of them.

Steps never go back in what is written. Numbers of training that do are left out, as wandb does; an eval that does is
kept where the run stands, because that is what it was measured on.

The surprising thing: an eval that is logged without a step does not count as one. It is about the weights that the next
row of training starts from, and has that row's number, as in rung's own runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from rung.own_loop.arriving import Arriving
from rung.own_loop.logged import Logged, to_float
from rung.own_loop.pairing import Pairing
from rung.own_loop.quiet import Quiet


class Course:
    """`summary` has the last value of each name."""

    def __init__(self, out: Quiet) -> None:
        self._out = out
        self._rows = Arriving(self._write)
        self.updates = Pairing()
        self.summary: dict[str, Any] = {}
        self.best: dict[str, Any] | None = None
        self._evals: list[tuple[int, float]] = []
        self._next, self._last = 0, -1  # the step that a row without a number has, and the newest that was written
        self._gives_steps = False
        self._last_train: tuple[int, float] | None = None  # step and time of the last row of training
        self._at_step: Mapping[str, Any] = {}  # what was logged at the newest step
        self._num_targets, self._targets_waiting = 0, 0
        self._num_left_out = 0

    @property
    def has_begun(self) -> bool:
        return self._last >= 0 or self.updates.num_updates > 0

    @property
    def last(self) -> int | None:
        """The newest step that was logged, or after the last update; None where nothing was."""
        num_taken = 0 if self._last_train is None else self._last_train[0] + 1
        return None if self._last < 0 else max(self._last, num_taken)

    @property
    def step(self) -> int:
        """Where the run stands: of what is not numbered itself."""
        return max(self._last, 0) if self._gives_steps else self._next

    def log(self, logged: Logged, step: Any = None) -> None:
        if "step" in logged.row:  # a name that is taken
            said = logged.row.pop("step")
            step = said if step is None else step
        is_eval = logged.is_eval_only
        at = self._number(step, is_eval)
        if logged.row and not is_eval:
            self._train(at, logged)
        if logged.evals or is_eval:
            self._eval(max(at, self._last), logged)

    def targets(self, count: int) -> None:
        self._targets_waiting += int(count)

    def something_else(self) -> None:
        """The time of an eval or a sample is not that of a step."""
        if self._last_train is not None:
            self._last_train = (self._last_train[0], math.nan)

    def close(self) -> dict[str, Any]:
        """Writes what is still on its way; returns the totals."""
        try:
            for at, update in self.updates.rest():
                if at >= self._last:
                    self._rows.push(at, update.values, update.tables)
            self._rows.read(wait=True)
        except Exception as error:  # a device that has failed gives nothing back, and the run still ends
            self._out.tell(f"the last rows could not be read: {type(error).__name__}: {str(error)[:160]}")
        if self._num_left_out:
            self._out.event("left_out", step=self._last, rows=self._num_left_out, why="their steps went back")
        return {
            "step": 0 if self._last_train is None else self._last_train[0] + 1,
            "targets": self._num_targets,
            "evals": [loss for _, loss in self._evals],
            "eval_steps": [step for step, _ in self._evals],
        }

    def _number(self, given: Any, is_eval: bool) -> int:
        """The step that a script means."""
        if given is not None:
            try:
                number = int(given)
                if not 0 <= number < 2**53 or number != float(given):
                    raise ValueError
            except (TypeError, ValueError, OverflowError):
                self._out.tell(f"step={given!r} is not a whole number from 0 on; rows are counted instead", "step")
            else:
                self._gives_steps = True
                return number
        if self._gives_steps:
            return max(self._last, 0)
        number = self._next
        self._next += not is_eval
        return number

    def _train(self, step: int, logged: Logged) -> None:
        if step < self._last:
            self._num_left_out += 1
            self._out.tell(
                f"step {step} comes after step {self._last}: numbers of training that go back are left out, as a run "
                "has one course; start another run with rung.init",
                "back",
            )
            return
        self._note_names(step, logged.row)
        own, mine = self.updates.rows(step)
        row = logged.row
        if "norm" in row:  # the script knows the norm before it clipped; ours is after
            for update in (*(update for _, update in own), mine):
                if "norm" in update.values:
                    update.values.setdefault("norm_clipped", update.values.pop("norm"))
        for at, update in own:
            if at >= self._last:
                self._rows.push(at, update.values, update.tables)
        row = {**mine.values, **row}
        self._count_targets(row)
        self._time(step, row, has_eval=bool(logged.evals))
        self._last, self._next = step, step + 1
        self._rows.push(step, row, mine.tables)

    def _note_names(self, step: int, row: Mapping[str, Any]) -> None:
        if self._last_train is None or step != self._last_train[0]:
            self._at_step = row
            return
        if twice := self._at_step.keys() & row.keys():
            names = ", ".join(repr(name) for name in sorted(twice)[:3])
            self._out.tell(f"{names} logged twice at step {step}; both rows are kept", "twice")
        self._at_step = {**self._at_step, **row}

    def _count_targets(self, row: dict[str, Any]) -> None:
        if self._targets_waiting:
            row.setdefault("targets", self._targets_waiting)
            self._targets_waiting = 0
        if "targets" in row:
            row["targets"] = to_float(row["targets"])
            self._num_targets += int(row["targets"]) if math.isfinite(row["targets"]) else 0

    def _time(self, step: int, row: dict[str, Any], has_eval: bool) -> None:
        """Seconds of a step, where nothing else is known to have happened since the last row."""
        now, before = time.perf_counter(), self._last_train
        if before is not None and step > before[0] and not math.isnan(before[1]) and not has_eval:
            row.setdefault("step_s", (now - before[1]) / (step - before[0]))
        self._last_train = (step, now)

    def _eval(self, step: int, logged: Logged) -> None:
        self._rows.read(wait=True)
        results = {of: {n: to_float(v) for n, v in values.items()} for of, values in logged.evals.items()}
        row = {f"eval/{of}/{name}": value for of, values in results.items() for name, value in values.items()}
        if logged.is_eval_only:
            row |= {name: to_float(value) for name, value in logged.row.items()}
        self._last = max(self._last, step)
        self._write(step, row, {})
        self.something_else()
        if not results:  # how long it took, and no more
            return
        self._out.event("eval", step=step, results=results)
        of = self.best["set"] if self.best else next((of for of, values in results.items() if "loss" in values), None)
        loss = results.get(of or "", {}).get("loss")
        if loss is None:
            return
        self._evals.append((step, loss))
        if math.isfinite(loss) and (self.best is None or loss < self.best["loss"]):
            best = self.best = {"step": step, "set": of, "loss": loss}
            self._out.do(lambda record: record.update(best=best))

    def _write(self, step: int, values: dict[str, float], tables: Mapping[str, Any]) -> None:
        if values:
            self._out.log(step, values)
            self.summary.update(values)
        for kind, table in tables.items():
            self._out.do(lambda record: record.table(kind, step, table.names, table.columns))  # noqa: B023
