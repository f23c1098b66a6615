"""Rules about numbers that are not finite, the loss scale of float16, and runs that ended because of them; all scans.

Which operation made the first bad number, and in which precision, is for `rung replay`, which runs the captured step
again. One bad number shows in many places, so each step has one rule: a loss that is not finite makes the norm NaN too,
and is N1, not N2; weights that broke make the next loss NaN, and are N3, not N1. N7 is for what none of them names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import compress

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import (
    at,
    before,
    check,
    event_at,
    half_weights,
    listed,
    losses,
    micro_and_rank,
    names_the_cause,
    norms,
    own_diagnosis,
    replay,
    value,
)

HUGE = 1e15  # a norm that is larger is on its way to 1.8e19, whose square float32 cannot hold
CALIBRATION = 20  # skips: from the usual 2**16, seventeen halvings lead below 1
IN_A_ROW = 8  # skipped steps: eight halvings are a factor of 256, more than a scale is off by once it was found
SETTLED = 200  # steps after which a scale has been found
SKIP_RATE = 0.05


@rule("N1", "Loss not finite", "scan", needs=("loss|*/loss",))
def nonfinite_loss(history: History) -> Finding | None:
    """Any loss that is not finite. Where float16 overflows only in the gradients, the loss is finite: that is N4."""
    found = first_bad_loss(history)
    if found is None:
        return None
    step, name = found
    where = micro_and_rank(event_at(history, "diverged", step))
    num_bad = sum(series.num_bad for series in losses(history).values())
    continued, fewest = _continued(history, step), value(targets(history), step)
    half = half_weights(history)
    after = f"{num_bad} recorded losses are not, and the run continued" if continued else "the run cannot continue"
    return Finding(
        "sick" if continued else "fatal",
        f"{name} is not finite at step {step}{where}; {after}",
        since=step,
        evidence=[
            before(history, "loss", step),
            before(history, "norm", step),
            f"computed in {history.derived.get('dtype', 'an unknown type')} with lr {value(history['lr'], step):g}",
            own_diagnosis(history, step),
        ],
        ruled_out=[
            f"no targets (N6): the smallest micro had {fewest:g}" if fewest > 0 else "",
            "weights that broke before (N3): every recorded norm of a weight is finite",
            _no_explosion(history, step),
        ],
        probe=replay(history, step),
        remedy=(f"keep the trained weights in float32, and compute in half precision under `torch.autocast`: they are "
        f"{half}, in which Adam's eps of 1e-8 is 0; if they are not the cause, " if half == "float16" else "")
        + names_the_cause(history, step, "the operation, the row of data, and what was wrong before the step"),
        remedy_is_guess=half == "float16",
    )


@rule("N2", "Gradient norm not finite", "scan", needs=("norm|*/norm",))
def nonfinite_norm(history: History) -> Iterator[Finding]:
    """An element, the sum of squares, or the loss scale of float16. A step whose loss is bad too is left to N1."""
    for name, norm in norms(history).items():
        loss = history[name.removesuffix("norm") + "loss"]
        bad = np.setdiff1d(norm.steps[~np.isfinite(norm.values)], loss.steps[~np.isfinite(loss.values)])
        if len(bad) and "scale" in history:
            yield from overflow_under_scale(history, name, bad)
        elif len(bad):
            first, last = int(bad[0]), int(bad[-1])
            continued = bool(np.isfinite(history["loss"].between(last + 1, history.end).values).any())
            is_left_out = continued or bool((at(history["skipped"], bad) == 1).all())
            if not is_left_out or set(history.steps_of("diverged")) & set(bad.tolist()):
                yield _element_or_sum(history, name, first)
                continue
            # Somebody else left these steps out, as a GradScaler does that finds its scale: a NaN that had been applied
            # would have made every later loss NaN.
            yield Finding(
                "info",
                f"{name} is not finite at {len(bad)} steps, {first} to {last}, which were not applied",
                since=first,
                evidence=["the loss is finite after them" if continued else "they are recorded as skipped"],
                remedy="nothing, where a GradScaler finds its scale; log it to see: "
                "run.log({'scale': scaler.get_scale()})",
            )
    yield from norm_of_scaled(history)


def overflow_under_scale(history: History, name: str, bad: np.ndarray) -> Iterator[Finding]:
    """A norm that is not finite at some steps of a run with a scale: benign unless such a step was applied.

    Where `skipped` was not recorded, as in a script that steps through its own GradScaler, the scale left it out.
    """
    is_applied = at(history["skipped"], bad) == 0
    scale = history["scale"]
    if is_applied.any():
        step = int(bad[is_applied][0])
        yield Finding(
            "fatal",
            f"{name} is not finite at step {step}, and the step was applied all the same",
            since=step,
            evidence=[f"skipped is 0 at step {step}; the scale was {value(scale, step):g}"],
            ruled_out=[f"calibration: it skips the step, as it did {int((~is_applied).sum())} times"],
            probe=replay(history, step),
            remedy="check the norm before the update, and skip the update where it is not finite",
        )
    elif first_struggle(history) is None:
        yield Finding(
            "info",
            f"{name} is not finite at {len(bad)} steps, which were all skipped: float16 was finding its scale",
            since=int(bad[0]),
            evidence=[f"steps {listed(bad)}; the scale went from {scale.values[0]:g} to {scale.values[-1]:g}"],
            ruled_out=["a failure: no such step was applied, and the loss was finite at each"],
            probe=f"rung doctor {history.run_id or 'RUN'} --all",
            remedy="nothing to do; leave such steps out of any average of the norm",
        )


def norm_of_scaled(history: History) -> Iterator[Finding]:
    """A norm that was computed before the scale was divided out moves with the scale; seen in scripts only."""
    scale, norm = history["scale"], history["norm"].finite
    for change in np.flatnonzero(np.diff(scale.values)):
        old, new, step = scale.values[change], scale.values[change + 1], int(scale.steps[change + 1])
        usual, later = norm.between(0, step).last(10), norm.between(step, history.end)
        later = Series(later.steps[:10], later.values[:10])
        if min(len(usual), len(later)) < 10 or not usual.median > 0 or not later.median > 0:
            continue
        follows = math.log(later.median / usual.median) / math.log(new / old)
        # A healthy norm of .8 at a scale of 65536 is neither above 100 nor, divided by it, of the size of gradients.
        if 0.7 < follows < 1.3 and later.median > 100 and 1e-4 < later.median / new < 1e3:
            yield Finding(
                "warn",
                f"the norm follows the scale of float16: {usual.median:.3g} became {later.median:.3g} when the scale "
                f"went from {old:g} to {new:g} at step {step}",
                since=int(norm.steps[0]),
                evidence=[f"norm / scale = {later.median / new:.3g}, the size that gradients have"],
                ruled_out=[
                    f"gradients that changed by themselves: the ratio is the scale's, to {abs(follows - 1):.0%}"
                ],
                probe="print the norm before and after unscaling, for one step",
                remedy="call `scaler.unscale_(optimizer)` before the norm is computed and before anything is clipped: "
                "a limit of 1 on a scaled norm clips every step",
            )
            return


def _element_or_sum(history: History, name: str, step: int) -> Finding:
    """An element is not finite, or all are and only the sum of their squares is not.

    Only norms are recorded: a NaN never comes from a sum of squares; finite norms of all tensors make an overflow
    sure; a norm that was huge before makes it likely.
    """
    norm, table, bad_names = history[name], history.table("tensors"), None
    if table is not None and step in table.steps:
        grad = table.columns["grad"]
        row, has_any = grad[int(np.searchsorted(table.steps, step))], np.isfinite(grad).any(axis=0)
        bad = np.isinf(row) | (np.isnan(row) & has_any)  # a tensor that never had a gradient is recorded as NaN
        bad_names = list(compress(table.names, bad))
    earlier = norm.between(0, step).finite.last(3).values
    grew = bool(len(earlier)) and float(earlier.max()) > HUGE
    is_inf = bool(np.isinf(value(norm, step)))
    evidence = [
        before(history, name, step),
        own_diagnosis(history, step),
        f"tensors whose norm is not finite: {', '.join(bad_names[:5])}" if bad_names else "",
    ]
    forward = f"a bad forward pass (N1): the loss of the step is {value(history['loss'], step):g}"
    if is_inf and (grew or bad_names == []):
        why_finite = "the norm grew up to here" if grew else "the norm of each tensor is finite"
        return Finding(
            "sick",
            f"{name} is inf at step {step} though its elements are finite: the sum of squares overflowed",
            since=step,
            evidence=[*evidence, "float32 ends at 3.4e38, so squares overflow near 1.8e19; in float16 at 256"],
            ruled_out=[forward, f"an element that is not finite: {why_finite}"],
            probe=replay(history, step),
            remedy=names_the_cause(
                history,
                step,
                "what made gradients this large: the learning rate, the scale of the "
                "inputs, the initial weights, a division by almost 0",
            ),
        )
    clip = history.number("optimizer.grad_clip") or 0.0
    spread = "one inf becomes NaN and all others 0" if is_inf else "one NaN makes every gradient NaN"
    return Finding(
        "fatal",
        f"{name} is {value(norm, step):g} at step {step} while the loss is finite: an element of a gradient is "
        + ("infinite, or too large to be squared" if is_inf else "NaN"),
        since=step,
        evidence=[*evidence, f"when it is clipped at {clip:g}, {spread}" if clip else "optimizer.grad_clip is not set"],
        ruled_out=[forward, _no_explosion(history, step)],
        probe=replay(history, step),
        remedy=names_the_cause(history, step, "the operation whose backward is not finite, and what led to it")
        + "; a where() around a root or a division does not protect its gradient: make the argument safe inside it",
    )


@rule("N3", "Weights not finite", "scan", needs=("tensors|weights_broken",))
def nonfinite_weights(history: History) -> Finding | None:
    """From the event of a run that looked itself, else from the norms of the weights at the next measured step."""
    step = min(history.steps_of("weights_broken"), default=None)
    if step is not None:
        event = event_at(history, "weights_broken", step)
        names = [str(name) for name in event.get("tensors") or ()]
        gradients_finite = bool(event.get("gradients_finite", True))
    elif (table := history.table("tensors")) is not None:
        weight, grad = table.columns["weight"], table.columns["grad"]
        bad = np.isinf(weight) | (np.isnan(weight) & ~np.isnan(grad))  # all is NaN where an objective was not due
        rows = np.flatnonzero(bad.any(axis=1))
        if not len(rows):
            return None
        step = max(0, int(table.steps[rows[0]]) - 1)  # weights are measured before an update
        names = list(compress(table.names, bad[rows[0]]))
        gradients_finite = bool(np.isfinite(value(history["norm"], step)))
    else:
        return None
    # The step that was kept is the one that first showed it: this one, or one after it.
    kept = min((at for at in history.steps_of("diverged") if at >= step), default=step)
    seen = f"the gradient norm of the step is {value(history['norm'], step):g}"
    why = "the gradients were finite: the update broke them" if gradients_finite else "the gradients were not either"
    return Finding(
        "sick" if _continued(history, step + 1) else "fatal",
        f"{len(names)} tensors are not finite after step {step} ({', '.join(names[:5])}); {why}",
        since=step,
        evidence=[
            seen,
            f"lr {value(history['lr'], step):g}, optimizer.eps {history.config.get('optimizer.eps', 'unknown')}, "
            f"optimizer.weight_decay {history.config.get('optimizer.weight_decay', 'unknown')}",
            own_diagnosis(history, step),
        ],
        ruled_out=[
            f"a bad batch: {seen}, its loss {value(history['loss'], step):g}"
            if gradients_finite
            else "the optimizer alone: its gradients were not finite"
        ],
        probe=replay(history, kept),
        remedy="keep the trained weights in float32 and compute under autocast: eps and squares of gradients do not "
        f"fit {half_weights(history)}"
        if half_weights(history)
        else names_the_cause(
            history, kept, "what broke them: the learning rate, the optimizer's state, or code that writes into weights"
        )
        + "; then go back to a save from before it",
        remedy_is_guess=not half_weights(history),
        hides=["N1", "N2"],
    )


@rule("N4", "float16 does not fit", "scan", needs=("scale", "skipped"))
def float16_struggles(history: History) -> Finding | None:
    found = first_struggle(history)
    if found is None:
        return None
    step, seen = found
    scale, skipped = history["scale"], history["skipped"]
    ended = [s for s in history.steps_of("diverged") if s >= step]
    return Finding(
        "fatal" if ended else "warn",
        f"float16 overflows and its scale does not settle: {seen}",
        since=step,
        evidence=[
            f"{int((skipped.values > 0).sum())} of {len(skipped)} steps were skipped; "
            f"the scale is {scale.values[-1]:g}, the least was {scale.values.min():g}",
            before(history, "norm", step),
            own_diagnosis(history, ended[0]) if ended else "",
        ],
        ruled_out=[
            f"calibration: that ends within {CALIBRATION} skips and keeps the scale above 1",
            f"a bad forward pass (N1): {history['loss'].num_bad} losses are not finite",
        ],
        probe=replay(history, ended[0] if ended else step),
        remedy="use bfloat16, which has the range of float32; or keep the operation that a replay names in float32",
        changes={"system.dtype": "bfloat16"},
    )


def first_struggle(history: History) -> tuple[int, str] | None:
    """The first step at which the scale was wrong, and how."""
    scale, skipped = history["scale"], history["skipped"]
    if not len(scale) or not len(skipped):
        return None
    # A guard ends where a GradScaler has come down to 1: what overflows there is no calibration.
    is_end = (scale.values <= 1) & np.isin(scale.steps, history.steps_of("diverged"))
    low = np.flatnonzero((scale.values < 1) | is_end)[:1]
    found = [(int(scale.steps[n]), f"it is {scale.values[n]:g}") for n in low]
    is_skip = skipped.values > 0
    counted = (is_skip & (np.cumsum(is_skip) > CALIBRATION)).astype(float)
    in_a_row = np.flatnonzero(np.convolve(counted, np.ones(IN_A_ROW), "full")[: len(counted)] > IN_A_ROW - 0.5)[:1]
    found += [(int(skipped.steps[n]), f"{IN_A_ROW} steps in a row were skipped") for n in in_a_row]
    late = skipped.steps >= SETTLED
    if late.sum() >= WINDOW:
        rates = np.convolve(is_skip[late], np.ones(WINDOW), "valid") / WINDOW
        ends = skipped.steps[late][WINDOW - 1 :]
        often = np.flatnonzero(rates > SKIP_RATE)[:1]
        found += [(int(ends[n]), f"{rates[n]:.0%} of {WINDOW} steps were skipped") for n in often]
    return min(found, default=None)


@rule("N6", "Micros without targets", "scan", needs=("targets|targets_min",))
def empty_targets(history: History) -> Finding | None:
    """Explains N1 where a count of 0 comes with a bad loss. A row that attends to nothing is not counted anywhere and
    cannot be seen here: `rung replay` finds it."""
    counts = targets(history)
    if not len(counts):
        return None
    low, middle, least = float(np.percentile(counts.values, 5)), counts.median, counts.values.min()
    empty = counts.steps[counts.values == 0]
    # A step without a target is recorded with a loss of NaN; harmless, unless the step was left out because of it.
    is_left_out = (at(history["skipped"], empty) > 0) | np.isin(empty, history.steps_of("diverged"))
    bad = empty[is_left_out & ~np.isfinite(at(history["loss"], empty))]
    idle = empty[at(history["targets"], empty) == 0]
    finding = Finding(
        "warn",
        "",
        evidence=[f"targets of the smallest micro: median {middle:g}, 5th percentile {low:g}, least {least:g}"],
        probe=check(history),
        remedy="drop rows without targets from the data; return a sum of losses and their count, never a mean",
    )
    if len(bad):
        finding.severity, finding.since = "fatal", int(bad[0])
        finding.what = f"a micro of step {bad[0]} has no target, and the loss of the step is not finite"
        finding.evidence += [f"such steps: {listed(bad)}", own_diagnosis(history, int(bad[0]))]
        finding.ruled_out = ["a bad forward pass (N1): the mean of no losses is 0/0, whatever the model predicts"]
        finding.probe = replay(history, int(bad[0]))
    elif first_bad_loss(history) is not None:
        return None  # a warning would hide what is worse
    elif len(idle):
        finding.since = int(idle[0])
        finding.what = f"{len(idle)} steps had no target and changed nothing (steps {listed(idle)})"
        finding.ruled_out = ["a failure: their sums were finite, and they were not applied"]
    elif len(counts) >= 50 and low < 0.1 * middle:  # of fewer counts the 5th percentile is one value or two
        finding.since = int(counts.steps[counts.values <= low][0])
        finding.what = f"5 % of steps have a micro with {low:g} targets or fewer, where the median is {middle:g}"
        finding.ruled_out = [
            f"rows of equal worth: in a mean of means a target there weighs {middle / max(low, 1):.0f} x"
        ]
    else:
        return None
    return finding


@rule("N7", "A step failed", "scan")
def step_failed(history: History) -> Finding | None:
    """A run that diverged or crashed, or a step that failed and was skipped; hidden where another rule names the step.

    Goes by the run's own events and status, so that no such run is ever called healthy.
    """
    events = [event for event in history.events_of("diverged") if isinstance(event.get("step"), int)]
    ended = history.status == "diverged"  # what crashed is R6's
    if not events and not ended:
        return None
    continued = not ended and (history.status == "finished" or _continued(history, events[-1]["step"]))
    event = {} if not events else events[0] if continued else events[-1]
    step = int(event.get("step", history.end))
    what = f"the run {history.status} at step {step}" if ended else f"step {step} failed"
    what += " and was left out" if continued else ""
    why = str(event.get("why") or history.reason or "the run does not say why")
    return Finding(
        "warn" if continued else "fatal",
        f"{what}: {why}",
        since=step,
        evidence=[
            own_diagnosis(history, step),
            f"captured in {event['capture']}" if event.get("capture") else "",
            f"{len(events)} steps failed: {listed([e['step'] for e in events])}" if events[1:] else "",
            before(history, "loss", step),
        ],
        probe=replay(history, step),
        remedy=names_the_cause(history, step, "the cause"),
    )


def targets(history: History) -> Series:
    """Targets of the smallest micro of each step; of the step, where it has one micro only."""
    return history["targets_min"] if len(history["targets_min"]) else history["targets"]


def first_bad_loss(history: History) -> tuple[int, str] | None:
    """The step and the name of the first loss that is not finite although it had targets."""
    found = []
    for name, series in losses(history).items():
        bad = series.steps[~np.isfinite(series.values)]
        bad = bad[at(history["targets"], bad) != 0]
        found += [(int(bad[0]), name)] if len(bad) else []
    for step in history.steps_of("rollback"):  # taken again since, and finite now
        for row in history.superseded.get(step, ()):
            found += [(step, "loss")] if not np.isfinite(row.get("loss", 0.0)) and row.get("targets") != 0 else []
    return min(found, default=None)


def _continued(history: History, step: int) -> bool:
    """Finite losses after a step that was left out or undone: not the end, and so not fatal."""
    good = history["loss"].finite.steps
    return bool(len(good)) and int(good[-1]) > step


def _no_explosion(history: History, step: int) -> str:
    """Rules out that gradients grew beforehand; empty where they did."""
    earlier = history["norm"].between(0, step).finite
    recent, usual = earlier.last(4).values, earlier.median
    if not len(recent) or not usual > 0 or recent.max() > 10 * usual:
        return ""
    return f"exploding gradients: the norm was at most {recent.max():.3g} just before, {usual:.3g} in the median"
