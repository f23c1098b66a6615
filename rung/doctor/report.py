"""What the doctor says, in words: findings, what coincided, and what was looked at and found fine.

Rules are asked by diagnose; nothing is judged here. Which rules could not be asked is found out by watching what they
reach for: a rule that finds nothing, and whose last reach was for something that was never recorded, said nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rung.doctor.coincidence import Coincidence, coincidences
from rung.doctor.diagnose import EVERY, IN_A_ROW, diagnose, looks
from rung.doctor.finding import SEVERITIES, Finding
from rung.doctor.history import WINDOW, History, Series, Table
from rung.doctor.rules import Rule, catalogue
from rung.units import count

WIDTH = 118
_UNITS = {"loss": "loss", "norm": "norm", "clip rate": "share of clipped steps"}


@dataclass(frozen=True)
class Report:
    """All that can be said of a run today."""

    history: History
    findings: list[Finding]
    coincidences: list[Coincidence]
    rules: list[Rule]
    unasked: dict[str, str]  # rule -> the signal that was not recorded
    early: list[str]  # states that have not been looked at three times yet
    failed: dict[str, str]  # rule -> what it raised
    preflight: list[dict[str, Any]]  # checks before step 0 that had something to say

    def at_least(self, severity: str) -> list[Finding]:
        return [f for f in self.findings if f.rank >= SEVERITIES.index(severity)]

    @property
    def is_sick(self) -> bool:
        return bool(self.at_least("sick"))

    def plain(self, ref: str) -> dict[str, Any]:
        history = self.history
        return {
            "run": history.run_id,
            "status": history.status,
            "steps": history.end,
            "is_sick": self.is_sick,
            "findings": [{**f.plain(), "command": f.command(ref)} for f in self.findings],
            "coincidences": [c.plain() for c in self.coincidences],
            "preflight": self.preflight,
            "rules": [rule.id for rule in self.rules],
            "unasked": self.unasked,
            "early": self.early,
            "failed": self.failed,
        }

    @property
    def num_asked(self) -> int:
        return len(self.rules) - len(self.unasked) - len(self.early) - len(self.failed)


def report_of(history: History, rules: Sequence[Rule] | None = None) -> Report:
    rules = list(rules if rules is not None else catalogue())
    failed: dict[str, str] = {}
    findings = diagnose(history, rules, failed)
    silent = [rule for rule in rules if rule.id not in {f.rule for f in findings} and rule.id not in failed]
    early = [rule.id for rule in silent if rule.kind == "state" and _num_looks(rule, history) < IN_A_ROW]
    unasked = {rule.id: missing for rule in silent if rule.id not in early and (missing := _missing(rule, history))}
    checks = history.events_of("check")
    results = (checks[-1].get("results") or []) if checks else []
    preflight = [dict(r) for r in results if isinstance(r, Mapping) and r.get("level") in ("warn", "fail")]
    return Report(history, findings, coincidences(history), rules, unasked, early, failed, preflight)


def _num_looks(rule: Rule, history: History) -> int:
    return max((len(group) for group in looks(history, rule)), default=0)


def lines(report: Report, ref: str, severity: str = "warn") -> Iterator[str]:
    """The page that `rung doctor` prints, with findings from this severity on."""
    history, shown = report.history, report.at_least(severity)
    yield from textwrap.wrap(headline(report), WIDTH, subsequent_indent="  ")
    if not history.end:
        yield from _preflight(report)
        return
    for finding in shown:
        yield ""
        yield from finding_lines(finding, ref)
    hidden = len(report.findings) - len(shown)
    if hidden:
        yield ""
        yield f"{hidden} more below {severity}: {', '.join(f.rule for f in report.findings if f not in shown)} (--all)"
    if report.coincidences:
        yield ""
        yield from _coincided(report.coincidences)
    yield from _preflight(report)
    yield ""
    yield from textwrap.wrap(_fine(report), WIDTH)


def headline(report: Report) -> str:
    """One sentence: how the run stands, in numbers."""
    history = report.history
    if not history.end:
        return f"{history.run_id} ({history.status}) has taken no step yet; there is nothing to look at."
    counts = [(s, sum(f.severity == s for f in report.findings)) for s in reversed(SEVERITIES)]
    told = ", ".join(f"{num} {severity}" for severity, num in counts if num and severity != "info")
    name = f"{history.run_id} ({history.status}, {history.end} steps)"
    if told:
        return f"{name}: {told}."
    return f"{name} is healthy as far as {report.num_asked} rules can tell: {_numbers(history)}."


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


def _coincided(found: Sequence[Coincidence]) -> Iterator[str]:
    yield "What changed, and what happened within 5 % of that step:"
    for one in found:
        events = ", ".join(one.events) or "nothing that was recorded"
        yield f"  step {one.step}: {_UNITS[one.signal]} {one.before:.4g} -> {one.after:.4g}; {events}"


def _preflight(report: Report) -> Iterator[str]:
    if report.preflight:
        yield ""
        yield "Before step 0 the checks had said:"
    for result in report.preflight:
        text = f"{result.get('level')}  {result.get('name')}: {result.get('seen')}"
        text += f"; {result['remedy']}" if result.get("remedy") else ""
        yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _fine(report: Report) -> str:
    """What was looked at and found fine, and what could not be asked."""
    history, found = report.history, {f.rule for f in report.findings}
    num_evals = len({int(s) for of in history.evals.values() for series in of.values() for s in series.steps})
    num_fine = report.num_asked - len(found)
    seen = f"{history.end} steps and {num_evals} eval{'' if num_evals == 1 else 's'}"
    parts = [f"{num_fine} of {len(report.rules)} rules looked at {seen} and found nothing"]
    missing: dict[str, list[str]] = {}
    for rule, signal in report.unasked.items():
        missing.setdefault(signal, []).append(rule)
    if missing:
        signals = ", ".join(f"{signal} ({' '.join(rules)})" for signal, rules in sorted(missing.items()))
        parts.append(f"not asked, because it was not recorded: {signals}")
    for kind, what in (("no_looks", "activations were not looked at"), ("no_probes", "no probes were made")):
        parts += [f"{what}: {event.get('why')}" for event in history.events_of(kind)[:1]]
    if report.early:
        parts.append(
            f"{len(report.early)} need a longer run: they judge after step 50 and the warm-up, {IN_A_ROW} times, "
            f"{EVERY} steps apart"
        )
    parts += [f"{rule} could not be asked ({why})" for rule, why in report.failed.items()]
    return f"{'; '.join(parts)}."


def _numbers(history: History) -> str:
    """The figures that a healthy run is described by."""
    loss, words = history["loss"].finite, []
    if len(loss):
        words.append(
            f"loss {loss.values[0]:.4g} -> {loss.last().median:.4g} (median of the last {min(len(loss), WINDOW)})"
        )
    for name, measures in history.evals.items():
        if "loss" in measures and len(measures["loss"]):
            words.append(f"{name} {measures['loss'].values[-1]:.4g} at step {measures['loss'].steps[-1]}")
    norm, clipped = history["norm"].last().finite, history["norm_clipped"].last().finite
    if len(norm) and len(norm) == len(clipped):
        share = float(np.mean(clipped.values < norm.values * (1 - 1e-5)))
        words.append(f"norm {norm.median:.3g} with {share:.0%} of steps clipped")
    targets, seconds = history["targets"].last().median, history["step_s"].last().median
    if seconds > 0 and targets > 0:
        words.append(f"{count(targets / seconds)} targets/s")
    return ", ".join(words) or "nothing but steps was recorded"


def _missing(rule: Rule, history: History) -> str:
    """What a rule reached for last, if that was never recorded."""
    traced = Traced(**{f.name: getattr(history, f.name) for f in fields(History)})
    rule(traced)
    return traced.last if not traced.was_there else ""


@dataclass
class Traced(History):
    """A history that remembers what was reached for last."""

    last: str = ""
    was_there: bool = True

    def __getitem__(self, name: str) -> Series:
        self.last, self.was_there = name, name in self.rows
        return super().__getitem__(name)

    def table(self, kind: str) -> Table | None:
        self.last, self.was_there = kind, kind in self.tables
        return super().table(kind)

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        self.last, self.was_there = kind, True  # an event that did not happen is an answer
        return super().events_of(kind)
