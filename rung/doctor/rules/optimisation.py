"""Rules about the learning rate, clipping and the batch size, from the curves of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.rules import NotLooked, rule
from rung.doctor.rules.lookups import GOALS, at, check, losses, train, two_digits
from rung.doctor.rules.updates import FIRST, SAFE, STRIDES, Matrices, beyond_the_rate, matrices, median, recent
from rung.doctor.rules.ways import way
from rung.robust import theil_sen

# Median update / weight: healthy 2.6e-3, ten times the rate 4.9e-3, a hundred times 1.7e-2. With small initial weights
# (std .02 at width 32) healthy ones begin at 2.8e-2 and end at 6e-3: this sign alone says nothing.
LARGE = 1e-2
JUMP = 0.5  # update / weight of one tensor in one step: healthy .076
TINY = 2e-3  # a hundredth of a good rate: 1.3e-4 with torch's initial weights, 7.4e-4 with small ones (healthy 1.6e-2)
K_LOW = 16  # the best multiple of the last update: healthy 1-4, at a tenth of the rate 16-64, at a hundredth 64
LONG = 500  # steps: in the first 300 of a healthy run with batches of one row the norm doubles every 430
SCRATCH = ("", "scratch", "scratch_next_token")
# Distance from the first weights, relative to their size: 0.09 at a hundredth of a good rate, at that 0.38 and more.
CLOSE, NOWHERE = 0.25, 0.02
BARELY_FELL, STILL_FALLS = 0.15, 0.25  # of the first loss; of what the first half gained
FEW_UPDATES, FEW_LOSSES = 50, 20


@rule("O1", "Learning rate too high", needs=("tensors|attention", "lr|lr.learning_rate"))
def lr_too_high(history: History) -> Finding | None:
    """Any two of four signs: each alone occurs in good runs too. The best multiple of an update is not among them: it
    was 0 to 1 in the best run of all."""
    signs = {"updates": "", "attention": "", "jump": ""}
    seen = recent(history)
    if seen is not None and len(seen.steps) >= 3 and (ratio := _median_ratio(seen)) > LARGE:
        signs["updates"] = f"updates are {ratio:.2g} of the weights in the median (limit {LARGE:g})"
    if (table := history.table("attention")) is not None:
        largest = np.fmax.reduce(table.columns["logit"], axis=1)
        last, good = float(largest[-1]), np.isfinite(largest)
        if last > 1e3:
            signs["attention"] = f"attention logits reach {last:.3g} (limit 1000)"
        elif last > 100 and len(table.steps) >= 6:
            slope, p = theil_sen(table.steps[good], np.log(np.maximum(largest[good], 1e-12)), most=200, continuity=0)
            if slope > 0 and p < 0.01:
                signs["attention"] = f"attention logits reach {last:.3g} and grow (limit 100)"
    late = matrices(history, max(FIRST, history.warmup_steps, history.end - WINDOW))  # the first steps are O3's
    if late is not None and ((ratios := late.ratio) > JUMP).any():
        row, place = np.unravel_index(np.nanargmax(ratios), ratios.shape)
        share = ratios[row, place]
        signs["jump"] = f"step {late.steps[row]} changed {late.names[place]} by {share:.0%} (limit {JUMP:.0%})"
    signs["loss"] = _loss_suffers(history) if any(signs.values()) else ""  # alone it would not be enough
    held = {name: text for name, text in signs.items() if text}
    if len(held) < 2:
        return None
    lr = _learning_rate(history)
    if (broken := beyond_the_rate(history, late)) is not None:
        broken.evidence += held.values()
        return broken
    # What is far too high does not heal by a third: also no more than SAFE of what the matrices were at first.
    first, lower = matrices(history), two_digits(lr / 3)
    if first is not None and str(history.config.get("optimizer.name", "adam")).startswith("adam"):
        size = float(np.nanmedian(first.size[0]))
        lower = two_digits(min(lr / 3, SAFE * size)) if size > 0 else lower
    return Finding(
        "sick" if "loss" in held or "attention" in held else "warn",
        f"the learning rate {lr:g} is too high: {' and '.join(held.values())}",
        evidence=[f"signs that do not hold: {', '.join(n for n in signs if n not in held) or 'none'}"],
        ruled_out=[
            f"a shock at the start (O3): only steps after the warm-up of {history.warmup_steps} are counted",
            f"a single bad batch (O5): it held over the last {WINDOW} steps, at three looks in a row",
        ],
        probe=train(history, "lr.learning_rate", lower),
        remedy=f"use a learning rate of {lower:g}; a longer warm-up, or a norm on queries and keys, may help as well",
        changes={"lr.learning_rate": lower},
        hides=["O3", "O8"],
    )


def _learning_rate(history: History) -> float:
    """The peak: that of the config, else the largest recorded."""
    return history.number("lr.learning_rate") or history["lr"].finite.values.max()


def _median_ratio(seen: Matrices) -> float:
    """The median update / weight; NaN where none was measured."""
    ratio = seen.ratio[np.isfinite(seen.ratio)]
    return float(np.median(ratio)) if len(ratio) else math.nan


def _loss_suffers(history: History) -> str:
    """The loss is above its own best, or has become noisy; not asked of adversarial losses, which do both in health.

    At most 200 windows are compared, since a long run is looked at a hundred times.
    """
    loss = history["loss"].finite.between(history.warmup_steps, history.end)
    if len(losses(history)) > 1 or len(loss) < 50:
        return ""
    width = min(WINDOW, len(loss) // 2)
    stride = max(10, len(loss) // 200)
    start = stride * int(np.argmin(np.median(sliding_window_view(loss.values, width)[:-1:stride], axis=1)))
    best, now = Series(loss.steps[start : start + width], loss.values[start : start + width]), loss.last(width)
    if now.median >= best.median + 3 * best.sigma and best.sigma > 0:
        return f"the loss is {now.median:.4g} where it was {best.median:.4g} around step {best.steps[width // 2]}"
    if best.median > 0 and now.median > 0 and now.sigma / now.median > 4 * best.sigma / best.median > 0:
        return f"the loss varies by {now.sigma / now.median:.1%}, at its best by {best.sigma / best.median:.1%}"
    return ""


@rule("O2", "Learning rate too low", "scan", needs=("loss", "probe/k|observed"))
def lr_too_low(history: History) -> Finding | None:
    """A scan, because probes are made only at some evals."""
    return _too_low_by_probes(history) if "probe/k" in history else _too_low_by_distance(history)


def _too_low_by_probes(history: History) -> Finding | None:
    """Where the loss should be is not known: that it still falls is asked instead."""
    # In the last fifth of a decay the rate is low on purpose.
    falls = history.config.get("lr.decay_lr", True) and history.config.get("lr.schedule") not in ("constant", "plateau")
    decay_steps = history.derived.get("decay_steps")
    until = int(0.8 * decay_steps) if falls and decay_steps else history.end + 1
    probes = history["probe/k"].finite.between(history.warmup_steps, until)
    if len(probes) < 3:
        raise NotLooked(f"{len(probes)} probes after the warm-up are too few", way("probe/k", history))
    if probes.median < K_LOW:
        return None
    last = int(probes.steps[-1])
    seen = matrices(history, max(history.warmup_steps, int(probes.steps[0]) - WINDOW), last + 1)
    loss = history["loss"].finite.between(history.warmup_steps, last + 1).last()
    t = slope_t(loss)
    if seen is None or not (ratio := _median_ratio(seen)) < TINY or not t < -3:
        return None
    lr, faster = _learning_rate(history), ""
    is_pretrained = str(history.config.get("init_from") or "") not in SCRATCH
    # Matrices whose updates are far larger than the others' have a learning rate of their own.
    stride = median(seen.stride, axis=0)
    times = stride / np.nanmedian(stride) if np.nanmedian(stride) > 0 else np.zeros(len(stride))
    if (times > STRIDES).any():
        faster = (
            f"size of an update, relative to the median matrix: {seen.worst(times)} (limit {STRIDES}; healthy below 6)"
        )
    return Finding(
        "info" if is_pretrained or faster else "warn",
        f"the learning rate {lr:g} is too low: an update {probes.median:g} times as large would have been best, and "
        f"updates are {ratio:.2g} of the weights",
        since=int(probes.steps[0]),
        evidence=[
            "best multiple of the last update on a fresh batch: "
            + ", ".join(f"{k:g} at {s}" for s, k in zip(*probes, strict=True))
            + f" (limit {K_LOW})",
            f"median update / weight {ratio:.2g} (limit {TINY:g}, healthy 2.6e-3 and more)",
            f"the loss still falls: t = {t:.1f} over the {len(loss)} steps up to {last} (limit -3)",
            faster,
        ],
        ruled_out=[
            "a rate that is low on purpose: these probes were made after the warm-up and before the end of the decay",
            f"weights that do not move at all (O9): the median update is {ratio:.1g} of the weight, not 0",
        ],
        probe=check(history) if faster else train(history, "lr.learning_rate", two_digits(lr * probes.median / 4)),
        remedy="some parameters have a higher rate than others: if that is not intended, raise the rate of the others, "
        "not the learning rate of all"
        if faster
        else "multiply the learning rate by a quarter of that multiple",
        changes={} if faster else {"lr.learning_rate": two_digits(lr * probes.median / 4)},
        hides=["O8"],
    )


def _too_low_by_distance(history: History) -> Finding | None:
    """In a script, where nobody tries updates of another size: the weights are close to where they began, and so is the
    loss, though it falls as fast as it did at first.

    Weights that were trained before begin close to where they end. They are told apart by their first loss.
    """
    seen = history.derived.get("observed") or {}
    updates, displaced = int(seen.get("updates") or 0), seen.get("displaced")
    if not isinstance(displaced, int | float):
        raise NotLooked("how far the weights have moved is not known", way("observed", history))
    if displaced >= CLOSE:
        return None
    loss = history["loss"].finite
    if updates < FEW_UPDATES or len(loss) < FEW_LOSSES:
        raise NotLooked(
            f"{min(updates, len(loss))} steps are too few", f"a run of {FEW_UPDATES} steps that logs its loss"
        )
    rates = history["lr"].finite.values
    if len(rates) >= FEW_LOSSES and rates[-1] >= rates.max() > 1.1 * np.median(rates):
        raise NotLooked("the learning rate is still rising", "a run that is past its warm-up")
    if not displaced:
        raise NotLooked("the weights do not move at all, which is another fault (L1)")
    if len(losses(history)) > 1 or any(re.search(GOALS, name) for name in history.rows):
        raise NotLooked("several losses, or rewards: their levels say little")
    width = min(WINDOW, len(loss) // 4)
    start, end = Series(loss.steps[:5], loss.values[:5]).median, loss.last(width).median
    noise = loss.jumps.sigma / math.sqrt(max(width, 1))
    if start <= 0 or start - end > BARELY_FELL * start:
        return None  # it fell, with weights that hardly had to move
    # What the loss gained in each half of the way, measured in sums of the learning rate, after the first rows.
    way_by_rate = np.cumsum(_rates(history, loss.steps))
    middle = int(np.searchsorted(way_by_rate, way_by_rate[-1] / 2))
    if not width < middle < len(loss) - width // 2:
        raise NotLooked("nearly all of the learning rate was spent in a few steps")
    before, half = (
        Series(loss.steps[at : at + width], loss.values[at : at + width]).median for at in (0, middle - width // 2)
    )
    falls = before - end > 3 * noise
    if falls and half - end < STILL_FALLS * (before - half):
        return None  # it fell, and is through with it
    if not falls and displaced > NOWHERE:
        raise NotLooked("the loss does not fall, and the weights have moved: a low rate is one of many reasons")
    moved = f"the weights are {displaced:.2g} of their size away from where they began after {updates} steps"
    gained = f"the loss went from {start:.4g} to {end:.4g}"
    if not _is_from_scratch(history, start):
        raise NotLooked(
            f"{moved}, and {gained}: enough for weights that were trained before, too little for new ones",
            'config={"init_from": "scratch"}, where the weights are new',
        )
    return Finding(
        "warn",
        f"the learning rate {_learning_rate(history):g} looks too low: {moved}, and {gained}"
        + (", falling as fast as at first" if falls else ""),
        since=0,
        evidence=[
            f"distance from the first weights, relative to their size: {displaced:.2g} in the median matrix (limit "
            f"{CLOSE:g})",
            f"the loss has lost {(start - end) / start:.1%} (limit {BARELY_FELL:.0%}): {before - half:.3g} while the "
            f"first half of the learning rate was spent, {half - end:.3g} in the second",
        ],
        ruled_out=[
            f"weights that were trained before: the first loss, {start:.4g}, is that of a guess",
            "a loss that has come to its end: it falls on" if half - end > 2 * noise else "",
            "weights that do not move at all (L1): they do",
        ],
        probe="run the script again with ten times the learning rate: the loss falls about ten times as far",
        remedy="raise the learning rate tenfold, and again for as long as the loss falls faster; with a rate that is "
        "meant, train much longer",
        hides=["L6", "O8"],
    )  # fmt: skip


def _rates(history: History, steps: np.ndarray) -> np.ndarray:
    """The learning rate at these steps; one for all where it was not recorded at most of them."""
    rates = at(history["lr"], steps)
    return np.nan_to_num(rates) if np.isfinite(rates).mean() > 0.9 and np.nansum(rates) > 0 else np.ones(len(steps))


def _is_from_scratch(history: History, first: float) -> bool:
    """Whether the config says so, or the loss begins where a guess has it."""
    said = next((str(v).lower() for k, v in history.config.items() if k.rpartition(".")[2] == "init_from"), None)
    if said is not None:
        return said in SCRATCH
    guesses = dict(history.derived.get("baselines") or {})
    if len(kinds := history["logits/vocab"].finite):
        guesses["uniform"] = math.log(max(2.0, kinds.values[0]))
    return any(0.8 * guess < first < 3 * guess for guess in guesses.values())


@rule("O4", "Clipping at every step, or never applied", needs=("norm", "optimizer.grad_clip"))
def clipping(history: History) -> Finding | None:
    """Adam is invariant to the size of gradients, so clipping all of them changes little: clip .05 ends at 1.174, none
    at 1.175. With SGD it lowers the learning rate."""
    limit = history.number("optimizer.grad_clip") or 0.0
    if limit <= 0 or not len(history["norm"]):
        return None
    norm = history["norm"].between(history.warmup_steps, history.end)
    is_applied = ~(at(history["skipped"], norm.steps) > 0) & np.isfinite(norm.values)
    trend = Series(norm.steps[is_applied], norm.values[is_applied]).last(10 * WINDOW)
    norm = trend.last()
    unread = any("optimizer.grad_clip" in event.get("keys", ()) for event in history.events_of("unread_keys"))
    after = at(history["norm_clipped"], norm.steps)
    bad = norm.steps[after > 1.01 * limit]
    if unread or len(bad):
        return Finding(
            "warn",
            f"optimizer.grad_clip={limit:g} is set and not applied: "
            + ("nothing has read the key" if unread else f"the norm after clipping is {np.nanmax(after):.3g}"),
            since=int(bad[0]) if len(bad) else None,
            evidence=[f"norm after clipping above {1.01 * limit:g} at {len(bad)} of the last {len(norm)} steps",
                      f"norm before clipping: median {norm.median:.3g}"],
            ruled_out=["skipped steps: they are not counted"],
            probe="compare norm and norm_clipped of one step",
            remedy="clip after the last backward of the step and before the update, or set the key to 0",
        )  # fmt: skip
    share = float((norm.values > limit).mean()) if len(norm) else 0.0
    if share <= 0.9 or len(norm) < 50:
        return None
    name = str(history.config.get("optimizer.name", "adamw"))
    is_plain = name.startswith("sgd")
    lr = history["lr"].last().median
    slope, p = theil_sen(trend.steps, np.log(np.maximum(trend.values, 1e-30)), most=200, continuity=0)
    grows = p < 0.01 and slope > math.log(2) / 1000 and len(trend) >= LONG
    if grows:
        # Norms rise in the first few hundred steps of healthy runs, while weights find their size, and then stop.
        half = trend.last(len(trend) // 2)
        later, _ = theil_sen(half.steps, np.log(np.maximum(half.values, 1e-30)), most=200, continuity=0)
        grows = later >= slope / 3 and norm.median >= 2 * Series(trend.steps[:WINDOW], trend.values[:WINDOW]).median
    effective = lr * limit / norm.median
    p90 = float(np.percentile(norm.values, 90))
    return Finding(
        "warn" if is_plain or grows else "info",
        f"{share:.0%} of the last {len(norm)} steps were clipped at {limit:g}; the median norm is {norm.median:.3g}"
        + (f" and doubles every {math.log(2) / slope:.0f} steps" if grows else ""),
        evidence=[
            f"norm: median {norm.median:.3g}, 90th percentile {p90:.3g}; limit optimizer.grad_clip={limit:g}",
            f"with {name} the effective rate is lr x limit / norm = {effective:.2g} instead of {lr:.2g}"
            if is_plain
            else f"{name} is invariant to the size of gradients: this alone does little",
            f"log norm by step: slope {1000 * slope:.3g} per 1000 steps, p {p:.2g} (limit 0.69, p .01)",
        ],
        ruled_out=[
            "skipped steps: they are not counted",
            "" if grows else f"exploding gradients: log norm moves by {1000 * slope:.2g} per 1000 steps",
        ],
        probe=train(history, "optimizer.grad_clip", two_digits(p90)),
        remedy="set the limit near the 90th percentile of the norm; k times the batch lowers a noisy norm by sqrt(k)"
        + ("; and find out why it grows: see O1 and the update sizes per tensor" if grows else ""),
        changes={"optimizer.grad_clip": two_digits(p90)},
    )


@rule("O11", "Batch changed, learning rate not", "scan", needs=("parent|norm_first",))
def batch_changed(history: History) -> Iterator[Finding]:
    """Against the parent, and against the noise of the gradient itself. A declared sweep is not known here."""
    if (parent := history.parent) is not None:
        batch, before = (
            float(h.derived.get("rows_per_step") or 0) * float(h.derived.get("targets_per_row") or 1)
            for h in (history, parent)
        )
        lr, old = history.number("lr.learning_rate"), parent.number("lr.learning_rate")
        if history.config.get("lr.scale", 1) != parent.config.get("lr.scale", 1):
            old = None  # the whole family was scaled
        times = batch / before if before else 0.0
        if lr and old and abs(lr / old - 1) <= 0.01 and times and not 1 / 1.5 < times < 1.5:
            is_plain = str(history.config.get("optimizer.name", "")).startswith("sgd")
            wanted = two_digits(lr * (times if is_plain else math.sqrt(times)))
            low, high = sorted((lr * math.sqrt(times) if is_plain else lr, lr * times))
            was, now = parent["norm"].finite.median, history["norm"].finite.median
            yield Finding(
                "warn",
                f"a step has {times:.3g} times the targets of {parent.run_id or 'its parent'}, at the same lr {lr:g}",
                since=0,
                evidence=[
                    f"targets in a step: {before:g} before, {batch:g} now (limit x1.5)",
                    f"norm: median {was:.3g} before, {now:.3g} now; averaging of noise alone would give "
                    f"{was / math.sqrt(times):.3g}",
                ],
                ruled_out=[f"a rate that was scaled with the batch: it is {lr:g} in both runs"],
                probe=train(history, "lr.learning_rate", wanted),
                remedy=f"scale the rate with {'the batch' if is_plain else 'the root of the batch'}: {wanted:g}, "
                f"somewhere between {two_digits(low):g} and {two_digits(high):g}; a lower norm is averaging, not "
                "health",
                changes={"lr.learning_rate": wanted},
            )

    # The rows at which the gradient is as large as its noise, from the norms of one micro and of the whole step.
    first = history["norm_first"].between(history.warmup_steps, history.end).finite.last()
    small, large = at(history["rows_first"], first.steps), float(history.derived.get("rows_per_step") or 0)
    whole = at(history["norm"], first.steps)
    good = np.isfinite(whole) & (small > 0) & (small < large)
    if good.sum() < 5:
        return
    a, b, small = first.values[good] ** 2, whole[good] ** 2, small[good]
    noise = float(np.median((a - b) / (1 / small - 1 / large)))
    signal = float(np.median((large * b - small * a) / (large - small)))
    if noise <= 0 or signal <= 0:  # too few steps, or hardly any noise: nothing can be said
        return
    fitting = noise / signal
    if fitting / 10 <= large <= 10 * fitting:
        return
    share = "below a tenth of" if large < fitting else "more than ten times"
    yield Finding(
        "info",
        f"a step of {large:g} rows is {share} the {fitting:.3g} rows at which noise and gradient are equal",
        since=int(first.steps[good][0]),
        evidence=[
            f"squared norms at {int(good.sum())} steps: {np.median(a):.3g} for {np.median(small):g} rows, "
            f"{np.median(b):.3g} for {large:g}; noise {noise:.3g}, gradient {signal:.3g}"
        ],
        ruled_out=[f"chance: medians over {int(good.sum())} steps"],
        probe="train with another optimizer.gradient_accumulation_steps and compare the loss at equal targets",
        remedy="a larger batch would give more per step" if large < fitting else "a smaller batch would learn as much",
    )


def slope_t(series: Series) -> float:
    """How many standard errors the slope of a straight line is from 0."""
    if len(series) < 10:
        return math.nan
    x = series.steps - series.steps.mean()
    y = series.values - series.values.mean()
    slope = float(x @ y / (x @ x))
    rest = float(((y - slope * x) ** 2).sum()) / (len(x) - 2)
    return slope / math.sqrt(rest / float(x @ x)) if rest > 0 else math.copysign(math.inf, slope)
