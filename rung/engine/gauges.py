"""Brings what a lens sees to a few numbers: sizes of activations, attention, answers of a classifier.

All of it stays on the device as tensors without axes, and nothing waits. What is large is taken in chunks or in a
sample that is spread evenly, so that a vocabulary of 50 thousand costs megabytes and not gigabytes.

The surprising thing: what a loss ignores has the weight 0 and is not cut out. To cut, the host would have to wait for
the device and ask how much is left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rung.engine.lens import Attended, Judged, Passed

QUERIES, PLACES = 64, 512  # that are judged in one attention, and in one cross entropy
CHUNK = 2**20  # numbers that are worked on at once: 4 MB

Columns = dict[str, Tensor]


def sizes(seen: Passed, is_block: bool) -> Columns:
    left, entered = seen.left, seen.entered
    columns = {"rms": _rms(left), "peak": _norm(left, math.inf)}
    columns |= dict.fromkeys(("entered", "ratio"), constant(math.nan, left))
    if is_block and entered is not None and entered.shape == left.shape and entered.is_floating_point():
        columns["entered"] = _rms(entered)
        columns["ratio"] = _norm(left - entered) / _norm(entered)
    return columns


def squashing(function: str, output: Tensor) -> Columns:
    """Of (places, units): the share of units that never spoke, the share of numbers at an end, the mean slope."""
    nan = constant(math.nan, output)
    if function == "relu":
        return {"silent": (output <= 0).all(0).float().mean(), "saturated": nan, "slope": nan}
    values = output.float()
    if function == "tanh":
        at_end, slope = values.abs() > 0.97, 1 - values.square()
    else:  # a sigmoid is a tanh of half the argument: .97 there is .985 here
        at_end, slope = (values < 0.015) | (values > 0.985), values * (1 - values)
    return {"silent": nan, "saturated": at_end.float().mean(), "slope": slope.mean()}


def outside(function: str, seen: Judged) -> Columns:
    """The share of targets that a tanh or a sigmoid can never reach."""
    if not seen.targets.is_floating_point() or not seen.targets.numel():
        return {}
    low = -1.0 if function == "tanh" else 0.0
    return {"outside": ((seen.targets < low - 1e-3) | (seen.targets > 1 + 1e-3)).float().mean()}


def attention(seen: Attended) -> Columns | None:
    """The largest logit, the entropy in units of the log of the keys a query sees, and the share of heads without."""
    logits, is_seen = _logits_of(seen)
    if not logits.numel():
        return None
    logits = logits.masked_fill(~is_seen, -math.inf)
    num_keys = is_seen.sum(-1)
    counts = num_keys > 1  # with one key there is nothing to choose
    shares = torch.softmax(logits, -1).nan_to_num(0.0)  # of a row without any key: nothing
    entropy = torch.special.entr(shares).sum(-1) / num_keys.clamp(min=2).log()
    by_head = (entropy * counts).sum((0, 2)) / counts.sum((0, 2))
    return {
        "logit": logits.amax(),
        "entropy": by_head.nanmean(),
        "collapsed": (by_head < 0.05).float().mean(),
    }


def _logits_of(seen: Attended) -> tuple[Tensor, Tensor]:
    """(rows, heads, queries, keys) for a few rows and queries, spread evenly, and which of the keys are seen."""
    if seen.logits is not None:
        rows, places = _spread(seen.logits.shape[0], seen.logits.shape)
        logits = seen.logits[rows][:, :, places].float()
        return logits, logits > max(-1e8, torch.finfo(seen.logits.dtype).min / 2)  # masked by hand: -inf, -1e9, ..
    assert seen.queries is not None
    assert seen.keys is not None
    queries, keys = _four(seen.queries), _four(seen.keys)
    shape = (*queries.shape[:3], keys.shape[2])
    rows, places = _spread(shape[0], shape)
    queries, keys = queries[rows][:, :, places].float(), keys[rows].float()
    if keys.shape[1] != queries.shape[1]:  # heads that share keys
        keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    with torch.autocast(queries.device.type, enabled=False):
        logits = queries @ keys.transpose(-1, -2) * seen.scale
    is_seen = torch.ones_like(logits, dtype=torch.bool)
    if seen.is_causal:
        at = torch.arange(shape[2], device=logits.device)[places]
        is_seen = is_seen & (torch.arange(shape[3], device=logits.device) <= at[:, None])
    if seen.mask is not None:
        mask = _four(seen.mask.expand(*seen.queries.shape[:-1], shape[3]))[rows][:, :, places]
        if mask.dtype == torch.bool:
            is_seen = is_seen & mask
        else:
            logits, is_seen = logits + mask, is_seen & (mask > max(-1e8, torch.finfo(mask.dtype).min / 2))
    return logits, is_seen


def _spread(num_rows: int, shape: torch.Size | tuple[int, ...]) -> tuple[slice, slice]:
    """Which rows and queries of (rows, heads, queries, keys) to take, so that they fit a chunk."""
    _, heads, num_queries, num_keys = shape
    room = max(1, CHUNK // max(1, heads * num_keys))
    rows = min(num_rows, 4, room)
    queries = min(QUERIES, max(1, room // max(1, rows)))
    stride = max(1, math.ceil(num_queries / queries))
    return slice(0, rows), slice(stride - 1, None, stride)  # the last ones of each stretch: they see most


def _four(x: Tensor) -> Tensor:
    """(rows, heads, T, D): what is missing is 1, and where heads were folded into rows they count as heads."""
    return x.flatten(0, -4) if x.dim() >= 4 else x[(None,) * (4 - x.dim())]


def classes(seen: Judged) -> Columns:
    """What a classifier says, as means over a few places; those that the loss ignores have no weight."""
    logits, targets = seen.predictions.detach(), seen.targets
    if logits.dim() == 1:
        logits, targets = logits[None], targets[None]
    logits = logits.movedim(1, -1)
    by_class = not targets.is_floating_point()
    if not by_class:
        targets = targets.movedim(1, -1).argmax(-1)  # only to know where; the loss of such targets is not told
    stride = max(1, math.ceil(targets.numel() / PLACES))
    logits, targets = logits.reshape(-1, logits.shape[-1])[::stride], targets.reshape(-1)[::stride]
    weights = torch.ones_like(targets, dtype=torch.float32)
    if by_class and seen.ignore_index is not None:
        weights = (targets != seen.ignore_index).float()
    num_classes = logits.shape[-1]
    targets = targets.clamp(0, num_classes - 1)
    rows = max(1, CHUNK // num_classes)
    chunks = [_of_chunk(logits[i : i + rows], targets[i : i + rows]) for i in range(0, len(targets), rows)]
    lse, mean, entropy, top, losses = (torch.cat(parts) for parts in zip(*chunks, strict=True))

    def average(values: Tensor, weights: Tensor = weights) -> Tensor:
        return (values * weights).sum() / weights.sum()

    said, asked = (torch.zeros(num_classes, device=lse.device).index_add_(0, ids, weights) for ids in (top, targets))
    found = {"entropy": average(entropy), "top1": said.max() / said.sum(), "targets": weights.sum()}
    found["vocab"] = constant(num_classes, lse)
    if seen.function == "cross_entropy":  # a nll_loss gets them normalised
        found |= {"lse": average(lse), "logit_mean": average(mean)}
    if by_class:
        is_common = (targets == asked.argmax()).float()
        found |= {
            "loss": average(losses),
            "target_share": asked.max() / asked.sum(),
            "target_loss": average(losses, weights * is_common),
            "other_loss": average(losses, weights * (1 - is_common)),
            "target_entropy": torch.special.entr(asked / asked.sum()).sum(),
        }
    return found


def _of_chunk(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    logits = logits.float()
    lse = logits.logsumexp(-1)
    log_shares = logits - lse[:, None]
    entropy = -(log_shares.exp() * log_shares).nansum(-1)  # a class that is ruled out has -inf, and adds nothing
    losses = -log_shares.gather(1, targets[:, None])[:, 0]
    return lse, logits.mean(-1), entropy, logits.argmax(-1), losses


def _norm(x: Tensor, order: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x, order, dtype=torch.float32)


def _rms(x: Tensor) -> Tensor:
    return _norm(x) / math.sqrt(x.numel())


def constant(value: float, like: Tensor) -> Tensor:
    return torch.full((), float(value), device=like.device)
