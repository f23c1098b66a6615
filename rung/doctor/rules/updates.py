"""Rules about single tensors: how far each update moved them, and what gradient reached them.

Embeddings (by name) and vectors are left out of comparisons: their rows see few tokens, and gains and biases have
sizes of their own. The ratio of update to weight is NaN while a weight is still close to zero, as output projections
often are at first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import compress

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Table
from rung.doctor.rules import NotLooked, rule
from rung.doctor.rules.lookups import at, check, half_weights, replay
from rung.doctor.rules.numerics import first_struggle
from rung.doctor.rules.ways import way

EMBEDDING = re.compile(r"(^|[._])(\w*emb\w*|wte|wpe|tok|tokens?|pos|positions?|positional\w*|places?)([._]|$)")
SMALL = 0.05  # of the usual size of a weight: below, a tensor began at zero and has not grown yet
FIRST, SHOCK = 20, 0.5  # steps, and the ratio of one update there: healthy .076; lr x 10 with warm-up .25, without 1.6
AT_ONCE = 1e3  # times less gradient from one matrix to the next; twelve sigmoids 60 at most
VANISHED = 1e-4  # of the median over layers: 12 sigmoids 1e-11, 12 tanhs 1.9e-3, Kaiming and ReLU 4.7e-2
LEAST, MOST, APART = 1e-5, 3e-2, 30  # healthy ratios: 2.6e-3 in the median, or 6e-3 to 3e-2 with small initial weights
# Small initial weights make all ratios large for a while (4e-2 at step 60 of a healthy run), which says nothing about
# single tensors: what is outside the limits must also stand out. Healthy projections out of attention reach 0.036 at
# x5.3 of the median, in runs of 600 steps and more. A head with 100 times the rate has no more than that (0.036 to
# 0.047 at x3.1 to x4.7, as its weights grow), but its updates are 90 times as large as the others'; healthy ones 6.
STANDS_OUT, CLEARLY, STRIDES = 3, 10, 20
SAFE = 2e-2  # of the size of a matrix, per update: where small initial weights begin in healthy runs
BEYOND = 10  # learning rates that Adam moved the elements of a matrix by, in rms: gradients allow 7, 1 is usual


class Matrices(Table):
    """The matrices in the table of tensors, at steps that updated them; all arrays are (steps, names)."""

    @property
    def size(self) -> np.ndarray:
        """Root mean square of the weights."""
        return self.columns["weight"] / np.sqrt(self.columns["numel"])

    @property
    def stride(self) -> np.ndarray:
        """Root mean square of the updates: with Adam near the learning rate, whatever the weights."""
        return self.columns["update"] / np.sqrt(self.columns["numel"])

    @property
    def ratio(self) -> np.ndarray:
        """Update over weight, NaN for what is still close to zero."""
        usual = median(self.size, axis=1)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.size > SMALL * usual, self.columns["update"] / self.columns["weight"], np.nan)

    def worst(self, values: np.ndarray, largest: bool = True, num: int = 3) -> str:
        """The names with the largest (or smallest) value, and the values."""
        finite = np.flatnonzero(np.isfinite(values))
        order = finite[np.argsort(-values[finite] if largest else values[finite], kind="stable")][:num]
        return ", ".join(f"{self.names[n]} {values[n]:.3g}" for n in order)


def matrices(history: History, first: int = 0, end: int | None = None) -> Matrices | None:
    """What was measured in [first, end) at steps that were applied; None if nothing was."""
    table = history.table("tensors")
    if table is None:
        return None
    begin, stop = np.searchsorted(table.steps, [first, history.end if end is None else end])
    steps = table.steps[begin:stop]
    rows = begin + np.flatnonzero(~(at(history["skipped"], steps) > 0) & ~(at(history["lr"], steps) == 0))
    is_matrix = table.columns["decayed"][-1] > 0
    names = np.flatnonzero(is_matrix & [not EMBEDDING.search(name) for name in table.names])
    if not len(rows) or not len(names):
        return None
    picked = {c: table.columns[c][np.ix_(rows, names)] for c in ("grad", "weight", "update", "eps_share", "numel")}
    return Matrices(table.steps[rows], [table.names[n] for n in names], picked)


def recent(history: History) -> Matrices | None:
    """The last window, without the warm-up."""
    return matrices(history, max(history.warmup_steps, history.end - WINDOW))


def median(values: np.ndarray, axis: int) -> np.ndarray:
    """Of the finite values along an axis; NaN where there is none."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=axis)  # NaN comes last
    count = np.isfinite(values).sum(axis=axis, keepdims=True)
    middles = [np.take_along_axis(ordered, np.maximum(n, 0), axis) for n in ((count - 1) // 2, count // 2)]
    return np.where(count > 0, (middles[0] + middles[1]) / 2, np.nan).squeeze(axis)


def commonprefix(paths: Sequence[Sequence[str]]) -> list[str]:
    """What all paths begin with, without their last parts."""
    shared = []
    for parts in zip(*(path[:-1] for path in paths)):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared


def _peak(history: History) -> float:
    """The learning rate: that of the config, else the largest recorded."""
    values = history["lr"].finite.values
    return history.number("lr.learning_rate") or (float(values.max()) if len(values) else 0.0)


def beyond_the_rate(history: History, seen: Matrices | None, since: int = 0) -> Finding | None:
    """Updates of Adam that are many times the learning rate, which no gradient makes: its moments are to blame.

    A rival of the learning rate: lowering that would only divide what is wrong.
    """
    name = str(history.config.get("optimizer.name", "")).lower()
    if seen is None or not name.startswith(("adam", "nadam")):
        return None
    rates = at(history["lr"], seen.steps)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        times = seen.stride / rates
    times, half = np.where(np.isfinite(times), times, 0.0), half_weights(history)
    times = times / _largest_scale(history)
    if not times.max() > BEYOND:
        return None
    row, place = np.unravel_index(times.argmax(), times.shape)
    own = "its moments are not those of its gradients: they were reset, loaded wrongly or written to"
    small = f"weights and moments are {half}, in which the squares of usual gradients are 0 or lose their digits"
    return Finding(
        "sick",
        f"step {seen.steps[row]} moved {seen.names[place]} by {times.max():.3g} times the learning rate, which Adam "
        f"never does by itself: {small if half else own}",
        since=int(seen.steps[np.flatnonzero(times.max(axis=1) > BEYOND)[0]]),
        evidence=[
            f"rms of an update over the learning rate: {seen.worst(times.max(axis=0))} (limit {BEYOND}, usual below 1)",
            f"the type of the weights is {half}" if half else "the weights are not of half precision",
        ],
        ruled_out=[f"a learning rate that is too high: of {rates[row, 0]:.3g} Adam moves an element by "
                   f"{rates[row, 0]:.2g} at a step, whatever the gradients"],
        probe="print exp_avg, exp_avg_sq and the step of the optimizer's state for one matrix",
        remedy="keep the trained weights in float32, and compute under autocast" if half
        else "resume from a save before it, with the state of the optimizer",
        title="The optimizer's moments are broken",
        remedy_is_guess=not half,
        hides=["O3", "O8"],
    )  # fmt: skip


def _largest_scale(history: History) -> float:
    """The largest rate of a group over that of the run: an update is so much larger there, and nothing is broken."""
    rates = [rate for rate in (history.derived.get("observed") or {}).get("rates") or () if rate]
    scales = [*(history.derived.get("lr_scales") or {}).values(), *(rate / rates[0] for rate in rates)]
    return max([1.0, *map(float, scales)])


@rule("O3", "Shock without a warm-up", "scan", needs=("tensors",))
def warmup_shock(history: History) -> Finding | None:
    seen = matrices(history, 0, FIRST)
    if history.warmup_steps >= 50 or seen is None:
        return None
    # What starts at zero is compared with the usual size of the others until it has grown, since its first updates are
    # all that it is made of.
    usual = median(seen.size, axis=1)[:, None]
    starts_small = ~(seen.size[:1] > SMALL * usual[:1])
    size = np.where(starts_small | ~(seen.size > SMALL * usual), np.fmax(seen.size, usual), seen.size)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = seen.stride / size
    ratio = np.where(np.isfinite(ratio), ratio, 0.0)  # 0 where nothing was measured
    rows = np.flatnonzero(ratio.max(axis=1) > SHOCK)
    if not len(rows):
        return None
    if (broken := beyond_the_rate(history, seen)) is not None:
        broken.hides = ["O1", "O8"]
        return broken
    step, biggest = int(seen.steps[rows[0]]), ratio.max(axis=0)
    table = history.table("attention")
    early = np.zeros(0) if table is None else table.columns["logit"][table.steps <= 100].ravel()
    logit = float(np.nanmax(early)) if np.isfinite(early).any() else float("nan")
    lr, beta2 = history.config.get("lr.learning_rate"), history.number("optimizer.beta2") or 0.95
    # At most a tenth of the run; no change if that is not longer than it was, or not shorter than the run.
    wanted = max(100, round(2 / max(1 - beta2, 1e-6)))
    length = min((n for n in (history.num_steps, history.derived.get("decay_steps")) if n), default=10 * wanted)
    warmup = min(wanted, max(FIRST, length // 10))
    return Finding(
        "sick" if logit > 50 else "warn",  # 93 after a shock, 16 at the same rate with a warm-up
        f"an update of step {step} changed a matrix by {biggest.max():.0%} of its norm, with a warm-up of "
        f"{history.warmup_steps} steps",
        since=step,
        evidence=[
            f"largest update / weight in the first {FIRST} steps (limit {SHOCK:g}): {seen.worst(biggest)}",
            f"lr {lr}; largest attention logit in the first 100 steps: {logit:.3g} (limit 50)",
        ],
        ruled_out=[
            f"one tensor alone (O8): the median over matrices is {float(np.median(biggest)):.2g}",
            "weights that start at zero: they are compared with the size of the others",
        ],
        probe=check(history),
        remedy="warm the learning rate up over max(100, 2 / (1 - beta2)) steps, at most a tenth of the run"
        + (f"; if it still does that, lower the learning rate {biggest.max() / SHOCK:.2g} times: an update as large as "
           "a matrix leaves nothing of it" if biggest.max() > 1 else ""),
        changes={"lr.warmup_iters": warmup} if history.warmup_steps < warmup < length else {},
    )


@rule("O6", "Eps too large", needs=("tensors", "optimizer.eps"))
def eps_too_large(history: History) -> Finding | None:
    """Adam divides by the root of the second moment plus eps: where eps is the larger, it is a slow SGD."""
    seen = recent(history)
    eps = history.number("optimizer.eps") or 0.0
    if seen is None or not eps:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        shrink = at(history["norm_clipped"], seen.steps) / at(history["norm"], seen.steps)  # Adam sees what was clipped
        shrink = np.where(np.isfinite(shrink), shrink, 1.0)[:, None]
        against = median(eps / (seen.columns["grad"] * shrink / np.sqrt(seen.columns["numel"])), axis=0)
    share = median(seen.columns["eps_share"], axis=0)
    has_moments = np.isfinite(share)
    # A matrix whose gradient is mostly 0 (silent units) has such a share at any eps; the rest of it is large there:
    # healthy matrices have eps / rms(g) near 1e-5.
    # A gradient that is small only now has moments from when it was not, and no share: eps does nothing to it.
    # With a share of 0.13 eps is not what most of a matrix is divided by, however small the rest (a world, 150 steps).
    bad = has_moments & np.isfinite(against) & (share > 0.5) & (against > 0.01)
    if not bad.any():
        return None
    held = bad[has_moments].mean()
    gradients = eps / against
    depth = float(np.nanmin(gradients) / np.nanmedian(gradients))
    # A hundredth of the smallest gradient, as a power of ten. Then an element moves by the learning rate, whatever the
    # gradient: a rate that was found with this eps may be far too high for that.
    wanted = float(f"1e{math.floor(math.log10(np.nanmin(gradients) / 100))}")
    wanted = min(max(wanted, 1e-15), eps / 10)
    lr, size = _peak(history), float(np.nanmedian(median(seen.size, axis=0)))
    fitting = float(f"{SAFE * size:.1g}")
    changes, lower_rate = {"optimizer.eps": wanted}, ""
    if lr > SHOCK * size > 0:
        changes["lr.learning_rate"] = fitting
        lower_rate = f", and the learning rate to {fitting:g}: with a small eps each element moves by it at every step"
    return Finding(
        "sick" if held > 0.5 else "warn",
        f"optimizer.eps={eps:g} outweighs the gradients of {int(bad.sum())} of {int(has_moments.sum())} matrices: "
        "Adam acts as a slow SGD there",
        evidence=[
            f"eps / rms(gradient), limit 0.01: {seen.worst(np.where(bad, against, np.nan))}",
            f"share of elements with a second moment below eps, limit 0.5: {seen.worst(np.where(bad, share, np.nan))}",
        ],
        ruled_out=[
            f"gradients that vanish with depth (O7): the smallest is {depth:.2g} of the median",
            "rows of rare tokens: embeddings are not counted",
        ],
        probe=f"compare eps={eps:g} with the root of Adam's second moment: that is the larger of the two it divides by",
        remedy=f"lower eps to {wanted:g}{lower_rate}",
        changes=changes,
        hides=["O2", "O8"],
    )


@rule("O7", "Gradients vanish with depth", needs=("tensors",))
def vanishing(history: History) -> Finding | None:
    """A gradient of exactly zero is O9's or a dead unit's and is not counted; nor are vectors."""
    seen = recent(history)
    if seen is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        grad = seen.columns["grad"]
        flow = median(np.where(grad > 0, grad / seen.columns["weight"], np.nan), axis=0)
    if np.isfinite(flow).sum() < 3:
        return None
    middle, least = float(np.nanmedian(flow)), float(np.nanmin(flow))
    if not least < VANISHED * middle:
        return None
    is_bad = flow < VANISHED * middle
    num_bad, total = int(is_bad.sum()), history["norm"].last()
    # With depth the gradient is lost layer by layer. A branch that the loss hardly depends on loses it at once: far
    # more from the last good matrix to the first bad one than between any two good ones.
    order = np.argsort(np.where(np.isfinite(flow), flow, np.inf))[: np.isfinite(flow).sum()]
    gaps = np.diff(np.log(flow[order]))
    border, usual = float(gaps[num_bad - 1]), float(gaps[num_bad:].max(initial=0.0))
    if border > max(math.log(AT_ONCE), 3 * usual):
        branch = commonprefix([seen.names[n].split(".") for n in np.flatnonzero(is_bad)])
        inside = f", all in {'.'.join(branch)}," if branch else ""
        above, below = (seen.names[order[n]] for n in (num_bad, num_bad - 1))
        return Finding(
            "warn",
            f"{num_bad} of {len(flow)} matrices{inside} get almost no gradient: {least / middle:.1e} of the median",
            evidence=[
                f"gradient / weight: median {middle:.3g}, limit {VANISHED:g} x; least "
                + seen.worst(flow, largest=False),
                f"it drops by a factor of {math.exp(border):.3g} at once, from {above} to {below}",
            ],
            ruled_out=[
                f"gradients that vanish with depth: between other matrices it drops by {math.exp(usual):.3g} at most",
                "weights that are not trained (O9): these have a gradient above 0",
            ],
            probe=check(history) or "change what goes into this branch, and see whether the loss moves",
            remedy="look at what goes into this branch: an input that is withheld, masked or constant (an "
            "unconditional run trains what reads its condition on nothing), a gate near 0, a detach further on; freeze "
            "it if that is meant",
            title="A branch that the loss does not need",
            remedy_is_guess=True,
            hides=["O6", "O8"],
        )
    return Finding(
        "sick" if least < 1e-2 * VANISHED * middle else "warn",
        f"{num_bad} of {len(flow)} matrices get almost no gradient: {least / middle:.1e} of what the median gets",
        evidence=[
            f"gradient / weight: median {middle:.3g}, limit {VANISHED:g} x; least {seen.worst(flow, largest=False)}",
            f"most: {seen.worst(flow)}",
        ],
        ruled_out=[
            f"no gradient at all: the norm of the step is {total.median:.3g}",
            "weights that are not trained (O9): these have a gradient above 0, and frozen ones are not in the table",
        ],
        probe=check(history),
        remedy="use residual connections, a norm before each layer, an initialisation that fits the activation "
        "(Kaiming for ReLU), or an activation that does not saturate",
        hides=["O6", "O8"],
    )


@rule("O8", "Update size off in some tensors", needs=("tensors", "lr"))
def update_off(history: History) -> Finding | None:
    """Only while the rate is near its peak: at the end of a decay every update is small on purpose."""
    seen = recent(history)
    rates = history["lr"]
    if seen is None or not len(rates):
        return None
    near_peak = at(rates, seen.steps) >= 0.1 * rates.values.max()
    if near_peak.sum() < 2:
        return None
    ratio = median(seen.ratio[near_peak], axis=0)
    if np.isfinite(ratio).sum() < 4:  # too few for a median to compare with
        return None
    middle = float(np.nanmedian(ratio))
    stride = median(seen.stride[near_peak], axis=0)
    is_far = stride > STRIDES * float(np.nanmedian(stride))
    stands_out = (ratio > CLEARLY * middle) | ((ratio > STANDS_OUT * middle) & is_far)
    high = ((ratio > MOST) & stands_out) | (ratio > APART * middle)
    low = ((ratio < LEAST) & (ratio < middle / STANDS_OUT)) | (ratio < middle / APART)
    low &= ratio > 0  # exactly 0 is O9's
    if not (high | low).any():
        return None
    return Finding(
        "warn",
        f"{int(high.sum())} matrices are changed too much by each update and {int(low.sum())} too little",
        evidence=[
            f"update / weight: median over matrices {middle:.2g}; usual {LEAST:g} to {MOST:g}, and within x{APART}",
            f"too much: {seen.worst(np.where(high, ratio, np.nan), num=5)}" if high.any() else "",
            f"size of an update, relative to the median matrix, limit {STRIDES}: "
            + seen.worst(np.where(high, stride / np.nanmedian(stride), np.nan)) if (high & is_far).any() else "",
            f"too little: {seen.worst(np.where(low, ratio, np.nan), largest=False, num=5)}" if low.any() else "",
        ],
        ruled_out=[
            f"the learning rate as a whole (O1, O2): {int((~(high | low)).sum())} of {len(ratio)} are in range",
            f"weights close to zero: those below {SMALL:g} of the usual size are not counted",
        ],
        probe=f"rung show {history.run_id or 'RUN'}",
        remedy="give these tensors a learning rate of their own (a parameter group), or other initial weights",
    )  # fmt: skip


@rule("O9", "Parameters not updating", "scan", needs=("tensors|skipped|left_out|trained_parameters",))
def not_updating(history: History) -> Finding | None:
    """Exactly no change at each of three or more steps that were applied with lr > 0, in the whole history so far; or
    none but weight decay, as no step had a gradient.

    A vector whose gradient is exactly 0 while others move is info: the last bias of a discriminator with a hinge loss
    gets -1 from real and +1 from generated rows, until a margin is met.

    A parameter that no objective has is in no table. If the run names them (`left_out`: they require a gradient, and no
    objective has them) it is sick; if it knows only their number, they may be frozen on purpose.
    """
    left_out = [str(name) for name in history.derived.get("left_out") or ()]
    table = history.table("tensors")
    names: list[str] = []
    steps, grad, is_vector = np.zeros(0, np.int64), np.zeros((1, 0)), np.zeros(0, bool)
    if table is not None:
        applied = ~(at(history["skipped"], table.steps) > 0) & (at(history["lr"], table.steps) > 0)
        update, grad, steps = table.columns["update"][applied], table.columns["grad"][applied], table.steps[applied]
        still = (update == 0).sum(axis=0)
        frozen = (still >= 3) & (still == np.isfinite(update).sum(axis=0))  # NaN: its objective was not due
        without = (grad == 0).sum(axis=0)
        frozen |= (without >= 3) & (without == np.isfinite(grad).sum(axis=0)) & (table.columns["decayed"][-1] > 0)
        names, grad = list(compress(table.names, frozen)), grad[:, frozen]
        is_vector = ~(table.columns["decayed"][-1, frozen] > 0)
    if not names and not left_out:
        skipped, every = history["skipped"], history.derived.get("parameters") or 0
        trained = history.derived.get("trained_parameters") or 0
        # Nothing was measured because nothing was applied; unless N4 knows why.
        all_skipped = len(skipped) >= 3 and (skipped.values > 0).all() and not history.events_of("diverged")
        if all_skipped and first_struggle(history) is None:
            how, step = replay(history, int(skipped.steps[-1])), int(skipped.steps[-1])
            return Finding(
                "sick",
                f"none of {len(skipped)} steps was applied: all were skipped",
                since=int(skipped.steps[0]),
                evidence=[f"skipped is 1 at all of {len(skipped)} steps"],
                ruled_out=["parameters that no optimizer has: no parameter changed at all"],
                probe=how,
                remedy="find out why steps are skipped: gradients are not finite, or a loss scale never settles"
                + (f"; `{how}` takes step {step} again" if how else ""),
                remedy_is_guess=True,
            )
        if 0 < trained < every and "left_out" not in history.derived:
            return Finding(
                "info",
                f"{every - trained} of {every} parameters are in no objective ({1 - trained / every:.0%})",
                since=0,
                evidence=[f"the model has {every} trainable parameters, the objectives have {trained}"],
                ruled_out=["parameters that an objective has and does not move: each of these changed"],
                probe=check(history),
                remedy="nothing if they are frozen on purpose; else give an objective all parameters of the model",
            )
        if table is None and "left_out" not in history.derived:  # that steps were applied says nothing of the weights
            raise NotLooked("no tensor was measured", way("tensors", history))
        return None
    has_none = np.all(np.isnan(grad), axis=0)
    is_zero = ~has_none & np.all(np.nan_to_num(grad) == 0, axis=0)
    causes = {
        "in no objective": left_out,
        "no gradient: the loss does not depend on it, or it is detached": list(compress(names, has_none)),
        "a gradient of exactly 0": list(compress(names, is_zero)),
        "a gradient, and still no change": list(compress(names, ~has_none & ~is_zero)),
    }
    dead = bool(is_zero.any()) and not left_out
    num_all = len(table.names) + len(left_out) if table is not None else len(left_out)
    half = half_weights(history)
    smallest = f"if there is a gradient, the update is below the last digit of {half or 'float32'}: "
    smallest += "keep the trained weights in float32, and compute under autocast" if half else "raise the rate"
    is_benign = not left_out and len(names) < num_all and bool((is_zero & is_vector).all())
    return Finding(
        # (a script may leave parameters to nobody on purpose, and need not say so)
        "info" if is_benign else "warn" if history.is_script and not names else "sick",
        f"{len(names) + len(left_out)} of {num_all} parameters "
        + ("learn nothing, as their gradient is exactly 0: " if dead and is_zero.all() else "have not changed at all: ")
        + ", ".join([*left_out, *names][:5]),
        since=int(steps[0]) if len(steps) else 0,
        evidence=[f"{why}: {', '.join(which[:8])}" for why, which in causes.items() if which]
        + [f"no update but weight decay at {len(steps)} measured steps that were applied with lr > 0"],
        ruled_out=[
            "frozen on purpose: what does not require a gradient is not counted",
            f"skipped steps: {int((history['skipped'].values > 0).sum())} of {len(history['skipped'])}",
        ],
        probe=check(history),
        remedy=("look for dead units between them and the loss (a rectifier that is below 0 for every row: a bias far "
        "below 0, a scale or a shift before it), or a product with 0; " if dead else "")
        + "give the optimizer these parameters, or make the loss depend on them (look for detach, no_grad, a "
        f"branch that is never taken); {smallest}",
    )
