"""Student's t distribution: its cdf and quantile, and the incomplete beta function they stand on.

Correct to about ten digits for one to a million degrees of freedom, which may be fractions (Welch). The surprising
thing: tails are computed as such and never as 1 minus the rest, so that the p-value of a large t keeps its digits.
"""

from __future__ import annotations

import functools
import math

_TINY = 1e-300
_MOST_TERMS = 500


def cdf(t: float, df: float) -> float:
    """P(T <= t)."""
    return upper_tail(-t, df)


def upper_tail(t: float, df: float) -> float:
    """P(T > t)."""
    if not df > 0:
        raise ValueError(f"{df} degrees of freedom; a t distribution has more than 0")
    if math.isnan(t):
        return math.nan
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    # Of the two arguments the small one is exact: df/(df + t^2) far out, t^2/(df + t^2) in the middle.
    square = t * t
    if square > df:
        tail = 0.5 * incomplete_beta(df / (df + square), df / 2, 0.5)
    else:
        tail = 0.5 - 0.5 * incomplete_beta(square / (df + square), 0.5, df / 2)
    return tail if t >= 0 else 1.0 - tail


def two_sided(t: float, df: float) -> float:
    """P(|T| > |t|): the p-value."""
    return 2 * upper_tail(abs(t), df)


def quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p."""
    if not 0 < p < 1:
        raise ValueError(f"a quantile is asked for a probability between 0 and 1, not {p}")
    if p < 0.5:
        return -_upper_quantile(p, df)
    return _upper_quantile(1 - p, df) if p > 0.5 else 0.0


def limit(level: float, df: float) -> float:
    """The t that |T| exceeds with probability `level`: what an interval of 1 - level reaches to."""
    return _upper_quantile(level / 2, df)


@functools.lru_cache(maxsize=4096)
def _upper_quantile(tail: float, df: float) -> float:
    """The t >= 0 with P(T > t) = tail, by halving: slower than Newton by microseconds, and it cannot run away."""
    low, high = 0.0, 1.0
    while upper_tail(high, df) > tail:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if upper_tail(middle, df) > tail else (low, middle)
    return (low + high) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1.0 - incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    return front / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 + c1/(1 + c2/(1 + ...)), evaluated from the front by keeping the ratios of successive convergents."""
    value = over = 1.0
    under = 0.0
    for n in range(1, _MOST_TERMS):
        m = n // 2
        if n % 2:
            c = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            c = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        under = 1 / ((1 + c * under) or _TINY)
        over = (1 + c / over) or _TINY
        value *= over * under
        if abs(over * under - 1) < 1e-15:
            break
    return value
