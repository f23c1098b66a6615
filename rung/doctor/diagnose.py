"""From a history to findings: asks every rule, and hides what follows from something else.

A rule answers sick (a finding of warn or more), healthy (it looked, and found nothing) or not looked at, with the
reason and what would let it look. A scan is asked once. A
state is asked every twenty steps and counts when it held three times in a row; one that is over is info.

Of a run as a whole `verdict` says the same three: sick, healthy, or not known where rules that no run is healthy
without could not look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rung.doctor.finding import Finding
from rung.doctor.history import History
from rung.doctor.rules import NotLooked, Rule, catalogue
from rung.text import error_text

EVERY, IN_A_ROW, LEAST = 20, 3, 50
MOST_LOOKS = 120  # at a long run: the last ones, and groups of three spread over the rest
LONG_OVER = 100  # steps, or a twentieth of the run: a state that ended so long ago is over
HIDES = {
    "D3": ("N1", "N2"),
    "N6": ("N1", "N2"),
    "O9": ("O2", "E1", "L1"),
    "O1": ("A2", "A3", "A4", "A5"),
    "E1": ("L7",),
    "E3": ("E1", "E2"),
    "L1": ("E1", "L3", "L4", "L5", "L6", "O2"),
    "L5": ("L6", "O2"),
}
# What has to be known of any run that is called healthy, and the rules of which one has to have looked.
ESSENTIAL = {
    "whether the loss is finite and falls": ("L6", "E1", "E2"),
    "whether the weights change": ("L1", "O9"),
    "whether evals follow": ("L4", "E1", "E2", "C3"),
}
ESSENTIAL_IN_SCRIPTS = {  # a recipe has checks before step 0 for it
    "whether the learning rate is high enough": ("O2",),
    "whether train and eval measure the same": ("L11",),
}
BAD_ENDS = ("crashed", "diverged", "vanished")


@dataclass(frozen=True)
class Answer:
    """Without a finding the rule looked and found nothing, unless one of the other fields is set."""

    rule: Rule
    findings: list[Finding] = field(default_factory=list)
    missing: str = ""  # not looked at: what it needs was not recorded
    is_early: bool = False  # not looked at: a state that could not be seen three times yet
    error: str = ""  # not looked at: the rule raised this
    unclear: str = ""  # not looked at: the rule could not tell
    how: str = ""  # what would let it look

    @property
    def why_not(self) -> str:
        """Why the rule has not looked; empty where it has."""
        if self.missing:
            return f"not recorded: {self.missing}"
        if self.error:
            return f"it failed: {self.error}"
        if self.is_early:
            return f"too few steps: states are looked at after step {LEAST} and the warm-up, {IN_A_ROW} times"
        return self.unclear


def diagnose(history: History, rules: Sequence[Rule] | None = None, raises: bool = True) -> list[Finding]:
    """What is wrong, worst first; of the same severity, what began first.

    Without `raises`, a rule that fails is left out: records come from anywhere, and one rule must not cost the rest.
    """
    return conclude(ask(history, rules, raises=raises))


def conclude(answers: Sequence[Answer]) -> list[Finding]:
    """The findings that no other explains, worst first."""
    return ordered(suppress([finding for answer in answers for finding in answer.findings]))


def ask(
    history: History, rules: Sequence[Rule] | None = None, only_now: bool = False, raises: bool = False
) -> list[Answer]:
    """The answer of each rule; with `only_now`, of states that hold at the end and not of those that are over."""
    answers = []
    for rule in rules if rules is not None else catalogue():
        if rule.is_for_scripts and not history.is_script:
            continue
        try:
            answers.append(_answer(rule, history, only_now))
        except Exception as error:
            if raises:
                raise
            answers.append(Answer(rule, error=error_text(error)))
    if history.is_script:
        for finding in (finding for answer in answers for finding in answer.findings):
            finding.changes = {}  # keys of a recipe: `rung train` cannot start a script
    return answers


def _answer(rule: Rule, history: History, only_now: bool) -> Answer:
    if missing := rule.missing(history):
        return Answer(rule, missing=missing, how=rule.how(history))
    if rule.kind == "scan":
        try:
            return Answer(rule, rule.ask(history))
        except NotLooked as error:
            return Answer(rule, unclear=error.why, how=error.how)
    groups = looks(history, rule)
    if max(map(len, groups), default=0) < IN_A_ROW:
        return Answer(rule, is_early=True, how=f"a run of {_enough(history, rule)} steps")
    if only_now:  # the last look first: nearly all states end there, and a run in progress pays for one look
        found, ends = rule(history), groups[-1]
        is_held = found and all(rule(history.until(end)) for end in ends[-IN_A_ROW:-1])
        return Answer(rule, _since(found, ends[-IN_A_ROW]) if is_held else [])

    # The latest time at which the state held three times in a row.
    kept: list[Finding] = []
    began, last, unclear = 0, 0, NotLooked("")
    for group in groups:
        streak = 0
        for end in group:
            unclear = NotLooked("")
            try:
                found = rule.ask(history.until(end))
            except NotLooked as error:
                found, unclear = [], error
            streak = streak + 1 if found else 0
            if streak == 1:
                began = end
            if streak >= IN_A_ROW:
                kept, last = _since(found, began), end
    if kept and last < history.end - max(LONG_OVER, history.end // 20):
        for finding in kept:
            finding.evidence.append(f"as {finding.severity} it held until step {last}, and not to the end")
            finding.severity = "info"
    if not kept and unclear.why:  # in the end it still could not tell
        return Answer(rule, unclear=unclear.why, how=unclear.how)
    return Answer(rule, kept)


def _enough(history: History, rule: Rule) -> int:
    first = max(LEAST, 0 if rule.in_warmup else history.warmup_steps + 1)
    return -(-first // EVERY) * EVERY + (IN_A_ROW - 1) * EVERY


def tally(answers: Sequence[Answer], findings: Sequence[Finding]) -> dict[str, dict[str, str]]:
    """sick, healthy and not_looked_at: which rules said so, each with its reason.

    A finding that follows from another is neither: what it sees can be judged when the other is gone.
    """
    shown = {finding.rule: finding for finding in findings}
    found: dict[str, dict[str, str]] = {"sick": {}, "healthy": {}, "not_looked_at": {}}
    for answer in answers:
        rule, finding = answer.rule.id, shown.get(answer.rule.id)
        if finding is not None and finding.severity != "info":
            found["sick"][rule] = finding.what
        elif why := answer.why_not:
            found["not_looked_at"][rule] = why
        elif finding is None and any(f.severity != "info" for f in answer.findings):
            found["not_looked_at"][rule] = "what it sees follows from another finding"
        else:
            found["healthy"][rule] = "" if finding is None else finding.what
    return found


def verdict(history: History, answers: Mapping[str, Mapping[str, str]]) -> tuple[str, list[str]]:
    """sick, healthy or not known; and of what nothing is known that a healthy run needs."""
    if answers["sick"] or history.status in BAD_ENDS:
        return "sick", []
    unknown = ["whether it still runs"] if history.status == "silent" else []
    essential = ESSENTIAL | (ESSENTIAL_IN_SCRIPTS if history.is_script else {})
    if not history.evals:  # said once
        essential = {what: rules for what, rules in essential.items() if rules != ("L11",)}
    unknown += [what for what, rules in essential.items() if not any(rule in answers["healthy"] for rule in rules)]
    return ("not known", unknown) if unknown else ("healthy", [])


def _since(findings: Sequence[Finding], began: int) -> list[Finding]:
    return [replace(f, since=began if f.since is None else f.since) for f in findings]


def looks(history: History, rule: Rule) -> list[list[int]]:
    """Steps at which to look: groups of neighbours, each long enough for a streak."""
    first = max(LEAST, 0 if rule.in_warmup else history.warmup_steps + 1)
    if history.end < first:
        return []
    ends = range(-(-first // EVERY) * EVERY, history.end, EVERY)  # and the end itself
    if len(ends) < MOST_LOOKS:
        return [[*ends, history.end]]
    num_groups = MOST_LOOKS // (2 * IN_A_ROW)
    stride = (len(ends) + 1 - MOST_LOOKS // 2) // num_groups
    spread = [[*ends[number * stride : number * stride + IN_A_ROW]] for number in range(num_groups)]
    return [*spread, [*ends[1 - MOST_LOOKS // 2 :], history.end]]


def suppress(findings: Sequence[Finding]) -> list[Finding]:
    """Leaves out what another finding explains. After numbers broke, nothing that began later means anything."""
    causes = [f for f in findings if f.severity != "info"]
    hidden = {name for f in causes for name in (*HIDES.get(f.rule, ()), *f.hides)}
    replayed = {f.probe for f in causes if f.rule != "N7"}  # N7 only says that a step failed; these say how
    broken = [f.since for f in findings if f.rule[0] == "N" and f.severity == "fatal" and f.since is not None]
    kept = []
    for finding in findings:
        is_later = broken and finding.since is not None and finding.since >= min(broken) and finding.rule[0] not in "ND"
        is_explained = finding.rule in hidden or (finding.rule == "N7" and finding.probe in replayed)
        if not is_later and not is_explained:
            kept.append(finding)
    return kept


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Worst first, then what began first; an error that ended the run before all others."""
    return sorted(findings, key=lambda f: (-f.rank, f.rule != "R6", f.since if f.since is not None else 0, f.rule))
