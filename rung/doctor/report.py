"""The doctor's report as text: findings, what changed at the same step, and what could not be looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rung.doctor.coincidence import Coincidence, coincidences, signal
from rung.doctor.diagnose import Answer, ask, conclude, tally, verdict
from rung.doctor.finding import SEVERITIES, Finding
from rung.doctor.history import EMPTY, WINDOW, History
from rung.doctor.rules import Rule
from rung.report.table import paragraph
from rung.units import count

MOST_WAYS = 10  # that are shown even if they help one rule only
_UNITS = {"loss": "loss", "norm": "norm", "clip rate": "share of clipped steps"}


@dataclass(frozen=True)
class Report:
    history: History
    findings: list[Finding]
    coincidences: list[Coincidence]
    asked: list[Answer]
    answers: dict[str, dict[str, str]]  # sick, healthy, not_looked_at -> rule -> what it saw, or why it did not look
    preflight: list[dict[str, Any]]  # checks before step 0 that warned or failed

    def at_least(self, severity: str) -> list[Finding]:
        return [f for f in self.findings if f.rank >= SEVERITIES.index(severity)]

    @property
    def is_sick(self) -> bool:
        return bool(self.at_least("sick"))

    @property
    def rules(self) -> list[Rule]:
        return [answer.rule for answer in self.asked]

    @property
    def unasked(self) -> dict[str, str]:
        """Rule -> what it needs and the run did not record."""
        return {answer.rule.id: answer.missing for answer in self.asked if answer.missing}

    @property
    def how(self) -> dict[str, str]:
        """Rule that has not looked -> what would let it: a line of the script, or a key."""
        unknown = self.answers["not_looked_at"]
        return {answer.rule.id: answer.how for answer in self.asked if answer.rule.id in unknown and answer.how}

    @property
    def verdict(self) -> str:
        """sick, healthy, or not known where what every healthy run needs was not looked at."""
        return verdict(self.history, self.answers)[0]

    @property
    def unknown(self) -> list[str]:
        return verdict(self.history, self.answers)[1]

    def to_dict(self, ref: str) -> dict[str, Any]:
        history = self.history
        return {
            "run": history.run_id,
            "status": history.status,
            "steps": history.end,
            "verdict": self.verdict,
            "unknown": self.unknown,
            "answers": self.answers,
            "how": self.how,
            "is_sick": self.is_sick,
            "findings": [{**f.to_dict(), "command": f.command(ref)} for f in self.findings],
            "coincidences": [c._asdict() for c in self.coincidences],
            "preflight": self.preflight,
            "rules": [rule.id for rule in self.rules],
            "unasked": self.unasked,
            "early": [answer.rule.id for answer in self.asked if answer.is_early],
            "failed": {answer.rule.id: answer.error for answer in self.asked if answer.error},
        }


def report_of(history: History, rules: Sequence[Rule] | None = None) -> Report:
    answers = ask(history, rules)
    findings = conclude(answers)
    checks = history.events_of("check")
    results = (checks[-1].get("results") or []) if checks else []
    return Report(
        history,
        findings,
        coincidences(history),
        answers,
        tally(answers, findings),
        preflight=[dict(r) for r in results if isinstance(r, Mapping) and r.get("level") in ("warn", "fail")],
    )


def lines(report: Report, ref: str, severity: str = "warn") -> Iterator[str]:
    """The page that `rung doctor` prints, with findings from this severity on."""
    history, shown = report.history, report.at_least(severity)
    yield from paragraph(headline(report)).split("\n")
    for finding in shown:
        yield ""
        yield from finding_lines(finding, ref)
    if hidden := [f.rule for f in report.findings if f not in shown]:
        yield ""
        yield f"{len(hidden)} more below {severity}: {', '.join(hidden)} (--all)"
    if report.coincidences:
        yield ""
        yield "What changed, and what happened within 5 % of that step:"
    for one in report.coincidences:
        events = ", ".join(one.events) or "nothing that was recorded"
        yield f"  step {one.step}: {_UNITS[one.signal]} {one.before:.4g} -> {one.after:.4g}; {events}"
    if report.preflight:
        yield ""
        yield "The checks before step 0 found:"
    for result in report.preflight:
        text = f"{result.get('level')}  {result.get('name')}: {result.get('seen')}"
        text += f"; {result['remedy']}" if result.get("remedy") else ""
        yield from paragraph(text, "  ", "    ").split("\n")
    if history.end or report.findings:
        yield ""
        yield from not_looked_at(report)
        yield tally_line(report)


def headline(report: Report) -> str:
    """One sentence: what is wrong, or that nothing was found; and what is not known, where a healthy run needs it."""
    history = report.history
    if not history.end and not report.findings:
        if history.last_step:
            problem = f"says it has taken {history.last_step} steps, but none of their rows is in its folder"
            return f"{history.run_id} ({history.status}) {problem}; bring the rest of metrics/ to look at them."
        return f"{history.run_id} ({history.status}) has taken no step yet; there is nothing to look at."
    of = f"{history.run_id} ({history.status}, {history.end} steps)"
    counts = [(s, sum(f.severity == s for f in report.findings)) for s in reversed(SEVERITIES)]
    found = ", ".join(f"{num} {severity}" for severity, num in counts if num)
    if report.verdict == "sick":
        return f"{of}: {found or history.status}."
    figures, found = _figures(history), f"{found}; " if found else ""
    if report.unknown:
        return f"{of}: {found}not known to be well, as nobody looked {_listed(report.unknown)}; {figures}."
    return f"{of}: {found}healthy as far as {len(report.answers['healthy'])} rules can tell; {figures}."


def tally_line(report: Report) -> str:
    """The last line: how many rules gave which of the three answers."""
    counts = {name.replace("_", " "): len(rules) for name, rules in report.answers.items()}
    return ", ".join(f"{num} {name}" for name, num in counts.items())


def not_looked_at(report: Report) -> Iterator[str]:
    """The rules that did not look, by what would let them: one line of code, or one key."""
    reasons = report.answers["not_looked_at"]
    how, titles = report.how, {rule.id: rule.title for rule in report.rules}
    groups: dict[str, list[str]] = {}
    for rule in reasons:
        groups.setdefault(how.get(rule, "").partition("; ")[0], []).append(rule)
    if groups:
        yield "Not looked at, and what would let the doctor look:"
    ordered = sorted(groups.items(), key=lambda group: (not group[0], -len(group[1]), group[0]))
    for line, rules in ordered:
        if line and len(rules) == 1 and len(ordered) > MOST_WAYS:
            continue
        if line:
            text = f"{line}: {', '.join(f'{titles[rule].lower()} ({rule})' for rule in rules)}"
        else:
            text = "; ".join(f"{titles[rule].lower()} ({rule}): {reasons[rule]}" for rule in rules)
        yield from paragraph(text, "  ", "    ").split("\n")
    if rest := [rules[0] for line, rules in ordered if line and len(rules) == 1 and len(ordered) > MOST_WAYS]:
        text = f"a line or a key of their own (`how` in --json): {', '.join(rest)}"
        yield from paragraph(text, "  ", "    ").split("\n")
    history = report.history
    for kind, what in (("no_activation_stats", "activations were not recorded"), ("no_probes", "no probes were made")):
        for event in history.events_of(kind)[:1]:
            yield from paragraph(f"{what}: {event.get('why')}", "  ", "    ").split("\n")


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def finding_lines(finding: Finding, ref: str) -> Iterator[str]:
    """One finding: what was seen and since when, then what a reader needs to believe it, then what to do."""
    since = f" Since step {finding.since}." if finding.since is not None else ""
    head = f"{finding.rule}  {finding.severity}  {finding.title}: "
    yield from paragraph(head + sentence(finding.what) + since).split("\n")
    for label, texts in (
        ("evidence", finding.evidence),
        ("ruled out", finding.ruled_out),
        ("confirm", [finding.probe] if finding.probe else []),
        ("try", [finding.remedy] if finding.remedy else []),
    ):
        for i, text in enumerate(texts):
            first = f"  {label if i == 0 else '':<10}"
            yield from paragraph(text, first, " " * 12).split("\n")
    if command := finding.command(ref):
        yield f"{'':12}{command}"  # in one piece, to be copied


def sentence(text: str) -> str:
    """With a capital and a full stop, however the rule wrote it; a name such as lr.min_lr keeps its letters."""
    first = text.split(" ")[0]
    text = text if any(mark in first for mark in "._/@=") else text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _figures(history: History) -> str:
    loss, parts = history["loss"].finite, []
    if len(loss):
        last = f"{loss.last().median:.4g} (median of the last {min(len(loss), WINDOW)})"
        parts.append(f"loss {loss.values[0]:.4g} -> {last}")
    for name, measures in history.evals.items():
        if len(evals := measures.get("loss", EMPTY)):
            parts.append(f"{name} {evals.values[-1]:.4g} at step {evals.steps[-1]}")
    norm, clipped = history["norm"].last().finite, signal(history, "clip rate").last()
    if len(norm) and len(clipped):
        parts.append(f"norm {norm.median:.3g} with {clipped.values.mean():.0%} of steps clipped")
    targets, seconds = history["targets"].last().median, history["step_s"].last().median
    if seconds > 0 and targets > 0:
        parts.append(f"{count(targets / seconds)} targets/s")
    return ", ".join(parts) or "nothing but steps was recorded"
