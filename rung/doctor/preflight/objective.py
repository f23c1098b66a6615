"""Asks whether training and eval mean the same by a loss, and whether an eval says the same twice.

Which targets count is seen from outside: a prediction on which the summed loss has no gradient does not count. That
works wherever a loss function of torch judges predictions; elsewhere only the counts that the loss returns are
compared, and the result says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rung.doctor.preflight.batches import is_place
from rung.doctor.preflight.forward import at_step, forward, gap_of, mean_of, paired, stilled_forward, watch
from rung.doctor.preflight.result import CheckContext, NotApplicable, Result, check
from rung.engine.config import SCRATCH
from rung.engine.evaluate import Evaluator
from rung.engine.op_tracer import OpTracer
from rung.engine.parallel import World
from rung.engine.prefetch import Micro
from rung.random import Draw
from rung.recipe import Batch, Loss

ROWS = 4
SAME_LOSS = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}
SAME_EVAL = 1e-6
DRAWS = 16  # of training and eval, for the mean of what is random
SURE = 4.0  # standard errors
APART = 3.0  # spreads of one draw: noise moves the loss of a new model by about its own spread, smoothing by more
DRAWN = 0.01  # of the loss or of the targets: a difference that matters
SHOWN = 24  # positions of a listed row at either end; between them only those around a change


class _LossTrace(NamedTuple):
    """A forward, and per call of a loss function, in the shape of its targets, which count; None: cannot be seen."""

    loss: Loss
    tracer: OpTracer
    counted: list[Tensor | None]
    mean: float


def _trace_loss(context: CheckContext, micro: Micro, is_training: bool = False) -> _LossTrace:
    loss, tracer = watch(context, micro, is_training)
    counted: list[Tensor | None] = []
    for call in tracer.loss_calls:
        gradient = None
        if call.predictions.requires_grad and loss.sum.requires_grad:
            (gradient,) = torch.autograd.grad(loss.sum, call.predictions, retain_graph=True, allow_unused=True)
        if gradient is None:
            counted.append(None)
        elif call.ignore_index is not None and gradient.dim() > call.targets.dim():
            counted.append((gradient != 0).any(dim=min(1, gradient.dim() - 1)))
        else:
            counted.append(gradient != 0)
    return _LossTrace(loss, tracer, counted, mean_of(loss.sum, loss.count))


@check("same objective", "E3")
def same_objective(context: CheckContext) -> Iterator[Result]:
    """One batch through the loss as in training and as in eval, with the same random numbers on both sides.

    Counts and counted targets must be equal: an eval over other targets measures something else, and at step 0 the
    loss does not show it yet. Those of training are taken in training mode too, where a mask may hide behind
    `model.training`. Where even the same random numbers choose other targets, the mean of their number is compared.

    Losses are compared in eval mode on both sides, and then in both modes with dropout stilled. A difference may be
    meant: parts that only training has (the opinion of a discriminator), or noise that the loss draws in training and
    leaves out of evals. So where the parts differ in name those of one name are compared; and noise must explain the
    difference: stilled, it must be gone, or many draws must agree with the eval in the mean. A difference that neither
    explains is worth a warning, and none is a failure, because the same targets are judged.
    """
    rows, tolerance = context.micro, SAME_LOSS[context.setup.precision.name]
    in_training, as_train = (_trace_loss(context, rows, is_training) for is_training in (True, False))
    as_eval = _trace_loss(context, paired(rows))
    detail = listing(rows, as_eval.tracer, as_eval.counted)
    remedy = "if eval leaves a term out on purpose, return it as a part in training; else compute one loss for both"
    if differing := _other_targets(as_train, as_eval) or _other_targets(in_training, as_eval):
        if not (drawn := _other_targets(as_train, _trace_loss(context, at_step(rows, 1)))):
            yield Result("fail", differing, "give training and eval one mask", detail=detail)
            return
        counts = np.array([[float(one.count) for one in pair] for pair in _pairs(context, rows)])
        mean, error = _mean_of((counts[:, 0] - counts[:, 1]) / max(1.0, counts.max()))
        if abs(mean) <= max(DRAWN, SURE * error):
            raise NotApplicable(f"the targets are drawn, in evals otherwise than in training: of two draws, {drawn}")
        number, in_evals = counts.mean(0)
        seen = f"of the same rows training draws {number:.4g} targets on average, an eval {in_evals:.4g}"
        yield Result("warn", seen, "draw the targets of evals as those of training", detail=detail)
        return

    seen = f"{float(as_eval.loss.count):g} targets"
    if all(one is None for one in as_eval.counted):
        seen += " (which ones is not known: the loss calls no loss function of torch)"
    seen += f"; loss {as_train.mean:.6g} under a training draw, {as_eval.mean:.6g} under that of an eval"
    only, gap = _apart(as_train.loss, as_eval.loss)
    more = f"; only one of them has {', '.join(only)}" if only else ""
    if gap > tolerance:
        level, why = _explain(context, rows, gap, tolerance)
    else:
        level, why = "pass", "the same random numbers in both"
    yield Result(level, f"{seen}{more}: {why}", remedy, detail=detail)
    if level != "warn":
        yield from _same_in_both_modes(context, tolerance)


def _explain(context: CheckContext, rows: Micro, gap: float, tolerance: float) -> tuple[str, str]:
    """What is to be said of a difference between a training draw and that of an eval."""
    losses = [[mean_of(one.sum, one.count) for one in pair] for pair in _pairs(context, rows)]
    in_training, gaps = [pair[0] for pair in losses], np.array([a - b for a, b in losses])
    if gap_of(min(in_training), max(in_training)) <= tolerance:
        return "warn", f"a difference of {gap:.2g}, which no random number explains"
    left: list[tuple[float, float]] = []  # stilled losses of training, and how far they are from those of evals
    for value in (0.5, 1 - 2**-24, 0.0):
        stilled, in_eval = (stilled_forward(context, micro, value) for micro in (rows, paired(rows)))
        left.append((mean_of(stilled.sum, stilled.count), _apart(stilled, in_eval)[1]))
        if left[-1][1] <= tolerance:
            return "pass", "noise of training alone explains it; stilled, both are the same"
    # Where two values still it to one loss nothing is dropped in either, and what is left is no noise.
    if twice := [b for a, b in pairwise(left) if gap_of(a[0], b[0]) <= tolerance]:
        return "warn", f"a difference of {twice[0][1]:.2g} is left when the noise of training is stilled"
    (mean, error), spread = _mean_of(gaps), float(gaps.std(ddof=1))
    scale = max(abs(value) for pair in losses for value in pair)
    seen = f"over {len(gaps)} draws training lies {mean:+.3g} +- {SURE * error:.2g} from an eval"
    is_new = context.setup.cfg.init_from in SCRATCH and context.setup.state.progress.step == 0
    if is_new and abs(mean) > APART * spread + tolerance * scale:
        return "warn", f"{seen}, which its noise does not explain"
    if abs(mean) <= SURE * error <= DRAWN * scale:
        return "pass", f"{seen}: noise"
    return "skip", f"{seen}: its noise cannot be stilled, and may explain that"


def _same_in_both_modes(context: CheckContext, tolerance: float) -> Iterator[Result]:
    """Whether the loss asks for `model.training` for more than dropout and statistics."""
    rows, model = context.micro, context.setup.state.model
    # Statistics of the batch are meant to be others in training; an own dropout that nothing stills differs by itself.
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses = [stilled_forward(context, at_step(rows, n), 0.5, is_training=True) for n in (0, 0, 1)]
    moved = any(not torch.equal(before[name], b) for name, b in model.named_buffers() if name in before)
    for name, buffer in model.named_buffers():
        if name in before:
            buffer.copy_(before[name])
    in_eval_mode = [stilled_forward(context, at_step(rows, n), 0.5) for n in (0, 1)]
    only, gap = _apart(losses[0], in_eval_mode[0])
    is_random = _apart(losses[0], losses[1])[1] > tolerance or (
        gap_of(_apart(losses[2], in_eval_mode[1])[1], gap) > 0.5 and not only
    )
    if gap <= tolerance or moved or is_random:
        return
    a, b = (mean_of(one.sum, one.count) for one in (losses[0], in_eval_mode[0]))
    seen = f"loss {a:.6g} in training mode, {b:.6g} in eval mode, with dropout stilled in both"
    remedy = "compute one loss in both modes; a term that only training has is a part of the loss"
    yield Result("warn", seen, remedy, name="same loss in both modes")


def _pairs(context: CheckContext, rows: Micro) -> list[tuple[Loss, Loss]]:
    """Losses of some draws of training, and of evals with the same random numbers."""
    draws = [at_step(rows, number) for number in range(DRAWS)]
    return [(forward(context, micro), forward(context, paired(micro))) for micro in draws]


def _mean_of(values: np.ndarray) -> tuple[float, float]:
    """The mean, and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _apart(a: Loss, b: Loss) -> tuple[list[str], float]:
    """Parts that only one of them has, and how far the rest is apart."""
    only = sorted(a.parts.keys() ^ b.parts.keys())
    if not only:
        return [], gap_of(mean_of(a.sum, a.count), mean_of(b.sum, b.count))
    gaps = [gap_of(mean_of(*a.parts[name]), mean_of(*b.parts[name])) for name in a.parts.keys() & b.parts.keys()]
    return only, max(gaps, default=0.0)


def _other_targets(a: _LossTrace, b: _LossTrace) -> str:
    """How the counted targets differ; empty where they do not. Calls that only one side makes are not compared."""
    if float(a.loss.count) != float(b.loss.count):
        return f"the same rows have {float(a.loss.count):g} targets in training and {float(b.loss.count):g} in eval"
    for one, other, in_a, in_b in zip(a.tracer.loss_calls, b.tracer.loss_calls, a.counted, b.counted):
        if one.function != other.function or in_a is None or in_b is None or in_a.shape != in_b.shape:
            continue
        if one.ignore_index is None and not torch.equal(one.predictions, other.predictions):
            continue  # an l1 of exactly 0 has no gradient either: only classes can be told from other predictions
        if num := int((in_a != in_b).sum()):
            some = one.targets[in_a != in_b].unique()[:5].tolist() if one.targets.shape == in_a.shape else []
            return f"of {float(a.loss.count):g} targets {num} count in only one of the two" + (
                f", with ids such as {some}" if one.ignore_index is not None and some else ""
            )
    return ""


def listing(micro: Micro, tracer: OpTracer, counted: Sequence[Tensor | None]) -> str:
    """One row of the batch, position by position: the input, the target, and whether it counts.

    Empty where no loss function with classes was seen.
    """
    num_rows = len(micro.ids)
    for call, counts in zip(tracer.loss_calls, counted):
        is_plain = call.ignore_index is not None and not call.targets.is_floating_point()
        if counts is None or not is_plain or counts.shape != call.targets.shape or counts.numel() % num_rows:
            continue
        targets, marks = (t.reshape(num_rows, -1)[0].tolist() for t in (call.targets, counts))
        inputs: Sequence[int | None] = [None] * len(targets)
        for lookup in tracer.lookups:
            # What is looked up once per target; positions themselves are the same in all rows.
            if lookup.ids.numel() == len(targets) * num_rows and not is_place(lookup.ids, num_rows):
                inputs = lookup.ids.reshape(num_rows, -1)[0].tolist()
                break
        first = f"row {micro.ids[0]} of train: {sum(marks)} of {len(marks)} positions count"
        return "\n".join([first, "position  input  target", *listing_lines(inputs, targets, marks)])
    return ""


def listing_lines(inputs: Sequence[int | None], targets: Sequence[int], marks: Sequence[bool]) -> list[str]:
    lines: list[str] = []
    hidden_from: int | None = None
    labels = ["counted" if mark else "not counted" for mark in marks]
    for at, label in enumerate(labels):
        if at < SHOWN or at >= len(marks) - SHOWN or len(set(marks[max(0, at - 2) : at + 3])) > 1:
            if hidden_from is not None:
                lines.append(f"{hidden_from} to {at - 1}  {labels[at - 1]}")
                hidden_from = None
            entered = "-" if inputs[at] is None else inputs[at]
            lines.append(f"{at:>8}  {entered:>5}  {targets[at]:>6}  {label}")
        elif hidden_from is None:
            hidden_from = at
    return lines


@check("same eval twice", "E4")
def same_eval(context: CheckContext) -> Result:
    """Two evals of the same weights: equal, in eval mode, and without a trace."""
    setup, model = context.setup, context.setup.state.model
    streams = dict(list(setup.evaluator.streams.items())[: 1 if context.is_quick else None])
    if not streams:
        raise NotApplicable("the recipe has no eval set")
    in_training: set[str] = set()

    def loss(batch: Batch, draw: Draw) -> Loss:
        in_training.update(name or "the model" for name, module in model.named_modules() if module.training)
        return setup.state.objectives[0].plain_loss(batch, draw)

    world = World(0, 1, setup.world.device)
    objective = replace(setup.state.objectives[0], loss=loss, eager=None)
    evaluator = Evaluator(setup.recipe, streams, objective, setup.precision, world, ROWS, 1, setup.cfg.seed)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with OpTracer(model) as tracer:
        first, second = evaluator.run(model), evaluator.run(model)
    moved = [
        name for name, buffer in model.named_buffers()
        if name in before and not (buffer.shape == before[name].shape and torch.equal(buffer, before[name]))
    ]  # fmt: skip
    gaps = {f"{name} {part}": gap_of(value, second[name][part]) for name, values in first.items()
            for part, value in values.items() if value == value}  # fmt: skip
    worst = max(gaps, key=lambda name: gaps[name])
    wrong = []
    if tracer.dropout_calls:
        dropout = tracer.dropout_calls[0]
        wrong.append(f"dropout {dropout.share:g} is at work in {dropout.module or 'the loss'}")
    elif in_training:
        wrong.append(f"{min(in_training)} is in training mode")
    if moved:
        context.shared["moved"] = moved[0]
        wrong.append(f"the eval moves {moved[0]}" + (f" and {len(moved) - 1} more buffers" if moved[1:] else ""))
    if gaps[worst] > SAME_EVAL:
        wrong.append(f"two evals differ by {gaps[worst]:.2g} in {worst}")
    if wrong:
        remedy = (
            "register every module with its parent, and make dropout and statistics depend on self.training; draw "
            "random numbers through `draw`"
        )
        return Result("fail", "; ".join(wrong), remedy)
    values = ", ".join(f"{name} {values['loss']:.4g}" for name, values in first.items())
    return Result("pass", f"{values}, twice; no dropout, no buffer moved")
