"""Numbers and names of a study as its page writes them; every rounding on the page is in ROUNDED."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rung.compare.lineage import value_text
from rung.compare.scaling.fit import Interval
from rung.compare.scaling.study import COMPONENTS, Study
from rung.text import one_line
from rung.units import count

ROUNDED = {"figure": ".4f", "se": ".4f", "difference": "+.4f", "exponent": ".3g"}
_MOST_TICK = 8  # characters


def axis(study: Study) -> str:
    return "K, the number of components" if study.x == COMPONENTS else one_line(study.x)


def short(study: Study) -> str:
    """The last part of the key, for the head of a column."""
    return "K" if study.x == COMPONENTS else one_line(study.x.rpartition(".")[2])


def tick(value: Any) -> str:
    """A value on the axis of a drawing, where there is little room."""
    if isinstance(value, int) and value >= 10_000:
        return count(value)
    text = value_text(value)
    return text if len(text) <= _MOST_TICK or not isinstance(value, float) else f"{value:.3g}"


def figure(value: float) -> str:
    return format(value, ROUNDED["figure"])


def with_se(value: float, se: float | None) -> str:
    return figure(value) if se is None else f"{figure(value)} ± {format(se, ROUNDED['se'])}"


def move(value: float) -> str:
    return "-" if math.isnan(value) else format(value, ROUNDED["difference"])


def ends(one: Interval, name: str = "difference") -> str:
    """The interval, with the rounding of that name; "-" where there is none."""
    return f"[{one.low:{ROUNDED[name]}}, {one.high:{ROUNDED[name]}}]" if one.is_known else "-"


def rms(residuals: Sequence[Sequence[float]]) -> float:
    flat = [value for one in residuals for value in one]
    return math.sqrt(fmean(value * value for value in flat)) if flat else 0.0
