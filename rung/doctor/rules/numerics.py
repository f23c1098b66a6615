"""Rules about numbers that are not finite. All are scans: such things happen at a step.

Which operation made the first bad number is not asked here: `rung replay` runs the captured step again and answers it.

The surprising thing: one bad number shows in many places, so each step has one rule. A loss that is not finite makes
the norm NaN too, and is N1 and not N2; weights that broke make the next loss NaN, and are N3 and not N1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import History, Series, Table
from rung.doctor.rules import rule
from rung.doctor.rules.float16 import norm_of_scaled, overflow_under_scale
from rung.doctor.rules.lookups import at, before, event_at, listed, losses, norms, replay, steps_of, value

HUGE = 1e15  # a norm that is larger is on its way to 1.8e19, whose square float32 cannot hold


@rule("N1", "Loss not finite", "scan", in_warmup=True)
def nonfinite_loss(history: History) -> Finding | None:
    """Any loss that is not finite. With float16, where only gradients overflow, the loss is finite: that is N4."""
    found = first_bad_loss(history)
    if found is None:
        return None
    step, name = found
    event = event_at(history, "diverged", step)
    where = ", ".join(f"{key} {event[key]}" for key in ("micro", "rank") if event.get(key) is not None)
    num_bad = sum(series.num_bad for series in losses(history).values())
    went_on = _went_on(history, step)
    return Finding(
        "N1",
        "sick" if went_on else "fatal",
        f"{name} is not finite at step {step}{f' ({where})' if where else ''}; "
        + (
            f"{num_bad} losses in the record are so, and the run went on" if went_on else "the run cannot go on from it"
        ),
        since=step,
        evidence=[
            before(history, "loss", step),
            before(history, "norm", step),
            f"computed in {history.derived.get('dtype', 'an unknown type')} with lr {value(history['lr'], step):g}",
            *_origin(history, step),
        ],
        ruled_out=[
            *_had_targets(history, step),
            "weights that broke before (N3): no look at them found one that is not finite",
            *_no_explosion(history, step),
        ],
        probe=replay(history, step),
        remedy="replay the step: it names the operation, the row of data, and whether another precision helps",
    )


@rule("N2", "Gradient norm not finite", "scan", in_warmup=True)
def nonfinite_norm(history: History) -> Iterator[Finding]:
    """Four diseases with one symptom. A step whose loss is bad too is left to N1."""
    for name, norm in norms(history).items():
        loss = history[name.removesuffix("norm") + "loss"]
        bad = norm.steps[~np.isfinite(norm.values) & np.isfinite(at(loss, norm.steps))]
        if len(bad) and "scale" in history:
            yield from overflow_under_scale(history, name, bad)
        elif len(bad):
            yield _element_or_sum(history, name, int(bad[0]))
    yield from norm_of_scaled(history)


def _element_or_sum(history: History, name: str, step: int) -> Finding:
    """An element is not finite, or all are and only the sum of their squares is not.

    What is recorded are norms, not elements, so the nearest is asked: a NaN never comes from a sum of squares; norms of
    single tensors that are all finite make an overflow sure; a norm that was huge before makes it likely.
    """
    norm, table = history[name], history.table("tensors")
    is_measured = table is not None and step in table.steps
    bad_names = _bad_gradients(table, step) if table is not None and is_measured else []
    earlier = norm.between(0, step).finite.last(3).values
    grew = bool(len(earlier)) and float(earlier.max()) > HUGE
    is_inf = bool(np.isinf(value(norm, step)))
    evidence = [before(history, name, step), *_origin(history, step)]
    if bad_names:
        evidence.append(f"tensors whose norm is not finite: {', '.join(bad_names[:5])}")
    forward = f"a bad forward (N1): the loss of the step is {value(history['loss'], step):g}"
    if is_inf and (grew or (is_measured and not bad_names)):
        norms_say = "the norms of the single tensors are finite" if not grew else "the norm grew up to here"
        return Finding(
            "N2",
            "sick",
            f"{name} is inf at step {step} though its elements are finite: the sum of squares overflowed",
            since=step,
            evidence=[*evidence, "float32 ends at 3.4e38, so a norm does near 1.8e19; in float16 it does at 256"],
            ruled_out=[forward, f"an element that is not finite: {norms_say}"],
            probe=replay(history, step),
            remedy="take norms in a wider type, or divide by the largest element first; and see why gradients are this "
            "large: the learning rate, the first weights, a division by almost nothing",
        )
    clip = float(history.config.get("optimizer.grad_clip") or 0)
    spread = "one inf becomes NaN and all others 0" if is_inf else "one NaN makes every gradient NaN"
    return Finding(
        "N2",
        "fatal",
        f"{name} is {value(norm, step):g} at step {step} while the loss is finite: an element of a gradient is "
        + ("infinite, or too large to be squared" if is_inf else "not a number"),
        since=step,
        evidence=[*evidence, f"when it is clipped at {clip:g}, {spread}" if clip else "clipping is off"],
        ruled_out=[forward, *_no_explosion(history, step)],
        probe=replay(history, step),
        remedy="replay the step: it names the operation whose backward is not finite; a where() around a root or a "
        "division does not help its gradient: make the argument safe inside of it",
    )


@rule("N3", "Weights not finite", "scan", in_warmup=True)
def nonfinite_weights(history: History) -> Finding | None:
    """Told by the run itself where it looked; else the norms of the weights tell, a look later."""
    found = _broken_by_event(history) or _broken_by_norm(history)
    if found is None:
        return None
    step, names, gradients_finite = found
    seen = f"the gradient norm of the step is {value(history['norm'], step):g}"
    why = "its gradients were finite: the update broke them" if gradients_finite else "nor were its gradients"
    config = history.config
    return Finding(
        "N3",
        "sick" if _went_on(history, step + 1) else "fatal",
        f"{len(names)} tensors are not finite after step {step} ({', '.join(names[:5])}); {why}",
        since=step,
        evidence=[
            seen,
            f"lr {value(history['lr'], step):g}, optimizer.eps {config.get('optimizer.eps', 'unknown')}, "
            f"optimizer.weight_decay {config.get('optimizer.weight_decay', 'unknown')}",
        ],
        ruled_out=[
            f"a bad batch: {seen}, its loss {value(history['loss'], step):g}"
            if gradients_finite
            else "the optimizer alone: what it was given was not finite"
        ],
        probe=replay(history, step),
        remedy="go back to the last save before the step; then look at eps in the type of the weights, at squares of "
        "gradients that overflow, at lr times weight decay, and at code that writes into weights",
        hides=["N1", "N2"],
    )


@rule("N6", "Micros without targets", "scan", in_warmup=True)
def empty_targets(history: History) -> Finding | None:
    """Explains N1 where a count of 0 comes with a bad loss. A row that attends to nothing leaves no count behind and
    cannot be seen here: replay finds it."""
    counts = targets(history)
    if not len(counts):
        return None
    low, middle, least = float(np.percentile(counts.values, 5)), counts.median, counts.values.min()
    empty = counts.steps[counts.values == 0]
    bad = np.asarray([step for step in empty if _could_not_be_applied(history, int(step))], np.int64)
    idle = empty[at(history["targets"], empty) == 0]
    finding = Finding(
        "N6",
        "warn",
        "",
        evidence=[f"targets of the smallest micro: median {middle:g}, 5th percentile {low:g}, least {least:g}"],
        probe=f"rung check {history.run_id}",
        remedy="leave rows without targets out of the data; return a sum of losses and their count, never a mean",
    )
    if len(bad):
        finding.severity, finding.since = "fatal", int(bad[0])
        finding.what = f"a micro of step {bad[0]} has no target, and the loss of the step is not finite"
        finding.evidence.append(f"such steps: {listed(bad)}")
        finding.ruled_out = ["a bad forward (N1): the mean of no losses is 0/0, whatever the model says"]
    elif first_bad_loss(history) is not None:
        return None  # what follows would hide what is worse
    elif len(idle):
        finding.since = int(idle[0])
        finding.what = f"{len(idle)} steps had no target at all and changed nothing (steps {listed(idle)})"
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


def _had_targets(history: History, step: int) -> list[str]:
    fewest = value(targets(history), step)
    return [f"no targets (N6): the smallest micro had {fewest:g}"] if fewest > 0 else []


def targets(history: History) -> Series:
    """Targets of the smallest micro of each step; of the step, where it has one micro only."""
    return history["targets_min"] if len(history["targets_min"]) else history["targets"]


def first_bad_loss(history: History) -> tuple[int, str] | None:
    """The step and the name of the first loss that is not finite though it had targets: of nothing, the mean is NaN."""
    found = []
    for name, series in losses(history).items():
        bad = series.steps[~np.isfinite(series.values)]
        bad = bad[at(history["targets"], bad) != 0]
        found += [(int(bad[0]), name)] if len(bad) else []
    for step in steps_of(history, "rollback"):  # done again since, and finite now
        for row in history.superseded.get(step, ()):
            found += [(step, "loss")] if not np.isfinite(row.get("loss", 0.0)) and row.get("targets") != 0 else []
    return min(found, default=None)


def _went_on(history: History, step: int) -> bool:
    """A step that was left out, or undone, and finite losses after it: not the end, and so not fatal."""
    good = history["loss"].finite.steps
    return bool(len(good)) and int(good[-1]) > step


def _could_not_be_applied(history: History, step: int) -> bool:
    """A step without any target has the loss NaN in the record; harmless, unless it was left out because of it."""
    is_left_out = value(history["skipped"], step) > 0 or bool(event_at(history, "diverged", step))
    return is_left_out and not np.isfinite(value(history["loss"], step))


def _broken_by_event(history: History) -> tuple[int, list[str], bool] | None:
    step = min(steps_of(history, "weights_broken"), default=None)
    if step is None:
        return None
    event = event_at(history, "weights_broken", step)
    return step, [str(n) for n in event.get("tensors") or ()], bool(event.get("gradients_finite", True))


def _broken_by_norm(history: History) -> tuple[int, list[str], bool] | None:
    """Weights are measured before an update: a bad norm at a step was made before it."""
    table = history.table("tensors")
    if table is None:
        return None
    weight, grad = table.columns["weight"], table.columns["grad"]
    bad = np.isinf(weight) | (np.isnan(weight) & ~np.isnan(grad))  # all is NaN where an objective was not due
    rows = np.flatnonzero(bad.any(axis=1))
    if not len(rows):
        return None
    step = max(0, int(table.steps[rows[0]]) - 1)
    names = [name for name, is_bad in zip(table.names, bad[rows[0]], strict=True) if is_bad]
    return step, names, bool(np.isfinite(value(history["norm"], step)))


def _bad_gradients(table: Table, step: int) -> list[str]:
    """A tensor that never had a gradient has NaN in place of a norm, and is not meant."""
    grad = table.columns["grad"]
    row, has_any = grad[int(np.searchsorted(table.steps, step))], np.isfinite(grad).any(axis=0)
    bad = np.isinf(row) | (np.isnan(row) & has_any)
    return [name for name, is_bad in zip(table.names, bad, strict=True) if is_bad]


def _origin(history: History, step: int) -> list[str]:
    event = event_at(history, "diverged", step)
    said = event.get("diagnosis") or event.get("origin")
    return [f"what the run saw at once: {said}"] if said else []


def _no_explosion(history: History, step: int) -> list[str]:
    """Gradients that grew beforehand are a rival cause; where they did not, this says so in numbers."""
    earlier = history["norm"].between(0, step).finite
    recent, usual = earlier.last(4).values, earlier.median
    if not len(recent) or not usual > 0 or recent.max() > 10 * usual:
        return []
    return [f"exploding gradients: the norm was {recent.max():.3g} at most just before, usually {usual:.3g}"]
