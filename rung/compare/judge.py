"""The verdict on two arms of runs: BETTER, WORSE, EQUIVALENT, UNDECIDED, CONFOUNDED or INCOMPARABLE.

First the gate: does the metric mean the same, was it exactly one change, did every run end healthy? Only then the
statistics (decide), on one number per seed (endpoint). It reads records only; nothing is trained or written. One
forgotten edit, even in a file that nobody imports, gives CONFOUNDED; `allowed` names the differences to accept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from shlex import quote
from statistics import fmean
from typing import Any

from rung.compare.align import endpoint, own_endpoint, reached
from rung.compare.decide import (
    ALPHA,
    ASSUMED,
    LOOKS,
    ONE_MODE_BELOW,
    UNPLANNED,
    AlphaSpending,
    Decision,
    correlation,
    decide,
    decide_by_floor,
    decide_unpaired,
)
from rung.compare.gate import Gate, check_arms, identity
from rung.compare.noise import Floor, floor_for, seed_of
from rung.compare.reading import curve_of, is_lower_better, is_of_engine, main_metric
from rung.errors import RunError
from rung.runs.files import to_json
from rung.runs.query import Run, ref
from rung.units import duration

DELTA_SHARE = 0.005  # of the control's loss: less does not matter, unless a person says otherwise


@dataclass
class Pair:
    """One seed: which runs, and the endpoint of each arm; several runs of a seed are averaged."""

    seed: int | None
    a: list[str]
    b: list[str]
    value_a: float
    value_b: float
    difference: float
    num_evals: int


@dataclass
class ArmMeans:
    """An arm by itself: means over its runs."""

    final: float = math.nan
    best: float = math.nan


@dataclass
class Judgement:
    """`effect` is B - A; without an interval low and high are NaN. `summary_line()` is the sentence for people."""

    word: str
    metric: str = ""
    factor: str = ""  # what was changed, in words; "none" in an A/A test
    effect: float = math.nan
    low: float = math.nan
    high: float = math.nan
    percent: float = math.nan  # of the control's endpoint
    targets_saved: float = math.nan  # share of the training that B would not need, negative where it needs more
    num_pairs: int = 0
    is_paired: bool = True  # else num_pairs is the number of runs in the smaller arm
    correlation: float = math.nan
    sd: float = math.nan  # of one difference
    p: float = math.nan
    level: float = math.nan  # the two-sided error that this look may make; the interval is one of 1 - level
    method: str = ""
    assumes: str = ""  # what the level is promised for
    # The verdicts of rung on these arms that showed other runs or another metric, and this one; None: nobody counted.
    look: int | None = None
    metrics: list[str] = field(default_factory=list)  # that these arms were judged by so far, this one among them
    all_looks_level: float = ALPHA  # what all looks at these arms may err together, whatever the metric
    delta: float = math.nan
    is_lower_better: bool | None = True  # None: nobody said, and the name does not tell
    is_provisional: bool = False
    is_aa: bool = False
    floor: Floor | None = None
    more_pairs: int | None = None
    more_s: float | None = None  # what these would take, as long as the runs that are there
    a: ArmMeans = field(default_factory=ArmMeans)
    b: ArmMeans = field(default_factory=ArmMeans)
    pairs: list[Pair] = field(default_factory=list)
    confounders: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    what_next: str = ""  # empty where the matter is decided

    @property
    def has_interval(self) -> bool:
        """Not where every seed gave the very same difference: both ends are that, which says nothing of others."""
        return math.isfinite(self.low) and self.low < self.high

    @property
    def confidence(self) -> str:
        """That of the interval, as "96.2 %"; rounded down, so that it never says too much."""
        return f"{math.floor(1000 * (1 - self.level) + 1e-9) / 10:g} %"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "confidence": 1 - self.level, "words": self.summary_line()}

    def summary_line(self) -> str:
        """The verdict in one line."""
        provisional = " (provisional)" if self.is_provisional else ""
        if not math.isfinite(self.effect):
            reasons = (self.confounders if self.word == "CONFOUNDED" else self.reasons) or ["no figure"]
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            return f"{self.word}{provisional}: {reasons[0]}{more}"
        unit = " nats" if self.metric.rpartition("/")[2] == "loss" else ""
        span = f", {self.confidence} interval [{_signed(self.low)}, {_signed(self.high)}]" if self.has_interval else ""
        plural = "s" if self.num_pairs != 1 else ""
        how = f"{self.num_pairs} pair{plural}" if self.is_paired else f"{self.num_pairs} run{plural} an arm"
        how += f", corr {self.correlation:.2f}" if math.isfinite(self.correlation) else ""
        how += f", look {self.look}" if self.look is not None and self.look > 1 else ""
        how += f", {len(self.metrics)} metrics" if len(self.metrics) > 1 else ""
        how += ", if the noise has one mode" if self.has_interval and self.num_pairs < ONE_MODE_BELOW else ""
        line = f"B\N{MINUS SIGN}A = {_signed(self.effect)}{unit}{span} ({how}): {self.word}"
        line += f" at δ={self.delta:.2g}" if self.word in ("EQUIVALENT", "UNDECIDED") else ""
        line += provisional
        if self.word != "UNDECIDED":
            return line

        would_decide = []
        if self.more_pairs is not None:
            cost = f", about {duration(self.more_s)}" if self.more_s else ""
            would_decide.append(f"~{self.more_pairs} more pair{'s' if self.more_pairs != 1 else ''}{cost}")
        wide = max(abs(self.low), abs(self.high))
        if math.isfinite(wide) and self.num_pairs >= LOOKS[0]:
            # Rounded up to two digits: at this delta the word would really be EQUIVALENT.
            place = 10 ** (math.floor(math.log10(wide)) - 1) if wide > 0 else 1.0
            least = f"{math.ceil(wide / place * (1 + 1e-9)) * place:.2g}"
            would_decide.append(f"{'or ' if would_decide else ''}EQUIVALENT at δ={least}")
        return "; ".join(filter(None, [line, ", ".join(would_decide)]))


def judge(
    a: Sequence[Run],
    b: Sequence[Run],
    metric: str | None = None,
    delta: float | None = None,
    allowed: Sequence[str] = (),
    declared: str | None = None,
    spending: AlphaSpending = UNPLANNED,
    better: str | None = None,
) -> Judgement:
    """The verdict on arm B against arm A. `allowed` are parts, names, or "sick"; `declared` may be "code".

    `better` ("lower", "higher") says what the definition of the metric leaves open.
    """
    if not a or not b:
        message = "a judgement needs runs in both arms; name them as `rung ab --judge A... -- B...`."
        raise RunError(message, code="too-few")
    both = {identity(run) for run in a}
    for run in b:
        if identity(run) in both:
            message = f"{run.id} ({run.path}) is in both arms; a run cannot be compared with itself."
            raise RunError(message, code="options-conflict")
    metric = (metric or main_metric(a[0])).removeprefix("eval/")
    gate = check_arms(a, b, metric, allowed, declared)
    out = Judgement("", metric, gate.factor, is_aa=gate.is_aa)
    out.is_lower_better = is_lower_better(a[0], metric) if better is None else better == "lower"
    if out.is_lower_better is None and metric.endswith("loss"):
        out.is_lower_better = True
    out.left_out, out.confounders, out.reasons = gate.left_out, gate.confounders, list(gate.reasons)
    if gate.word:
        out.word = gate.word
    elif gate.diverged:
        _judge_diverged(out, gate, spending)
    else:
        _judge_finished(out, gate, delta, spending)
    out.what_next = _what_next(out, gate, (a[0], b[0]))
    return out


def planned_seeds(runs: Sequence[Run]) -> int | None:
    """The number of seeds that was fixed before the first look: all runs declare one, and the first run's counts.

    Who declares more after a look has not planned them: the first number stays, and what follows is a later look.
    """
    ordered = sorted(runs, key=lambda run: str(run.document.get("created")))
    found = [run.document.get("planned_seeds") for run in ordered]
    return found[0] if found and all(isinstance(num, int) for num in found) else None


def _what_next(out: Judgement, gate: Gate, first: tuple[Run, Run]) -> str:
    """What a person can do where nothing was decided."""
    diff = "rung diff " + " ".join(ref(run.path, run.id) for run in first)
    if out.word == "INCOMPARABLE":
        return "name another --metric, or train both arms again with the same evals"
    if out.word == "CONFOUNDED":
        allow = " ".join(f"--allow {quote(name)}" for name in gate.blame)
        return f"see `{diff}`; train again with one change, or accept all but that one: {allow}"
    if out.word != "UNDECIDED":
        return ""
    if out.is_aa:
        return f"change something: as far as the records go, both arms are the same (`{diff}`)"
    if out.is_lower_better is None and (out.low > 0 or out.high < 0):
        return "say which it is with --better higher or --better lower"
    if not math.isfinite(out.effect):
        return "train more seeds of both arms, or resume those that have not finished (`rung resume`)"
    if out.sd == 0:
        return "train with seeds that change the weights or the order of rows"
    if out.more_pairs is not None:
        plural = "s" if out.more_pairs != 1 else ""
        return f"train {out.more_pairs} more seed{plural} of both arms and judge all together"
    return "no number of pairs below 1000 would decide it: give a larger --delta, or leave it at that"


def _judge_finished(out: Judgement, gate: Gate, delta: float | None, spending: AlphaSpending) -> None:
    """The figures of runs that all have an endpoint, and the word that they allow."""
    for seed in gate.seeds:
        runs_a, runs_b = gate.of_seed(seed)
        ends = [endpoint(gate.curves[x], gate.curves[y]) for x in runs_a for y in runs_b]
        found = [end for end in ends if end is not None]  # the gate has seen to it that there is one
        value_a, value_b, difference = (fmean(end[i] for end in found) for i in (1, 2, 0))
        names = [gate.names[r] for r in runs_a], [gate.names[r] for r in runs_b]
        out.pairs.append(Pair(seed, *names, value_a, value_b, difference, min(end.num_evals for end in found)))
    lone = [run for run in (*gate.a, *gate.b) if out.pairs and seed_of(run) not in gate.seeds]
    out.left_out += [f"{gate.names[run]} has no partner of seed {seed_of(run)}" for run in lone]

    # One value per seed; runs of unknown seed each count as their own, unless they begin with the same weights.
    values = []
    for arm in (gate.a, gate.b):
        by_seed: dict[Any, list[float]] = {}
        for run in arm:
            seed, weights = seed_of(run), run.initial_weights()
            unknown = to_json(weights) if weights else run.path
            by_seed.setdefault(unknown if seed is None else seed, []).append(own_endpoint(gate.curves[run]))
        values.append([fmean(group) for group in by_seed.values()])
    level = fmean(values[0])
    out.delta = delta if delta is not None else DELTA_SHARE * abs(level)
    decision = _decide(out, gate, values, spending)
    for name in ("word", "effect", "low", "high", "sd", "p", "level", "method", "more_pairs"):
        setattr(out, name, getattr(decision, name))
    out.is_paired = bool(out.pairs)
    out.num_pairs = len(out.pairs) or min(map(len, values))
    out.reasons += decision.reasons
    out.is_provisional = out.floor is not None and decision.word in ("BETTER", "WORSE")
    out.assumes = ASSUMED if out.has_interval else ""
    out.metrics = list(dict.fromkeys([*(look.metric for look in spending.earlier or ()), *spending.metrics]))
    if out.metrics == [""]:  # of a spending that was told none
        out.metrics = [out.metric]
    out.look = None if spending.earlier is None else 1 + len(spending.earlier)
    out.percent = 100 * out.effect / abs(level) if level else math.nan

    is_lower = out.is_lower_better is not False
    for means, arm in ((out.a, gate.a), (out.b, gate.b)):
        curves = [gate.curves[run].values for run in arm]
        finite = [known for one in curves if (known := [value for value in one if math.isfinite(value)])]
        if finite:
            means.final = fmean(one[-1] for one in curves)
            means.best = math.nan if out.is_lower_better is None else fmean(map(min if is_lower else max, finite))
    if out.is_lower_better is not None:
        # How much earlier B comes to where A ends; where B ends worse, the other way round.
        is_ahead, shares = (out.effect < 0) == is_lower, []
        for seed in gate.seeds:
            a, b = (gate.curves[runs[0]] for runs in gate.of_seed(seed))
            goal = own_endpoint(a if is_ahead else b)
            at_a, at_b = (reached(one, goal, is_lower) for one in (a, b))
            if at_a is not None and at_b is not None and (a.targets is None) == (b.targets is None) and a.x[-1]:
                shares.append((at_a - at_b) / a.x[-1])
        out.targets_saved = fmean(shares) if shares else math.nan
    errors = curve_of(gate.b[0], f"{out.metric}_se").values  # of an eval, over the rows it saw
    if out.word in ("BETTER", "WORSE") and errors and abs(out.effect) < errors[-1] < math.inf:
        out.reasons.append(f"it holds for these rows: over its rows, one eval has a standard error of {errors[-1]:.2g}")
    if out.more_pairs:
        seconds = [[s for run in arm if (s := elapsed_s(run)) is not None] for arm in (gate.a, gate.b)]
        out.more_s = out.more_pairs * sum(map(fmean, seconds)) if all(seconds) else None

    # An interval on one side of 0 is no BETTER where nothing was changed, or where nobody knows which side is good.
    is_refused = out.word in ("BETTER", "WORSE") and (out.is_aa or out.is_lower_better is None)
    if is_refused:
        out.word, out.is_provisional = "UNDECIDED", False
    if out.is_aa:
        out.reasons.append("an A/A test: nothing that was recorded differs, so what is seen here is noise")
    if is_refused and out.is_aa:
        out.reasons.append("the interval excludes 0 nevertheless: chance, or something that no record holds")
    elif is_refused:
        out.reasons.append(f"the interval excludes 0, but no run says whether a higher {out.metric} is better")


def _decide(out: Judgement, gate: Gate, values: Sequence[list[float]], spending: AlphaSpending) -> Decision:
    """By pairs where there are three or more; else by arms without common seeds, or against the noise floor."""
    is_lower = out.is_lower_better is not False
    differences = [pair.difference for pair in out.pairs]
    if len(differences) >= LOOKS[0]:
        out.correlation = correlation([p.value_a for p in out.pairs], [p.value_b for p in out.pairs])
        return decide(differences, out.delta, spending, is_lower)
    if not differences:
        if min(map(len, values)) >= LOOKS[0]:
            out.reasons.append("no seed is in both arms: Welch's interval, wider than that of pairs")
            return decide_unpaired(values[0], values[1], out.delta, spending, is_lower)
        out.reasons.append("no seed is in both arms, so nothing is paired")
        differences = [fmean(values[1]) - fmean(values[0])]
        if any(seed_of(run) is None for run in (*gate.a, *gate.b)) and min(len(gate.a), len(gate.b)) >= LOOKS[0]:
            out.reasons.append("runs that name no seed and begin with the same weights count as one")

    control = gate.a[0]
    out.floor = floor_for(control, out.metric)
    if out.floor is not None and out.floor.sd > 0:
        return decide_by_floor(differences, out.floor.sd, out.floor.df, out.delta, spending, is_lower)
    how = "three seeds of A make one"
    if is_of_engine(control):
        how = f"`rung ab {ref(control.path, control.id)} --aa` makes one"
    num, nan = len(differences), math.nan
    out.reasons.append(f"no noise floor to judge {num} of three pairs by: {how}")
    return Decision("UNDECIDED", fmean(differences), nan, nan, nan, num, nan)


def _judge_diverged(out: Judgement, gate: Gate, spending: AlphaSpending) -> None:
    """A run that broke has no endpoint. A word takes most of an arm broken and none of the other; two equal arms, of
    which each run breaks with some chance, look like one broken and none in up to half of all cases."""
    finished = {"A": len(gate.a), "B": len(gate.b)}
    out.word = "UNDECIDED"
    for side, runs in gate.diverged.items():
        out.reasons.append(f"{', '.join(gate.names[run] for run in runs)} of arm {side} diverged")
    if len(gate.diverged) > 1:
        return
    side = next(iter(gate.diverged))
    other = "B" if side == "A" else "A"
    num_broken, num_whole, num_other = len(gate.diverged[side]), finished[side], finished[other]
    if num_other and num_broken > num_whole:
        out.word = "WORSE" if side == "B" else "BETTER"
        # All of three against none of three: in equal arms at most 2 (1/2)^6 = 3 %, whatever the chance to break; of
        # several variants each has that chance.
        by_chance = spending.num_variants * 2 * 0.5 ** (num_broken + num_other)
        out.is_provisional = min(num_broken, num_other) < LOOKS[0] or num_whole > 0 or by_chance > ALPHA
        out.reasons.append(
            f"{num_other} of arm {other} finished, none diverged; no interval, since NaN is not a number"
        )
    else:
        out.reasons.append(f"{num_whole} of arm {side} and {num_other} of arm {other} did not")


def elapsed_s(run: Run) -> float | None:
    """How long a run took."""
    seconds = (run.document.get("totals") or {}).get("elapsed_s")
    if isinstance(seconds, int | float) and math.isfinite(seconds):
        return float(seconds)
    try:
        ends = [datetime.fromisoformat(str(run.document.get(name))) for name in ("created", "ended")]
    except ValueError:
        return None
    return (ends[1] - ends[0]).total_seconds()


def _signed(value: float) -> str:
    is_plain = abs(value) >= 5e-5 or value == 0
    text = f"{value:+.4f}" if is_plain else f"{value:+.1e}"
    return text.replace("-", "\N{MINUS SIGN}", 1)
