"""Rules about the loss scale of float16: when its skipped steps are calibration, and when they are a disease.

Whether it is the precision, the device or the model that fails is not decided here: replay computes the captured step
again in wider types and on another device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import before, listed, replay, steps_of, value

CALIBRATION = 20  # skips: from the usual 2**16, seventeen halvings lead below 1
IN_A_ROW = 8  # skipped steps: eight halvings are a factor of 256, more than a scale is off by once it was found
SETTLED = 200  # steps after which a scale has been found
SKIP_RATE = 0.05


@rule("N4", "float16 does not fit", "scan", in_warmup=True)
def float16_struggles(history: History) -> Finding | None:
    found = first_struggle(history)
    if found is None:
        return None
    step, seen = found
    scale, skipped = history["scale"], history["skipped"]
    ended = [s for s in steps_of(history, "diverged") if s >= step]
    return Finding(
        "N4",
        "fatal" if ended else "warn",
        f"float16 overflows and its scale does not settle: {seen}",
        since=step,
        evidence=[
            f"{int((skipped.values > 0).sum())} of {len(skipped)} steps were left out; "
            f"the scale is {scale.values[-1]:g}, the least was {scale.values.min():g}",
            before(history, "norm", step),
        ],
        ruled_out=[
            f"calibration: that is the first {CALIBRATION} skips and a scale above 1",
            f"a bad forward (N1): {history['loss'].num_bad} losses are not finite",
        ],
        probe=replay(history, ended[0] if ended else step),
        remedy="use bfloat16, whose range is that of float32; or keep the operation that replay names in float32",
        changes={"system.dtype": "bfloat16"},
    )


def first_struggle(history: History) -> tuple[int, str] | None:
    """The first step at which the scale had gone wrong, and how."""
    scale, skipped = history["scale"], history["skipped"]
    if not len(scale) or not len(skipped):
        return None
    low = np.flatnonzero(scale.values < 1)[:1]
    found = [(int(scale.steps[n]), f"it is {scale.values[n]:g}, below 1") for n in low]
    is_skip = skipped.values > 0
    counted = (is_skip & (np.cumsum(is_skip) > CALIBRATION)).astype(float)
    in_a_row = np.flatnonzero(np.convolve(counted, np.ones(IN_A_ROW), "full")[: len(counted)] > IN_A_ROW - 0.5)[:1]
    found += [(int(skipped.steps[n]), f"{IN_A_ROW} steps in a row were left out") for n in in_a_row]
    late = skipped.steps >= SETTLED
    if late.sum() >= WINDOW:
        rates = np.convolve(is_skip[late], np.ones(WINDOW), "valid") / WINDOW
        ends = skipped.steps[late][WINDOW - 1 :]
        often = np.flatnonzero(rates > SKIP_RATE)[:1]
        found += [(int(ends[n]), f"{rates[n]:.0%} of {WINDOW} steps were left out") for n in often]
    return min(found, default=None)


def overflow_under_scale(history: History, name: str, bad: np.ndarray) -> Iterator[Finding]:
    """A norm that is not finite at some steps of a run with a scale: benign where the scale left them out."""
    is_skipped = np.isin(bad, history["skipped"].steps[history["skipped"].values > 0])
    scale = history["scale"]
    if not is_skipped.all():
        step = int(bad[~is_skipped][0])
        yield Finding(
            "N2",
            "fatal",
            f"{name} is not finite at step {step}, which was applied all the same",
            since=step,
            evidence=[f"skipped is 0 at step {step}; the scale was {value(scale, step):g}"],
            ruled_out=[f"calibration: it leaves a step out, as it did {int(is_skipped.sum())} times"],
            probe=replay(history, step),
            remedy="look at the norm before the update, and leave the update out where it is not finite",
        )
    elif first_struggle(history) is None:
        yield Finding(
            "N2",
            "info",
            f"{name} is not finite at {len(bad)} steps, which were all left out: float16 was finding its scale",
            since=int(bad[0]),
            evidence=[f"steps {listed(bad)}; the scale went from {scale.values[0]:g} to {scale.values[-1]:g}"],
            ruled_out=["a failure: no such step was applied, and the loss was finite at each"],
            probe=f"rung doctor {history.run_id}",
            remedy="nothing to do; leave such steps out of any average of the norm",
        )


def norm_of_scaled(history: History) -> Iterator[Finding]:
    """A norm that was taken before the scale was divided out moves with the scale.

    rung takes it afterwards; this is for records of other loops.
    """
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
                "N2",
                "warn",
                f"the norm follows the scale of float16: {usual.median:.3g} became {later.median:.3g} when the scale "
                f"went from {old:g} to {new:g} at step {step}",
                since=int(norm.steps[0]),
                evidence=[f"norm / scale = {later.median / new:.3g}, the size that gradients have"],
                ruled_out=[
                    f"gradients that changed by themselves: the ratio is the scale's, to {abs(follows - 1):.0%}"
                ],
                probe="print the norm before and after unscaling, for one step",
                remedy="divide the scale out (unscale_) before the norm is taken and before anything is clipped: "
                "a limit of 1 on a scaled norm clips every step",
            )
            return
