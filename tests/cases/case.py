"""A disease and how to catch it: a sick run and its healthy twin, what is found in each, and how clearly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rung.doctor.diagnose import ask, conclude, tally, verdict
from rung.doctor.history import History, read
from rung.doctor.preflight.result import CheckContext
from rung.recipe import Recipe
from tests.cases.running import run_case
from tests.cases.statistics import FACT, Reading, Statistic

Found = Mapping[str, str]  # rule -> severity: info, warn, sick, fatal


class Seen(NamedTuple):
    """What was found, in which record or context; of a run also its verdict and the rules that did not look."""

    found: Found
    evidence: History | CheckContext | None = None
    not_looked_at: Collection[str] = ()
    verdict: str = ""


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
    answers = ask(history, raises=True)
    found = conclude(answers)
    counted = tally(answers, found)
    severities = {f.rule: f.severity for f in sorted(found, key=lambda f: f.rank)}
    return Seen(severities, history, counted["not_looked_at"], verdict(history, counted)[0])


@dataclass(frozen=True)
class Trained:
    """What the doctor finds in a run of this recipe with these keys."""

    recipe: type[Recipe]
    overrides: tuple[str, ...]

    def __call__(self, root: Path, seed: int) -> Seen:
        return diagnosed(read(run_case(self.recipe, root, *self.overrides, seed=seed)))


def trained(recipe: type[Recipe], *overrides: str) -> Ask:
    return Trained(recipe, overrides)
