"""Rules about what flows through a model: dead and saturated units, attention, logits, the entropy of predictions.

They read the statistics of a forward pass of a few rows, taken every so many steps (a look). Numbers in comments were
measured on a healthy GPT of two layers and on sick twins of it. No rule goes by one look: a healthy GPT has 20 to 46 %
of its ReLUs silent on one batch, and the best run had an attention entropy of .34.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import EMPTY, WINDOW, History, Series, Table
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import two_digits
from rung.robust import theil_sen

FEWEST_TARGETS = 64  # of a look, below which shares of targets and answers say nothing
RELU, TANH, SIGMOID = 0, 1, 2


@rule("A1", "Dead units", needs=("units",))
def dead_units(history: History) -> Finding | None:
    """Nine in ten units of a layer silent in 50 looks, or three in ten more than early on.

    The second alone is info: runs that ended at their best had .54 (rate 1e-2), .58 (decay 1) and .66 (width 8,
    50 epochs) of a layer dead. It is a warning if the loss has risen with it.
    """
    table = history.table("units")
    if table is None or "looks" not in table.columns:
        return None
    function, dead, looks = (table.columns[c] for c in ("function", "dead", "looks"))
    judged = (function[-1] == RELU) & (looks[-1] >= 50)
    early = int(np.searchsorted(table.steps, 100))
    # Fewer looks make more units seem dead, so a rise against an early look is never overstated.
    rise = dead[-1] - dead[early] if early < len(table.steps) else np.zeros(len(table.names))
    is_dead, has_died = judged & (dead[-1] >= 0.9), judged & (rise >= 0.3)
    if not (is_dead | has_died).any():
        return None
    since = int(table.steps[min(early, len(table.steps) - 1)])
    worst = _worst(table, np.where(is_dead | has_died, dead[-1], -1.0), "dead")
    name, share = worst[0]
    at = table.names.index(name)
    # The training loss of the best stretch of 100 steps, and of the last one.
    losses = history["loss"].finite.between(since, history.end)
    starts = range(len(losses) % WINDOW, len(losses) - WINDOW, WINDOW)
    stretches = [Series(losses.steps[i : i + WINDOW], losses.values[i : i + WINDOW]) for i in starts]
    now = losses.last()
    best = min([now, *stretches], key=lambda stretch: stretch.median)
    is_worse = now.median > best.median + max(best.sigma, now.sigma)
    needs_lower_rate = has_died.any() and (is_dead.any() or is_worse)
    return Finding(
        "sick" if is_dead.any() else "warn" if is_worse else "info",
        f"{share:.0%} of the units of {name} were silent in each of the last {looks[-1, at]:.0f} looks (limit 90 %, or "
        f"30 % more than at step {since})",
        evidence=[
            "share of dead units: " + _listed(worst),
            f"this holds for {int((is_dead | has_died).sum())} of {int((function[-1] == RELU).sum())} ReLU layers",
            f"change since step {since}: {rise[at]:+.2f}; the loss was {best.median:.4g} at its best since then and "
            f"is {now.median:.4g} now (medians of {WINDOW} steps)",
        ],
        ruled_out=[
            f"units that are rarely active: {looks[-1, at]:.0f} looks at different rows saw none of them; in one look "
            f"{table.columns['silent'][-1, at]:.0%} were silent (healthy models: 20-46 %)",
        ],
        probe="print the biases before this ReLU: those of dead units are far below the reach of their weights",
        remedy="use a lower learning rate or a longer warm-up" if needs_lower_rate
        else "initialise biases with 0, or use GELU" if is_dead.any()
        else "nothing as long as the loss is good; a narrower layer would do as well, or GELU",
        changes=_lower_rate(history) if needs_lower_rate else {},
    )  # fmt: skip


@rule("A2", "Saturation", needs=("units|logits/outside",))
def saturation(history: History) -> Iterator[Finding]:
    """A tanh or sigmoid at its ends in three looks in a row, and targets that the output can never reach."""
    outside = history["logits/outside"].last(3)
    if len(outside) and outside.median > 0.01:
        yield Finding(
            "fatal",
            f"{outside.median:.0%} of the targets lie outside the range of the output, which is a tanh (-1 to 1) or a "
            "sigmoid (0 to 1)",
            evidence=[f"share of targets beyond the ends by more than .001, in the last {len(outside)} looks: "
                      + ", ".join(f"{v:.2f}" for v in outside.values) + " (limit .01)"],
            ruled_out=["a model that has not learned yet: no weights can reach these targets"],
            probe="print the smallest and the largest target of a batch",
            remedy="scale the targets into the range of the output, or remove the last activation",
        )  # fmt: skip
    table = history.table("units")
    if table is None or len(table.steps) < 3:
        return
    last = table.last(3).columns
    is_tanh, is_sigmoid = last["function"][-1] == TANH, last["function"][-1] == SIGMOID
    steepest = np.where(is_sigmoid, 0.25, 1.0)  # the slope in the middle
    at_ends = np.all(last["saturated"] > 0.9, axis=0)
    is_flat = np.all(last["slope"] / steepest < 0.05, axis=0)
    # Scales 1, 5 and 50: shares of .001, .47, .94, slopes of .78, .26, .027. A gate may be open or shut for good, and a
    # picture black, so a sigmoid needs both signs, and is info.
    is_bad = (is_tanh & (at_ends | is_flat)) | (is_sigmoid & at_ends & is_flat)
    if not is_bad.any():
        return
    worst = _worst(table, np.where(is_bad, last["saturated"][-1] + is_tanh, -1.0), "saturated")
    at = table.names.index(worst[0][0])
    yield Finding(
        "warn" if (is_bad & is_tanh).any() else "info",
        f"{worst[0][1]:.0%} of the outputs of {worst[0][0]} lie at an end of its "
        f"{'tanh' if is_tanh[at] else 'sigmoid'}, in three looks in a row (limit 90 %, or a mean slope below .05)",
        evidence=[
            "share at an end: " + _listed(worst),
            f"mean slope {last['slope'][-1, at] / steepest[at]:.3f} of the steepest: that much of the gradient passes",
        ],
        ruled_out=[
            "a single odd batch: shares in the last three looks "
            + ", ".join(f"{v:.2f}" for v in last["saturated"][:, at]),
            "an output that is rightly certain: what goes straight into the loss is not counted",
        ],
        probe="halve the weights before it, and see whether the loss falls faster",
        remedy="use smaller initial weights before it, a norm in front of it, or a lower learning rate",
        changes=_lower_rate(history) if at_ends[at] and table.columns["saturated"][0, at] < 0.5 else {},
    )  # fmt: skip


@rule("A3", "Attention logits too large", needs=("attention",))
def attention_logits(history: History) -> Finding | None:
    """Attention logits above 100 and growing, or above 1000; or heads that attend to one key. Never entropy alone."""
    table = history.table("attention")
    if table is None:
        return None
    logit, entropy, collapsed = (table.columns[c] for c in ("logit", "entropy", "collapsed"))
    if not np.isfinite(logit[-1]).any():
        return None
    largest = Series(table.steps, np.nanmax(np.where(np.isfinite(logit), logit, -np.inf), 1))
    now = float(largest.values[-1])
    recent = largest.last(20)
    slope, p = theil_sen(recent.steps, np.log(np.maximum(recent.values, 1e-6)))
    has_collapsed = float(np.nanmean(collapsed[-1])) > 0.5 and now > 50
    is_growing = now > 100 and slope > 0 and p < 0.01
    if not (now > 1e3 or is_growing or has_collapsed):
        return None
    severity = "fatal" if now > 1e4 else "sick" if now > 1e3 else "warn"
    worst = _worst(table, np.where(np.isfinite(logit[-1]), logit[-1], -np.inf), "logit")
    at = table.names.index(worst[0][0])
    return Finding(
        severity,
        f"the largest attention logit is {now:.4g} (in {worst[0][0]}; healthy 1-20, limits 100 and growing, 1e3, 1e4)"
        + (f", and {np.nanmean(collapsed[-1]):.0%} of the heads attend to a single key" if has_collapsed else ""),
        evidence=[
            "largest logit by layer: " + _listed(worst),
            f"over the last {len(recent)} looks it went from {recent.values[0]:.4g} to {now:.4g} (log slope "
            f"{slope * WINDOW:+.2g} per 100 steps, p {p:.2g})",
            f"entropy there {entropy[-1, at]:.2f} of the log of the keys, mean of all layers "
            f"{np.nanmean(entropy[-1]):.2f}; heads below .05: {np.nanmean(collapsed[-1]):.0%}",
            f"bfloat16 has a spacing of {2.0 ** (math.floor(math.log2(max(now, 1.0))) - 7):g} at this size",
        ],
        ruled_out=[
            f"sharp but healthy attention: its logits stay below 100 (here {now:.4g}); the best run we measured had an "
            "entropy of .34 at a largest logit of 16",
        ],
        probe="train with qk-norm: if logits stay below 20 and the loss is no worse, that was it",
        remedy="normalise queries and keys (qk-norm), lower the learning rate, or cap the logits (QK-clip at 100)",
        changes=_lower_rate(history) if slope > 0 else {},
    )


@rule("A4", "Output logits drift", needs=("logits/lse",))
def logit_drift(history: History) -> Finding | None:
    """The logsumexp of the logits drifts in one direction. Softmax does not notice; half precision does."""
    lse, mean = history["logits/lse"].finite, history["logits/logit_mean"].finite
    if len(lse) < 6:
        return None
    now, mean_now = float(lse.last(3).median), float(mean.last(3).median)
    limit = 10.0 if history.derived.get("dtype") in ("bfloat16", "float16") else 20.0
    recent = lse.between(history.end - 3 * WINDOW, history.end)
    slope, p = theil_sen(*recent)
    runs_away = len(recent) >= 6 and p < 0.01 and slope * now > 0 and abs(now) > limit
    # ln V of a uniform prediction is no drift, however large the vocabulary.
    runs_away = runs_away and abs(now) > 2 * math.log(max(history["logits/vocab"].median, 2.0))
    if not (runs_away or mean_now < -50):
        return None
    return Finding(
        "warn",
        f"the mean logsumexp of the output logits is {now:.1f} and the mean logit {mean_now:.1f} (limits: "
        f"{limit:.0f} and moving one way for 300 steps, or a mean below -50)",
        since=int(recent.steps[0]) if runs_away else None,
        evidence=[
            f"logsumexp from {recent.values[0]:.1f} at step {int(recent.steps[0])} to {recent.values[-1]:.1f} at step "
            f"{int(recent.steps[-1])}: {slope * WINDOW:+.2g} per 100 steps, p {p:.2g}",
            f"the loss does not show it: {history['loss'].last().median:.4g}",
        ],
        ruled_out=["the usual level of small models: that is 5 to 12 (11.8 when overfit)",
                   f"a large vocabulary: the log of its {history['logits/vocab'].median:.0f} classes is "
                   f"{math.log(max(history['logits/vocab'].median, 1.0)):.1f}"],
        probe="compare mean and spread of the logits of one batch at two checkpoints",
        remedy="add 1e-4 times the squared logsumexp to the loss (z-loss), or decay the weights of the head",
    )  # fmt: skip


@rule("A5", "Output entropy off", needs=("entropy|logits/entropy",))
def output_entropy(history: History) -> Iterator[Finding]:
    """Predictions that are more certain than right, entropy that does not follow the loss, and jumpy entropy."""
    names = ("entropy", "vocab", "loss", "top1", "target_entropy", "target_share")
    looks = {name: history[f"logits/{name}"].finite for name in names}
    targets = history["logits/targets"].last(3)
    needed = ("logits/entropy", "logits/vocab", "logits/top1")
    if all(len(history[name].finite) >= 3 for name in needed) and targets.median >= FEWEST_TARGETS:
        recent = {name: series.last(3).median for name, series in looks.items()}
        collapse = _collapse(history, recent)
        if collapse is not None:
            yield collapse
            return
    span = history.end - 3 * WINDOW, history.end
    entropy, losses, unit = entropy_of(history)
    entropy, losses = entropy.between(*span), losses.between(*span)
    if len(entropy) >= 10 and entropy.steps[-1] - entropy.steps[0] >= 2 * WINDOW:
        (slope, p), (fall, p_fall) = theil_sen(*entropy), theil_sen(*losses)
        if slope >= 0 and fall < 0 and p < 0.01 and p_fall < 0.01:
            alone = looks["target_entropy"].last(3).median
            yield Finding(
                "info",
                f"over 300 steps the loss fell by {-fall * WINDOW:.3g} per 100 steps, but the entropy of predictions "
                f"rose by {slope * WINDOW:.3g}: the model improves by being less certain",
                evidence=[f"p {p:.2g} and {p_fall:.2g}; entropy {entropy.last(10).median:.3g}, loss "
                          f"{losses.last(10).median:.3g} in the last ten {unit}",
                          *([f"entropy of the targets alone {alone:.3g} nats"] if math.isfinite(alone) else [])],
                ruled_out=["a model that was too certain at the start: that is over within a few hundred steps"],
                probe="look at the loss per class of target: which classes improved?",
                remedy="look for targets that are mostly noise, and for a loss term that rewards uncertainty",
            )  # fmt: skip
    # Entropy that jumps more than three times as much as in the parent at the same steps.
    if history.parent is None:
        return
    before, _, unit_before = entropy_of(history.parent)
    ours, theirs = entropy.jumps, before.between(*span).jumps
    if unit == unit_before and len(ours) >= 10 and len(theirs) >= 10 and ours.sigma > 3 * theirs.sigma > 0:
        yield Finding(
            "info",
            f"the entropy of the predictions jumps {ours.sigma / theirs.sigma:.1f} times as much between {unit} as in "
            f"{history.parent.run_id} (limit 3)",
            evidence=[f"spread of the jumps {ours.sigma:.3g} nats here, {theirs.sigma:.3g} there, over "
                      f"{len(ours)} and {len(theirs)} {unit} up to step {history.end}"],
            ruled_out=[f"different spacing of the {unit}: both runs use the same"],
            probe="compare norm and lr of the two runs at these steps",
            remedy="look at what was changed: a smaller batch or a higher learning rate does this",
        )  # fmt: skip


def entropy_of(history: History) -> tuple[Series, Series, str]:
    """The output entropy, the loss of the same predictions, and what there is one of each at.

    At steps, where the loss of a recipe has a part `entropy`, else at looks; what a script calls so may be anything.
    """
    if len(entropy := history["entropy"].finite) and not history.is_script:
        return entropy, history["loss"].finite, "steps"
    return history["logits/entropy"].finite, history["logits/loss"].finite, "looks"


def _collapse(history: History, recent: dict[str, float]) -> Finding | None:
    low = 0.1 * math.log(max(recent["vocab"], 2.0))
    # A model that has only learned class frequencies predicts one class too, but with their entropy.
    one_answer = recent["top1"] > 0.9 and not recent["entropy"] > 0.5 * recent["target_entropy"]
    one_answer = one_answer and recent["top1"] - recent["target_share"] > 0.2
    evals = next(iter(history.evals.values()), {}).get("loss", EMPTY)
    elsewhere = evals.last(1).median if recent["top1"] > 0.9 else math.nan  # certain on one set, wrong on the other
    loss = max((v for v in (recent["loss"], elsewhere) if math.isfinite(v)), default=math.nan)
    too_sure = recent["entropy"] < low and loss > recent["entropy"] + 1
    if not (too_sure or one_answer):
        return None
    return Finding(
        "sick",
        f"predictions have an entropy of {recent['entropy']:.3g} nats (of at most {10 * low:.3g}), the loss is "
        f"{loss:.3g}, and {recent['top1']:.0%} of the predictions are one class",
        evidence=[
            f"limits: entropy below {low:.3g} with a loss more than 1 nat above it, or one class in more than 90 % of "
            "the predictions",
            f"loss on the rows of the look {recent['loss']:.3g}"
            + (f", on the eval set {elsewhere:.3g}" if math.isfinite(elsewhere) else ""),
        ],
        ruled_out=[
            f"targets of one class: their entropy is {recent['target_entropy']:.3g} nats, the "
            f"commonest is {recent['target_share']:.0%} of them"
            if recent["target_share"] < 0.8
            else f"nothing: {recent['target_share']:.0%} of the targets are one class, so look at the data first",
        ],
        probe="count the classes among the targets and among the predictions of an eval batch",
        remedy="check the data for one class everywhere and the loss for a term that rewards certainty; lower the "
        "learning rate",
    )


@rule("A6", "Residual scale changed", "scan", needs=("parent", "modules"))
def residual_scale(history: History) -> Finding | None:
    """At step 0: how fast the residual stream grows per block, against the parent. It has no absolute limit.

    Growth per block falls with depth, and what a block adds grows with width, so only equal shapes are compared.
    """
    parent = history.parent
    if parent is None or any("scratch" not in str(h.config.get("init_from", "scratch")) for h in (history, parent)):
        return None
    ours, theirs = growth(history), growth(parent)
    if ours is None or theirs is None or abs(ours[0] - theirs[0]) <= 0.15:
        return None
    # The same number of blocks, with parameters of the same names and sizes.
    sizes = []
    for table, (_, blocks) in ((history.table("tensors"), ours), (parent.table("tensors"), theirs)):
        if table is None:
            return None
        starts = tuple(f"{name}." for name, _ in blocks)
        sizes.append({n: k for n, k in zip(table.names, table.columns["numel"][0]) if n.startswith(starts)})
    if not sizes[0] or sizes[0] != sizes[1]:
        return None
    ratios = [f"{name} {ratio:.3g}" for name, ratio in ours[1][:3]]
    return Finding(
        "warn",
        f"at step 0 the residual stream grows by {ours[0]:+.2f} (log) per block, in {parent.run_id} by "
        f"{theirs[0]:+.2f} (limit: a difference of .15)",
        since=0,
        evidence=[
            f"what a block adds, relative to what enters it: {', '.join(ratios)}; in the parent "
            + ", ".join(f"{name} {ratio:.3g}" for name, ratio in theirs[1][:3]),
        ],
        ruled_out=["pretrained weights: both runs start from scratch",
                   f"another depth or width: both have {len(ours[1])} blocks, with weights of the same sizes"],
        probe="compare the norm of the residual stream after each block on the first batch of both runs",
        remedy="initialise with a standard deviation of .02, and 1/sqrt(2 L) of it on the output projections only",
    )  # fmt: skip


def growth(history: History) -> tuple[float, list[tuple[str, float]]] | None:
    """The log of the growth of the stream per block in the first look, and the blocks with what each adds."""
    table = history.table("modules")
    if table is None or table.steps[0] != 0 or "entered" not in table.columns:
        return None
    ratio, rms, entered = (table.columns[c][0] for c in ("ratio", "rms", "entered"))
    groups: dict[str, list[int]] = {}
    for at, name in enumerate(table.names):
        if np.isfinite(ratio[at]) and "#" not in name:
            groups.setdefault(name.rpartition(".")[0], []).append(at)
    blocks = max(groups.values(), key=len, default=[])
    if len(blocks) < 2 or not (entered[blocks[0]] > 0 and rms[blocks[-1]] > 0):
        return None
    per_block = math.log(rms[blocks[-1]] / entered[blocks[0]]) / len(blocks)
    return per_block, [(table.names[at], float(ratio[at])) for at in blocks]


def _worst(table: Table, scores: np.ndarray, column: str) -> list[tuple[str, float]]:
    """The three layers with the highest scores, with this column of the last look."""
    order = np.argsort(-scores, kind="stable")[:3]
    return [(table.names[at], float(table.columns[column][-1, at])) for at in order if scores[at] > -1]


def _listed(layers: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in layers)


def _lower_rate(history: History) -> dict[str, float]:
    rate = history.number("lr.learning_rate") or 0.0
    return {"lr.learning_rate": two_digits(rate / 3)} if rate > 0 else {}
