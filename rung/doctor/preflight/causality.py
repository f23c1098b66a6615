"""Asks whether predictions see what comes after them, and whether they are asked for what they were given.

Everything after a position is changed in the batch itself, so a leak by any way is seen: a mask that is off, targets
that are fed to the model, a mean over time. Predictions up to that position must not move at all.

The surprising thing: a model whose output projections start at zero mixes nothing over time, and would pass whatever
its mask. So predictions after a change must move for the answer to count. And arg-max = input is no sign of a missing
shift: with a tied head it is so in every healthy model at the start. Targets that equal their inputs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rung.data.prefetch import Micro
from rung.doctor.preflight.batches import stretch_of
from rung.doctor.preflight.forward import NotAsked, rows_of, watch
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.lens import Judged, Lens

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


def causality(bench: Bench) -> Iterator[Result]:
    """Changes what comes after t; predictions up to t must stay (E6)."""
    if not bench.setup.recipe.is_causal:
        raise NotAsked("the recipe says that it is not causal")
    if moved := bench.shared.get("moved"):
        raise NotAsked(
            f"statistics of the batch are at work in eval mode ({moved}), and positions see each other there"
        )
    micro = rows_of(bench.micro, 0, ROWS)
    _, lens = watch(bench, micro, is_exact=True)
    chain = chain_of(lens, micro)
    if not chain.is_shifted:
        yield Result("no look ahead", "fail", f"{SAME:.0%} or more of the targets are the input at their own position",
                     "shift: the target at t is the input at t + 1; a model that may see all sets is_causal = False",
                     "E6")  # fmt: skip
        return
    before = predictions(lens.judged[chain.number], len(micro.ids))
    scale = max(1.0, float(before.abs().max()))
    mixes, worst, where = False, 0.0, 0
    for t in sorted({chain.num_targets // 4, chain.num_targets // 2}):
        after = _changed(bench, micro, chain, t + 1, chain.num_targets + 1)
        moved = (predictions(after, len(micro.ids)) - before).abs().amax(dim=(0, 2))
        if float(moved[: t + 1].max()) > worst:
            worst, where = float(moved[: t + 1].max()), t
        alone = predictions(_changed(bench, micro, chain, t, t + 1), len(micro.ids))
        mixes |= bool((alone - before).abs().amax(dim=(0, 2))[t + 1 :].max() > 0)
    if worst > LEAK * scale:
        yield Result("no look ahead", "fail", f"changing the inputs after position {where} moves predictions up to it "
                     f"by {worst:.2g}", "mask attention (is_causal=True), pad convolutions on the left only, and give "
                     "the model no targets", "E6")  # fmt: skip
    elif not mixes:
        raise NotAsked("at these weights no position sees another one yet; ask again after some steps: rung check RUN")
    else:
        yield Result("no look ahead", "pass", f"predictions of {chain.num_targets} positions move by {worst:.1g} when "
                     "what follows is changed", rule="E6")  # fmt: skip


def chain_of(lens: Lens, micro: Micro) -> Chain:
    """Finds the predictions whose targets are the sequence that the model read, one further on."""
    num_rows = len(micro.ids)
    for number, judged in enumerate(lens.judged):
        if judged.ignore_index is None or judged.targets.is_floating_point():
            continue
        if judged.targets.numel() % num_rows or judged.targets.numel() < 4 * num_rows:
            continue
        targets = judged.targets.reshape(num_rows, -1).long()
        counts = targets.ne(judged.ignore_index)
        if (target_at := stretch_of(judged.targets, micro, judged.ignore_index)) is None:
            continue
        for lookup in lens.lookups:
            if lookup.ids.numel() != targets.numel() or (input_at := stretch_of(lookup.ids, micro)) is None:
                continue
            ids = lookup.ids.reshape(num_rows, -1).long()
            is_next = _share(ids[:, 1:] == targets[:, :-1], counts[:, :-1]) >= SAME
            is_same = _share(ids == targets, counts) >= SAME
            if is_next or is_same:
                # The sequence may lie in one array, or once as inputs and once, shifted, as targets.
                starts = {target_at[0]: target_at[1] - int(is_next), input_at[0]: input_at[1]}
                return Chain(number, targets.shape[1], starts, is_next, counts)
    raise NotAsked("no cross entropy was seen whose targets are the ids that the model reads")


def _share(is_so: Tensor, counts: Tensor) -> float:
    return float((is_so & counts).sum() / counts.sum().clamp(min=1))


def predictions(judged: Judged, num_rows: int) -> Tensor:
    """(rows, positions, classes)"""
    logits = judged.predictions.detach().float()
    if logits.dim() > 2:
        logits = logits.movedim(1, -1)
    return logits.reshape(num_rows, -1, logits.shape[-1])


def _changed(bench: Bench, micro: Micro, chain: Chain, start: int, stop: int) -> Judged:
    """The same predictions with other inputs at the positions [start, stop)."""
    batch = dict(micro.batch)
    for name, first in chain.starts.items():
        batch[name] = other_ids(batch[name], max(0, first + start), first + stop, _values(batch[name], chain, first))
    _, lens = watch(bench, micro._replace(batch=batch), is_exact=True)
    return lens.judged[chain.number]


def _values(array: Tensor, chain: Chain, first: int) -> Tensor:
    """Ids that are judged somewhere: no padding and no marks that a model may treat as more than an id."""
    own = array.reshape(len(array), -1)[:, first + 1 :][:, : chain.num_targets]
    return own.long()[chain.counts[:, : own.shape[1]]].unique()  # long first: CUDA cannot pick from uint16


def other_ids(array: Tensor, start: int, stop: int, values: Tensor) -> Tensor:
    """Each id of the stretch becomes the next larger one of `values`; what is not among them stays."""
    flat = array.reshape(len(array), -1).long().clone()
    part = flat[:, start:stop].contiguous()
    place = torch.searchsorted(values, part).clamp(max=len(values) - 1)
    is_known = values[place] == part
    flat[:, start:stop] = torch.where(is_known, values[(place + 1) % len(values)], part)
    return flat.reshape(array.shape).to(array.dtype)


CHECKS = [Check("no look ahead", causality)]
