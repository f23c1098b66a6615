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
    """Predictions of a sequence of ids, and the arrays in which that sequence lies."""

    number: int  # of the call of the loss function
    num_positions: int  # in a row
    starts: dict[str, int]  # array -> the position of the first prediction's own input
    is_shifted: bool
    counts: Tensor  # (rows, positions * width)
    width: int = 1  # ids of a position: the codebooks, where there are several


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
    shape = len(micro.ids), chain.num_positions
    before = predictions(tracer.loss_calls[chain.number], *shape)
    scale = max(1.0, float(before.abs().max()))
    mixes, worst, where = False, 0.0, 0
    for t in sorted({chain.num_positions // 4, chain.num_positions // 2}):
        after = _changed(context, micro, chain, t + 1, chain.num_positions + 1)
        moved = (predictions(after, *shape) - before).abs().amax(dim=(0, 2))
        if float(moved[: t + 1].max()) > worst:
            worst, where = float(moved[: t + 1].max()), t
        alone = predictions(_changed(context, micro, chain, t, t + 1), *shape)
        mixes |= bool((alone - before).abs().amax(dim=(0, 2))[t + 1 :].max() > 0)
    if worst > LEAK * scale:
        seen = f"changing the inputs after position {where} moves predictions up to it by {worst:.2g}"
        remedy = "mask attention (is_causal=True), pad convolutions on the left only, and give the model no targets"
        return Result("fail", seen, remedy)
    if not mixes:
        raise NotApplicable("with these weights no position sees another yet; a run can be checked after some steps")
    books = f", of {chain.width} codebooks each," if chain.width > 1 else ""
    seen = f"predictions of {chain.num_positions} positions{books} move by {worst:.1g} when all after them is changed"
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
        if (chain := _chain_of_codebooks(tracer, micro, number, targets, counts)) is not None:
            return chain
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


def _chain_of_codebooks(tracer: OpTracer, micro: Micro, number: int, targets: Tensor, counts: Tensor) -> Chain | None:
    """The same where a position has several ids: an array (rows, positions, codebooks) of the batch.

    The model looks them up in one table each, or in one table for all, where each codebook begins at a row of its own.
    """
    for name, array in micro.batch.items():
        if array.dim() != 3 or array.is_floating_point() or array.dtype == torch.bool or array.shape[2] < 2:
            continue
        whole, width = array.long(), array.shape[2]
        num_positions = targets.shape[1] // width
        if targets.shape[1] % width or not 2 <= num_positions <= whole.shape[1]:
            continue
        by_book = (len(whole), num_positions, width)
        if (target_at := _start_in(whole, targets.reshape(by_book), counts.reshape(by_book))) is None:
            continue
        for lookup in tracer.lookups:
            if lookup.ids.numel() == targets.numel():
                input_at = _start_in(whole, lookup.ids.reshape(by_book).long(), may_differ=True)
            elif lookup.ids.numel() * width == targets.numel():
                ids = lookup.ids.reshape(len(whole), -1, 1).long()
                starts = [_start_in(whole[:, :, book : book + 1], ids) for book in range(width)]
                input_at = next((start for start in starts if start is not None), None)
            else:
                continue
            if input_at is not None:
                return Chain(number, num_positions, {name: input_at}, target_at == input_at + 1, counts, width)
    return None


def _start_in(whole: Tensor, part: Tensor, counts: Tensor | None = None, *, may_differ: bool = False) -> int | None:
    """The position at which `part` lies in `whole`, both (rows, positions, codebooks).

    With `may_differ` each codebook may be so many ids further on, as in one table for all.
    """
    for start in range(whole.shape[1] - part.shape[1] + 1):
        difference = part - whole[:, start : start + part.shape[1]]
        is_same = difference == (difference[:1, :1] if may_differ else 0)
        if (is_same if counts is None else is_same | ~counts).all():
            return start
    return None


def predictions(call: LossCall, num_rows: int, num_positions: int) -> Tensor:
    """(rows, positions, classes of all codebooks)"""
    logits = call.predictions.detach().float()
    if logits.dim() > 2:
        logits = logits.movedim(1, -1)
    return logits.reshape(num_rows, num_positions, -1)


def _changed(context: CheckContext, micro: Micro, chain: Chain, start: int, stop: int) -> LossCall:
    """The same predictions with other inputs at the positions [start, stop)."""
    batch = dict(micro.batch)
    for name, first in chain.starts.items():
        # Ids that are judged somewhere: no padding and no marks that a model may treat as more than an id.
        own = batch[name].reshape(len(batch[name]), -1)[:, (first + 1) * chain.width :][:, : chain.counts.shape[1]]
        values = own.long()[chain.counts[:, : own.shape[1]]].unique()  # long first: CUDA cannot pick from uint16
        # Each of them in the stretch becomes the next larger one; what is not among them stays.
        stretch = slice(max(0, first + start) * chain.width, (first + stop) * chain.width)
        flat = batch[name].reshape(len(batch[name]), -1).long().clone()
        part = flat[:, stretch].contiguous()
        place = torch.searchsorted(values, part).clamp(max=len(values) - 1)
        flat[:, stretch] = torch.where(values[place] == part, values[(place + 1) % len(values)], part)
        batch[name] = flat.reshape(batch[name].shape).to(batch[name].dtype)
    _, tracer = watch(context, micro._replace(batch=batch), is_exact=True)
    return tracer.loss_calls[chain.number]
