"""The doctor's report as text: findings, what changed at the same step, and what could not be looked at."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rung.doctor.coincidence import Coincidence, coincidences, signal
from rung.doctor.diagnose import EVERY, IN_A_ROW, ask, conclude
from rung.doctor.finding import SEVERITIES, Finding
from rung.doctor.history import EMPTY, WINDOW, History
from rung.doctor.rules import Rule
from rung.units import count

WIDTH = 118
_UNITS = {"loss": "loss", "norm": "norm", "clip rate": "share of clipped steps"}


@dataclass(frozen=True)
class Report:
    history: History
    findings: list[Finding]
    coincidences: list[Coincidence]
    rules: list[Rule]
    unasked: dict[str, str]  # rule -> what it needs and the run did not record
    early: list[str]  # states that could not be looked at three times yet
    failed: dict[str, str]  # rule -> what it raised
    preflight: list[dict[str, Any]]  # checks before step 0 that warned or failed

    def at_least(self, severity: str) -> list[Finding]:
        return [f for f in self.findings if f.rank >= SEVERITIES.index(severity)]

    @property
    def is_sick(self) -> bool:
        return bool(self.at_least("sick"))

    @property
    def num_asked(self) -> int:
        return len(self.rules) - len(self.unasked) - len(self.early) - len(self.failed)

    def to_dict(self, ref: str) -> dict[str, Any]:
        history = self.history
        return {
            "run": history.run_id,
            "status": history.status,
            "steps": history.end,
            "is_sick": self.is_sick,
            "findings": [{**f.to_dict(), "command": f.command(ref)} for f in self.findings],
            "coincidences": [c._asdict() for c in self.coincidences],
            "preflight": self.preflight,
            "rules": [rule.id for rule in self.rules],
            "unasked": self.unasked,
            "early": self.early,
            "failed": self.failed,
        }


def report_of(history: History, rules: Sequence[Rule] | None = None) -> Report:
    answers = ask(history, rules)
    checks = history.events_of("check")
    results = (checks[-1].get("results") or []) if checks else []
    return Report(
        history,
        conclude(answers),
        coincidences(history),
        rules=[answer.rule for answer in answers],
        unasked={answer.rule.id: answer.missing for answer in answers if answer.missing},
        early=[answer.rule.id for answer in answers if answer.is_early],
        failed={answer.rule.id: answer.error for answer in answers if answer.error},
        preflight=[dict(r) for r in results if isinstance(r, Mapping) and r.get("level") in ("warn", "fail")],
    )


def lines(report: Report, ref: str, severity: str = "warn") -> Iterator[str]:
    """The page that `rung doctor` prints, with findings from this severity on."""
    history, shown = report.history, report.at_least(severity)
    yield from textwrap.wrap(headline(report), WIDTH, subsequent_indent="  ")
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
        yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    if history.end:
        yield ""
        yield from textwrap.wrap(coverage(report), WIDTH)


def headline(report: Report) -> str:
    """One sentence: how many findings, how many rules could look, and the figures of a run that has none."""
    history = report.history
    if not history.end and not report.findings:
        return f"{history.run_id} ({history.status}) has taken no step yet; there is nothing to look at."
    counts = [(s, sum(f.severity == s for f in report.findings)) for s in reversed(SEVERITIES)]
    found = ", ".join(f"{num} {severity}" for severity, num in counts if num) or "no finding"
    num_rules = len(report.rules)
    blind = num_rules - report.num_asked
    rules = f"{blind} of {num_rules} rules had nothing to look at" if blind else f"all {num_rules} rules looked"
    figures = "" if report.at_least("warn") else f"; {_figures(history)}"
    return f"{history.run_id} ({history.status}, {history.end} steps): {found}; {rules}{figures}."


def finding_lines(finding: Finding, ref: str) -> Iterator[str]:
    """One finding: what was seen and since when, then what a reader needs to believe it, then what to do."""
    since = f" Since step {finding.since}." if finding.since is not None else ""
    head = f"{finding.rule}  {finding.severity}  {finding.title}: "
    yield from textwrap.wrap(head + sentence(finding.what) + since, WIDTH, subsequent_indent="  ")
    for label, texts in (
        ("evidence", finding.evidence),
        ("ruled out", finding.ruled_out),
        ("confirm", [finding.probe] if finding.probe else []),
        ("try", [finding.remedy] if finding.remedy else []),
    ):
        for i, text in enumerate(texts):
            first = f"  {label if i == 0 else '':<10}"
            yield from textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * 12)
    if command := finding.command(ref):
        yield f"{'':12}{command}"  # in one piece, to be copied


def sentence(text: str) -> str:
    """With a capital and a full stop, however the rule wrote it; a name such as lr.min_lr keeps its letters."""
    first = text.split(" ")[0]
    text = text if any(mark in first for mark in "._/@=") else text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def coverage(report: Report) -> str:
    """How many rules found nothing, and which had nothing to look at."""
    history = report.history
    num_evals = len({int(s) for of in history.evals.values() for series in of.values() for s in series.steps})
    num_fine = report.num_asked - len({f.rule for f in report.findings})
    seen = f"{history.end} steps and {num_evals} eval{'' if num_evals == 1 else 's'}"
    parts = [f"{num_fine} of {len(report.rules)} rules looked at {seen} and found nothing"]
    by_need: dict[str, list[str]] = {}
    for rule, missing in report.unasked.items():
        by_need.setdefault(missing.split(", ")[0], []).append(rule)  # the rest is in --json
    if by_need:
        needs = ", ".join(f"{missing} ({' '.join(rules)})" for missing, rules in sorted(by_need.items()))
        parts.append(f"{len(report.unasked)} had nothing to look at, because the run did not record {needs}")
    for kind, what in (("no_activation_stats", "activations were not recorded"), ("no_probes", "no probes were made")):
        parts += [f"{what}: {event.get('why')}" for event in history.events_of(kind)[:1]]
    if report.early:
        parts.append(
            f"{len(report.early)} need a longer run: they look after step 50 and the warm-up, {IN_A_ROW} times, "
            f"{EVERY} steps apart"
        )
    parts += [f"{rule} failed ({why})" for rule, why in report.failed.items()]
    return f"{'. '.join(sentence(part).removesuffix('.') for part in parts)}."


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
