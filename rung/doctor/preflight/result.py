"""What a check found, and what checks are given to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rung.data.prefetch import Cut, Feed, Micro
from rung.engine.build import Setup

LEVELS = ("pass", "skip", "warn", "fail")  # skip: could not be asked here, with the reason in `seen`


class Result(NamedTuple):
    name: str  # short and stable, such as "ids in range"
    level: str
    seen: str  # the numbers
    remedy: str = ""  # for warn and fail: what to do
    rule: str = ""  # the entry of the catalogue, such as D3
    detail: str = ""  # more lines, such as one sample position by position


@dataclass
class Bench:
    """A run that is ready to start, and what is worth sharing between checks. Checks leave it as they found it.

    `is_quick` is the form that `rung train` runs before step 0: a few seconds in all, whatever the model.
    """

    setup: Setup
    is_quick: bool = False
    recipe_name: str = ""
    shared: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def micro(self) -> Micro:
        """A few rows of step 0 on the device, few enough for a quick look."""
        rows = min(self.setup.cut.micro_rows, 4)
        feed = Feed(self.setup.streams["train"], Cut(rows, rows), self.setup.cfg.seed, self.setup.world.device, 0)
        return feed.take(0)[0]

    def rows(self, stream: str, num_rows: int, first: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Ids and host arrays of rows of a stream, in the order of training for train, else from the start."""
        from rung.engine.evaluate import EVAL_STEP
        from rung.recipe import Draw

        of = self.setup.streams[stream]
        num_rows = min(num_rows, of.num_rows)
        is_train = stream == "train"
        ids = of.ids(first, num_rows, self.setup.cfg.seed) if is_train else np.arange(first, first + num_rows)
        return ids, of.gather(ids, Draw(self.setup.cfg.seed, 0 if is_train else EVAL_STEP, np.arange(len(ids))))


@dataclass(frozen=True)
class Check:
    name: str
    look: Callable[[Bench], Iterable[Result]]
    is_quick: bool = True  # whether it is part of the quick form
    changes_state: bool = False  # such checks come last, and only `rung check` makes them
