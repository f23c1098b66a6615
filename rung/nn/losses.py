"""Cross entropy as sums and counts, in float32, never as a mean.

Dividing is the engine's business: it knows the count of the whole step. A target that does not count (weight 0, or the
ignored id) adds nothing to the sum, the count or the gradient; its id may be out of range.

Shapes: any leading axes "..." (rows, positions, channels), V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Part = tuple[Tensor, Tensor]  # a sum and its count
_NOT_COUNTED = -100


def token_losses(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None, ignore: int | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted losses and weights of all targets, both float32 in the shape of `targets`.

    `weights` (bool or any number, at least 0) and `ignore` (an id that never counts) can be given together.
    """
    weights = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights.float()
    if ignore is not None:
        weights = weights * (targets != ignore)
    counted = targets.masked_fill(weights == 0, _NOT_COUNTED)
    losses = F.cross_entropy(
        logits.float().flatten(0, -2), counted.flatten(), reduction="none", ignore_index=_NOT_COUNTED
    )
    return losses.view(targets.shape) * weights, weights


def cross_entropy_sums(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None, ignore: int | None = None
) -> Part:
    """The summed loss over (..., V) logits and (...) targets, and the sum of the weights."""
    losses, weights = token_losses(logits, targets, weights, ignore)
    return losses.sum(), weights.sum()


def sums_by_class(losses: Tensor, weights: Tensor, classes: Tensor, names: Sequence[str]) -> dict[str, Part]:
    """Splits what `token_losses` gave by a class id per target: {names[i]: (sum, count) where classes == i}.

    An id outside of names belongs to no part. A class without targets has the count 0.
    """
    parts = {}
    for index, name in enumerate(names):
        is_in = (classes == index).float()
        parts[name] = (losses * is_in).sum(), (weights * is_in).sum()
    return parts
