"""Checks that predictions do not see what comes after them, and that targets are not the inputs themselves.

Everything after a position is changed in the batch itself, so any leak shows: a missing mask, targets that are fed to
the model, a mean over time. A model whose output projections start at zero mixes nothing over time and would pass
whatever its mask, so predictions after a change must move for a pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rung.doctor.preflight.batches import stretch_of
from rung.doctor.preflight.forward import rows_of, watch
from rung.doctor.preflight.result import CheckContext, NotApplicable, Result, check
from rung.engine.op_tracer import LossCall, OpTracer
from rung.engine.prefetch import Micro

ROWS = 2
LEAK = 1e-5  # of the largest logit; a causal model gives exactly 0.0, one without its mask 2.9e-3 at the start
SAME = 0.99


class Chain(NamedTuple):
    """Predictions of a sequence of ids, one per position, and the arrays in which that sequence lies."""

    number: int  # of the call of the loss function
    num_targets: int  # in a row
    starts: dict[str, int]  # array -> the place of the first prediction's own input
    is_shifted: bool
    counts: Tensor  # (rows, targets)


@check("no look ahead", "E6")
def causality(context: CheckContext) -> Result:
    """Changes what comes after t; predictions up to t must stay."""
    if not context.setup.recipe.is_causal:
        raise NotApplicable("the recipe declares that it is not causal")
    if moved := context.shared.get("moved"):
        raise NotApplicable(f"batch statistics are used in eval mode ({moved}), so positions see each other")
    micro = rows_of(context.micro, 0, ROWS)
    _, tracer = watch(context, micro, is_exact=True)
    chain = chain_of(tracer, micro)
    if not chain.is_shifted:
        seen = f"{SAME:.0%} or more of the targets are the input at their own position"
        remedy = "shift: the target at t is the input at t + 1; a model that may see all sets is_causal = False"
        return Result("fail", seen, remedy)
    before = predictions(tracer.loss_calls[chain.number], len(micro.ids))
    scale = max(1.0, float(before.abs().max()))
    mixes, worst, where = False, 0.0, 0
    for t in sorted({chain.num_targets // 4, chain.num_targets // 2}):
        after = _changed(context, micro, chain, t + 1, chain.num_targets + 1)
        moved = (predictions(after, len(micro.ids)) - before).abs().amax(dim=(0, 2))
        if float(moved[: t + 1].max()) > worst:
            worst, where = float(moved[: t + 1].max()), t
        alone = predictions(_changed(context, micro, chain, t, t + 1), len(micro.ids))
        mixes |= bool((alone - before).abs().amax(dim=(0, 2))[t + 1 :].max() > 0)
    if worst > LEAK * scale:
        seen = f"changing the inputs after position {where} moves predictions up to it by {worst:.2g}"
        remedy = "mask attention (is_causal=True), pad convolutions on the left only, and give the model no targets"
        return Result("fail", seen, remedy)
    if not mixes:
        raise NotApplicable("with these weights no position sees another yet; run `rung check RUN` after some steps")
    seen = f"predictions of {chain.num_targets} positions move by {worst:.1g} when everything after them is changed"
    return Result("pass", seen)


def chain_of(tracer: OpTracer, micro: Micro) -> Chain:
    """Finds the predictions whose targets are the sequence that the model reads, shifted by one."""

    def share(is_so: Tensor, counts: Tensor) -> float:
        return float((is_so & counts).sum() / counts.sum().clamp(min=1))

    num_rows = len(micro.ids)
    for number, call in enumerate(tracer.loss_calls):
        if call.ignore_index is None or call.targets.is_floating_point():
            continue
        if call.targets.numel() % num_rows or call.targets.numel() < 4 * num_rows:
            continue
        targets = call.targets.reshape(num_rows, -1).long()
        counts = targets.ne(call.ignore_index)
        if (target_at := stretch_of(call.targets, micro, call.ignore_index)) is None:
            continue
        for lookup in tracer.lookups:
            if lookup.ids.numel() != targets.numel() or (input_at := stretch_of(lookup.ids, micro)) is None:
                continue
            ids = lookup.ids.reshape(num_rows, -1).long()
            is_next = share(ids[:, 1:] == targets[:, :-1], counts[:, :-1]) >= SAME
            # Arg-max = input is no sign of a missing shift: with a tied head every healthy model starts like that.
            is_same = share(ids == targets, counts) >= SAME
            if is_next or is_same:
                # The sequence may lie in one array, or once as inputs and once, shifted, as targets.
                starts = {target_at[0]: target_at[1] - int(is_next), input_at[0]: input_at[1]}
                return Chain(number, targets.shape[1], starts, is_next, counts)
    raise NotApplicable("no cross entropy has the ids that the model reads as its targets")


def predictions(call: LossCall, num_rows: int) -> Tensor:
    """(rows, positions, classes)"""
    logits = call.predictions.detach().float()
    if logits.dim() > 2:
        logits = logits.movedim(1, -1)
    return logits.reshape(num_rows, -1, logits.shape[-1])


def _changed(context: CheckContext, micro: Micro, chain: Chain, start: int, stop: int) -> LossCall:
    """The same predictions with other inputs at the positions [start, stop)."""
    batch = dict(micro.batch)
    for name, first in chain.starts.items():
        # Ids that are judged somewhere: no padding and no marks that a model may treat as more than an id.
        own = batch[name].reshape(len(batch[name]), -1)[:, first + 1 :][:, : chain.num_targets]
        values = own.long()[chain.counts[:, : own.shape[1]]].unique()  # long first: CUDA cannot pick from uint16
        # Each of them in the stretch becomes the next larger one; what is not among them stays.
        stretch = slice(max(0, first + start), first + stop)
        flat = batch[name].reshape(len(batch[name]), -1).long().clone()
        part = flat[:, stretch].contiguous()
        place = torch.searchsorted(values, part).clamp(max=len(values) - 1)
        flat[:, stretch] = torch.where(values[place] == part, values[(place + 1) % len(values)], part)
        batch[name] = flat.reshape(batch[name].shape).to(batch[name].dtype)
    _, tracer = watch(context, micro._replace(batch=batch), is_exact=True)
    return tracer.loss_calls[chain.number]
