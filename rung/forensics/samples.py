"""Finds the rows of a micro that make it fail, by halving.

Rows fail when they fail as the whole micro does. A try that fails in another way says nothing of its rows: a model that
does not take so few of them (batch statistics want two) raises something of its own. Such rows are tried in company.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from rung.engine.prefetch import Micro
from rung.forensics.rerun import EAGER, Rerun, Try, rows_of
from rung.forensics.verdict import Answers

MOST_SAMPLES = 4


class SameFailure(NamedTuple):
    """Whether a try fails as this one does. None: it fails in another way, and answers nothing."""

    failed: Try

    def __call__(self, tried: Try) -> bool | None:
        if not tried.fails or "error" not in (tried.place, self.failed.place):
            return tried.fails
        is_same = tried.place == self.failed.place and _kind(tried.error) == _kind(self.failed.error)
        return True if is_same else None


def _kind(error: str) -> str:
    """What an error says whichever the row: without numbers, lists of them, and what it quotes."""
    without = re.sub(r"'[^']*'|\"[^\"]*\"|\b0x\w+|[-+]?\d[\d.]*(e[-+]?\d+)?|\b(nan|inf)\b", "#", error)
    return re.sub(r"#(,? #)*", "#", without)


def find_samples(rerun: Rerun, a: Answers, micro: Micro, same_failure: SameFailure) -> None:
    """The rows without which the micro passes, one after the other."""
    cut = _Cut(rerun, micro, same_failure)
    rest = np.arange(len(micro.ids))
    a.num_rows = len(rest)
    while does_fail := cut.fails(rest):
        if len(a.samples) == MOST_SAMPLES or a.cut == "together":
            break
        rows = cut.smallest(rest)
        if 1 < len(rows) == a.num_rows:  # which names nobody
            a.not_tested += ["the sample: the model does not take fewer rows"] if cut.is_stuck else []
            return
        a.samples += micro.ids[rows].tolist()
        a.cut = "together" if len(rows) > 1 else cut.how
        rest = rest[~np.isin(rest, rows)]
    a.rest_fails = does_fail


class _Cut:
    """Tries some rows of a micro."""

    def __init__(self, rerun: Rerun, micro: Micro, same_failure: SameFailure) -> None:
        self._rerun, self._micro, self._same_failure = rerun, micro, same_failure
        self.how, self.is_stuck = "alone", False

    def fails(self, rows: np.ndarray) -> bool | None:
        """As the micro does; None where these rows cannot be tried."""
        return self._same_failure(self._rerun.take(EAGER, [rows_of(self._micro, rows)])) if len(rows) else False

    def smallest(self, rest: np.ndarray) -> np.ndarray:
        """Of rows that fail: one that does by itself, or the fewest that do together."""
        rows = rest
        while len(rows) > 1 and (half := self._half_of(rows, rest)) is not None:
            rows = half
        return rows

    def _half_of(self, rows: np.ndarray, rest: np.ndarray) -> np.ndarray | None:
        """The half that fails by itself. None: it takes several together, or fewer cannot be tried."""
        halves = np.array_split(rows, 2)
        alone = self._outcomes(halves)
        if True in alone or None not in alone:
            return halves[alone.index(True)] if True in alone else None
        self.is_stuck = True
        company = rest[~np.isin(rest, rows)]
        if len(company) and self.fails(company) is False:
            beside = self._outcomes([np.sort(np.concatenate([company, half])) for half in halves])
        else:
            beside = [self.fails(np.repeat(half, 2)) for half in halves]
            if False not in beside:  # nothing shows that a row may stand beside itself
                return None
        if True not in beside:
            return None
        self.how, self.is_stuck = "in company (fewer cannot be tried)", False
        return halves[beside.index(True)]

    def _outcomes(self, groups: list[np.ndarray]) -> list[bool | None]:
        """Up to the first that fails."""
        outcomes: list[bool | None] = []
        for rows in groups:
            outcomes.append(self.fails(rows))
            if outcomes[-1]:
                break
        return outcomes
