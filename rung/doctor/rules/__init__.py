"""The catalogue: each rule is a function of a History, registered under its entry.

A `scan` looks at the whole history once, for things that happen at a step. A `state` says how a run stands at the end
of the history it is given, and counts only when it holds at three looks in a row, twenty steps apart; it is not asked
before there are 50 steps, nor, unless it asks for that itself, during the warm-up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rung.doctor.finding import Finding
from rung.doctor.history import History

FILES = (
    "numerics", "float16", "optimisation", "updates", "spikes", "activations", "objective", "data", "conditional",
    "performance", "provenance",
)  # fmt: skip
Found = Finding | Iterable[Finding] | None


@dataclass(frozen=True)
class Rule:
    id: str
    title: str
    kind: str  # scan or state
    look: Callable[[History], Found]
    in_warmup: bool = False

    def __call__(self, history: History) -> list[Finding]:
        found = self.look(history)
        findings = [] if found is None else [found] if isinstance(found, Finding) else list(found)
        for finding in findings:
            finding.rule, finding.title = self.id, finding.title or self.title
        return findings


_RULES: dict[str, Rule] = {}


def rule(
    id: str, title: str, kind: str = "state", in_warmup: bool = False
) -> Callable[[Callable[[History], Found]], Callable[[History], Found]]:
    def register(look: Callable[[History], Found]) -> Callable[[History], Found]:
        assert kind in ("scan", "state")
        assert id not in _RULES, f"{id} is there twice"
        _RULES[id] = Rule(id, title, kind, look, in_warmup)
        return look

    return register


def catalogue() -> list[Rule]:
    for name in FILES:
        importlib.import_module(f"rung.doctor.rules.{name}")
    return sorted(_RULES.values(), key=lambda rule: (rule.id[0], int(rule.id[1:])))
