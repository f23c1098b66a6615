"""One problem of one run, with the evidence that a reader needs to believe it or not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rung.advice import located

SEVERITIES = ("info", "warn", "sick", "fatal")


@dataclass
class Finding:
    """`evidence` is numbers with their steps and limits; `ruled_out` other causes, with the number against them."""

    rule: str = field(default="", kw_only=True)  # its id, such as O1; filled in by the rule, as is the title
    severity: str
    what: str  # one sentence: what was seen, in numbers
    since: int | None = None  # the first step at which it showed
    evidence: list[str] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    probe: str = ""  # what would confirm it: a command, or a sentence
    remedy: str = ""
    changes: dict[str, Any] = field(default_factory=dict)  # keys that would fix it, for a ready command
    hides: list[str] = field(default_factory=list)  # rules whose findings follow from this one, beyond diagnose.HIDES
    title: str = ""
    remedy_is_guess: bool = False  # it does not heal the rule's own sick case, or nobody has tried it: it may help

    def at(self, run_id: str, ref: str) -> Finding:
        """With the run named in its commands as it is found from here."""
        return replace(self, probe=located(self.probe, run_id, ref), remedy=located(self.remedy, run_id, ref))

    @property
    def rank(self) -> int:
        return SEVERITIES.index(self.severity)

    def command(self, run: str) -> str:
        """What to type next, where keys would fix it."""
        if not self.changes:
            return ""
        keys = (f"{key}={v:g}" if isinstance(v, float) else f"{key}={v}" for key, v in self.changes.items())
        return f'rung train --parent {run} {" ".join(keys)} --why "{self.rule}: {self.title.lower()}"'

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
