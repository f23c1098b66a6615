"""What the doctor has to say: one disease of one run, with all that a reader needs to believe it or not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SEVERITIES = ("info", "warn", "sick", "fatal")


@dataclass
class Finding:
    """`evidence` are sentences with numbers and steps; `ruled_out` rivals with the number that spoke against them."""

    rule: str  # the entry of the catalogue, such as O1
    severity: str
    what: str  # one sentence: what was seen, in numbers
    since: int | None = None  # the first step at which it showed
    evidence: list[str] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    probe: str = ""  # what would confirm it
    remedy: str = ""
    changes: dict[str, Any] = field(default_factory=dict)  # keys that would cure it, for a ready command
    hides: list[str] = field(default_factory=list)  # rules whose findings follow from this one, beyond the usual
    title: str = ""  # filled in from the rule

    @property
    def rank(self) -> int:
        return SEVERITIES.index(self.severity)

    def command(self, run: str) -> str:
        """What to type next, where keys would cure it."""
        if not self.changes:
            return ""
        words = " ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
                         for key, value in self.changes.items())  # fmt: skip
        return f'rung train --from {run} {words} --why "{self.rule}: {self.title.lower()}"'

    def plain(self) -> dict[str, Any]:
        return asdict(self)
