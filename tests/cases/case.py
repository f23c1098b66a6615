"""A disease and how to catch it: a sick run and its healthy twin, and what is found in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rung.doctor.finding import Finding
from rung.recipe import Recipe
from tests.cases.running import findings_of

Found = Mapping[str, str]  # rule -> severity: info, warn, sick, fatal
Ask = Callable[[Path, int], Found]  # a folder for runs, a seed


@dataclass(frozen=True)
class Case:
    """`severity` is the least that the sick one must be given; `is_quick` puts it into the everyday tests."""

    rule: str
    name: str
    sick: Ask
    healthy: Ask
    severity: str = "warn"
    is_quick: bool = False


def by_rule(findings: list[Finding]) -> Found:
    return {f.rule: f.severity for f in sorted(findings, key=lambda f: f.rank)}


def trained(recipe: type[Recipe], *words: str) -> Ask:
    """What the doctor finds in a run of this recipe with these keys."""
    return lambda root, seed: by_rule(findings_of(recipe, root, *words, seed=seed))
