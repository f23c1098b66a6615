"""A disease and how to catch it: a sick run and its healthy twin, what is found in each, and how clearly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rung.doctor.diagnose import diagnose
from rung.doctor.history import History, read
from rung.doctor.preflight.result import CheckContext
from rung.recipe import Recipe
from tests.cases.running import run_case
from tests.cases.statistics import FACT, Reading, Statistic

Found = Mapping[str, str]  # rule -> severity: info, warn, sick, fatal


class Seen(NamedTuple):
    """What was found, and the record or the context in which it was."""

    found: Found
    evidence: History | CheckContext | None = None


Ask = Callable[[Path, int], Seen]  # a folder for runs, a seed


@dataclass(frozen=True)
class Case:
    """`severity` is the least that the sick one must be given; `is_quick` puts it into the everyday tests.

    `statistic` is what the rule compares with a limit; FACT where it compares nothing that could come near one.
    """

    rule: str
    name: str
    sick: Ask
    healthy: Ask
    severity: str = "warn"
    is_quick: bool = False
    statistic: Statistic = field(kw_only=True)

    def reading(self, seen: Seen, is_sick: bool) -> Reading | None:
        """The statistic beside the limit that is nearest: of the severity the sick one must have, or of any alarm."""
        if self.statistic is FACT:
            return None
        return self.statistic(seen.evidence, self.severity if is_sick else "warn")


def diagnosed(history: History) -> Seen:
    return Seen({f.rule: f.severity for f in sorted(diagnose(history), key=lambda f: f.rank)}, history)


@dataclass(frozen=True)
class Trained:
    """What the doctor finds in a run of this recipe with these keys."""

    recipe: type[Recipe]
    overrides: tuple[str, ...]

    def __call__(self, root: Path, seed: int) -> Seen:
        return diagnosed(read(run_case(self.recipe, root, *self.overrides, seed=seed)))


def trained(recipe: type[Recipe], *overrides: str) -> Ask:
    return Trained(recipe, overrides)
