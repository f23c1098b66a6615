"""How far a case is from the limit that decides it: for each rule the statistic it compares, as the rule computes it.

A trained run is chaotic: another processor rounds otherwise, and after a hundred steps every number has moved. A case
whose statistic lies near the limit then tests the processor. So each case names its statistic here, or is a FACT, and
its margin is asserted (test_cases.py) and printed (margins.py).

Limits come from the rules where these have names for them. Statistics take a History, or for a preflight check a
CheckContext.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rung.doctor.diagnose import IN_A_ROW, looks
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.preflight import batches, causality, cut, inputs, leakage, scale
from rung.doctor.preflight import objective as same
from rung.doctor.preflight.copies import USED, ablate_inputs, copy_of, train
from rung.doctor.preflight.forward import gap_of, in_eval, mean_of, rows_of, watch
from rung.doctor.preflight.inputs import NUM_ROWS, array_stats, sample_rows
from rung.doctor.preflight.result import CheckContext
from rung.doctor.rules import Rule, catalogue, conditional, objective, optimisation, performance, spikes, updates
from rung.doctor.rules.activations import TANH, growth
from rung.doctor.rules.lookups import at
from rung.doctor.rules.numerics import HUGE, targets
from rung.engine.evaluate import eval_mode
from rung.robust import BEFORE, theil_sen
from tests.cases.tiny import VOCAB

ENOUGH = 1.0  # the least margin: twice the limit, or half of it; or a spread over seeds away from it
NOTHING = -math.inf
Spread = tuple[float, float]  # of sick and of healthy runs


@dataclass(frozen=True)
class Reading:
    """A value beside the limit that it is compared with; `is_below` where the rule speaks below the limit.

    `spread` makes it a bounded one (a share): how much it varies over twenty seeds, largest less smallest, in sick
    runs, where it lies beyond the limit, and in healthy ones.
    """

    what: str
    value: float
    limit: float
    is_below: bool
    spread: Spread | None = None

    @property
    def margin(self) -> float:
        """How far beyond the limit, above 0 where the rule speaks: in doublings, or in spreads if it is bounded."""
        if math.isnan(self.value):
            return NOTHING  # not measured: the rule has nothing to say
        if self.spread is not None:
            sick, healthy = self.spread
            higher = self.value - self.limit
            higher /= max(sick if (higher > 0) != self.is_below else healthy, 1e-9)
        else:
            higher = math.log2(self.value / self.limit) if self.value > 0 else NOTHING
        return -higher if self.is_below else higher


Statistic = Callable[[Any, str], Reading]  # of a History or a CheckContext, and of the severity that is asked for


def FACT(evidence: Any, severity: str) -> Reading:
    """What decides is a count, an event or an equality: no limit that a trajectory could come near."""
    raise AssertionError("a fact has no margin")


def above(what: str, value: float, limit: float, spread: Spread | None = None) -> Reading:
    return Reading(what, value, limit, False, spread)


def below(what: str, value: float, limit: float) -> Reading:
    return Reading(what, value, limit, True)


def all_of(*readings: Reading) -> Reading:
    """The weakest of several signs that a rule wants together."""
    return min(readings, key=lambda reading: reading.margin)


def any_of(*readings: Reading) -> Reading:
    """The strongest of several signs of which one is enough."""
    return max(readings, key=lambda reading: reading.margin)


def of(what: Callable[[Any], Reading]) -> Statistic:
    return lambda evidence, severity: what(evidence)


def held(rule: str, what: Callable[[History], Reading]) -> Statistic:
    """Of a state: the reading that held at as many looks in a row as the doctor asks for."""

    def statistic(history: History, severity: str) -> Reading:
        state: Rule = next(one for one in catalogue() if one.id == rule)
        streaks = [above("three looks in a row", math.nan, 1.0)]
        for group in looks(history, state):
            readings = [what(history.until(end)) for end in group]
            streaks += [all_of(*readings[i : i + IN_A_ROW]) for i in range(len(readings) - IN_A_ROW + 1)]
        return any_of(*reversed(streaks))

    return statistic


# Numbers that are not finite


def norm_before_overflow(history: History) -> Reading:
    norm = history["norm"]
    bad = norm.steps[~np.isfinite(norm.values)]
    earlier = norm.between(0, int(bad[0]) if len(bad) else history.end).finite.last(3).values
    return above("norm before it overflows", float(earlier.max()), HUGE)


def norm_follows_scale(history: History) -> Reading:
    scale_, norm, best = history["scale"], history["norm"].finite, above("norm follows scale", math.nan, 1.0)
    for change in np.flatnonzero(np.diff(scale_.values)):
        step, times = int(scale_.steps[change + 1]), scale_.values[change + 1] / scale_.values[change]
        usual, later = norm.between(0, step).last(10), norm.between(step, step + 10)
        follows = math.log(later.median / usual.median) / math.log(times)
        best = any_of(
            best,
            all_of(
                above("norm beside a scale", later.median, 100.0),
                below("|log norm / log scale - 1|", abs(follows - 1), 0.3),
            ),
        )
    return best


def least_scale(history: History) -> Reading:
    return below("least scale", float(history["scale"].values.min()), 1.0)


def few_targets(history: History) -> Reading:
    counts = targets(history)
    share = float(np.percentile(counts.values, 5)) / counts.median
    return below("targets of the smallest micros / median", share, 0.1)


# Optimisation


def rate_too_high(history: History) -> Reading:
    """Two of four signs: the second strongest decides."""
    seen, ratio = updates.recent(history), math.nan
    if seen is not None and np.isfinite(seen.ratio).any():
        ratio = float(np.nanmedian(seen.ratio))
    table = history.table("attention")
    logit = float(np.fmax.reduce(table.columns["logit"][-1])) if table is not None and len(table.steps) else math.nan
    late = updates.matrices(history, max(updates.FIRST, history.warmup_steps, history.end - WINDOW))
    jump = float(np.nanmax(late.ratio, initial=0.0)) if late is not None else math.nan
    signs = [
        above("median update / weight", ratio, optimisation.LARGE),
        above("attention logit", logit, 1e3),
        above("one update / weight", jump, optimisation.JUMP),
        _loss_suffers(history),
    ]
    return sorted(signs, key=lambda sign: sign.margin)[-2]


def _loss_suffers(history: History) -> Reading:
    loss = history["loss"].finite.between(history.warmup_steps, history.end)
    width = min(WINDOW, len(loss) // 2)
    if width < 25:
        return above("loss above its best", math.nan, 3.0)
    windows = np.lib.stride_tricks.sliding_window_view(loss.values, width)[:-1:10]
    start = 10 * int(np.argmin(np.median(windows, axis=1)))
    best, now = Series(loss.steps[:width], loss.values[start : start + width]), loss.last(width)
    scatter = (now.sigma / now.median) / (best.sigma / best.median)
    return any_of(
        above("loss above its best, in sigmas", (now.median - best.median) / best.sigma, 3.0),
        above("scatter of the loss / at its best", scatter, 4.0),
    )


def rate_too_low(history: History) -> Reading:
    until = 0.8 * history.derived["decay_steps"]
    probes = history["probe/k"].finite.between(history.warmup_steps, int(until))
    if len(probes) < 3:
        return above("best multiple of an update", math.nan, optimisation.K_LOW)
    last = int(probes.steps[-1])
    seen = updates.matrices(history, max(history.warmup_steps, int(probes.steps[0]) - WINDOW), last + 1)
    assert seen is not None
    falls = -optimisation.slope_t(history["loss"].finite.between(history.warmup_steps, last + 1).last())
    return all_of(
        above("best multiple of an update", probes.median, optimisation.K_LOW),
        below("median update / weight", float(np.nanmedian(seen.ratio)), optimisation.TINY),
        above("t of the fall of the loss", falls, 3.0),
    )


def first_updates(history: History) -> Reading:
    seen = updates.matrices(history, 0, updates.FIRST)
    assert seen is not None
    usual = updates.median(seen.size, axis=1)[:, None]
    starts_small = ~(seen.size[:1] > updates.SMALL * usual[:1])
    size = np.where(starts_small | ~(seen.size > updates.SMALL * usual), np.fmax(seen.size, usual), seen.size)
    return above("update / weight in the first steps", float(np.nanmax(seen.stride / size)), updates.SHOCK)


def norm_over_clip(history: History) -> Reading:
    """More than nine in ten norms lie above the limit where their tenth percentile does."""
    norm = history["norm"].between(history.warmup_steps, history.end).finite.last()
    tenth = float(np.percentile(norm.values, 10)) if len(norm) >= 50 else math.nan
    return above("10th percentile of the norm", tenth, float(history.config["optimizer.grad_clip"]))


def not_clipped(history: History) -> Reading:
    limit = float(history.config["optimizer.grad_clip"])
    return above("norm after clipping above its limit", float(history["norm_clipped"].values.max()) / limit - 1, 0.01)


def spike(left_spread: Spread) -> Statistic:
    """A jump that stays, or one batch that is worse than any at the start. `left_spread` is of what stays of it."""

    def statistic(history: History, severity: str) -> Reading:
        loss = history["loss"].finite
        scores, best = spikes.scores(loss.values), above("spreads above expectation", 0.0, spikes.HIGH)
        usual = np.median(np.lib.stride_tricks.sliding_window_view(loss.values, BEFORE)[:-1], axis=1)
        residual = np.concatenate([np.zeros(BEFORE), loss.values[BEFORE:] - usual])
        for place in np.flatnonzero(scores > 0):
            jump, after = residual[place], loss.values[place + 1 : place + 1 + spikes.AT_ONCE]
            left = float((after.min() - loss.values[place] + jump) / jump) if len(after) else math.nan
            others = np.sort(residual[np.abs(np.arange(len(residual)) - place) > spikes.NEAR])
            broken = all_of(
                above("loss of a batch / of the untrained model", loss.values[place] / loss.values[:BEFORE].max(), 1.0),
                below("third largest other jump / this one", float(others[-3]) / jump, 0.25),
            )
            lasting = above("share of a jump that is left two steps later", left, 0.5, spread=left_spread)
            score = above("spreads above expectation", float(scores[place]), spikes.HIGH)
            best = any_of(best, all_of(score, any_of(broken, lasting)))
        return best

    return statistic


def eps_against_gradients(history: History) -> Reading:
    seen = updates.recent(history)
    if seen is None:
        return above("eps / rms(gradient)", math.nan, 0.3)
    shrink = (at(history["norm_clipped"], seen.steps) / at(history["norm"], seen.steps))[:, None]
    against = updates.median(
        float(history.config["optimizer.eps"]) * np.sqrt(seen.columns["numel"]) / (seen.columns["grad"] * shrink),
        axis=0,
    )
    return above("eps / rms(gradient)", float(np.nanmax(against)), 0.3)


def least_flow(history: History) -> Reading:
    seen = updates.recent(history)
    if seen is None:
        return below("least gradient / weight over the median", math.nan, updates.VANISHED)
    flow = updates.median(
        np.where(seen.columns["grad"] > 0, seen.columns["grad"] / seen.columns["weight"], np.nan), axis=0
    )
    least = float(np.nanmin(flow) / np.nanmedian(flow))
    return below("least gradient / weight over the median", least, updates.VANISHED)


def update_apart(history: History) -> Reading:
    """The matrix whose updates are most unlike those of the others, upwards or downwards."""
    seen, rates = updates.recent(history), history["lr"]
    nothing = above("update / weight over the median", math.nan, updates.APART)
    if seen is None or (near_peak := at(rates, seen.steps) >= 0.1 * rates.values.max()).sum() < 2:
        return nothing
    ratio, stride = (updates.median(values[near_peak], axis=0) for values in (seen.ratio, seen.stride))
    middle, usual = float(np.nanmedian(ratio)), float(np.nanmedian(stride))
    if np.isfinite(ratio).sum() < 4:
        return nothing
    found = []
    for one, length in zip(ratio[ratio > 0].tolist(), stride[ratio > 0].tolist(), strict=True):
        stands_out = any_of(
            above("update / weight over the median", one / middle, updates.CLEARLY),
            all_of(
                above("update / weight over the median", one / middle, updates.STANDS_OUT),
                above("length of an update over the median", length / usual, updates.STRIDES),
            ),
        )
        low = all_of(
            below("update / weight", one, updates.LEAST),
            below("update / weight over the median", one / middle, 1 / updates.STANDS_OUT),
        )
        found += [
            all_of(above("update / weight", one, updates.MOST), stands_out),
            above("update / weight over the median", one / middle, updates.APART),
            low,
            below("update / weight over the median", one / middle, 1 / updates.APART),
        ]
    return any_of(nothing, *found)


# What flows through a model


def dead_units(spread: Spread) -> Callable[[History], Reading]:
    def reading(history: History) -> Reading:
        table = history.table("units")
        assert table is not None
        early = int(np.searchsorted(table.steps, 100))
        dead, looks_ = table.columns["dead"], table.columns["looks"][-1]
        if not len(table.steps) or looks_.max() < 50:
            return above("share of dead units", math.nan, 0.9)
        rise = float((dead[-1] - dead[early]).max()) if early < len(table.steps) else 0.0
        loss = history["loss"].finite.between(100, history.end)
        first, now = Series(loss.steps[:WINDOW], loss.values[:WINDOW]), loss.last()
        worse = (now.median - first.median) / max(first.sigma, now.sigma)
        return any_of(
            above("share of dead units", float(dead[-1].max()), 0.9, spread=spread),
            all_of(
                above("rise of the share of dead units", rise, 0.3),
                above("rise of the loss with it, in sigmas", worse, 1.0),
            ),
        )

    return reading


def saturated(spread: Spread) -> Callable[[History], Reading]:
    def reading(history: History) -> Reading:
        table = history.table("units")
        if table is None or len(table.steps) < 3:
            return above("share at the ends of a tanh", math.nan, 0.9)
        last = table.last(3).columns
        is_tanh = last["function"][-1] == TANH
        ends = float(last["saturated"].min(axis=0)[is_tanh].max())
        slope = float(last["slope"].max(axis=0)[is_tanh].min())
        return any_of(
            above("share at the ends of a tanh", ends, 0.9, spread=spread), below("mean slope of a tanh", slope, 0.05)
        )

    return reading


def targets_outside(history: History) -> Reading:
    return above("share of targets out of reach", history["logits/outside"].last(3).median, 0.01)


def attention_logit(history: History, severity: str) -> Reading:
    """Of what is called sick the limit is 1000; below 50 nothing is said of attention at all."""
    limit = {"warn": 50.0, "sick": 1e3, "fatal": 1e4}[severity]

    def largest(until: History) -> Reading:
        table = until.table("attention")
        assert table is not None
        return above("largest attention logit", float(np.nanmax(table.columns["logit"][-1])), limit)

    return held("A3", largest)(history, severity)


def logit_drift(history: History) -> Reading:
    lse, mean = history["logits/lse"].finite, history["logits/logit_mean"].finite
    if len(lse) < 6:
        return above("logsumexp", math.nan, 20.0)
    recent = lse.between(history.end - 3 * WINDOW, history.end)
    slope, p = theil_sen(*recent)
    now = lse.last(3).median
    return any_of(
        all_of(above("|logsumexp|", abs(now) if slope * now > 0 else 0.0, 20.0), below("p of its slope", p, 0.01)),
        above("- mean logit", -mean.last(3).median, 50.0),
    )


def too_sure(history: History) -> Reading:
    recent = {name: history[f"logits/{name}"].finite.last(3) for name in ("entropy", "vocab", "loss", "top1")}
    if min(map(len, recent.values())) < 3:
        return above("entropy of predictions", math.nan, 1.0)
    entropy, low = recent["entropy"].median, 0.1 * math.log(recent["vocab"].median)
    _, evals, _ = objective.first_set(history)
    elsewhere = evals.last(1).median if recent["top1"].median > 0.9 else 0.0
    loss = max(recent["loss"].median, elsewhere)
    return all_of(below("entropy of predictions", entropy, low), above("loss above that entropy", loss - entropy, 1.0))


def growth_apart(history: History) -> Reading:
    ours, theirs = growth(history), growth(history.parent) if history.parent else None
    assert ours is not None
    assert theirs is not None
    return above("growth per block apart from the parent's", abs(ours[0] - theirs[0]), 0.15)


# What is minimised


def flat_eval(history: History) -> Reading:
    _, losses, _ = objective.first_set(history)
    loss = history["loss"].finite
    before, after = loss.between(0, objective.SMOOTH), loss.between(0, int(losses.steps[-1])).last(objective.SMOOTH)
    moved = before.median - after.median
    return all_of(
        above("fall of the loss of training / its spread", moved / after.sigma, 5.0),
        below("change of evals / fall in training", float(np.ptp(losses.values)) / moved, 0.1),
    )


def evals_rise(history: History) -> Reading:
    _, losses, errors = objective.first_set(history)
    best = int(losses.values.argmin())
    later, limit = losses.values[best + 1 :], max(3 * errors.median, 0.01 * losses.values[best])
    if len(later) < 3:
        return above("least of three evals above the best", 0.0, limit)
    loss = history["loss"].finite
    before, after = (loss.between(0, int(losses.steps[i])).last(objective.SMOOTH) for i in (best, -1))
    return all_of(
        above("least of three evals above the best", float(later[-3:].min() - losses.values[best]), limit),
        above("fall of the loss of training since, in sigmas", (before.median - after.median) / after.sigma, 1.0),
    )


def padding(spread: Spread) -> Callable[[History], Reading]:
    def reading(history: History) -> Reading:
        share, easy, content, reported = (
            history[f"logits/{name}"].finite.last(3).median
            for name in ("target_share", "target_loss", "other_loss", "loss")
        )
        return all_of(
            below("loss of the commonest id", easy, 0.05),
            any_of(
                above("share of the commonest id", share, 0.5, spread=spread),
                above("loss of the others / reported", content / reported, 2.0),
            ),
        )

    return reading


def too_good(history: History) -> Reading:
    before_epoch = history["loss"].finite.between(0, int(min(history.steps_per_epoch, history.end)))
    if len(before_epoch) < objective.SMOOTH:
        return above("loss within the first epoch", math.nan, 0.05)
    looked = history["logits/loss"].finite.last(3).median
    return all_of(
        below("loss within the first epoch", before_epoch.last(objective.SMOOTH).median, 0.05),
        below("loss of the rows looked at", looked, 0.05),
    )


# Inputs, rollouts, opponents


def input_used(history: History) -> Reading:
    highs = [
        s.last(conditional.IN_A_ROW).values.max()
        for name, s in history.rows.items()
        if name.startswith("probe/without_") and name.endswith(conditional.HIGH)
    ]
    return below("rise of the loss without an input", float(min(highs)), conditional.USED)


def rollout(history: History) -> Reading:
    [measures] = history.evals.values()
    last3 = {name: series.last(conditional.IN_A_ROW).values for name, series in measures.items()}
    return any_of(
        above("l1@16 / l1@1", float((last3["l1@16"] / last3["l1@1"]).min()), conditional.WORSE),
        above("l1@16 / that of the mean", float((last3["l1@16"] / last3["mean_frame@16"]).min()), 1.0),
        above("l1@1 / that of no change", float((last3["l1@1"] / last3["persistence@1"]).min()), conditional.BETTER),
    )


def dominates(spread: Spread) -> Callable[[History], Reading]:
    def reading(history: History) -> Reading:
        accuracy, gap, loss = (history[f"discriminator/{name}"].last().median for name in ("accuracy", "gap", "loss"))
        return all_of(
            above("accuracy of the discriminator", accuracy, 0.98, spread=spread),
            any_of(above("gap of its scores", gap, 10.0), below("its loss", loss, 0.05)),
        )

    return reading


def pull(history: History) -> Reading:
    return below("grad_ratio", history["grad_ratio"].last(WINDOW // 10).median, 1e-3)


# Time and memory


def _time_share(history: History, name: str) -> Reading:
    parts, steps = history[name].last().values, history["step_s"].last().values
    kept = np.argsort(parts)[:-2]
    return above(f"{name} / step_s", float(parts[kept].sum() / steps[kept].sum()), performance.SHARE)


def waits(history: History) -> Reading:
    lost = history["wait_s"].last().values.mean() * (history.num_steps or 0)
    return all_of(_time_share(history, "wait_s"), above("seconds lost", float(lost), performance.WORTH_S))


def copies(history: History) -> Reading:
    return all_of(_time_share(history, "copy_s"), _time_share(history, "wait_s"))


def memory_grows(history: History) -> Reading:
    found = []
    for name in ("memory_mb", "rss_mb"):
        series = history[name].between(100, history.end)
        if len(series) >= 8:
            slope, p = theil_sen(*series)
            grown = slope * float(series.steps[-1] - series.steps[0])
            found.append(
                all_of(
                    above(f"growth of {name}", grown, max(0.01 * series.median, 20.0)),
                    below(f"p of the slope of {name}", p, 0.01),
                )
            )
    return any_of(above("growth of memory", math.nan, 20.0), *found)


def slower(history: History) -> Reading:
    rates = np.log(history["targets"].values / history["step_s"].values)[performance.SETTLED :]
    if len(rates) < 2 * WINDOW:
        return above("log of the loss of speed", math.nan, 0.1)
    windows = np.lib.stride_tricks.sliding_window_view(rates[:-WINDOW], WINDOW)[:: WINDOW // 2]
    usual, now = float(np.quantile(np.median(windows, axis=1), 0.75)), float(np.median(rates[-WINDOW:]))
    noise = 1.25 * Series(rates, rates).last(2 * WINDOW).sigma / math.sqrt(WINDOW)
    return above("log of the loss of speed", usual - now, max(-math.log(1 - performance.SLOWER), 6 * noise))


# Before the first step


def initial_loss(context: CheckContext) -> Reading:
    scalars = scale.look(context).scalars
    loss, chance = scalars["logits/loss"].item(), math.log(scalars["logits/vocab"].item())
    error = scale.LOSS_DEVIATION / math.sqrt(max(1.0, scalars["logits/targets"].item()))
    slack = max(scale.LOSS_SLACK * chance, scale.LEAST_SLACK) + 3 * error
    return above("initial loss above that of a guess", loss - chance, slack)


def initial_logit(context: CheckContext) -> Reading:
    return above(
        "largest attention logit", max(scale.table(context, "attention", "logit").values()), scale.LARGEST_AT_START
    )


def block_ratio(context: CheckContext) -> Reading:
    ratios, [names] = scale.table(context, "modules", "ratio"), scale.blocks(context).values()
    return above("what a block adds / its input", max(ratios[name] for name in names[1:]), scale.LARGEST_RATIO)


def targets_per_micro(context: CheckContext) -> Reading:
    counts = [float(batches.forward(context, micro).count) for micro in batches.micros(context)]
    share = float(np.quantile(counts, 0.05) / np.median(counts))
    return below("targets of the smallest micros / median", share, 0.1)


def loss_apart(context: CheckContext) -> Reading:
    as_train, as_eval = (watch(context, micro)[0] for micro in (context.micro, in_eval(context.micro)))
    gap = gap_of(mean_of(as_train.sum, as_train.count), mean_of(as_eval.sum, as_eval.count))
    return above("loss of training and eval apart", gap, same.SAME_LOSS["float32"])


def gradients_apart(context: CheckContext) -> Reading:
    micro, noise = context.micro, list[str]()
    parts = [rows_of(micro, i, i + 1) for i in range(len(micro.ids))]
    [whole], [apart] = (cut.take_step(context, some, noise).gradients for some in ([micro], parts))
    return above("gradients of two cuts apart", cut.gradient_gap(whole, apart), cut.SAME_GRADIENT)


def input_shift(context: CheckContext) -> Reading:
    looked = [
        {n: array_stats(n, a) for n, a in sample_rows(context, stream, NUM_ROWS).items()} for stream in ("train", "val")
    ]
    ratios = [np.abs(np.log(looked[1][name].std / of_train.std)).max() for name, of_train in looked[0].items()]
    return above("log ratio of deviations in eval and train", float(max(ratios)), math.log(inputs.RATIO))


def input_scale(context: CheckContext) -> Reading:
    deviation = max(float(array.std()) for array in sample_rows(context, "train", NUM_ROWS).values())
    return above("deviation of an input", deviation, inputs.SCALES[1])


def look_ahead(context: CheckContext) -> Reading:
    """How far the first half of the predictions moves when the second half of the inputs is changed."""
    ids = context.micro.batch["ids"][:, :-1]
    half = ids.shape[1] // 2
    changed = torch.cat([ids[:, :half], (ids[:, half:] + 1) % VOCAB], dim=1)
    with torch.no_grad(), eval_mode(context.setup.state.model):
        before, after = (context.setup.state.model(some)[:, :half] for some in (ids, changed))
    return above("move of earlier predictions", float((after - before).abs().max()), causality.LEAK)


def duplicates(context: CheckContext) -> Reading:
    streams, seed = context.setup.streams, context.setup.cfg.seed
    held_, train = (
        leakage.read(streams[name], leakage.Pairing(names=("ids",)), streams[name].num_rows, seed, 60.0)
        for name in ("val", "train")
    )
    return above("share of eval rows in train", float(np.isin(held_.hashes, train.hashes).mean()), leakage.DUPLICATES)


def near_frames(spread: Spread) -> Statistic:
    def statistic(context: CheckContext, severity: str) -> Reading:
        def frames(name: str) -> np.ndarray:
            stream = context.setup.streams[name]
            return leakage.shrunk(stream, "frames", np.arange(stream.num_rows), 0, context.setup.cfg.seed)

        train, held_ = frames("train"), frames("val")
        near = float(np.median(np.linalg.norm(np.diff(train, axis=0), axis=1)))
        far = np.linalg.norm(train[:, None] - train[None], axis=2)
        far[np.abs(np.subtract.outer(np.arange(len(train)), np.arange(len(train)))) <= leakage.AROUND] = np.inf
        nearest = np.linalg.norm(held_[:, None] - train[None], axis=2).min(axis=1)
        share = (nearest <= near).mean() - (far.min(axis=1) <= near).mean()
        return above("share of frames with a neighbour in train", float(share), leakage.SHARE, spread=spread)

    return statistic


def input_used_briefly(context: CheckContext) -> Reading:
    copy = copy_of(context.setup)
    train(copy)
    high = ablate_inputs(copy)["control"].high
    return below("rise of the loss without an input", high, USED)
