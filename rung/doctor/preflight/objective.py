"""Asks whether training and eval mean the same by a loss, and whether an eval says the same twice.

Which targets count is seen from outside: a prediction on which the summed loss has no gradient does not count. That
works wherever a loss function of torch judges predictions; elsewhere only the counts that the loss returns are
compared, and the result says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rung.data.prefetch import Micro
from rung.doctor.preflight.forward import NotAsked, gap_of, in_eval, mean_of, watch
from rung.doctor.preflight.listing import listing
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.evaluate import Evaluator
from rung.engine.lens import Judged, Lens
from rung.engine.parallel import World
from rung.recipe import Batch, Draw, Loss

ROWS = 4
SAME_LOSS = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}
SAME_EVAL = 1e-6


def counted(loss: Loss, judged: Sequence[Judged]) -> list[Tensor | None]:
    """Per call of a loss function, in the shape of its targets: whether the target counts. None: cannot be seen."""
    found: list[Tensor | None] = []
    for one in judged:
        gradient = None
        if one.predictions.requires_grad and loss.sum.requires_grad:
            (gradient,) = torch.autograd.grad(loss.sum, one.predictions, retain_graph=True, allow_unused=True)
        if gradient is None:
            found.append(None)
        elif one.ignore_index is not None and gradient.dim() > one.targets.dim():
            found.append((gradient != 0).any(dim=min(1, gradient.dim() - 1)))
        else:
            found.append(gradient != 0)
    return found


def same_objective(bench: Bench) -> Iterator[Result]:
    """One batch through the loss as in training and as in eval (E3).

    Counts and counted targets must be equal: an eval over other targets measures something else, and at step 0 the
    loss does not show it yet. Those of training are taken in training mode too, where a mask may hide behind
    `model.training`. Targets that two training draws choose differently are drawn by step, and not compared.

    Losses are compared in eval mode on both sides, where dropout is off. A difference there may be meant: parts that
    only training has (the opinion of a discriminator), or noise that the loss draws in training and leaves out of
    evals. So where the parts differ in name those of one name are compared, and where two training draws already give
    two losses nothing is concluded. Only a difference that neither explains is worth a warning, and none is a failure,
    because the same targets are judged.
    """
    rows, later = bench.micro, replace(bench.micro.draw, step=bench.micro.draw.step + 1)
    in_training, as_train, as_eval = _judge(bench, rows, True), _judge(bench, rows), _judge(bench, in_eval(rows))
    detail = listing(rows, as_eval.lens, as_eval.counted)
    differing = _other_targets(as_train, as_eval) or _other_targets(in_training, as_eval)
    again = None
    if differing or gap_of(as_train.mean, as_eval.mean) > SAME_LOSS[bench.setup.precision.name]:
        again = _judge(bench, rows._replace(draw=later))
    if differing and again is not None:
        if drawn := _other_targets(as_train, again):
            raise NotAsked(f"the targets are drawn by step: of two training draws, {drawn}")
        yield Result("same objective", "fail", differing, "give training and eval one mask", "E3", detail)
        return
    noise = 0.0 if again is None else gap_of(as_train.mean, again.mean)
    yield _same_loss(bench, as_train, as_eval, noise)._replace(detail=detail)


class _Judged(NamedTuple):
    loss: Loss
    lens: Lens
    counted: list[Tensor | None]

    @property
    def mean(self) -> float:
        return mean_of(self.loss.sum, self.loss.count)


def _judge(bench: Bench, micro: Micro, is_training: bool = False) -> _Judged:
    loss, lens = watch(bench, micro, is_training)
    return _Judged(loss, lens, counted(loss, lens.judged))


def _other_targets(a: _Judged, b: _Judged) -> str:
    """How the counted targets differ; empty where they do not. Calls that only one side makes are not compared."""
    if float(a.loss.count) != float(b.loss.count):
        return f"the same rows have {float(a.loss.count):g} targets in training and {float(b.loss.count):g} in eval"
    for one, other, in_a, in_b in zip(a.lens.judged, b.lens.judged, a.counted, b.counted):
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


def _same_loss(bench: Bench, as_train: _Judged, as_eval: _Judged, noise: float) -> Result:
    tolerance, gap = SAME_LOSS[bench.setup.precision.name], gap_of(as_train.mean, as_eval.mean)
    is_seen = any(one is not None for one in as_eval.counted)
    seen = f"{float(as_eval.loss.count):g} targets"
    seen += "" if is_seen else " (which ones cannot be seen: no loss function of torch judges them)"
    seen += f"; loss {as_train.mean:.6g} under a training draw, {as_eval.mean:.6g} under that of an eval"
    if gap <= tolerance:
        return Result("same objective", "pass", seen, rule="E3")
    train, evaluated = as_train.loss.parts, as_eval.loss.parts
    only = sorted(train.keys() ^ evaluated.keys())
    gaps = [gap_of(mean_of(*train[name]), mean_of(*evaluated[name])) for name in train.keys() & evaluated.keys()]
    if only and all(gap <= tolerance for gap in gaps):
        return Result("same objective", "pass", f"{seen}; only one of them has {', '.join(only)}", rule="E3")
    if noise > tolerance:
        return Result("same objective", "pass", f"{seen}; training draws differ among themselves", rule="E3")
    return Result(
        "same objective", "warn", f"{seen}: a difference of {gap:.2g}",
        "if eval leaves a term out on purpose, return it as a part in training; else compute one loss for both", "E3",
    )  # fmt: skip


def same_eval(bench: Bench) -> Iterator[Result]:
    """Two evals of the same weights: equal, in eval mode, and without a trace (E4)."""
    setup, model = bench.setup, bench.setup.state.model
    streams = dict(list(setup.evaluator.streams.items())[: 1 if bench.is_quick else None])
    if not streams:
        raise NotAsked("the recipe has no eval set")
    in_training: set[str] = set()

    def loss(batch: Batch, draw: Draw) -> Loss:
        in_training.update(name or "the model" for name, module in model.named_modules() if module.training)
        return setup.state.objectives[0].plain_loss(batch, draw)

    world = World(0, 1, setup.world.device)
    objective = replace(setup.state.objectives[0], loss=loss, eager=None)
    evaluator = Evaluator(setup.recipe, streams, objective, setup.precision, world, ROWS, 1, setup.cfg.seed)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with Lens(model) as lens:
        first, second = evaluator.run(model), evaluator.run(model)
    moved = [name for name, buffer in model.named_buffers() if name in before and not _equal(buffer, before[name])]
    gaps = {f"{name} {part}": gap_of(value, second[name][part]) for name, values in first.items()
            for part, value in values.items() if value == value}  # fmt: skip
    worst = max(gaps, key=lambda name: gaps[name])
    wrong = []
    if lens.dropped:
        wrong.append(f"dropout {lens.dropped[0].share:g} is at work in {lens.dropped[0].module or 'the loss'}")
    elif in_training:
        wrong.append(f"{min(in_training)} is in training mode")
    if moved:
        bench.shared["moved"] = moved[0]
        wrong.append(f"the eval moves {moved[0]}" + (f" and {len(moved) - 1} more buffers" * (len(moved) > 1)))
    if gaps[worst] > SAME_EVAL:
        wrong.append(f"two evals differ by {gaps[worst]:.2g} in {worst}")
    if wrong:
        yield Result("same eval twice", "fail", "; ".join(wrong),
                     "register every module with its parent, and make dropout and statistics depend on self.training; "
                     "draw random numbers through `draw`", "E4")  # fmt: skip
    else:
        values = ", ".join(f"{name} {values['loss']:.4g}" for name, values in first.items())
        yield Result("same eval twice", "pass", f"{values}, twice; no dropout, no buffer moved", rule="E4")


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))


CHECKS = [Check("same objective", same_objective), Check("same eval twice", same_eval)]
