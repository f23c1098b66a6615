"""The words in which two runs are compared: a difference, its weight, and all of them side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rung.compare.code import CodeDiff
from rung.runs.query import Run

PARTS = ("config", "code", "data", "environment", "seed", "budget", "metric", "pairing")
# What a difference means for a verdict:
#   factor   what was changed on purpose, a candidate for "the one change": a config key that somebody set
#   hidden   a difference nobody declared: code, data, packages, another horizon; spoils a verdict unless allowed
#   metric   the metric itself means something else: the figures cannot be compared at all
#   follows  a consequence of a factor, as a key derived from another
#   note     shown, and harmless: the host, where files lie, how often it was logged
WEIGHTS = ("factor", "hidden", "metric", "follows", "note")
ABSENT = "absent"  # the source of a value that is not there, as opposed to one that is null


class Difference(NamedTuple):
    part: str  # one of PARTS
    name: str  # optimizer.grad_clip; model.py; torch; train
    before: Any
    after: Any
    weight: str  # one of WEIGHTS
    detail: str = ""  # in words, where the two values do not say enough
    source_before: str = ""  # who set it: default, preset tiny, command line; ABSENT
    source_after: str = ""

    @property
    def has_values(self) -> bool:
        """Whether the two values tell what changed; else only `detail` does, as of code."""
        return self.part != "code" and not (self.before is None and self.after is None)


@dataclass
class Comparison:
    """Two runs side by side. `code` holds the patch; `same` what was looked at and found equal, in words."""

    a: Run
    b: Run
    differences: list[Difference]
    code: CodeDiff
    same: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how the runs stand: still running, diverged, shorter than planned

    def of(self, *weights: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.weight in weights]
