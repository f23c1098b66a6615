"""Numbers and names of a study as its page writes them; every rounding on the page is in ROUNDED."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rung.compare.lineage import value_text
from rung.compare.scaling.axis import COMPONENTS
from rung.compare.scaling.fit import Interval
from rung.compare.scaling.study import Study
from rung.text import one_line
from rung.units import count

ROUNDED = {"figure": ".4f", "difference": "+.4f", "exponent": ".3g"}
_SMALL, _DUST = 1e-3, 1e-12  # below the one, four places show a digit at most; below the other lies what floats leave
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


def _rounded(value: float, name: str) -> str:
    """With the rounding of that name; of small values, which it would take for 0, two digits."""
    is_small = _DUST < abs(value) < _SMALL
    return format(value, f"{'+' if '+' in ROUNDED[name] else ''}.2g" if is_small else ROUNDED[name])


def figure(value: float) -> str:
    return _rounded(value, "figure")


def with_se(value: float, se: float | None) -> str:
    return figure(value) if se is None else f"{figure(value)} ± {figure(se)}"


def move(value: float) -> str:
    return "-" if math.isnan(value) else _rounded(value, "difference")


def ends(one: Interval, name: str = "difference") -> str:
    """The interval, with the rounding of that name; "-" where there is none."""
    return f"[{_rounded(one.low, name)}, {_rounded(one.high, name)}]" if one.is_known else "-"


def estimate(one: Interval, name: str) -> str:
    """The value, and its interval where there is one."""
    return f"{_rounded(one.value, name)}{f' {ends(one, name)}' if one.is_known else ''}"


def rms(residuals: Sequence[Sequence[float]]) -> float:
    flat = [value for one in residuals for value in one]
    return math.sqrt(fmean(value * value for value in flat)) if flat else 0.0
