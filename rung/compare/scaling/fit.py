"""How a loss moves with a quantity: means with intervals, a line in log2(x), and a power law c + d (x / first)^-e.

Pure functions on numbers, in plain Python: the same figures on any machine. One list of points is one seed, and every
seed has a level of its own: what is fitted is the movement within a seed. Where the points do not bound a parameter,
its interval has an infinite end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev, variance
from typing import NamedTuple

from rung.compare.student import limit, skewed_limit

LEVEL = 0.05  # an interval misses in this share of cases
LEAST_DISTINCT = 4  # values of x for a power law: three parameters, and one to spare
_EXPONENTS = (0.01, 8.0)  # searched; beyond them the curve is a line in log(x), or a step at the first x
_NUM_EXPONENTS = 160
_GOLDEN = (math.sqrt(5) - 1) / 2

Points = Sequence[tuple[float, float]]  # x and y of one seed


class Interval(NamedTuple):
    """An estimate with its 95 % interval; both ends are NaN where nothing can be said, infinite where it is open."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_known(self) -> bool:
        return not (math.isnan(self.low) or math.isnan(self.high))

    @property
    def covers_zero(self) -> bool:
        """Whether 0 cannot be excluded; an interval that is not known excludes nothing."""
        return not self.is_known or self.low <= 0 <= self.high


class LineFit(NamedTuple):
    """y = intercept + slope * x. With one seed the interval is over points, with several over the seeds' own lines."""

    intercept: Interval
    slope: Interval
    num_seeds: int
    residuals: list[list[float]]  # by seed, about the common slope at the seed's own level


class PowerFit(NamedTuple):
    """y = floor + gain * (x / first)^-exponent; `floor` is the mean over seeds, `gain` what is left to win at `first`.

    Intervals are profiles: all values with which the other parameters can still follow the points about as well.
    """

    floor: Interval
    gain: Interval
    exponent: Interval
    first: float
    residuals: list[list[float]]


def mean_interval(values: Sequence[float]) -> Interval:
    """Student's interval of a mean; of one value there is none."""
    if len(values) < 2:
        return Interval(values[0] if values else math.nan)
    half = limit(LEVEL, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(fmean(values), fmean(values) - half, fmean(values) + half)


def joint_interval(values: Sequence[float], num: int) -> Interval:
    """Of a mean that is one of `num`: all of them hold the truth in 95 % of cases, also with an exponential's skew."""
    if len(values) < 2:
        return mean_interval(values)
    half = skewed_limit(LEVEL / num, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(fmean(values), fmean(values) - half, fmean(values) + half)


def unpaired(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Welch's interval of mean(after) - mean(before), as if the two had nothing in common."""
    difference = fmean(after) - fmean(before)
    if min(len(before), len(after)) < 2:
        return Interval(difference)
    parts = [variance(values) / len(values) for values in (before, after)]
    if sum(parts) == 0:
        return Interval(difference, difference, difference)
    df = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (before, after)))
    half = limit(LEVEL, df) * math.sqrt(sum(parts))
    return Interval(difference, difference - half, difference + half)


def line(seeds: Sequence[Points]) -> LineFit | None:
    """None where no seed has two different x."""
    usable = [points for points in seeds if _has_spread(points)]
    if not usable:
        return None
    own = []  # intercept and slope of each seed
    for points in usable:
        mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        b = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
        own.append((mean_y - b * mean_x, b))
    if len(usable) > 1:
        intercept, slope = mean_interval([a for a, _ in own]), mean_interval([b for _, b in own])
    elif (num := len(usable[0])) < 3:
        intercept, slope = map(Interval, own[0])
    else:
        a, b = own[0]
        squares = sum((y - a - b * x) ** 2 for x, y in usable[0])
        reach = limit(LEVEL, num - 2) * math.sqrt(squares / (num - 2))
        halves = [reach * math.sqrt(1 / num + mean_x**2 / spread), reach / math.sqrt(spread)]
        intercept, slope = (Interval(v, v - half, v + half) for v, half in zip((a, b), halves))
    return LineFit(intercept, slope, len(usable), [_residuals(points, slope.value) for points in usable])


def _has_spread(points: Points) -> bool:
    """Whether there are two x that a float can tell apart once their mean is taken off."""
    mean = fmean(x for x, _ in points) if points else 0.0
    return sum((x - mean) ** 2 for x, _ in points) > 0


def _residuals(points: Points, slope: float) -> list[float]:
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    return [y - mean_y - slope * (x - mean_x) for x, y in points]


def power(seeds: Sequence[Points]) -> PowerFit | None:
    """None where x is not positive, has fewer than four different values, or leaves nothing to judge the fit by."""
    usable = [points for points in seeds if _has_spread(points)]
    xs = {x for points in usable for x, _ in points}
    df = sum(map(len, usable)) - len(usable) - 2
    if len(xs) < LEAST_DISTINCT or min(xs) <= 0 or df < 1:
        return None
    law = _PowerLaw(usable, min(xs))
    exponent, least = law.best()
    sums = law.sums(exponent)
    gain = sums.zy / sums.zz
    floor = sums.mean_y - gain * sums.mean_z
    # Points that lie on the curve to the last digit would make a limit of 0, which rounding alone exceeds.
    most = max(least * (1 + limit(LEVEL, df) ** 2 / df), 1e-24 * law.scale**2)
    exponents = Interval(exponent, *law.exponents_within(most, exponent))
    floors = Interval(floor, *_profile_ends(law.least_at_floor, floor, most, law.scale))
    gains = Interval(gain, *_profile_ends(law.least_at_gain, gain, most, law.scale))
    if exponents.low == 0:  # a line in log(x) does as well: it has no floor, and what bounds one here is our own grid
        floors = floors._replace(low=-math.inf) if gain > 0 else floors._replace(high=math.inf)
        gains = gains._replace(high=math.inf) if gain > 0 else gains._replace(low=-math.inf)
    residuals = [_residuals([(x**-exponent, y) for x, y in points], gain) for points in law.seeds]
    return PowerFit(floors, gains, exponents, law.first, residuals)


class _Sums(NamedTuple):
    """Of z = (x / first)^-e and y within their seeds, and the means of their levels: all that a fit at e needs."""

    zy: float
    zz: float
    yy: float
    mean_z: float
    mean_y: float

    @property
    def least(self) -> float:
        """The sum of squares at the best d."""
        return max(0.0, self.yy - self.zy * self.zy / self.zz)


class _PowerLaw:
    """The sum of squares of c_seed + d z(x), z = (x / first)^-e: d is linear given e, and the levels drop out."""

    def __init__(self, seeds: Sequence[Points], first: float) -> None:
        self.first = first
        self.seeds = [[(x / first, y) for x, y in points] for points in seeds]
        ys = [y for points in seeds for _, y in points]
        self.scale = max(max(ys) - min(ys), 1e-9 * max(map(abs, ys)), 1e-300)
        # Holding the mean of the levels costs as one more row of this weight does: the seeds share the gap.
        self.weight = len(seeds) ** 2 / sum(1 / len(points) for points in seeds)
        low, high = map(math.log, _EXPONENTS)
        self.grid = [math.exp(low + (high - low) * i / (_NUM_EXPONENTS - 1)) for i in range(_NUM_EXPONENTS)]
        self.on_grid = [self.sums(exponent) for exponent in self.grid]

    def sums(self, exponent: float) -> _Sums:
        zy = zz = yy = 0.0
        levels = []
        for points in self.seeds:
            z = [x**-exponent for x, _ in points]
            mean_z, mean_y = fmean(z), fmean(y for _, y in points)
            zy += sum((value - mean_z) * (y - mean_y) for value, (_, y) in zip(z, points))
            zz += sum((value - mean_z) ** 2 for value in z)
            yy += sum((y - mean_y) ** 2 for _, y in points)
            levels.append((mean_z, mean_y))
        return _Sums(zy, zz, yy, fmean(z for z, _ in levels), fmean(y for _, y in levels))

    def best(self) -> tuple[float, float]:
        """The exponent with the least sum of squares, and that sum: on a grid, then by golden section beside it."""
        values = [sums.least for sums in self.on_grid]
        i = min(range(len(values)), key=values.__getitem__)
        low, high = math.log(self.grid[max(0, i - 1)]), math.log(self.grid[min(len(values) - 1, i + 1)])
        for _ in range(48):
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            is_left = self.sums(math.exp(left)).least <= self.sums(math.exp(right)).least
            low, high = (low, right) if is_left else (left, high)
        place = math.exp((low + high) / 2)
        return (place, value) if (value := self.sums(place).least) < values[i] else (self.grid[i], values[i])

    def least_at_floor(self, floor: float) -> float:
        """The least sum of squares with the mean level held."""
        values = []
        for s in self.on_grid:
            gap = s.mean_y - floor
            zy, zz = s.zy + self.weight * s.mean_z * gap, s.zz + self.weight * s.mean_z**2
            values.append(max(0.0, s.yy + self.weight * gap * gap - zy * zy / zz))
        return _lowest(values)

    def least_at_gain(self, gain: float) -> float:
        return _lowest([s.yy - 2 * gain * s.zy + gain**2 * s.zz for s in self.on_grid])

    def exponents_within(self, most: float, best: float) -> tuple[float, float]:
        """Where the sum of squares passes `most` on either side; 0 and infinity where it does not."""
        ends = []
        for bound, is_open in zip(_EXPONENTS, (0.0, math.inf)):
            if self.sums(bound).least <= most:
                ends.append(is_open)
                continue
            inside, outside = best, bound
            for _ in range(40):
                middle = math.sqrt(inside * outside)
                inside, outside = (middle, outside) if self.sums(middle).least <= most else (inside, middle)
            ends.append(inside)
        return ends[0], ends[1]


def _lowest(values: Sequence[float]) -> float:
    """The lowest of values on an even grid, at the foot of the parabola through it and its neighbours."""
    i = min(range(len(values)), key=values.__getitem__)
    if i in (0, len(values) - 1):
        return values[i]
    left, middle, right = values[i - 1 : i + 2]
    bend = left - 2 * middle + right
    return max(0.0, middle - (left - right) ** 2 / (8 * bend)) if bend > 0 else middle


def _profile_ends(least: Callable[[float], float], best: float, most: float, scale: float) -> tuple[float, float]:
    """Where the least sum of squares passes `most` below and above; infinite where it does not within reach."""
    ends = []
    for sign in (-1.0, 1.0):
        step = 1e-3 * scale
        while step < 1e4 * scale and least(best + sign * step) <= most:
            step *= 2
        if step >= 1e4 * scale:
            ends.append(sign * math.inf)
            continue
        inside, outside = 0.0 if step == 1e-3 * scale else step / 2, step
        for _ in range(24):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if least(best + sign * middle) <= most else (inside, middle)
        ends.append(best + sign * inside)
    return ends[0], ends[1]
