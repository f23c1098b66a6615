"""The catalogue: each rule is a function of a History, registered under its entry.

A `scan` looks at the whole history once, for things that happen at a step. A `state` describes a run at the end of the
history it is given, and counts when it holds at three looks in a row, twenty steps apart; it is not asked before step
50, nor during the warm-up unless it has `in_warmup`. A rule is asked only where what it needs was recorded; `ways.py`
says what would record it. A rule that has what it needs and still cannot tell raises NotLooked: it never passes for
one that has looked and found nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rung.advice import in_own_words
from rung.doctor.finding import Finding
from rung.doctor.history import History
from rung.doctor.rules.ways import rank, way

FILES = (
    "numerics", "optimisation", "updates", "spikes", "activations", "objective", "data", "conditional", "performance",
    "provenance", "ending", "own_loops",
)  # fmt: skip
# Rules whose remedy in words nobody has tried on their own sick case, or tried in vain (G1): tests/cases/remedies.py
UNTRIED = ("A1", "A2", "A3", "A4", "A5", "A6", "C3", "G1", "O7", "O8")
Found = Finding | Iterable[Finding] | None


class NotLooked(Exception):
    """Of a rule that cannot tell in this history: why, and what would let it."""

    def __init__(self, why: str, how: str = "") -> None:
        super().__init__(why)
        self.why, self.how = why, how


@dataclass(frozen=True)
class Rule:
    id: str
    title: str
    kind: str  # scan or state
    look: Callable[[History], Found]
    in_warmup: bool = False
    needs: tuple[str, ...] = ()
    is_for_scripts: bool = False  # asks what the engine sees to in a recipe

    def __call__(self, history: History) -> list[Finding]:
        """What it found; nothing where it could not tell."""
        try:
            return self.ask(history)
        except NotLooked:
            return []

    def ask(self, history: History) -> list[Finding]:
        found = self.look(history)
        findings = [] if found is None else [found] if isinstance(found, Finding) else list(found)
        for finding in findings:
            finding.rule, finding.title = self.id, finding.title or self.title
            finding.evidence = [line for line in finding.evidence if line]  # a rule leaves empty what does not apply
            finding.ruled_out = [line for line in finding.ruled_out if line]
            if self.id in UNTRIED and finding.remedy and (not finding.changes or self.id == "G1"):
                finding.remedy_is_guess, finding.remedy = True, f"may help: {finding.remedy}"
            if history.is_script:  # it has no keys of a recipe, and nothing but its author can start it
                finding.changes = {}
                finding.probe, finding.remedy = in_own_words(finding.probe), in_own_words(finding.remedy)
        return findings

    def missing(self, history: History) -> str:
        """What it needs and the run did not record; empty when it can look."""
        return ", ".join(_in_words(need, history) for need in self.needs if not history.has(need))

    def how(self, history: History) -> str:
        """What would let it look: of what is missing, each with its line of code or its flag, the best first."""
        ways = [way(need, history) for need in self.needs if not history.has(need)]
        return "; ".join(sorted(dict.fromkeys(filter(None, ways)), key=rank))


def _in_words(need: str, history: History) -> str:
    names, _, least = need.partition(":")
    words = names.replace("|", " or ")
    return f"{least} of {words} (so far {history.count(names)})" if least and history.has(names) else words


_RULES: dict[str, Rule] = {}


def rule(
    id: str,
    title: str,
    kind: str = "state",
    *,
    needs: Iterable[str] = (),
    in_warmup: bool = False,
    is_for_scripts: bool = False,
) -> Callable[[Callable[[History], Found]], Callable[[History], Found]]:
    def register(look: Callable[[History], Found]) -> Callable[[History], Found]:
        assert kind in ("scan", "state")
        assert not isinstance(needs, str), f"the needs of {id} are a tuple of names"
        assert id not in _RULES, f"there are two rules {id}"
        _RULES[id] = Rule(id, title, kind, look, in_warmup, tuple(needs), is_for_scripts)
        return look

    return register


def catalogue() -> list[Rule]:
    for name in FILES:
        importlib.import_module(f"rung.doctor.rules.{name}")
    return sorted(_RULES.values(), key=lambda rule: (rule.id[0], int(rule.id[1:])))
