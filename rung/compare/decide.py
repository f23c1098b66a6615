"""What a list of differences lets one conclude: an interval, a verdict, and how many more pairs it would take.

Pure functions on numbers, so that their error rates can be simulated (bench/verdicts). One difference is one seed.
Looking after 3 pairs, then 5, then 8 gives chance several tries, and so does another metric; so the 5 % are spent over
the looks, little on the early ones, and add up whatever the correlation between looks.

An interval errs no more often than its level where the differences are normal, and also where they are as skewed as an
exponential's, which a handful of them cannot show: Student's limit for 3 % would then be passed in 9 % of sets of five.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev, variance
from typing import NamedTuple

from rung.compare.student import skewed_limit, skewed_two_sided

ALPHA = 0.05  # of saying BETTER or WORSE where there is nothing, over all looks together
POWER = 0.8
LOOKS = (3, 5, 8, 12)  # numbers of pairs
# A first look whose number of pairs was fixed before; the looks at other numbers that come before or after it; and all
# that was not foreseen: a metric that was not named in the first call, other runs at a number that was looked at.
FIRST, LATER, EXTRA = 0.038, 0.009, 0.003
LEAST_Z = 3.0  # against a noise floor
MOST_PAIRS = 1000
ASSUMED = "differences with one mode, at most as skewed as an exponential's"
# Two equal groups of seeds, as where half the runs settle lower, put all n differences on one side in 2 ** (1 - n) of
# cases: in more than ALPHA below this number, with hardly any spread.
ONE_MODE_BELOW = 6


class Look(NamedTuple):
    """A verdict that was given before on the same arms; `metrics` are those of its call, `metric` is among them."""

    metric: str
    metrics: tuple[str, ...]
    num_pairs: int


@dataclass(frozen=True)
class AlphaSpending:
    """How much of ALPHA each look may spend; `planned` is the number of pairs fixed before the first look, if any.

    Of several variants that are judged against one control, and of several metrics that are named in one call, each may
    err in its part, so that all together keep the level: their intervals are wider, and hold all at once.

    `earlier` are the verdicts that were given on other runs of these arms or by other metrics, in order. Where nobody
    counted (None), the looks at fewer pairs are taken to have been made.
    """

    planned: int | None = None
    num_variants: int = 1
    metrics: tuple[str, ...] = ("",)  # of this call
    metric: str = ""
    earlier: tuple[Look, ...] | None = None

    def level(self, num_pairs: int) -> float:
        """The two-sided error that this look may make; between two looks, that of the smaller one."""
        this = Look(self.metric, self.metrics, num_pairs)
        first = (self.earlier or (this,))[0].metrics  # named before anything was seen
        regular = ALPHA - EXTRA if self.planned is None else LATER
        num_extra, level = 0, 0.0
        done: dict[str, list[int]] = {}  # the looks that each of the first metrics has had, -1 for the planned one
        for look in (*(self.earlier or ()), this):
            mine = done.setdefault(look.metric, [])
            place = sum(look.num_pairs >= n for n in LOOKS[1:])  # pairs below the first look count as the first
            latest = max(mine, default=-1)
            if self.earlier is None:
                latest = place - 1
            if look.metric in first and look.num_pairs == self.planned and -1 not in mine:
                level = FIRST / len(first)
                mine.append(-1)
            elif look.metric in first and look.num_pairs < LOOKS[0] and not mine:
                level = FIRST / len(first)  # against a noise floor: provisional, and not counted in ALPHA
                mine.append(-2)
            elif look.metric in first and place > latest and look.num_pairs >= LOOKS[0]:
                before = LOOKS[latest] if latest >= 0 else 0
                level = regular * (LOOKS[place] - before) / LOOKS[-1] / len(first)
                mine.append(place)
            else:
                num_extra += 1
                level = EXTRA / (num_extra * (num_extra + 1))  # these add up to EXTRA, however many they are
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
    method: str = "paired t"
    t: float = math.nan
    df: float = math.nan
    z: float = math.nan  # against a noise floor
    reasons: list[str] = field(default_factory=list)
    delta: float = 0.0
    spending: AlphaSpending = UNPLANNED

    @property
    def more_pairs(self) -> int | None:
        """How many would decide it in four cases of five; None: none are needed, or no number would do."""
        if self.word != "UNDECIDED" or self.sd == 0:
            return None
        found = None
        if math.isfinite(self.sd):
            found = more_pairs(self.effect, self.sd, self.num_pairs, self.delta, self.spending.level)
        return max(LOOKS[0] - self.num_pairs, found or 0) if self.num_pairs < LOOKS[0] else found

    @property
    def p(self) -> float:
        """The smallest level at which the interval would reach 0."""
        if self.sd == 0 and self.effect == 0:
            return 1.0
        return skewed_two_sided(self.t, self.df) if math.isfinite(self.t) else math.nan


def decide(
    differences: Sequence[float], delta: float, spending: AlphaSpending = UNPLANNED, is_lower_better: bool = True
) -> Decision:
    """Three or more paired differences B - A, one per seed: an interval of their mean at the level of this look."""
    n, effect, sd = len(differences), fmean(differences), stdev(differences)
    if sd <= 1e-12 * max(map(abs, differences)):
        return _no_spread(effect, n, spending.level(n))
    half = skewed_limit(spending.level(n), n - 1) * sd / math.sqrt(n)
    t = effect / (sd / math.sqrt(n))
    return _by_interval(effect, half, sd, n, t, n - 1, "paired t", delta, spending, is_lower_better)


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
    half, sd, t = skewed_limit(spending.level(n), df) * se, se * math.sqrt(n), effect / se
    return _by_interval(effect, half, sd, n, t, df, "Welch", delta, spending, is_lower_better)


def _by_interval(
    effect: float, half: float, sd: float, n: int, t: float, df: float, method: str, delta: float,
    spending: AlphaSpending, is_lower_better: bool,
) -> Decision:  # fmt: skip
    """EQUIVALENT comes first: an effect that is real and smaller than what matters does not matter."""
    low, high = effect - half, effect + half
    excludes_zero = low > 0 or high < 0
    side = "BETTER" if (high < 0) == is_lower_better else "WORSE"
    word, reasons = side if excludes_zero else "UNDECIDED", []
    if -delta < low and high < delta:
        word = "EQUIVALENT"
        reasons = [f"{side} by less than delta: the interval excludes 0"] if excludes_zero else []
    return Decision(
        word, effect, low, high, sd, n, spending.level(n), method, t, df, reasons=reasons, delta=delta,
        spending=spending,
    )  # fmt: skip


def _no_spread(effect: float, n: int, level: float) -> Decision:
    """Every seed gave the very same difference: nothing differs, or the seed decides nothing."""
    if effect == 0:
        reasons = ["equal to the last digit"]
        return Decision("EQUIVALENT", effect, effect, effect, 0.0, n, level, reasons=reasons)
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
    # |z| > 3 means little where the spread itself comes of three runs: then t asks for more.
    level = spending.level(n)
    least = max(LEAST_Z, skewed_limit(level, df))
    half = least * sd / math.sqrt(n)
    z = effect / (sd / math.sqrt(n)) if sd > 0 else math.nan
    reasons = [f"z = {z:+.1f} against a noise floor; {least:.1f} are needed"]
    word = "UNDECIDED"
    if abs(effect) > half and sd > 0:
        word = "BETTER" if (effect < 0) == is_lower_better else "WORSE"
    return Decision(
        word, effect, effect - half, effect + half, sd, n, level, method="noise floor", z=z, reasons=reasons,
        delta=delta, spending=spending,
    )  # fmt: skip


def more_pairs(effect: float, sd: float, num_pairs: int, delta: float, level: Callable[[int], float]) -> int | None:
    """Pairs to add until a true effect and spread like those seen would be decided in four cases of five."""

    def would_do(n: int) -> bool:
        shift = max(abs(effect), delta - abs(effect)) * math.sqrt(n) / sd if sd > 0 else math.inf
        return power(shift, skewed_limit(level(n), n - 1), n - 1) >= POWER

    low, high = max(num_pairs, LOOKS[0] - 1), MOST_PAIRS  # too few, and enough
    if not would_do(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if would_do(middle) else (middle, high)
    return high - num_pairs


def power(shift: float, least: float, df: int) -> float:
    """P(T > least) of normal values whose mean lies `shift` standard errors from 0: the noncentral t distribution.

    Over the spread that a sample of them may show, by the rectangle rule.
    """
    log_scale = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    around = 7 / math.sqrt(2 * df)
    start, found = max(0.0, 1 - around), 0.0
    step = (1 + around - start) / 400
    for i in range(400):
        s = start + step * (i + 0.5)
        density = math.exp(log_scale + (df - 1) * math.log(s) - df * s * s / 2)
        found += density * 0.5 * math.erfc((least * s - shift) / math.sqrt(2))
    return found * step


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's; NaN of fewer than three, or where one arm does not vary."""
    if len(a) < 3:
        return math.nan
    mean_a, mean_b = fmean(a), fmean(b)
    over = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b))
    under = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return max(-1.0, min(1.0, over / under)) if under > 0 else math.nan
