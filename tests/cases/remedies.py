"""Tries every remedy that is keys of a config on the sick run whose finding names them.

    python -m tests.cases.remedies [RULE ...]       which heal, which do not, and what else they bring about

A remedy heals when its rule no longer fires and nothing of severity warn or worse is new. One that does not heal its
own case must be worded as a guess (Finding.remedy_is_guess).
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.doctor.diagnose import diagnose
from rung.doctor.finding import Finding
from rung.doctor.history import read
from tests.cases.case import Case, Trained
from tests.cases.catalog import cases
from tests.cases.running import run_case


@dataclass(frozen=True)
class Tried:
    """What became of the keys that a finding names; `new` are findings of warn and worse that the sick run had not."""

    case: Case
    finding: Finding
    status: str
    still: str  # the severity at which the rule fires after all; empty: it does not
    new: list[str]

    @property
    def heals(self) -> bool:
        return self.status == "finished" and not self.still and not self.new

    def line(self) -> str:
        keys = " ".join(f"{key}={value}" for key, value in self.finding.changes.items())
        became = "heals" if self.heals else "does not heal"
        why = [f"{self.case.rule} is still {self.still}"] if self.still else []
        why += [f"new: {', '.join(self.new)}"] if self.new else []
        why += [self.status] if self.status != "finished" else []
        kind = "guess" if self.finding.remedy_is_guess else "remedy"
        return f"{self.case.rule:4} {self.case.name:36.36} {kind:7} {keys:60} {became} {'; '.join(why)}".rstrip()


def with_keys() -> list[Case]:
    """The cases that are one run of a recipe, which is what keys can change."""
    return [case for case in cases() if isinstance(case.sick, Trained)]


def try_remedy(case: Case, root: Path, seed: int = 1) -> Tried | None:
    """None where the finding names no keys, or is hidden behind another."""
    assert isinstance(case.sick, Trained)
    sick = diagnose(read(run_case(case.sick.recipe, root, *case.sick.overrides, seed=seed)))
    finding = next((f for f in sick if f.rule == case.rule and f.changes), None)
    if finding is None:
        return None
    changed = [f"{key}={_typed(value)}" for key, value in finding.changes.items()]
    run = run_case(case.sick.recipe, root, *case.sick.overrides, *changed, seed=seed)
    after = diagnose(read(run))
    still = next((f.severity for f in after if f.rule == case.rule and f.rank >= min(finding.rank, 1)), "")
    new = sorted({f.rule for f in after if f.rank >= 1} - {f.rule for f in sick} - {case.rule})
    return Tried(case, finding, run.status, still, new)


def _typed(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    only = sys.argv[1:]
    for case in with_keys():
        if only and case.rule not in only:
            continue
        with tempfile.TemporaryDirectory() as root:
            tried = try_remedy(case, Path(root))
        if tried is not None:
            print(tried.line(), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
