"""The guard inside a run of somebody's own loop: captures lie in the run, and its events are the run's.

The guard's own files of signals are not written twice: rows and tables come from the watch. The guard knows the norm
before it clipped, which a watch cannot, so it hands that to the row of the update, if the row is not written yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rung.own_loop import guarded
from rung.own_loop.guarded import Guarded
from rung.own_loop.log import Log

if TYPE_CHECKING:
    from rung.own_loop.run import OwnRun


class RunLog(Log):
    """Keeps in memory what the guard's doctor asks for, and tells the run."""

    def __init__(self, run: OwnRun) -> None:
        super().__init__(None)
        self._run = run

    def row(self, step: int, values: Mapping[str, float]) -> None:
        super().row(step, values)
        update = self._run.newest_update()
        if update is not None and step == self._run.num_updates - 1:
            update.values |= {name: values[name] for name in ("norm", "norm_clipped", "skipped") if name in values}

    def event(self, kind: str, step: int, **fields: Any) -> None:
        super().event(kind, step, **fields)
        self._run.event(kind, step, **fields)


def guard(run: OwnRun, model: Any, optimizer: Any, loss: Any = None, **how: Any) -> Guarded:
    out = how.pop("out", None if run.path is None else run.path / "captures")
    made = guarded.guard(model, optimizer, loss, out, **how)
    if run.path is not None:
        log = made._log = RunLog(run)  # before its first step: it has written nothing yet
        made.signals, made.tables, made.events = log.rows, log.tables, log.events
        if not run.is_watching:
            run.watch(model, optimizer)
    return made
