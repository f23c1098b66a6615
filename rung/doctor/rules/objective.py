"""Rules about what is minimised and how it is evaluated: flat evals, overfitting, padding, losses too good to be true.

Whether train and eval mean the same loss is checked before a run starts, not here. An eval set is fixed, so the
standard error of its loss is far larger than the difference of two evals of the same rows; "flat" therefore also means
flat beside the training loss.
"""

from __future__ import annotations

import math

import numpy as np

from rung.doctor.finding import Finding
from rung.doctor.history import EMPTY, WINDOW, History, Series
from rung.doctor.rules import NotLooked, rule
from rung.doctor.rules.lookups import check
from rung.robust import SIGMA

SMOOTH = 20  # steps of training whose median stands for a moment
FEWEST_TARGETS = 64  # of a look, below which the share of one id says nothing
CHAIN = 2.0  # targets in a row, from which on there is padding, and neighbours that may leak the answer


@rule("E1", "Flat eval", "scan", needs=("eval/*/loss:5", "loss"))  # a scan: five evals are three looks in a row
def flat_eval(history: History) -> Finding | None:
    """Five evals and no change, while the training loss moved."""
    name, losses, errors = first_set(history)
    if len(losses) < 5:
        raise NotLooked(f"{len(losses)} evals on {name} are too few", "five evals")
    first, best, worst = float(losses.values[0]), float(losses.values.min()), float(losses.values.max())
    error = errors.median if len(errors) else eval_noise(losses)
    before, after = _around(history, int(losses.steps[0])), _around(history, int(losses.steps[-1]))
    moved = before.median - after.median
    noise = max(after.sigma, 1e-12)
    gain = abs(first - best)
    is_constant = worst == best
    # Slow but real progress (.003 per epoch) is flattening, not flat: it is a good part of what training gained.
    is_flat = gain < 2 * error and worst - best < 3 * error and gain < 0.1 * moved
    if not (moved > 5 * noise and (is_constant or is_flat)):
        return None
    return Finding(
        "sick" if is_constant else "warn",
        f"{len(losses)} evals on {name} gave {'exactly ' if is_constant else ''}{first:.4f} "
        f"{'' if is_constant else f'to {best:.4f} '}while the training loss fell by {moved:.3g}",
        since=int(losses.steps[0]),
        evidence=[
            f"eval from {first:.5f} at step {int(losses.steps[0])} to {losses.values[-1]:.5f} at step "
            f"{int(losses.steps[-1])}; standard error {error:.3g}, limit 2 of them and a tenth of the training gain",
            f"training from {before.median:.4g} to {after.median:.4g}, {moved / noise:.0f} times its spread (limit 5)",
        ],
        ruled_out=[
            f"slow progress: {gain:.3g} is {gain / moved:.1%} of what training gained",
            f"overfitting: evals rose by at most {worst - first:.3g}",
        ],
        probe="evaluate the initial weights and the last save: equal losses mean that the eval does not use the "
        "weights that are trained",
        remedy="check whether a copy of the model is evaluated (an average that never moves, a stale compiled one), "
        "and whether the eval set has anything in common with the training data",
        hides=["L4", "L5"] if is_constant else [],
    )  # fmt: skip


@rule("E2", "Overfitting", "scan", needs=("eval/*/loss:4", "loss"))
def overfit(history: History) -> Finding | None:
    """Three evals above the best one by more than its error, while the training loss falls.

    Not within the first epoch: nothing can have been memorised before every row was seen once.
    """
    name, losses, errors = first_set(history)
    if len(losses) < 4:
        raise NotLooked(f"{len(losses)} evals on {name} are too few", "four evals")
    at = int(losses.values.argmin())
    best, best_step = float(losses.values[at]), int(losses.steps[at])
    if math.isfinite(history.steps_per_epoch) and losses.steps[-1] <= history.steps_per_epoch:
        return None
    # A set that fits one batch has no standard error, nor has a script: how much evals jump about is their noise then.
    # They are few, so that a rise has to be larger; one of a tenth is clear by itself.
    noise = errors.median if len(errors) else eval_noise(losses)
    margin = max(3 * noise, 0.01 * abs(best)) if len(errors) else min(max(3 * noise, 0.03 * abs(best)), 0.1 * abs(best))
    later = losses.values[at + 1 :]
    if len(later) < 3 or not (later[-3:] - best > margin).all():
        return None
    before, after = _around(history, best_step), _around(history, int(losses.steps[-1]))
    fallen = before.median - after.median
    if not fallen > max(after.sigma, 0.0):
        return None
    rise = float(later[-1]) - best
    limit = "three standard errors or 1 %" if len(errors) else "three times how evals jump about, of 3 to 10 %"
    per_epoch = history.steps_per_epoch
    targets = float(history["targets"].finite.between(0, best_step).values.sum())
    parameters = history.derived.get("parameters")
    rates = history["lr"].finite.between(best_step, history.end).last(WINDOW * 10).values
    # What speaks against memorised rows, and for a training target that is not the one of the eval.
    early = losses.between(best_step + 1, int(min(per_epoch, history.end)) + 1)
    errors_at_one = [
        (name, of[name].last(3).values, of["persistence@1"].last(3).values)
        for of in history.evals.values()
        for name in of
        if name.endswith("@1")
        and name.partition("@")[0] in ("l1", "l2", "mse", "mae", "rmse")
        and "persistence@1" in of
    ]
    not_memory = []
    if len(early) and (early.values - best > margin).any():
        not_memory.append(f"the eval rose by {float(early.values.max()) - best:.3g} before every row was seen once")
    not_memory += [
        f"{name} is {ours[-1]:.3g}, that of predicting no change {still[-1]:.3g}: not even one step ahead was learned"
        for name, ours, still in errors_at_one
        if len(ours) == len(still) == 3 and (ours > still).all()
    ]
    has_dropout = any(key.endswith("dropout") and (history.number(key) or 0) > 0 for key in history.config)
    if after.median > best + margin and not has_dropout:
        not_memory.append(f"the training loss is still {after.median:.4g}, above the best eval: nothing was memorised")
    if not_memory:
        return Finding(
            "sick" if rise > 0.1 * abs(best) else "warn",
            f"the loss on {name} was best at step {best_step} ({best:.4f}) and is {rise:.4f} above it at step "
            f"{int(losses.steps[-1])}, while the training loss fell by {fallen:.3g}; not because rows were memorised",
            since=best_step,
            evidence=[*not_memory, f"training {before.median:.4g} at the best step, {after.median:.4g} now"],
            ruled_out=[f"overfitting: {not_memory[0]}"],
            probe=check(history)
            or "compute the training loss and the eval loss on the same rows with the same weights",
            remedy="compare what training and eval ask for: a target that is shifted by a step or a frame, another "
            "normalisation, another loss; in a rollout, which output is compared with which frame",
            title="Training and eval pull apart",
            remedy_is_guess=True,
        )
    shorter = {"optimizer.max_iters": best_step} if best_step >= 2 else {}
    if shorter and best_step <= history.warmup_steps:  # the warm-up has to end before the run does
        shorter["lr.warmup_iters"] = best_step // 2
    return Finding(
        "sick" if rise > 0.1 * abs(best) else "warn",
        f"the loss on {name} was best at step {best_step} ({best:.4f}) and is {rise:.4f} above it at step "
        f"{int(losses.steps[-1])}, while the training loss fell by {fallen:.3g}",
        since=best_step,
        evidence=[
            "last three evals above the best by "
            + ", ".join(f"{v - best:.4f}" for v in later[-3:])
            + f" (limit {margin:.4f}: {limit})",
            f"training {before.median:.4g} at the best step, {after.median:.4g} now",
            f"epochs: {best_step / per_epoch:.2g} at the best step, {history.end / per_epoch:.2g} now"
            + (f"; {targets / parameters:.2g} targets per parameter then" if targets and parameters else ""),
        ],
        ruled_out=[
            (f"noise of the eval: its standard error is {errors.median:.2g}, the rise {rise:.2g}" if len(errors) else
             f"noise of the eval: it jumps about by {noise:.2g}, the rise is {rise:.2g}"),
            f"divergence: the training loss fell by {fallen:.3g} in the same steps",
            "" if len(rates) > 1 and np.diff(rates).max() > 0 else "a learning rate that rose again: it did not",
        ],
        probe="train the same config on twice the data: the best eval should come later and be lower",
        remedy="stop at the best step (its checkpoint is kept), or use more data, a smaller model, dropout or more "
        "weight decay",
        changes=shorter,
    )  # fmt: skip


@rule(
    "E5",
    "Padding dominates the loss",
    needs=("logits/target_share", "logits/target_loss", "targets", "rows_per_step"),
)
def padding_dominates(history: History) -> Finding | None:
    """One id makes up most targets and costs nothing, so that the loss says little about the others."""
    names = ("target_share", "target_loss", "other_loss", "loss", "targets")
    share, easy, content, reported, targets = (history[f"logits/{name}"].finite.last(3).median for name in names)
    if len(history["logits/target_share"]) < 3 or targets < FEWEST_TARGETS or not targets_a_row(history) >= CHAIN:
        return None  # with one target a row the commonest class is no padding, however rare the others are
    factor = content / reported if reported > 0 else math.nan
    if not (easy < 0.05 and (share > 0.5 or factor > 2)):
        return None
    return Finding(
        "warn",
        f"one id is {share:.0%} of the targets and costs {easy:.3g} nats; the others cost {content:.3g}, the reported "
        f"loss is {reported:.3g}",
        evidence=[
            f"limits: one id above 50 % with a loss below .05, or others above twice the reported loss (here "
            f"{factor:.2g} times)",
            f"medians of the last three looks, of {targets:.0f} targets each" if targets == targets else
            "medians of the last three looks",
        ],
        ruled_out=[f"a class that is frequent and hard: its loss is {easy:.3g}, that of padding is below .05"],
        probe="print the commonest target id of a batch, and what it stands for",
        remedy="leave it out of the loss (ignore_index) and of the count of targets; report the loss per class",
    )  # fmt: skip


@rule("E6", "Too good to be true", needs=("loss", "logits/loss", "epoch_rows", "rows_per_step"))
def too_good(history: History) -> Finding | None:
    """Less than .05 nat before every row was seen once, when nothing can have been memorised.

    With one target a row there is no neighbour to read it from, and easy classes are common (ten kinds of pictures:
    .0009 nat after an epoch, .0013 on the eval): then it is info, and only if the eval agrees.
    """
    losses = history["loss"].finite.between(0, int(min(history.steps_per_epoch, history.end))).last(SMOOTH)
    if len(losses) < SMOOTH or math.isinf(history.steps_per_epoch) or not losses.median < 0.05:
        return None
    if not history["logits/loss"].finite.last(3).median < 0.05:  # only a cross entropy is in nats, and is looked at
        return None
    entropy = history["logits/target_entropy"].finite.median
    if entropy < 0.5:  # targets that hardly vary need no leak: that is E5
        return None
    loss = history["loss"].finite
    _, evals, _ = first_set(history)
    is_chain = targets_a_row(history) >= CHAIN
    if not is_chain and not (len(evals) and evals.values[-1] < 0.05):
        return None
    return Finding(
        "warn" if is_chain else "info",
        f"the loss is {losses.median:.3g} nats after {losses.steps[-1] / history.steps_per_epoch:.2g} epochs: rows "
        "that were never seen before are predicted almost perfectly (limit .05 within the first epoch)",
        since=int(loss.steps[loss.values < 0.05][0]),
        evidence=[
            f"entropy of the targets alone {entropy:.3g} nats, of {history['logits/vocab'].median:.0f} classes",
            f"eval {evals.values[-1]:.4g}" if len(evals) else "no eval yet",
        ],
        ruled_out=[
            "memorised rows: less than one epoch was seen",
            f"targets that hardly vary: knowing only their frequencies would cost {entropy:.3g} nats",
        ],
        probe="remove the inputs one by one, to see which one it needs" if not is_chain else
        "change the inputs after a position, and see whether predictions before it move"
        + (f"; `{check(history)}` does that" if not history.is_script else ""),
        remedy=("look for a missing causal mask, targets that are not shifted, or an input that leaks the answer; "
                "nothing to do if the data is deterministic by design") if is_chain
        else "nothing, if the classes are that easy; else look for an input that leaks the answer",
    )  # fmt: skip


def eval_noise(losses: Series) -> float:
    """How evals jump about, of a set without standard errors: from second differences, which are free of any trend."""
    bends = np.diff(losses.values, 2)
    return float(np.median(np.abs(bends)) * SIGMA / math.sqrt(6)) if len(bends) >= 2 else 0.0


def targets_a_row(history: History) -> float:
    """As counted in training, not as the stream declares them."""
    rows = history.derived.get("rows_per_step")
    return history["targets"].last().median / rows if rows else math.nan


def first_set(history: History) -> tuple[str, Series, Series]:
    """The eval set that chooses the best: its name, its losses, and their standard errors."""
    for name, measures in history.evals.items():
        losses = measures.get("loss", EMPTY).finite
        return name, losses, measures.get("loss_se", EMPTY).finite
    return "", EMPTY, EMPTY


def _around(history: History, step: int) -> Series:
    """The training losses just before this step, or after it where there are none before."""
    losses = history["loss"].finite
    before = losses.between(max(0, step - SMOOTH), step)
    return before if len(before) >= SMOOTH // 2 else losses.between(step, step + SMOOTH)
