"""What a list of differences lets one conclude: an interval, a verdict, and how many more pairs it would take.

Pure functions on numbers, so that their error rates can be simulated (bench/verdicts). One difference is one seed.
Looking after 3 pairs, then 5, then 8 gives chance several tries; so the 5 % are spent over the looks, little on the
early ones, and add up whatever the correlation between looks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev, variance

from rung.compare.student import limit, two_sided

ALPHA = 0.05  # of saying BETTER or WORSE where there is nothing, over all looks together
POWER = 0.8
LOOKS = (3, 5, 8, 12)  # numbers of pairs
BEND = 1.5  # spent by look n: ALPHA * (n / 12) ** BEND; 2 leaves 3 sd at 5 pairs a power of 78 %, 1.5 of 84 %
# For a first look whose number of pairs was fixed before, and for all that come after it. Together 4 % and not 5:
# three pairs are sensitive to noise that is not normal: with 4 % and 1 %, going on after three planned pairs gave 4.5 %
# of false alarms in normal noise, and 4.9 to 6.3 % in noise drawn from 48 to 96 recorded pairs (bench/verdicts).
FIRST, LATER = 0.03, 0.01
LEAST_Z, FLOOR_LEVEL = 3.0, 0.01  # against a noise floor
BCA_FROM, BCA_DRAWS = 8, 4000
MOST_PAIRS = 1000
NORMAL = NormalDist()


@dataclass(frozen=True)
class AlphaSpending:
    """How much of ALPHA each look may spend; `planned` is the number of pairs fixed before the first look, if any.

    Of several variants that are judged against one control each may err in its part, so that all together keep the
    level: their intervals are wider, and hold all at once.
    """

    planned: int | None = None
    num_variants: int = 1

    def level(self, num_pairs: int) -> float:
        """The two-sided error that this look may make; between two looks, that of the smaller one."""
        if self.planned is not None and num_pairs == self.planned:
            return FIRST / self.num_variants
        share = ALPHA if self.planned is None else LATER
        level, before = share * (LOOKS[0] / LOOKS[-1]) ** BEND, 0.0
        for n in LOOKS:
            if num_pairs < n:
                break
            spent = share * (n / LOOKS[-1]) ** BEND
            level, before = spent - before, spent
        return level / self.num_variants


UNPLANNED = AlphaSpending()


@dataclass(frozen=True)
class Decision:
    """`effect` is B - A. Without an interval, `low` and `high` are not finite."""

    word: str
    effect: float
    low: float
    high: float
    sd: float  # of one difference
    num_pairs: int
    level: float
    p: float = math.nan
    method: str = "paired t"
    more_pairs: int | None = None  # None: none are needed, or no number would do
    z: float = math.nan  # against a noise floor
    reasons: list[str] = field(default_factory=list)


def decide(
    differences: Sequence[float], delta: float, spending: AlphaSpending = UNPLANNED, is_lower_better: bool = True
) -> Decision:
    """Three or more paired differences B - A, one per seed: a t interval at the level of this look."""
    n, effect, sd = len(differences), fmean(differences), stdev(differences)
    if sd <= 1e-12 * max(map(abs, differences)):
        return _no_spread(effect, n, spending.level(n))
    half = limit(spending.level(n), n - 1) * sd / math.sqrt(n)
    p = two_sided(effect / (sd / math.sqrt(n)), n - 1)
    return _by_interval(effect, half, sd, n, p, "paired t", delta, spending, is_lower_better)


def decide_unpaired(
    a: Sequence[float],
    b: Sequence[float],
    delta: float,
    spending: AlphaSpending = UNPLANNED,
    is_lower_better: bool = True,
) -> Decision:
    """Welch's interval for arms without common seeds, three or more runs each; `num_pairs` is the smaller arm."""
    n, effect = min(len(a), len(b)), fmean(b) - fmean(a)
    parts = [variance(a) / len(a), variance(b) / len(b)]
    se = math.sqrt(sum(parts))
    if se <= 1e-12 * max(abs(x) for x in (*a, *b)):
        return _no_spread(effect, n, spending.level(n))
    df = sum(parts) ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    half, sd, p = limit(spending.level(n), df) * se, se * math.sqrt(n), two_sided(effect / se, df)
    return _by_interval(effect, half, sd, n, p, "Welch", delta, spending, is_lower_better)


def _by_interval(
    effect: float, half: float, sd: float, n: int, p: float, method: str, delta: float, spending: AlphaSpending,
    is_lower_better: bool,
) -> Decision:  # fmt: skip
    """EQUIVALENT comes first: an effect that is real and smaller than what matters does not matter."""
    low, high = effect - half, effect + half
    excludes_zero = low > 0 or high < 0
    side = "BETTER" if (high < 0) == is_lower_better else "WORSE"
    word, reasons, more = side if excludes_zero else "UNDECIDED", [], None
    if -delta < low and high < delta:
        word = "EQUIVALENT"
        reasons = [f"{side} by less than delta: the interval excludes 0"] if excludes_zero else []
    elif not excludes_zero:
        more = more_pairs(effect, sd, n, delta, spending.level)
    return Decision(word, effect, low, high, sd, n, spending.level(n), p, method, more, reasons=reasons)


def _no_spread(effect: float, n: int, level: float) -> Decision:
    """Every seed gave the very same difference: nothing differs, or the seed decides nothing."""
    if effect == 0:
        reasons = ["equal to the last digit"]
        return Decision("EQUIVALENT", effect, effect, effect, 0.0, n, level, 1.0, reasons=reasons)
    reason = "every seed gave the very same difference: the seed decides nothing here, so these are no replicates"
    return Decision("UNDECIDED", effect, -math.inf, math.inf, 0.0, n, level, reasons=[reason])


def decide_by_floor(
    differences: Sequence[float],
    floor_sd: float,
    df: float,
    delta: float,
    spending: AlphaSpending = UNPLANNED,
    is_lower_better: bool = True,
) -> Decision:
    """One or two differences against the spread between seeds that other runs showed: provisional at best.

    `floor_sd` is that of one run, known with `df` degrees of freedom. Two runs of one seed have something in common,
    but how much is not known from one pair, so the difference is taken to vary as that of two unrelated runs.
    """
    n, effect = len(differences), fmean(differences)
    sd = math.sqrt(2) * floor_sd
    # |z| > 3 means little where the spread itself comes of three runs: then t at 1 % asks for more.
    level = FLOOR_LEVEL / spending.num_variants
    least = max(LEAST_Z, limit(level, df))
    half = least * sd / math.sqrt(n)
    z = effect / (sd / math.sqrt(n)) if sd > 0 else math.nan
    reasons = [f"z = {z:+.1f} against a noise floor; {least:.1f} are needed"]
    word = "UNDECIDED"
    if abs(effect) > half and sd > 0:
        word = "BETTER" if (effect < 0) == is_lower_better else "WORSE"
    more = max(LOOKS[0] - n, more_pairs(effect, sd, n, delta, spending.level) or 0) if word == "UNDECIDED" else None
    return Decision(
        word, effect, effect - half, effect + half, sd, n, level, method="noise floor", z=z, more_pairs=more,
        reasons=reasons,
    )  # fmt: skip


def more_pairs(effect: float, sd: float, num_pairs: int, delta: float, level: Callable[[int], float]) -> int | None:
    """Pairs to add until a true effect and spread like those seen would be decided in four cases of five."""

    def would_do(n: int) -> bool:
        # The power is one-sided: P(T > t) = 1 - POWER.
        reach = (limit(level(n), n - 1) + limit(2 * (1 - POWER), n - 1)) * sd / math.sqrt(n)
        return max(abs(effect), delta - abs(effect)) >= reach

    low, high = max(num_pairs, LOOKS[0] - 1), MOST_PAIRS  # too few, and enough
    if not would_do(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if would_do(middle) else (middle, high)
    return high - num_pairs


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's; NaN of fewer than three, or where one arm does not vary."""
    if len(a) < 3:
        return math.nan
    mean_a, mean_b = fmean(a), fmean(b)
    over = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b))
    under = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return max(-1.0, min(1.0, over / under)) if under > 0 else math.nan


def bca_interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """The bias-corrected and accelerated bootstrap of the mean: no assumption of a normal spread; always the same."""
    n, draw = len(values), random.Random(0)
    mean = fmean(values)
    means = sorted(fmean(draw.choices(values, k=n)) for _ in range(BCA_DRAWS))
    below = (sum(m < mean for m in means) + 0.5 * sum(m == mean for m in means)) / BCA_DRAWS
    bias = NORMAL.inv_cdf(min(max(below, 1 / BCA_DRAWS), 1 - 1 / BCA_DRAWS))
    # Leaving one out moves the mean by (mean - x) / (n - 1); only the shape of these moves counts.
    moves = [x - mean for x in values]
    squares = sum(m * m for m in moves)
    bend = sum(m**3 for m in moves) / (6 * squares**1.5) if squares > 0 else 0.0
    ends = []
    for p in (level / 2, 1 - level / 2):
        z = bias + NORMAL.inv_cdf(p)
        share = NORMAL.cdf(bias + z / (1 - bend * z))
        ends.append(means[min(BCA_DRAWS - 1, max(0, round(share * (BCA_DRAWS - 1))))])
    return ends[0], ends[1]
