"""The rule about spikes: a loss or a norm that jumps, stays finite, and recovers or does not.

`rung.robust.surprise` defines a jump, in a run in progress and here, for a whole curve at once. Most jumps are
harmless: a batch with a rare row has a loss that jumps and is back at the next step. Weights that were thrown off need
longer to recover; and a batch that is predicted worse than by the untrained model, as hardly any other is, is broken.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import listed, replay, value
from rung.robust import BEFORE, FLOOR, LATELY, LEAST, MEMORY, RISE, surprise

HIGH = 8.0  # of 98 healthy runs none reaches it; a step at 100 times the rate 86, a batch of one repeated token 72
NEAR = 8  # steps: jumps that are closer are one
AT_ONCE = 2  # steps in which the loss recovers from one odd batch; 20 and more after a rate that was too high
SURPRISE = 2.3  # rms of gradient over expectation, in a tensor, 1 to 8 steps before
MANY, OVER = 10, 2000  # spikes in so many steps: 0.5 %


@rule("O5", "Spike", "scan", needs=("loss|norm",))
def spike(history: History) -> Finding | None:
    found = {name: _spikes(history, name) for name in ("loss", "norm")}
    steps = sorted({step for of in found.values() for step in of})
    if not steps:
        return None
    loss, in_loss = history["loss"].finite, sorted(found["loss"])
    lasting = [step for step in in_loss if _lasts(loss, step)]
    stays = [step for step in lasting if not _recovers(history["loss"], step)]
    broken = [step for step in in_loss if step not in lasting and _is_broken_batch(loss, step)]
    first = (lasting or broken or in_loss or steps)[0]
    sigmas = ", ".join(f"{name} {of[first]:.0f}" for name, of in found.items() if first in of)
    lr, beta2 = history["lr"], history.number("optimizer.beta2") or 0.95

    # The most lasting spikes in OVER steps. Those of half the height count too: after one, others surprise less.
    rate = 0
    if lasting:
        jump = value(loss, lasting[0]) - _usual(loss, lasting[0])
        is_high = _residuals(loss.values)[1] > jump / 2
        high = [int(step) for step in loss.steps[BEFORE:][is_high] if step >= lasting[0]]
        apart = [step for step, last in zip(high, [lasting[0] - OVER, *high], strict=False) if step - last > NEAR]
        slow = np.asarray([step for step in apart if _lasts(loss, step)])
        rate = int(max((((slow > step - OVER) & (slow <= step)).sum() for step in slow), default=0))

    # Tensors whose gradients exceeded what Adam expected just before; not early on, when all do (3.1 to step 60).
    leading, table = [], history.table("tensors")
    if table is not None and first >= max(100, 3 * history.warmup_steps, 1 / (1 - beta2)):
        for row in np.flatnonzero((table.steps >= first - NEAR) & (table.steps < first)):
            rms = table.columns["rms"][row]
            largest = [n for n in np.argsort(-np.nan_to_num(rms))[:3] if rms[n] >= SURPRISE]
            if largest:
                named = ", ".join(f"{table.names[n]} {rms[n]:.2g}" for n in largest)
                step = table.steps[row]
                leading.append(f"gradients larger than Adam expected at step {step}, limit {SURPRISE}: {named}")
    return Finding(
        # A norm that jumps alone is what clipping is for; a loss that is back at once is the tail of the data.
        "sick" if rate > MANY or stays else "warn" if lasting or broken else "info",
        f"{_jump(history, 'loss' if in_loss else 'norm', first)} at step {first}"
        + (f", one of {len(steps)} spikes" if len(steps) > 1 else "")
        + (f"; after step {stays[0]} the loss does not recover within {WINDOW} steps" if stays else ""),
        since=first,
        evidence=[
            f"spreads above the level of the {BEFORE} steps before: {sigmas} (limit {HIGH:g})",
            *(_jump(history, name, first) for name in found),
            *leading,
            f"spikes in the loss: {len(in_loss)}; of these {len(lasting)} took more than {AT_ONCE} steps to recover, "
            f"at most {rate} in {OVER} steps (limit {MANY})",
            f"one batch is predicted worse than by the untrained model: step {broken[0]}" if broken else "",
        ],
        ruled_out=[
            f"the learning rate: {value(lr, first):.3g} at the step, {value(lr, first - 1):.3g} before it",
            "the beginning of an epoch, or an eval: such steps are not counted",
            f"weights that were thrown off: the loss is back at once after steps {listed(in_loss)}"
            if in_loss and not lasting else "",
        ],
        probe=replay(history, first),
        remedy=f"look at the batch of step {first} (long repeats, a row unlike the others); leaving it out, a lower "
        "optimizer.beta2, or clipping at the usual norm may help",
        remedy_is_guess=True,
        changes={"optimizer.beta2": 0.95} if lasting and beta2 > 0.95 else {},
    )  # fmt: skip


def scores(values: np.ndarray) -> np.ndarray:
    """The score of `rung.robust.Spikes` for each value; computed only for the few that are high enough."""
    found = np.zeros(len(values))
    if len(values) <= BEFORE + LEAST + RISE:
        return found
    expected, residual = _residuals(values)
    floor = FLOOR * np.maximum(abs(np.median(values[:BEFORE])), np.abs(expected))
    padded = np.concatenate([np.full(MEMORY, -np.inf), residual])
    largest = sliding_window_view(padded, MEMORY)[: len(residual) - RISE].max(axis=1)  # of what lies before RISE steps
    is_high = residual[RISE:] > np.maximum(floor[RISE:], 2 * largest)
    for n in RISE + np.flatnonzero(is_high):
        if n >= LEAST + RISE:
            earlier = residual[max(0, n - RISE - MEMORY) : n - RISE].tolist()
            found[BEFORE + n] = surprise(float(residual[n]), earlier, float(floor[n]))
    return found


def _residuals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What was expected, and how far each value is from it; without the first BEFORE values."""
    expected = np.median(sliding_window_view(values, BEFORE)[:-1], axis=1)
    return expected, values[BEFORE:] - expected


def _spikes(history: History, name: str) -> dict[int, float]:
    """Step and score of each spike; neighbours count once."""
    series = history[name].finite
    all_scores = scores(series.values)
    high = all_scores > HIGH
    found: dict[int, float] = {}
    last = -NEAR
    rows, epoch = history.derived.get("rows_per_step") or 0, history.derived.get("epoch_rows") or 0
    for step, score in zip(series.steps[high], all_scores[high], strict=True):
        begins_epoch = False
        if rows and epoch and step > 0:
            first, last_row = int(step) * rows, (int(step) + 1) * rows - 1
            begins_epoch = first // epoch != last_row // epoch or first % epoch == 0
        follows_eval = any(step in of["loss"].steps for of in history.evals.values() if "loss" in of)
        if step >= history.warmup_steps and not begins_epoch and not follows_eval:
            if step - last > NEAR:
                found[int(step)] = float(score)
            last = int(step)
    return found


def _lasts(loss: Series, step: int) -> bool:
    """Whether the loss stays above half of the jump for longer than one hard batch explains; no if not known yet."""
    after = loss.between(step + 1, step + NEAR).values[:AT_ONCE]
    return len(after) == AT_ONCE and bool(after.min() > (_usual(loss, step) + value(loss, step)) / 2)


def _is_broken_batch(loss: Series, step: int) -> bool:
    """Predicted worse than anything at the start of the run, and at most two other batches reach a quarter of the jump.

    A batch of one repeated token has 5 to 6.9 where the run began with 3.5, and no other batch deviates by a twentieth
    of that. With one wrong label in a hundred, or one row of a rare class, there are dozens alike.
    """
    if loss.steps[0] >= BEFORE or value(loss, step) <= loss.values[:BEFORE].max():  # the start is unknown, or as bad
        return False
    _, residual = _residuals(loss.values)
    jump = value(loss, step) - _usual(loss, step)
    others = np.abs(loss.steps[BEFORE:] - step) > NEAR
    return int((residual[others] > jump / 4).sum()) < 3


def _recovers(loss: Series, step: int) -> bool:
    """Whether the loss recovers within a window; assumed while there are fewer steps after it."""
    before, after = loss.between(0, step).finite.last(LATELY), loss.between(step, step + WINDOW).finite
    if len(loss.between(step, step + WINDOW)) < WINDOW or len(after) < BEFORE:
        return True
    level = np.median(sliding_window_view(after.values, BEFORE), axis=1)
    return bool(level.min() <= before.last(BEFORE).median + 3 * before.sigma)


def _usual(series: Series, step: int) -> float:
    """The level of the steps before this one."""
    return series.between(0, step).finite.last(BEFORE).median


def _jump(history: History, name: str, step: int) -> str:
    return f"{name} {_usual(history[name], step):.4g} -> {value(history[name], step):.4g}"
