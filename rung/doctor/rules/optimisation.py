"""Rules about the learning rate, clipping, spikes and the size of a batch: what the curves of a run tell."""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import at, losses, two_digits
from rung.doctor.rules.updates import FIRST, STRIDES, Matrices, matrices, median, recent

# Median update / weight: healthy 2.6e-3, ten times the rate 4.9e-3, a hundred times 1.7e-2. With small first weights
# (std .02 at width 32) healthy ones begin at 2.8e-2 and end at 6e-3: this sign alone says nothing.
LARGE = 1e-2
JUMP = 0.5  # update / weight of one tensor in one step: healthy .076
TINY = 2e-3  # at a hundredth of a good rate 1.3e-4 with torch's first weights, 7.4e-4 with small ones (healthy 1.6e-2)
K_LOW = 16  # the best multiple of the last update: healthy 1-4, at a tenth of the rate 16-64, at a hundredth 64
LONG = 500  # steps: in the first 300 of a healthy run with batches of one row the norm doubles every 430
SCRATCH = ("", "scratch", "scratch_next_token")


@rule("O1", "Learning rate too high")
def lr_too_high(history: History) -> Finding | None:
    """Any two of four signs: each alone is seen in good runs too. The best multiple of an update is none of them: it
    was 0 to 1 in the best run of all."""
    signs = {
        "updates": _large_updates(history),
        "attention": _attention_grows(history),
        "jump": _one_large_update(history),
    }
    signs["loss"] = _loss_suffers(history) if any(signs.values()) else ""  # alone it would not be enough
    held = {name: text for name, text in signs.items() if text}
    if len(held) < 2:
        return None
    lr = float(history.config.get("lr.learning_rate") or history["lr"].values.max())
    return Finding(
        "O1",
        "sick" if "loss" in held or "attention" in held else "warn",
        f"the learning rate {lr:g} is too high: {' and '.join(held.values())}",
        evidence=[f"the other signs do not hold: {', '.join(n for n in signs if n not in held) or 'none'}"],
        ruled_out=[
            f"a shock at the start (O3): only steps after the warm-up of {history.warmup_steps} are counted",
            f"a single bad batch (O5): it was so over the last {WINDOW} steps, at three looks in a row",
        ],
        probe=f"rung train --from {history.run_id} lr.learning_rate={two_digits(lr / 10):g}",
        remedy="a third of the learning rate, a longer warm-up, a norm on queries and keys",
        changes={"lr.learning_rate": two_digits(lr / 3)},
        hides=["O3", "O8"],
    )


def _large_updates(history: History) -> str:
    seen = recent(history)
    if seen is None or len(seen.steps) < 3:
        return ""
    ratio = _middle(seen)
    return f"updates are {ratio:.2g} of the weights in the median (limit {LARGE:g})" if ratio > LARGE else ""


def _middle(seen: Matrices) -> float:
    """The median update / weight; NaN where none was measured."""
    ratio = seen.ratio[np.isfinite(seen.ratio)]
    return float(np.median(ratio)) if len(ratio) else math.nan


def _loss_suffers(history: History) -> str:
    """The loss lies above its own best, or has become noisy. Losses that fight each other may do both in health.

    Its best is looked for in at most 200 windows, for a long run is asked about hundreds of times.
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
        return f"the loss scatters by {now.sigma / now.median:.1%}, at its best by {best.sigma / best.median:.1%}"
    return ""


def _attention_grows(history: History) -> str:
    table = history.table("attention")
    if table is None or not len(table.steps):
        return ""
    last = float(np.fmax.reduce(table.columns["logit"][-1]))
    if last > 1e3:
        return f"attention logits reach {last:.3g} (limit 1000)"
    if last > 100 and len(table.steps) >= 6:
        logit = np.fmax.reduce(table.columns["logit"], axis=1)
        good = np.isfinite(logit)
        slope, p = theil_sen(table.steps[good], np.log(np.maximum(logit[good], 1e-12)))
        return f"attention logits reach {last:.3g} and grow (limit 100)" if slope > 0 and p < 0.01 else ""
    return ""


def _one_large_update(history: History) -> str:
    """Not in the first steps, warm-up or not: that is O3's."""
    seen = matrices(history, max(FIRST, history.warmup_steps, history.end - WINDOW))
    ratio = seen.ratio if seen is not None else np.zeros(0)
    if seen is None or not (ratio > JUMP).any():
        return ""
    row, place = np.unravel_index(np.nanargmax(ratio), ratio.shape)
    return f"step {seen.steps[row]} changed {seen.names[place]} by {ratio[row, place]:.0%} (limit {JUMP:.0%})"


@rule("O2", "Learning rate too low", "scan")
def lr_too_low(history: History) -> Finding | None:
    """A scan, for the probe is asked only at some evals. How far the loss is from where it should be is not recorded:
    that it still falls is asked instead."""
    probes = history["probe/k"].finite.between(history.warmup_steps, _decay_begins(history))
    if len(probes) < 3 or probes.median < K_LOW:
        return None
    last = int(probes.steps[-1])
    seen = matrices(history, max(history.warmup_steps, int(probes.steps[0]) - WINDOW), last + 1)
    ratio = _middle(seen) if seen is not None else math.nan
    loss = history["loss"].finite.between(history.warmup_steps, last + 1).last()
    t = slope_t(loss)
    if not ratio < TINY or not t < -3:
        return None
    lr = float(history.config.get("lr.learning_rate") or history["lr"].values.max())
    is_pretrained = str(history.config.get("init_from") or "") not in SCRATCH
    faster = _own_rate(seen) if seen is not None else ""
    return Finding(
        "O2",
        "info" if is_pretrained or faster else "warn",
        f"the learning rate {lr:g} is too low: {probes.median:g} times the update would have been best, and updates "
        f"are {ratio:.2g} of the weights",
        since=int(probes.steps[0]),
        evidence=[
            "best multiple of the last update on a fresh batch: "
            + ", ".join(f"{k:g} at {s}" for s, k in zip(*probes, strict=True))
            + f" (limit {K_LOW})",
            f"median update / weight {ratio:.2g} (limit {TINY:g}, healthy 2.6e-3 and more)",
            f"the loss still falls: t = {t:.1f} over the {len(loss)} steps up to {last} (limit -3)",
            *([faster] if faster else []),
        ],
        ruled_out=[
            "a rate that is low on purpose: these probes lie after the warm-up and before the end of the decay",
            f"weights that do not move at all (O9): the median update is {ratio:.1g} of the weight, not 0",
        ],
        probe=f"rung check {history.run_id}"
        if faster
        else f"rung train --from {history.run_id} lr.learning_rate={two_digits(lr * probes.median / 4):g}",
        remedy="some parameters have a higher rate than others: where that is not meant, raise the lr_scale of the "
        "objective of the others, and not the learning rate"
        if faster
        else "the learning rate times a quarter of that multiple",
        changes={} if faster else {"lr.learning_rate": two_digits(lr * probes.median / 4)},
        hides=["O8"],
    )


def _own_rate(seen: Matrices) -> str:
    """Matrices whose steps are far longer than the others': an objective has an lr_scale of its own."""
    stride = median(seen.stride, axis=0)
    times = stride / np.nanmedian(stride) if np.nanmedian(stride) > 0 else np.zeros(len(stride))
    if not (times > STRIDES).any():
        return ""
    return f"length of a step, in that of the median matrix: {seen.worst(times)} (limit {STRIDES}; healthy below 6)"


def _decay_begins(history: History) -> int:
    """The last fifth of a decay, in which a rate is low on purpose; the end where it does not fall."""
    falls = history.config.get("lr.decay_lr", True) and history.config.get("lr.schedule") not in ("constant", "plateau")
    steps = history.derived.get("decay_steps")
    return int(0.8 * steps) if falls and steps else history.end + 1


@rule("O4", "Clipping at every step, or never applied")
def clipping(history: History) -> Finding | None:
    """Adam divides the size of gradients out, so that clipping all of them changes little: clip .05 ends at 1.174, none
    at 1.175. Under SGD it is the learning rate that is cut."""
    limit = float(history.config.get("optimizer.grad_clip") or 0)
    norm, clipped = history["norm"], history["norm_clipped"]
    if limit <= 0 or not len(norm):
        return None
    trend = _applied(history, norm.between(history.warmup_steps, history.end)).last(10 * WINDOW)
    norm = trend.last()
    unread = any("optimizer.grad_clip" in event.get("keys", ()) for event in history.events_of("unread_keys"))
    after = at(clipped, norm.steps)
    if unread or (len(norm) and (after > 1.01 * limit).any()):
        return _not_applied(limit, norm, after, unread)
    share = float((norm.values > limit).mean()) if len(norm) else 0.0
    if share <= 0.9 or len(norm) < 50:
        return None
    name = str(history.config.get("optimizer.name", "adamw"))
    is_plain = name.startswith("sgd")
    lr = history["lr"].last().median
    slope, p = theil_sen(trend.steps, np.log(np.maximum(trend.values, 1e-30)))
    grows = p < 0.01 and slope > math.log(2) / 1000 and _still_grows(trend, slope)
    effective = lr * limit / norm.median
    p90 = float(np.percentile(norm.values, 90))
    return Finding(
        "O4",
        "warn" if is_plain or grows else "info",
        f"{share:.0%} of the last {len(norm)} steps were clipped at {limit:g}; the median norm is {norm.median:.3g}"
        + (f" and doubles every {math.log(2) / slope:.0f} steps" if grows else ""),
        evidence=[
            f"norm: median {norm.median:.3g}, 90th percentile {p90:.3g}; limit optimizer.grad_clip={limit:g}",
            f"under {name} the rate is in effect lr x limit / norm = {effective:.2g} in place of {lr:.2g}"
            if is_plain
            else f"{name} divides the size of gradients out: by itself this does little",
            f"log norm by step: slope {1000 * slope:.3g} per 1000 steps, p {p:.2g} (limit 0.69, p .01)",
        ],
        ruled_out=[
            "steps that were left out: they are not counted",
            *([] if grows else [f"exploding gradients: log norm moves by {1000 * slope:.2g} per 1000 steps"]),
        ],
        probe=f"rung train --from {history.run_id} optimizer.grad_clip={two_digits(p90):g}",
        remedy="set the limit near the 90th percentile of the norm; k times the batch lowers a noisy norm by sqrt(k)"
        + ("; and see why it grows: see O1 and the update sizes per tensor" if grows else ""),
        changes={"optimizer.grad_clip": two_digits(p90)},
    )


def _still_grows(norm: Series, slope: float) -> bool:
    """Norms rise in the first few hundred steps of healthy runs, while weights find their size, and then no longer."""
    if len(norm) < LONG:
        return False
    half = norm.last(len(norm) // 2)
    later, _ = theil_sen(half.steps, np.log(np.maximum(half.values, 1e-30)))
    first = Series(norm.steps[:WINDOW], norm.values[:WINDOW])
    return later >= slope / 3 and norm.last().median >= 2 * first.median


def _not_applied(limit: float, norm: Series, after: np.ndarray, unread: bool) -> Finding:
    bad = norm.steps[after > 1.01 * limit]
    return Finding(
        "O4",
        "warn",
        f"optimizer.grad_clip={limit:g} is set and not applied: "
        + ("nothing has read the key" if unread else f"the norm after clipping is {np.nanmax(after):.3g}"),
        since=int(bad[0]) if len(bad) else None,
        evidence=[f"norm after clipping above {1.01 * limit:g} at {len(bad)} of the last {len(norm)} steps",
                  f"norm before clipping: median {norm.median:.3g}"],
        ruled_out=["steps that were left out: they are not counted"],
        probe="compare norm and norm_clipped of one step",
        remedy="clip after the last backward of the step and before the update, or set the key to 0",
    )  # fmt: skip


@rule("O11", "Batch changed, learning rate not", "scan")
def batch_changed(history: History) -> list[Finding]:
    """Against the parent, and against the noise of the gradient itself. A sweep that is declared is not known here."""
    return [finding for finding in (_against_parent(history), _noise_scale(history)) if finding is not None]


def _batch(history: History) -> float:
    """Targets in a step."""
    rows, each = history.derived.get("rows_per_step"), history.derived.get("targets_per_row")
    return float(rows or 0) * float(each or 1)


def _against_parent(history: History) -> Finding | None:
    parent = history.parent
    if parent is None or not _batch(history) or not _batch(parent):
        return None
    times = _batch(history) / _batch(parent)
    lr, old = history.config.get("lr.learning_rate"), parent.config.get("lr.learning_rate")
    if not lr or not old or abs(lr / old - 1) > 0.01 or 1 / 1.5 < times < 1.5:
        return None
    is_plain = str(history.config.get("optimizer.name", "")).startswith("sgd")
    wanted = lr * (times if is_plain else math.sqrt(times))
    ends = sorted((lr, lr * times)) if not is_plain else sorted((lr * math.sqrt(times), lr * times))
    was, now = parent["norm"].finite.median, history["norm"].finite.median
    return Finding(
        "O11",
        "warn",
        f"a step has {times:.3g} times the targets of {parent.run_id or 'its parent'}, at the same lr {lr:g}",
        since=0,
        evidence=[
            f"targets in a step: {_batch(parent):g} before, {_batch(history):g} now (limit x1.5)",
            f"norm: median {was:.3g} before, {now:.3g} now; by averaging of noise alone it would be "
            f"{was / math.sqrt(times):.3g}",
        ],
        ruled_out=[f"a rate that was scaled along: it is {lr:g} in both"],
        probe=f"rung train --from {history.run_id} lr.learning_rate={two_digits(wanted):g}",
        remedy=f"scale the rate with {'the batch' if is_plain else 'the root of the batch'}: {two_digits(wanted):g}, "
        f"somewhere between {two_digits(ends[0]):g} and {two_digits(ends[1]):g}; a lower norm is averaging, not health",
        changes={"lr.learning_rate": two_digits(wanted)},
    )


def _noise_scale(history: History) -> Finding | None:
    """How many rows it takes until the gradient is as large as its noise, from the norms of a micro and of the step."""
    first = history["norm_first"].between(history.warmup_steps, history.end).finite.last()
    small, large = at(history["rows_first"], first.steps), float(history.derived.get("rows_per_step") or 0)
    whole = at(history["norm"], first.steps)
    good = np.isfinite(whole) & (small > 0) & (small < large)
    if good.sum() < 5:
        return None
    a, b, small = first.values[good] ** 2, whole[good] ** 2, small[good]
    noise = float(np.median((a - b) / (1 / small - 1 / large)))
    signal = float(np.median((large * b - small * a) / (large - small)))
    if noise <= 0 or signal <= 0:  # too few steps, or hardly any noise: nothing can be said
        return None
    fitting = noise / signal
    if fitting / 10 <= large <= 10 * fitting:
        return None
    says = "below a tenth of" if large < fitting else "more than ten times"
    return Finding(
        "O11",
        "info",
        f"a step of {large:g} rows is {says} the {fitting:.3g} at which noise and gradient are equal",
        since=int(first.steps[good][0]),
        evidence=[
            f"squared norms at {int(good.sum())} steps: {np.median(a):.3g} for {np.median(small):g} rows, "
            f"{np.median(b):.3g} for {large:g}; noise {noise:.3g}, gradient {signal:.3g}"
        ],
        ruled_out=[f"chance: medians over {int(good.sum())} steps"],
        probe=f"rung train --from {history.run_id} optimizer.gradient_accumulation_steps=...",
        remedy="a larger batch would give more per step" if large < fitting else "a smaller batch would learn as much",
    )


def _applied(history: History, series: Series) -> Series:
    """Without steps that were left out, and finite."""
    keep = ~(at(history["skipped"], series.steps) > 0) & np.isfinite(series.values)
    return Series(series.steps[keep], series.values[keep])


def slope_t(series: Series) -> float:
    """How many standard errors the slope of a straight line lies from 0."""
    if len(series) < 10:
        return math.nan
    x = series.steps - series.steps.mean()
    y = series.values - series.values.mean()
    slope = float(x @ y / (x @ x))
    rest = float(((y - slope * x) ** 2).sum()) / (len(x) - 2)
    return slope / math.sqrt(rest / float(x @ x)) if rest > 0 else math.copysign(math.inf, slope)


def theil_sen(steps: np.ndarray, values: np.ndarray, most: int = 200) -> tuple[float, float]:
    """The median slope of all pairs, and the chance of such an order among unordered values (Kendall, two sides)."""
    if len(steps) < 5:
        return 0.0, 1.0
    picked = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), most)).astype(int))
    x, y = steps[picked].astype(float), values[picked]
    i, j = np.triu_indices(len(x), 1)
    rise = y[j] - y[i]
    n = len(x)
    z = float(np.sign(rise).sum()) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return float(np.median(rise / (x[j] - x[i]))), math.erfc(abs(z) / math.sqrt(2))
