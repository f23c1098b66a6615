"""What a check is, what it is given to look at, and what it found; and its results as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from rung.engine.build import Setup
from rung.engine.prefetch import BatchLayout, Micro, Prefetcher
from rung.report.table import paragraph

LEVELS = ("fail", "warn", "skip", "pass")  # skip: not looked at, with the reason in `seen`


class NotApplicable(Exception):
    """A question that makes no sense for this recipe, or could not be put; the text says why."""


@dataclass(frozen=True)
class Result:
    """Name and rule are those of the check, unless it has results of several names or about several rules."""

    name: str = field(default="", kw_only=True)  # short and stable, such as "ids in range"
    level: str
    seen: str  # the numbers
    remedy: str = ""  # what to do; a check drops it where nothing is wrong
    rule: str | None = field(default=None, kw_only=True)  # the entry of the catalogue, such as D3
    detail: str = field(default="", kw_only=True)  # more lines, such as one sample position by position

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class CheckContext:
    """A run that is ready to start, and what is worth sharing between checks. Checks leave it as they found it.

    `is_quick` is the form that `rung train` runs before step 0: a few seconds in all, whatever the model.
    """

    setup: Setup
    is_quick: bool = False
    shared: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def micro(self) -> Micro:
        """A few rows of step 0 on the device, few enough for a quick look."""
        setup, rows = self.setup, min(self.setup.layout.micro_rows, 4)
        layout = BatchLayout(rows, rows)
        return Prefetcher(setup.streams["train"], layout, setup.cfg.seed, setup.world.device, 0).take(0)[0]


Look = Callable[[CheckContext], Result | Iterable[Result]]


@dataclass(frozen=True)
class Check:
    name: str
    rule: str
    look: Look
    is_quick: bool = True  # whether it is part of the quick form
    changes_state: bool = False  # such checks come last, and only `rung check` makes them

    def __call__(self, context: CheckContext) -> Iterator[Result]:
        found = self.look(context)
        for result in [found] if isinstance(found, Result) else found:
            rule = self.rule if result.rule is None else result.rule
            remedy = result.remedy if result.level in ("warn", "fail") else ""
            yield replace(result, name=result.name or self.name, rule=rule, remedy=remedy)


def check(name: str, rule: str = "", *, is_quick: bool = True, changes_state: bool = False) -> Callable[[Look], Check]:
    """Makes a check of a function; checks.py finds it in its module."""
    return lambda look: Check(name, rule, look, is_quick, changes_state)


def render(results: Sequence[Result], seconds: float, has_details: bool = False) -> str:
    """One line per result, with the remedy below it, and a last line with the counts."""
    longest, lines = max((len(r.name) for r in results), default=0), list[str]()
    for result in results:
        first = f"{result.level:<4}  {result.name:<{longest}}  {result.rule or '':<3}  "
        rest = " " * len(first)
        lines.append(paragraph(result.seen, first, rest))
        if result.remedy:
            lines.append(paragraph(f"try: {result.remedy}", rest, rest))
    for result in results if has_details else ():
        if result.detail:
            lines += ["", f"{result.name}:", *(f"  {line}" for line in result.detail.splitlines())]
    levels = Counter(result.level for result in results)
    counts = ", ".join(f"{levels[level]} {level}" for level in LEVELS if levels[level])
    return "\n".join([*lines, "", f"{len(results)} results in {seconds:.1f} s: {counts or 'none'}"])
