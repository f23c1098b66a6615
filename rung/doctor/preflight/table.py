"""Results as a table for people. Imports no torch."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rung.doctor.preflight.result import Result

ORDER = ("fail", "warn", "skip", "pass")


def render(results: Sequence[Result], seconds: float, width: int = 120, has_details: bool = False) -> str:
    """One line per result, with the remedy below it, and a last line with the counts."""
    names = max((len(r.name) for r in results), default=0)
    lines = [line for result in results for line in _result(result, names, width)]
    if has_details:
        for result in results:
            if result.detail:
                lines += ["", f"{result.name}:", *(f"  {line}" for line in result.detail.splitlines())]
    return "\n".join([*lines, "", summary(results, seconds)])


def _result(result: Result, names: int, width: int) -> Iterator[str]:
    first = f"{result.level:<4}  {result.name:<{names}}  {result.rule:<3}  "
    rest = " " * len(first)
    yield textwrap.fill(result.seen, width, initial_indent=first, subsequent_indent=rest)
    if result.remedy and result.level in ("warn", "fail"):
        yield textwrap.fill(f"try: {result.remedy}", width, initial_indent=rest, subsequent_indent=rest)


def summary(results: Sequence[Result], seconds: float) -> str:
    levels = Counter(result.level for result in results)
    counts = ", ".join(f"{levels[level]} {level}" for level in ORDER if levels[level])
    return f"{len(results)} results in {seconds:.1f} s: {counts or 'none'}"
