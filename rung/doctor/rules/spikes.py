"""The rule about spikes: a loss or a norm that jumps, stays finite, and comes back or does not.

A jump is measured against the sixteen steps before it and in robust sigmas of such surprises, as `rung.robust.Spikes`
does it while a run is going on; here for a whole curve at once. Healthy curves reach 4.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rung.doctor.finding import Finding
from rung.doctor.history import WINDOW, History, Series
from rung.doctor.rules import rule
from rung.doctor.rules.lookups import replay, value
from rung.robust import BEFORE, RESIDUALS, SIGMA

HIGH = 8.0  # healthy curves reach 2.3 to 3.7; a step at 100 times the rate 42, a batch of one repeated token 48
FLOOR = 1e-3  # of the value itself: a curve that hardly moves has a sigma near 0, and jumps below 1 % are no matter
NEAR = 8  # steps: jumps that are closer are one
SURPRISE = 2.3  # rms of gradient over expectation, in a tensor, 1 to 8 steps before
MANY, OVER = 10, 2000  # spikes in so many steps: 0.5 %


@rule("O5", "Spike", "scan")
def spike(history: History) -> Finding | None:
    found = {name: _spikes(history, name) for name in ("loss", "norm")}
    steps = sorted({step for of in found.values() for step in of})
    if not steps:
        return None
    in_loss = sorted(found["loss"])
    first = (in_loss or steps)[0]
    rate = max(int(((np.asarray(in_loss) > s - OVER) & (np.asarray(in_loss) <= s)).sum()) for s in in_loss or [0])
    stays = [step for step in in_loss if not _returns(history["loss"], step)]
    sigmas = ", ".join(f"{name} {of[first]:.0f}" for name, of in found.items() if first in of)
    lr = history["lr"]
    return Finding(
        "O5",
        # A norm that jumps alone is what clipping is for.
        "sick" if rate > MANY or stays else "warn" if in_loss else "info",
        f"{_jump(history, 'loss' if in_loss else 'norm', first)} at step {first}"
        + (f", the first of {len(steps)} spikes" if len(steps) > 1 else "")
        + (f"; after step {stays[0]} the loss does not come back in {WINDOW} steps" if stays else ""),
        since=first,
        evidence=[
            f"robust sigmas above what the {BEFORE} steps before let expect: {sigmas} (limit {HIGH:g}, healthy < 4)",
            *(_jump(history, name, first) for name in found),
            *_leading(history, first),
            f"spikes in the loss: {len(in_loss)}, at most {rate} in {OVER} steps (limit {MANY})",
        ],
        ruled_out=[
            f"the learning rate: {value(lr, first):.3g} at the step, {value(lr, first - 1):.3g} before it",
            "the beginning of an epoch, or an eval: such steps are not counted",
        ],
        probe=replay(history, first),
        remedy="replay the batch on older weights and other batches on these: only both together tell data from state; "
        "then skip the batch (look for long repeats in it), lower optimizer.beta2, or clip by the usual norm",
        changes={"optimizer.beta2": 0.95} if float(history.config.get("optimizer.beta2") or 0) > 0.95 else {},
    )


def scores(values: np.ndarray) -> np.ndarray:
    """How many robust sigmas each value lies above expectation; 0 for the first ones."""
    found = np.zeros(len(values))
    if len(values) <= BEFORE + RESIDUALS // 2:
        return found
    expected = np.median(sliding_window_view(values, BEFORE)[:-1], axis=1)
    residual = values[BEFORE:] - expected
    for number in range(RESIDUALS // 2, min(RESIDUALS, len(residual))):  # while there are fewer to compare with
        found[BEFORE + number] = _score(residual[None, :number], residual[number], expected[number])[0]
    for start in range(RESIDUALS, len(residual), 4096):  # in pieces, for memory
        rows = np.arange(start, min(start + 4096, len(residual)))
        windows = sliding_window_view(residual, RESIDUALS)[rows - RESIDUALS]
        found[BEFORE + rows] = _score(windows, residual[rows], expected[rows])
    return found


def _score(windows: np.ndarray, residual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    centre = np.median(windows, axis=1)
    spread = SIGMA * np.median(np.abs(windows - centre[:, None]), axis=1)
    return np.asarray((residual - centre) / np.maximum(spread, np.maximum(FLOOR * np.abs(expected), 1e-12)))


def _spikes(history: History, name: str) -> dict[int, float]:
    """Step and score of each; neighbours count once."""
    series = history[name].finite
    all_scores = scores(series.values)
    high = all_scores > HIGH
    found: dict[int, float] = {}
    last = -NEAR
    for step, score in zip(series.steps[high], all_scores[high], strict=True):
        if step >= history.warmup_steps and not _is_border(history, int(step)):
            if step - last > NEAR:
                found[int(step)] = float(score)
            last = int(step)
    return found


def _is_border(history: History, step: int) -> bool:
    """An eval was made just before it, or an epoch begins in it."""
    rows, epoch = history.derived.get("rows_per_step") or 0, history.derived.get("epoch_rows") or 0
    begins = bool(rows and epoch) and step > 0 and (step * rows) // epoch != ((step + 1) * rows - 1) // epoch
    begins |= bool(rows and epoch) and step > 0 and (step * rows) % epoch == 0
    return begins or any(step in of["loss"].steps for of in history.evals.values() if "loss" in of)


def _returns(loss: Series, step: int) -> bool:
    """Whether the loss comes back within a window; so it is assumed while there are fewer steps after it."""
    before, after = loss.between(0, step).finite.last(RESIDUALS), loss.between(step, step + WINDOW).finite
    if len(loss.between(step, step + WINDOW)) < WINDOW or len(after) < BEFORE:
        return True
    level = np.median(sliding_window_view(after.values, BEFORE), axis=1)
    return bool(level.min() <= before.last(BEFORE).median + 3 * before.sigma)


def _leading(history: History, step: int) -> list[str]:
    """Tensors whose gradients surprised Adam just before; not early on, when that is usual (3.1 in steps 20 to 60)."""
    table = history.table("tensors")
    beta2 = float(history.config.get("optimizer.beta2") or 0.95)
    if table is None or step < max(100, 3 * history.warmup_steps, 1 / (1 - beta2)):
        return []
    rows = np.flatnonzero((table.steps >= step - NEAR) & (table.steps < step))
    found = []
    for row in rows:
        rms = table.columns["rms"][row]
        which = [f"{table.names[n]} {rms[n]:.2g}" for n in np.argsort(-np.nan_to_num(rms))[:3] if rms[n] >= SURPRISE]
        if which:
            found.append(f"gradients larger than Adam expected at step {table.steps[row]}, limit {SURPRISE}: "
                         + ", ".join(which))  # fmt: skip
    return found


def _jump(history: History, name: str, step: int) -> str:
    before = history[name].between(0, step).finite.last(BEFORE).median
    return f"{name} {before:.4g} -> {value(history[name], step):.4g}"
