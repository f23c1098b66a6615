"""Student's t distribution, and limits of t that also hold for values as skewed as an exponential's.

Degrees of freedom run from one to a million and may be fractions (Welch). scipy has t too, but is no dependency. Tails
above 1e-15 agree with scipy to 1e-9 of their size.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence

# By how much Student's limit must be widened so that the mean of n values out of an exponential, less its own mean,
# passes it on either side in no more than that share of samples: at n = 5 the limit for 5 % is passed in 12 %. Of n
# values with mean M and standard deviation S, M and S / M are independent and M has a gamma distribution, so that a
# share is a mean of gamma tails over 400,000 drawn S / M (bench/verdicts checks each line). Rows: n; columns: share.
_SHARES = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001)
_WIDER = {
    2: (1.568, 1.769, 1.880, 1.947, 1.969, 1.975, 1.970, 1.970, 1.970, 1.970, 1.970),
    3: (1.387, 1.659, 1.873, 2.079, 2.191, 2.276, 2.361, 2.412, 2.459, 2.526, 2.586),
    4: (1.279, 1.535, 1.761, 1.999, 2.142, 2.260, 2.384, 2.458, 2.519, 2.583, 2.623),
    5: (1.221, 1.448, 1.665, 1.905, 2.057, 2.187, 2.333, 2.425, 2.505, 2.594, 2.651),
    6: (1.181, 1.378, 1.583, 1.813, 1.961, 2.092, 2.242, 2.341, 2.429, 2.531, 2.597),
    8: (1.136, 1.288, 1.467, 1.675, 1.812, 1.934, 2.080, 2.180, 2.272, 2.383, 2.459),
    12: (1.093, 1.192, 1.329, 1.502, 1.616, 1.719, 1.843, 1.930, 2.011, 2.112, 2.184),
    20: (1.057, 1.113, 1.202, 1.331, 1.419, 1.499, 1.594, 1.661, 1.724, 1.802, 1.859),
    40: (1.029, 1.055, 1.099, 1.176, 1.237, 1.292, 1.358, 1.403, 1.446, 1.499, 1.537),
    100: (1.013, 1.023, 1.039, 1.072, 1.102, 1.134, 1.175, 1.203, 1.230, 1.262, 1.285),
    400: (1.003, 1.006, 1.010, 1.018, 1.026, 1.035, 1.050, 1.062, 1.074, 1.090, 1.101),
}

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


def skewed_limit(level: float, df: float) -> float:
    """The t that the mean of df + 1 values exceeds on either side with probability `level` at most.

    With that much where the values are as skewed as an exponential's, and with less where they are normal. A fraction
    of a degree is dropped: what is known of skew is known of whole numbers of values.
    """
    whole = max(1, math.floor(df + 1e-9))
    return limit(level, whole) * _widening(level, whole + 1)


def skewed_two_sided(t: float, df: float) -> float:
    """The smallest level at which |t| reaches the skewed limit: a p-value for values that may be skewed."""
    whole = max(1, math.floor(df + 1e-9))
    low, high = math.log(max(two_sided(t, whole), 1e-15)), 0.0  # of the logarithm; it is never less than Student's
    for _ in range(40):
        middle = (low + high) / 2
        is_small = two_sided(t / _widening(math.exp(middle), whole + 1), whole) <= math.exp(middle)
        low, high = (low, middle) if is_small else (middle, high)
    return math.exp(high)


@functools.lru_cache(maxsize=4096)
def _widening(level: float, n: int) -> float:
    """Between the entries of the table, straight in log(n) and log(level); beyond the last n it shrinks as 1 / n."""
    rows = list(_WIDER)
    at = [_along([math.log(share) for share in reversed(_SHARES)], _WIDER[row][::-1], math.log(level)) for row in rows]
    if level > _SHARES[0]:  # towards 1, where every limit is 0
        share = (1 - level) / (1 - _SHARES[0])
        at = [1 + share * (_WIDER[row][0] - 1) for row in rows]
    if n > rows[-1]:
        return 1 + (at[-1] - 1) * rows[-1] / n
    return max(1.0, _along([math.log(row) for row in rows], at, math.log(n)))


def _along(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """A line through the two points beside x; before the first and after the last, the same line goes on."""
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


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
