"""The steps of a script's run: which step a logged row is of, its evals, and the best of them.

Steps never go back in what is written. Numbers of training that do are left out, as wandb does; an eval that does is
kept where the run stands, because that is what it was measured on. An eval that is logged without a step does not count
as one: it is about the weights that the next row of training starts from, and has that row's number, as in rung's own
runs.

Under a guard each step has a row, whether the script logs one or not. The guard's numbers wait until the script logs
its row, or takes the next step; then they are a row of their own. `Pairing` does the same for a watched optimizer.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rung.runs.record import Record
from rung.script.logged import Logged, is_away, to_float
from rung.script.never_raise import NeverRaise

if TYPE_CHECKING:
    from rung.engine.signals import Signals

MOST_WAITING = 10_000  # updates without a row; a script that logs none needs no more of them


@dataclass
class Update:
    """What was measured around one update: numbers, possibly still on a device, and tables by kind."""

    values: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)


class Pairing:
    """Which row of a script belongs to which update of its optimizer.

    Somebody who watches an optimizer learns of an update when it happens, and of the script's number for it when the
    script logs, before or after it, at each step or at every tenth. Where the numbers of rows and updates agree, each
    update gets the number that the script would have given it. Where they do not, the row has the last update and
    nothing is made up.
    """

    def __init__(self) -> None:
        self.num_updates = 0  # in all
        self.is_watched = False  # somebody would know of an update
        self._waiting: deque[Update] = deque(maxlen=MOST_WAITING)
        self._comes_first: bool | None = None  # the row before its update; known with the first row
        self._last_row: int | None = None

    def add(self, update: Update) -> None:
        self.num_updates += 1
        self._waiting.append(update)

    def rows(self, step: int) -> tuple[list[tuple[int, Update]], Update]:
        """At a row of training: updates that are rows of their own, by step, and the one that belongs into the row."""
        before, self._last_row = self._last_row, step
        if self._comes_first is False and len(self._waiting) == 1:  # as in most loops
            return [], self._waiting.popleft()
        waiting = list(self._waiting)
        self._waiting.clear()
        if self._comes_first is None:
            self._comes_first = not waiting
        if not waiting or (self._comes_first and before is None):
            return [], Update()
        if self._comes_first:
            assert before is not None
            own = list(enumerate(waiting, before)) if len(waiting) == step - before else [(before, waiting[0])]
            return own, Update()
        is_exact = len(waiting) == (step + 1 if before is None else step - before)
        own = list(enumerate(waiting[:-1], step - len(waiting) + 1)) if is_exact else []
        return own, waiting[-1]

    def rest(self) -> list[tuple[int, Update]]:
        """At the end: updates after the last row, of a script that logs rows first."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return [(self._last_row, waiting[0])] if waiting and self._comes_first and self._last_row is not None else []

    def has_none(self) -> bool:
        """Whether it is known that no update was made since the last row."""
        return self.is_watched and not self._waiting and not self._comes_first

    def skipped(self, step: int) -> None:
        """This row belongs to a step that was not applied."""
        self._last_row = step


class AsyncScalars:
    """Rows on their way from a device to the record, in order, without making the device wait.

    A row whose numbers are all on the host is written at once, unless an older one is still on its way. Numbers on a
    GPU travel as those of the engine do. `write(step, values, tables)` gets each row when it is complete; a table is
    names and columns.
    """

    def __init__(self, write: Callable[[int, dict[str, float], dict[str, Any]], None]) -> None:
        self._write = write
        self._signals: Signals | None = None
        self._pending: deque[tuple[dict[str, Any], list[str]]] = deque()  # a row, and which of it is on its way

    def push(self, step: int, values: dict[str, Any], tables: Mapping[str, Any] = {}) -> None:
        names = [name for name, value in values.items() if type(value) is not float and is_away(value)]
        if not names and not self._pending and not tables:
            self._write(step, values, {})
            return
        import torch

        from rung.engine.signals import Signals

        self._signals = self._signals or Signals()
        # By number, since the engine's own names have a meaning there; a row behind another may have nothing to send.
        numbers = {str(number): values[name] for number, name in enumerate(names)} or {"": torch.zeros(())}
        self._signals.push(step, {}, numbers, tables)
        self._pending.append((values, names))
        self.read()

    def read(self, wait: bool = False) -> None:
        for step, numbers, tables in self._signals.ready(wait) if self._signals is not None else ():
            values, names = self._pending.popleft()
            self._write(step, {**values, **{name: numbers[str(n)] for n, name in enumerate(names)}}, dict(tables))


class StepAxis:
    """`summary` has the last value of each name."""

    def __init__(self, out: NeverRaise) -> None:
        self._out = out
        self._rows = AsyncScalars(self._write)
        self.updates = Pairing()
        self.summary: dict[str, Any] = {}
        self.best: dict[str, Any] | None = None
        self._evals: list[tuple[int, float]] = []
        self._next, self._last = 0, -1  # the step that a row without a number has, and the newest that was written
        self._gives_steps = False
        self._last_train: tuple[int, float] | None = None  # step and time of the last row of training
        self._at_step: Mapping[str, Any] = {}  # what was logged at the newest step
        self._num_targets = 0
        self._fewest = self._num_counts = 0
        self._targets_waiting: int | None = None  # counted since the last row; None: nobody has counted
        self._num_left_out = 0
        self._guarded: tuple[int, Update] | None = None  # number and measures of a guarded step that has no row yet
        self._num_guarded, self._offset = 0, 0  # what the script's numbers are ahead of the guard's
        self._logs_first: bool | None = None  # a row before its step; known with the first row

    @property
    def has_begun(self) -> bool:
        return self._last >= 0 or self.updates.num_updates > 0 or self._num_guarded > 0

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
        is_eval, at = logged.is_eval_only, None
        if step is not None:
            try:
                number = int(step)
                if not 0 <= number < 2**53 or number != float(step):
                    raise ValueError
                at, self._gives_steps = number, True
            except (TypeError, ValueError, OverflowError):
                self._out.tell(f"step={step!r} is not a whole number from 0 on; rows are counted instead", "step")
        if at is None:
            at = max(self._last, 0) if self._gives_steps else self._next
            self._next += not is_eval and not self._gives_steps
        if logged.row and not is_eval:
            self._train(at, logged)
        if logged.evals or is_eval:
            self._eval(max(at, self._last), logged)

    def guarded_step(self, number: int, update: Update) -> None:
        """A step of a guard; its row is the next one that the script logs, or its own."""
        self._write_guarded()
        self._guarded = (number, update)
        self._num_guarded += 1

    def write_rows(self) -> None:
        """Whatever has no row yet gets one, and what is on its way from a device is waited for."""
        self._write_guarded()
        self._rows.read(wait=True)

    def _write_guarded(self) -> None:
        """The last guarded step as a row of its own, where the script has logged none for it."""
        if self._guarded is None:
            return
        (number, update), self._guarded = self._guarded, None
        step = number + self._offset
        if self._logs_first and self._last_train is not None:
            step = self._last_train[0]
        if step < self._last:
            return
        known = self._at_step if self._last_train is not None and step == self._last_train[0] else {}
        values = {name: value for name, value in update.values.items() if name not in known}
        if not known:
            self._count_and_time(step, values, has_eval=False)
            self._at_step = {}
        self._last, self._next = step, max(self._next, step + 1)
        self._rows.push(step, values, update.tables)

    def targets(self, count: int) -> None:
        """Of a step, or of each of its micros: then the row also says how many the smallest one had."""
        self._fewest = int(count) if self._targets_waiting is None else min(self._fewest, int(count))
        self._num_counts = 1 if self._targets_waiting is None else self._num_counts + 1
        self._targets_waiting = (self._targets_waiting or 0) + int(count)

    def measured(self, values: dict[str, float]) -> None:
        """Of the weights as they are now; no row of training, and no eval."""
        step = max(self.step, self._last)
        self._rows.read(wait=True)
        self._last = step
        self._write(step, values, {})
        self.forget_time()

    def forget_time(self) -> None:
        """The time of an eval or a sample is not that of a step."""
        if self._last_train is not None:
            self._last_train = (self._last_train[0], math.nan)

    def close(self) -> dict[str, Any]:
        """Writes what is still on its way; returns the totals."""
        try:
            self._write_guarded()
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

    def _train(self, step: int, logged: Logged) -> None:
        row = logged.row
        if step < self._last:
            self._num_left_out += 1
            self._out.tell(
                f"step {step} comes after step {self._last}: numbers of training that go back are left out, as a run "
                "has one course; start another run with rung.init",
                "back",
            )
            return
        # Updates that are rows of their own, by step, and what was measured of the one that belongs into this row.
        own: list[tuple[int, Update]] = []
        mine = Update()
        if self._logs_first is None:
            self._logs_first = self._guarded is None
        if self._num_guarded:
            if self._guarded is None or self._logs_first:
                self._write_guarded()
            else:
                (number, mine), self._guarded = self._guarded, None
                self._offset = step - number
        elif self.updates.has_none() and any(
            isinstance(value := row.get(name), float) and not math.isfinite(value) for name in ("loss", "norm")
        ):  # as a GradScaler leaves a step out
            self.updates.skipped(step)
            mine = Update({"skipped": 1.0})
        else:
            own, mine = self.updates.rows(step)
        if self._last_train is None or step != self._last_train[0]:
            self._at_step = row
        else:
            if twice := self._at_step.keys() & row.keys():
                names = ", ".join(repr(name) for name in sorted(twice)[:3])
                self._out.tell(f"{names} logged twice at step {step}; both rows are kept", "twice")
            self._at_step = {**self._at_step, **row}
        if "norm" in row:  # the script knows the norm before it clipped; ours is after
            for update in (*(update for _, update in own), mine):
                if "norm" in update.values:
                    update.values.setdefault("norm_clipped", update.values.pop("norm"))
        for at, update in own:
            if at >= self._last:
                self._rows.push(at, update.values, update.tables)
        row = {**mine.values, **row}
        self._count_and_time(step, row, has_eval=bool(logged.evals))
        self._last, self._next = step, step + 1
        self._rows.push(step, row, mine.tables)

    def _count_and_time(self, step: int, row: dict[str, Any], has_eval: bool) -> None:
        """Adds targets, and the seconds of the step where nothing else is known to have happened since the last row."""
        if self._targets_waiting is not None:
            row.setdefault("targets", self._targets_waiting)
            if self._num_counts > 1:
                row.setdefault("targets_min", self._fewest)
            self._targets_waiting = None
        if "targets" in row:
            row["targets"] = to_float(row["targets"])
            self._num_targets += int(row["targets"]) if math.isfinite(row["targets"]) else 0
        now, before = time.perf_counter(), self._last_train
        if before is not None and step > before[0] and not math.isnan(before[1]) and not has_eval:
            row.setdefault("step_s", (now - before[1]) / (step - before[0]))
        self._last_train = (step, now)

    def _eval(self, step: int, logged: Logged) -> None:
        if self._guarded is not None and self._guarded[0] + self._offset < step:
            self._write_guarded()  # rows do not go back
        self._rows.read(wait=True)
        results = {of: {n: to_float(v) for n, v in values.items()} for of, values in logged.evals.items()}
        row = {f"eval/{of}/{name}": value for of, values in results.items() for name, value in values.items()}
        if logged.is_eval_only:
            row |= {name: to_float(value) for name, value in logged.row.items()}
        self._last = max(self._last, step)
        self._write(step, row, {})
        self.forget_time()
        if not results:  # how long it took, and no more
            return
        self._out.event("eval", step=step, results=results)
        of = self.best["set"] if self.best else next((of for of, values in results.items() if "loss" in values), None)
        loss = results.get(of or "", {}).get("loss")
        if loss is None:
            return
        self._evals.append((step, loss))
        if math.isfinite(loss) and (self.best is None or loss < self.best["loss"]):
            self.best = {"step": step, "set": of, "loss": loss}
            self._out.do(Record.update, best=self.best)

    def _write(self, step: int, values: dict[str, float], tables: Mapping[str, Any]) -> None:
        if values:
            self._out.do(Record.log, step, values)
            self.summary.update(values)
        for kind, (names, columns) in tables.items():
            self._out.do(Record.table, kind, step, names, columns)
