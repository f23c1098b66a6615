"""From a history to findings: asks every rule, keeps what holds, and hides what follows from something else.

A scan is asked once. A state is asked every twenty steps and counts when it held three times in a row; what held only
for a while and is over is told as something worth knowing, no more. Of two findings of which one explains the other,
the cause stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rung.doctor.finding import Finding
from rung.doctor.history import History
from rung.doctor.rules import Rule, catalogue

EVERY, IN_A_ROW, LEAST = 20, 3, 50
MOST_LOOKS = 120  # at a long run: the last ones, and groups of three spread over the rest
LONG_OVER = 100  # steps, or a twentieth of the run: a state that ended so long ago is over
HIDES = {
    "D3": ("N1", "N2"),
    "N6": ("N1", "N2"),
    "O9": ("O2", "E1"),
    "O1": ("A2", "A3", "A4", "A5"),
    "E3": ("E1", "E2"),
}


def diagnose(
    history: History, rules: Sequence[Rule] | None = None, failed: dict[str, str] | None = None
) -> list[Finding]:
    """What is wrong, worst first; of the same severity, what began first.

    With `failed`, a rule that raises is left out and told there: records come from anywhere, and one must not cost the
    rest. Without it the rule's own error is raised.
    """
    findings: list[Finding] = []
    for one in rules if rules is not None else catalogue():
        try:
            findings += one(history) if one.kind == "scan" else _held(one, history)
        except Exception as error:
            if failed is None:
                raise
            failed[one.id] = f"{type(error).__name__}: {error}"
    return ordered(suppress(findings))


def _held(rule: Rule, history: History) -> list[Finding]:
    """The latest time at which a state held three times in a row."""
    kept: list[Finding] = []
    began, last = 0, 0
    for group in looks(history, rule):
        streak = 0
        for end in group:
            found = rule(history.until(end))
            streak = streak + 1 if found else 0
            if streak == 1:
                began = end
            if streak >= IN_A_ROW:
                kept = [replace(f, since=f.since if f.since is not None else began) for f in found]
                last = end
    if kept and last < history.end - max(LONG_OVER, history.end // 20):
        for finding in kept:
            finding.evidence.append(f"as {finding.severity} it held until step {last}, and not to the end")
            finding.severity = "info"
    return kept


def looks(history: History, rule: Rule) -> Iterator[list[int]]:
    """Steps at which to look: groups of neighbours, each long enough for a streak."""
    first = max(LEAST, 0 if rule.in_warmup else history.warmup_steps + 1)
    ends = [*range(-(-first // EVERY) * EVERY, history.end, EVERY), history.end]
    ends = [end for end in ends if end >= first]
    if len(ends) <= MOST_LOOKS:
        yield ends
        return
    num_groups = MOST_LOOKS // (2 * IN_A_ROW)
    stride = (len(ends) - MOST_LOOKS // 2) // num_groups
    for number in range(num_groups):
        yield ends[number * stride : number * stride + IN_A_ROW]
    yield ends[-MOST_LOOKS // 2 :]


def suppress(findings: Sequence[Finding]) -> list[Finding]:
    """Leaves out what another finding explains. After numbers broke, nothing that began later means anything."""
    causes = [f for f in findings if f.severity != "info"]
    hidden = {name for f in causes for name in (*HIDES.get(f.rule, ()), *f.hides)}
    broken = min((f.since for f in findings if f.rule[0] == "N" and f.severity == "fatal" and f.since is not None),
                 default=None)  # fmt: skip
    kept = []
    for finding in findings:
        is_later = broken is not None and finding.since is not None and finding.since >= broken
        if finding.rule in hidden or (is_later and finding.rule[0] not in "ND"):
            continue
        kept.append(finding)
    return kept


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: (-f.rank, f.since if f.since is not None else 0, f.rule))
