"""Takes a declared input away and says how much worse the loss becomes.

A model that ignores an input loses nothing without it, and no curve shows that; this question does. The rows are the
same in both cases, as is every random number of the loss, so what is compared is compared row by row, and the interval
comes from drawing rows again. Weights, modes and gradients are the caller's business: see `eval_mode`.

The surprising thing: another row's ids are no easier or harder to predict when the targets are those same ids. So where
an input is all that a batch has, and for rows of ids in any case, the order in time is what is taken away; a model that
only knows how frequent each id is does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rung.data.prefetch import to_device
from rung.engine.evaluate import EVAL_STEP
from rung.engine.step import seed_torch
from rung.errors import RecipeError
from rung.recipe import Batch, Draw, Input, Loss, Stream, key_of

NUM_BOOTSTRAPS = 1000  # the ends of a 95 % interval are then within about a tenth of its width


class Rise(NamedTuple):
    """Relative rise of the loss, with the 95 % interval over rows; 0.26 is 26 %."""

    mean: float
    low: float
    high: float


def held_out(stream: Stream, num_rows: int, seed: int, device: torch.device) -> tuple[Batch, Draw]:
    """Rows spread evenly over a set: neighbours in time are so alike that exchanging them takes nothing away."""
    num_rows = min(num_rows, stream.num_rows)
    ids = np.arange(num_rows) * stream.num_rows // num_rows
    draw = Draw(seed, EVAL_STEP, np.arange(num_rows))
    return to_device(stream.gather(ids, draw), device)[0], draw


def take_away(batch: Batch, given: Input, draw: Draw) -> Batch:
    """The batch without what this input says; other tensors are shared with it, none is written to.

    permute: that of another row, the same other row for all tensors of the input, in place and time unchanged.
    zero: nothing but zeros. shift: that of another time of the same row, half a row away.
    """
    missing = [name for name in given.tensors if name not in batch]
    if missing:
        raise RecipeError(
            f"inputs() says that {given.name} is in the tensor {missing[0]!r}, but a batch has {', '.join(batch)}; "
            "name one of these"
        )
    is_all = set(given.tensors) >= set(batch)
    changed = {name: _without(batch[name], given, draw, is_all) for name in given.tensors}
    return {**batch, **changed}


def _without(tensor: Tensor, given: Input, draw: Draw, is_all: bool) -> Tensor:
    num_rows = len(tensor)
    has_time = tensor.ndim > 1 and tensor.shape[1] > 1
    if given.how == "zero":
        return torch.zeros_like(tensor)
    if given.how == "shift" and has_time:
        return pick(tensor, slice(None), _rolled(tensor.shape[1], tensor.shape[1] // 2, tensor.device))
    if given.how not in ("permute", "shift"):
        raise RecipeError(f"inputs() takes {given.name} away by {given.how!r}; it can be permute, zero or shift")
    if is_all or _is_ids(tensor):
        tensor = _out_of_order(tensor, draw) if has_time else tensor
    if is_all or num_rows < 2:
        return tensor
    # By one distance for all rows, so that no row keeps its own and each is used once.
    distance = 1 + int(Draw(draw.seed, draw.step, np.zeros(1, np.int64)).integers("ablation", num_rows - 1)[0])
    return pick(tensor, _rolled(num_rows, distance, tensor.device))


def pick(tensor: Tensor, *index: Any) -> Tensor:
    """tensor[index]; on CUDA torch cannot index the unsigned types that ids travel in, but the same bits it can."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(tensor.dtype)
    return tensor[index] if signed is None else tensor.view(signed)[index].view(tensor.dtype)


def _rolled(length: int, distance: int, device: torch.device) -> Tensor:
    return (torch.arange(length, device=device) + distance) % length


def _is_ids(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool


def _out_of_order(tensor: Tensor, draw: Draw) -> Tensor:
    """Each row in an order of its own; the first place stays, for what begins a row is often never a target."""
    order = 1 + np.argsort(draw.uniform("ablation/order", tensor.shape[1] - 1), axis=1)
    order = np.concatenate([np.zeros((len(order), 1), np.int64), order], axis=1)
    rows = torch.arange(len(tensor), device=tensor.device)[:, None]
    return pick(tensor, rows, torch.from_numpy(order).to(tensor.device))


def row_losses(loss: Callable[[Batch, Draw], Loss], batch: Batch, draw: Draw, rows_at_once: int = 1) -> np.ndarray:
    """(groups, 2) float64: sum and count of each group of rows, computed apart from the others."""
    pairs = []
    for start in range(0, len(draw.rows), rows_at_once):
        few = slice(start, start + rows_at_once)
        part = Draw(draw.seed, draw.step, draw.rows[few])
        seed_torch("eval", part)
        found = loss({name: tensor[few] for name, tensor in batch.items()}, part)
        device = found.sum.device
        pairs.append(torch.stack([torch.as_tensor(x, device=device).detach().float().reshape(()) for x in found[:2]]))
    return torch.stack(pairs).cpu().double().numpy()


def rise(before: np.ndarray, after: np.ndarray, seed: int = 0) -> Rise:
    """How much larger the mean loss is in `after`, row for row the same rows; both are (rows, 2) sums and counts."""
    rng = np.random.default_rng(key_of(seed, "bootstrap"))
    drawn = rng.integers(0, len(before), (NUM_BOOTSTRAPS, len(before)))
    drawn = np.concatenate([np.arange(len(before))[None], drawn])  # the first is the sample itself
    with np.errstate(divide="ignore", invalid="ignore"):
        means = [pairs[drawn].sum(1) @ [1.0, 0.0] / (pairs[drawn].sum(1) @ [0.0, 1.0]) for pairs in (before, after)]
        ratio = np.where(means[0] == means[1], 0.0, (means[1] - means[0]) / np.abs(means[0]))
    low, high = np.nanquantile(ratio[1:], [0.025, 0.975]) if np.isfinite(ratio[1:]).any() else (np.nan, np.nan)
    return Rise(float(ratio[0]), float(low), float(high))


def ablate(
    loss: Callable[[Batch, Draw], Loss], batch: Batch, draw: Draw, inputs: Sequence[Input], rows_at_once: int = 1
) -> dict[str, Rise]:
    """What taking each input away costs, by its name. The caller has set eval mode and autocast."""
    if not inputs:
        return {}
    before = row_losses(loss, batch, draw, rows_at_once)
    return {
        given.name: rise(before, row_losses(loss, take_away(batch, given, draw), draw, rows_at_once), draw.seed)
        for given in inputs
    }
