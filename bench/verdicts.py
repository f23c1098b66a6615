"""How often a verdict is wrong: false alarms where nothing differs, and real effects that are missed.

    python -m bench.verdicts [--quick] [--threads N]

First noise is recorded: a small network is trained with many seeds, twice each, from the same weights and with rows in
another order, so that neither of the two is better. Their differences, with either sign, are all that two equal arms
can show. Then sets of pairs are drawn from these and judged by `decide`: as they are (every BETTER or WORSE is false),
and moved by three of their standard deviations (every other word is a miss). Delta is 0 for the first, so that nothing
hides behind EQUIVALENT, and one standard deviation for the second.

A planned look is `rung ab --seeds n`, or `rung ab --judge` of runs that declare planned_seeds=n; any other is
unplanned: counted as the first, or, where nobody counted, as one of several. Going on looks after 3, 5, 8 and 12 pairs
and stops at the first word. Two metrics is a call with both, of equal and independent noise, and wrong if one of them
is. The peer is what people do by eye: a t-test over the last evals of one pair.

Recorded differences are about normal. So the false words are counted again with noise of known shapes, all of mean 0,
beside those of Student's interval at the same level; each set that is no false word is one whose interval held 0, so
one minus the share is its coverage. Skew here is of the differences. The last shapes break what an interval assumes,
and show by how much: two equal modes with a little spread, and one seed in ten that jumps. Shares of the table that
widens the limits are counted anew, which takes half a minute.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rung.bench.report import facts, verdict
from rung.compare.decide import ALPHA, FIRST, LOOKS, UNPLANNED, AlphaSpending, decide, decide_by_floor, decide_unpaired
from rung.compare.student import limit, skewed_limit, two_sided

NUM_STEPS, EVERY, ROWS = 200, 10, 32
TAIL = 4  # evals of 20: the last fifth
MOST_FALSE, LEAST_FOUND = 0.05, 0.80
EFFECT = 3.0  # standard deviations of a paired difference


@dataclass(frozen=True)
class Noise:
    """Differences of pairs in which nothing differs but the order of rows; and the evals of each at the end."""

    differences: list[float]
    tails: list[list[float]]
    ends: list[float]  # of one run of each seed
    correlation: float

    @property
    def sd(self) -> float:
        return math.sqrt(statistics.fmean(d * d for d in self.differences))  # around 0: the sign is arbitrary


def record(num_seeds: int) -> Noise:
    """Trains each seed twice."""
    pairs = [[train(seed, order) for order in (0, 1)] for seed in range(num_seeds)]
    tails = [[b - a for a, b in zip(one[-TAIL:], two[-TAIL:])] for one, two in pairs]
    ends = [[statistics.fmean(losses[-TAIL:]) for losses in pair] for pair in pairs]
    together = statistics.correlation([a for a, _ in ends], [b for _, b in ends])
    return Noise([statistics.fmean(tail) for tail in tails], tails, [a for a, _ in ends], together)


def train(seed: int, order: int) -> list[float]:
    """Eval losses of a small classifier; weights come of the seed, the order of rows of both."""
    data = torch.Generator().manual_seed(7)
    x, truth = torch.randn(1536, 16, generator=data), torch.randn(16, 8, generator=data)
    y = (x @ truth + torch.randn(1536, 8, generator=data)).argmax(1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    draw = torch.Generator().manual_seed(1000 * seed + order + 1)
    losses = []
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 + math.cos(math.pi * step / NUM_STEPS))
        rows = torch.randint(0, 1024, (ROWS,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                losses.append(float(F.cross_entropy(model(x[1024:]), y[1024:])))
    return losses


def once(num_pairs: int, spending: AlphaSpending) -> Callable[[Sequence[float], float], str]:
    return lambda differences, delta: decide(differences[:num_pairs], delta, spending).word


def going_on(spending: AlphaSpending) -> Callable[[Sequence[float], float], str]:
    """Looks after 3, 5, 8 and 12 pairs and stops at the first word."""

    def judge(differences: Sequence[float], delta: float) -> str:
        words = (decide(differences[:n], delta, spending).word for n in LOOKS)
        return next((word for word in words if word != "UNDECIDED"), "UNDECIDED")

    return judge


DESIGNS = {
    **{f"planned, {n} pairs": once(n, AlphaSpending(n)) for n in LOOKS},
    **{f"first look, {n} pairs": once(n, AlphaSpending(earlier=())) for n in LOOKS},
    **{f"unplanned, {n} pairs": once(n, UNPLANNED) for n in LOOKS},
    "going on": going_on(UNPLANNED),
    "planned 3, then going on": going_on(AlphaSpending(3)),
}


def rates(noise: Noise, num_sets: int, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Design -> share of false alarms, and share of effects of three standard deviations that were found."""
    draw = random.Random(seed)
    sets = [
        [draw.choice((-1, 1)) * difference for difference in draw.choices(noise.differences, k=LOOKS[-1])]
        for _ in range(num_sets)
    ]
    shift = EFFECT * noise.sd
    found = {}
    for name, judge in DESIGNS.items():
        false = sum(judge(one, 0.0) in ("BETTER", "WORSE") for one in sets)
        hits = sum(judge([d - shift for d in one], noise.sd) == "BETTER" for one in sets)
        found[name] = (false / num_sets, hits / num_sets)
    return found


def by_floor(noise: Noise, num_runs: int, num_sets: int, seed: int = 0) -> float:
    """Share of false alarms of one pair against a noise floor of so many runs."""
    draw = random.Random(seed)
    words = []
    for _ in range(num_sets):
        floor = statistics.stdev(draw.sample(noise.ends, num_runs))
        words.append(decide_by_floor([draw.choice(noise.differences)], floor, num_runs - 1, 0.0).word)
    return sum(word != "UNDECIDED" for word in words) / num_sets


def _t3(draw: random.Random) -> float:
    return draw.gauss(0, 1) / math.sqrt(draw.gammavariate(1.5, 2) / 3)


def _lognormal(sigma: float) -> Callable[[random.Random], float]:
    return lambda draw: draw.lognormvariate(0, sigma) - math.exp(sigma**2 / 2)


# Name -> one difference of mean 0, and whether the promise is made for it.
SHAPES: dict[str, tuple[Callable[[random.Random], float], bool]] = {
    "normal": (lambda draw: draw.gauss(0, 1), True),
    "two exponentials less each other": (lambda draw: draw.expovariate(1) - draw.expovariate(1), True),
    "t, 3 degrees": (_t3, True),
    "lognormal 0.5, skew 1.8": (_lognormal(0.5), True),
    "exponential, skew 2": (lambda draw: draw.expovariate(1) - 1, True),
    "two points, +1 and -1": (lambda draw: draw.choice((-1.0, 1.0)), True),
    "lognormal 1, skew 6.2": (_lognormal(1.0), False),
    "two modes with spread 0.1": (lambda draw: draw.choice((-1, 1)) + draw.gauss(0, 0.1), False),
    "one in ten jumps": (lambda draw: (9 if draw.random() < 0.1 else -1) + draw.gauss(0, 0.3), False),
}
PLANNED_SHAPES = (3, 5, 8, 12, 20)


def of_shape(shape: Callable[[random.Random], float], num_sets: int, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Design -> share of false words of `decide`, and of Student's interval at the same level (NaN where several)."""
    draw = random.Random(seed)
    sets = [[shape(draw) for _ in range(PLANNED_SHAPES[-1])] for _ in range(num_sets)]
    found = {}
    for n in PLANNED_SHAPES:
        spending = AlphaSpending(n)
        ours = sum(decide(one[:n], 0.0, spending).word in ("BETTER", "WORSE") for one in sets)
        theirs = sum(
            abs(statistics.fmean(one[:n])) > limit(FIRST, n - 1) * statistics.stdev(one[:n]) / math.sqrt(n)
            for one in sets
            if statistics.pstdev(one[:n]) > 0
        )
        found[f"{n} pairs"] = (ours / num_sets, theirs / num_sets)
    for name, judge in (("going on", going_on(UNPLANNED)), ("3, then on", going_on(AlphaSpending(3)))):
        found[name] = (sum(judge(one, 0.0) in ("BETTER", "WORSE") for one in sets) / num_sets, math.nan)
    pair = ("loss", "other")
    spending = AlphaSpending(5, 1, pair, "loss", ())
    false = sum(
        any(decide(part, 0.0, spending).word in ("BETTER", "WORSE") for part in (one[:5], one[5:10])) for one in sets
    )
    found["2 metrics, 5"] = (false / num_sets, math.nan)
    welch = sum(decide_unpaired(one[:5], one[5:10], 0.0, AlphaSpending(5)).word in ("BETTER", "WORSE") for one in sets)
    found["Welch, 5 + 5"] = (welch / num_sets, math.nan)
    return found


def in_exponential_noise(num_values: int, level: float, num_draws: int, seed: int = 0) -> float:
    """How often the mean of so many exponential values passes the widened limit, whatever `_WIDER` holds."""
    values = np.random.default_rng(seed).exponential(size=(num_draws, num_values)) - 1
    t = values.mean(1) / values.std(1, ddof=1) * math.sqrt(num_values)
    return float((np.abs(t) > skewed_limit(level, num_values - 1)).mean())


def by_eye(noise: Noise) -> float:
    """Share of pairs of equal arms in which a t-test over the last evals sees a difference at 5 %."""
    false = 0
    for tail in noise.tails:
        t = statistics.fmean(tail) / (statistics.stdev(tail) / math.sqrt(len(tail)))
        false += two_sided(t, len(tail) - 1) < 0.05
    return false / len(noise.tails)


def spread_of(rate: float, num: int) -> float:
    """The standard deviation of a share counted over `num` cases."""
    return math.sqrt(rate * (1 - rate) / num)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="A minimal form, to see that it works.")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    num_seeds, num_sets, num_shaped, num_limit = (12, 50, 200, 20_000) if given.quick else (96, 2000, 10_000, 400_000)
    print(facts("torch", seeds=num_seeds, sets=num_sets))
    noise = record(num_seeds)
    print(f"noise    sd of a paired difference {noise.sd:.5f}, correlation of the arms {noise.correlation:.2f}")
    print(f"by eye   a t-test over the last {TAIL} evals of one pair: {by_eye(noise):.1%} false alarms")
    found = rates(noise, num_sets)
    for name, (false, hits) in found.items():
        print(
            f"{name:<25} false alarms {false:6.2%} (sd {spread_of(MOST_FALSE, num_sets):.2%})   "
            f"effects of {EFFECT:g} sd found {hits:6.1%}"
        )
    floors = ", ".join(f"{by_floor(noise, k, num_sets):.2%} of {k} runs" for k in (3, 5, 8))
    print(f"one pair against a noise floor: false alarms {floors}")
    print(f"\nfalse words by shape, {num_shaped} sets (sd of 5 %: {spread_of(MOST_FALSE, num_shaped):.2%});", end=" ")
    print(f"in brackets Student's interval of {1 - FIRST:.1%}")
    worst = 0.0
    for number, (name, (shape, is_promised)) in enumerate(SHAPES.items()):
        shares = of_shape(shape, num_shaped, number)
        cells = [
            f"{design} {ours:.1%}" + ("" if math.isnan(theirs) else f" ({theirs:.1%})")
            for design, (ours, theirs) in shares.items()
        ]
        print(f"{name:<34}{'' if is_promised else 'no promise; '}{', '.join(cells)}")
        worst = max(worst, *(ours for ours, _ in shares.values())) if is_promised else worst
    print("\nmeans of exponential values beyond the widened limit, over the level that it is meant for")
    for n in (3, 4, 5, 7, 8, 10, 12, 20, 50):
        ratios = [in_exponential_noise(n, level, num_limit) / level for level in (ALPHA, FIRST, 0.0118, 0.003)]
        print(f"{n:>4} values  " + "  ".join(f"{ratio:.2f}" for ratio in ratios))
    print(verdict("verdicts-found", [found["planned, 5 pairs"][1]], LEAST_FOUND))
    most = max(false for false, _ in found.values())
    print(verdict("verdicts-false", [max(most, worst)], MOST_FALSE, is_least=False))


if __name__ == "__main__":
    main()
