"""What another tracker knows of a run, in one shape, before it becomes a run of rung (import_run.py).

Readers fill a History: rows by step, the configuration, names and times as the tracker gives them. Trackers have no
segments, so a restart logs some steps of a metric again. As in a resume of rung, the later value counts, and what it
replaces is dropped and counted; but per metric, because one logged by epoch moves independently of one logged by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rung.runs.files import NON_FINITE

Number = float | int
_YEAR_10000 = 253_402_300_800.0


@dataclass
class History:
    """One run of another tracker."""

    tracker: str  # wandb, tensorboard or trackio
    id: str  # what names it there, the same at each import
    path: Path  # the file or folder it was read from
    name: str
    group: str = ""  # its project or folder
    notes: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    started: float | None = None  # unix time
    ended: float | None = None
    status: str = "finished"
    reason: str = ""
    command: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    remarks: list[tuple[int | None, float | None, str]] = field(default_factory=list)  # step, unix time, text
    left_out: Counter[str] = field(default_factory=Counter)  # kind of value -> how many were not imported
    problems: list[str] = field(default_factory=list)  # damage that was survived, in words
    num_replaced: int = 0
    _rows: dict[int, dict[str, Number]] = field(default_factory=dict)
    _times: dict[int, float] = field(default_factory=dict)
    _steps: dict[str, list[int]] = field(default_factory=dict)  # metric -> its steps, rising

    def add(self, step: int, unix_s: float | None, values: Mapping[str, Number]) -> None:
        """Some metrics of a step; a metric that goes back replaces what it had said from that step on."""
        if not values:
            return
        if not -(2**63) <= step < 2**63:
            self.left_out["rows with an impossible step"] += 1
            return
        row = self._rows.setdefault(step, {})
        for name, value in values.items():
            steps = self._steps.setdefault(name, [])
            while steps and steps[-1] > step:
                del self._rows[steps.pop()][name]
                self.num_replaced += 1
            if not steps or steps[-1] < step:
                steps.append(step)
            row[name] = value
        if unix_s is not None and is_time(unix_s):
            self._times[step] = unix_s
            self.started = unix_s if self.started is None else min(self.started, unix_s)
            self.ended = unix_s if self.ended is None else max(self.ended, unix_s)

    def rows(self) -> Iterator[tuple[int, float | None, dict[str, Number]]]:
        """Step, unix time and metrics, in the order of the steps."""
        for step in sorted(self._rows):
            if self._rows[step]:
                yield step, self._times.get(step), self._rows[step]

    @property
    def num_rows(self) -> int:
        return sum(map(bool, self._rows.values()))

    @property
    def names(self) -> list[str]:
        """The metrics, in the order in which they appeared."""
        return list(self._steps)


def is_time(unix_s: float) -> bool:
    """Whether a number can be a moment of a run: files may hold anything, and a calendar does not."""
    return 0 <= unix_s < _YEAR_10000


def put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Sets a leaf of a tree, making the branches to it."""
    for key in keys[:-1]:
        below = tree.get(key)
        if not isinstance(below, dict):
            below = tree[key] = {}
        tree = below
    tree[keys[-1]] = value


def numbers_of(tree: Mapping[str, Any], left_out: Counter[str], before: str = "") -> dict[str, Number]:
    """The numbers in a logged tree, by dotted name; what is none is counted by its kind."""
    out: dict[str, Number] = {}
    for key, value in tree.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            if "_type" in value:  # how both wandb and trackio write media
                left_out[str(value["_type"])] += 1
            else:
                out.update(numbers_of(value, left_out, f"{name}."))
        elif isinstance(value, str):
            if value in NON_FINITE:
                out[name] = NON_FINITE[value]
            else:
                left_out["text"] += 1
        elif isinstance(value, bool):
            out[name] = int(value)
        elif isinstance(value, int | float):
            out[name] = value
        elif value is not None:
            left_out["list"] += 1
    return out
