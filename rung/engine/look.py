"""Looks inside the model now and then: how large activations and logits are, who attends to what, which units are dead.

A look is a forward of its own on a few rows of the step, eager, in eval mode and without gradients, so it works for
any recipe and leaves training as it was: modes and buffers come back, gradients are not touched. The state of torch's
random numbers is not put back, because the engine seeds torch anew before every micro.

The surprising thing: nothing is kept. Each tensor is brought to a few numbers while the forward is still running, and
those stay on the device: whoever wants to read them copies them, without waiting. So a look needs less memory than the
step and never holds the host up. A model that cannot be run like this is not looked at again; `reason` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rung.data.prefetch import Micro
from rung.engine.evaluate import eval_mode
from rung.engine.lens import Attended, Judged, Lens, Passed, Seen, Squashed
from rung.engine.precision import Precision
from rung.engine.step import Trained, seed_torch

ENOUGH = 512  # numbers of the largest tensor of the batch: one long text is enough, of short rows it takes several
MOST_CALLS = 16  # of one module in one look: a loop over time is not told to its end
QUERIES, PLACES = 64, 512  # that are judged in one attention, and in one cross entropy
CHUNK = 2**20  # numbers that are worked on at once: 4 MB
REMEMBERED = 50  # looks; a unit that was silent in all of them is dead
FUNCTIONS = {"relu": 0.0, "tanh": 1.0, "sigmoid": 2.0}
CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)

Columns = dict[str, Tensor]
Active = dict[str, tuple[Tensor, int]]  # for each unit the last look in which it spoke, and the look before the first


@dataclass
class Looked:
    """Scalars by name, and per kind of table the names of its rows and one tensor per column."""

    scalars: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, tuple[list[str], Columns]] = field(default_factory=dict)


class Look:
    """`take` measures the model as it is; it remembers only when each unit was last active."""

    def __init__(self, model: nn.Module, objective: Trained, precision: Precision) -> None:
        self.reason = ""  # why there are no more looks
        self._model, self._objective, self._precision = model, objective, precision
        self._active: Active = {}
        self._num_looks = 0

    def take(self, micro: Micro, step: int) -> Looked:
        """What there is to see at this step; nothing where the model cannot be looked at."""
        if self.reason:
            return Looked()
        try:
            return self._take(few_rows(micro))
        except Exception as error:  # a look may fail in any way, and training must not notice
            self.reason = f"looking at the model failed at step {step}: {type(error).__name__}: {error}"
            return Looked()

    def _take(self, micro: Micro) -> Looked:
        self._num_looks += 1
        loss = getattr(self._objective, "eager", None) or self._objective.loss
        watch = _Watch(self._model, self._active, self._num_looks)
        with _same_buffers(self._model), eval_mode(self._model), self._precision.autocast():
            seed_torch(self._objective.name, micro.draw)
            with watch:
                loss(micro.batch, micro.draw)
        return watch.looked()


def few_rows(micro: Micro) -> Micro:
    """As many of the first rows as hold ENOUGH numbers, at least one: tensors with one entry per row are cut."""
    num_rows = len(micro.draw.rows)
    by_row = {name: t for name, t in micro.batch.items() if t.dim() and t.shape[0] == num_rows}
    largest = max((t[0].numel() for t in by_row.values() if num_rows), default=ENOUGH)
    few = min(num_rows, max(1, math.ceil(ENOUGH / max(1, largest))))
    batch = {name: t[:few] if name in by_row else t for name, t in micro.batch.items()}
    return Micro(micro.ids[:few], replace(micro.draw, rows=micro.draw.rows[:few]), batch)


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Puts back what a forward wrote into a buffer, in place or over it, in spite of eval mode."""
    before = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, version, copy in before:
            if buffer._version != version:
                buffer.copy_(copy)
            module._buffers[name] = buffer


class _Watch(Lens):
    """A lens that keeps numbers instead of tensors."""

    def __init__(self, model: nn.Module, active: Active, num_looks: int) -> None:
        super().__init__(model, keeps_modules=True)
        self._modules = dict(model.named_modules())
        self._active, self._num_looks = active, num_looks
        self._rows: dict[str, dict[str, Columns]] = {"modules": {}, "attention": {}, "units": {}}
        self._logits: Columns = {}
        self._num_logits = 0
        self._has_channels_first = False
        self._last_squashed: tuple[str, Squashed] | None = None

    def note(self, seen: Seen) -> None:
        if isinstance(seen, Passed):
            self._passed(seen)
        elif isinstance(seen, Attended):
            self._add("attention", seen.module, attention(seen))
        elif isinstance(seen, Squashed):
            self._squashed(seen)
        elif isinstance(seen, Judged):
            self._judged(seen)

    def looked(self) -> Looked:
        tables = {}
        for kind, rows in self._rows.items():
            if rows:
                columns = next(iter(rows.values())).keys()
                tables[kind] = (
                    list(rows),
                    {c: torch.stack([row[c].float() for row in rows.values()]) for c in columns},
                )
        return Looked({f"look/{name}": value for name, value in self._logits.items()}, tables)

    def _add(self, kind: str, module: str, columns: Columns | None) -> str:
        """The name of the new row: that of the module, and the number of the call from the second on."""
        if columns is None:
            return ""
        name, rows = module or "model", self._rows[kind]
        call = next(n for n in range(1, MOST_CALLS + 2) if (name if n == 1 else f"{name}#{n}") not in rows)
        if call > MOST_CALLS:
            return ""
        name = name if call == 1 else f"{name}#{call}"
        rows[name] = columns
        return name

    def _passed(self, seen: Passed) -> None:
        module = self._modules[seen.module]
        if isinstance(module, CHANNELS_FIRST):
            self._has_channels_first = True
        elif next(module.parameters(recurse=False), None) is not None:
            self._has_channels_first = False
        if seen.module and seen.left.numel():  # of the whole there is nothing to say that its parts do not
            parent = self._modules.get(seen.module.rpartition(".")[0])
            is_block = isinstance(parent, nn.ModuleList | nn.Sequential) and next(module.children(), None) is not None
            self._add("modules", seen.module, sizes(seen, is_block))

    def _squashed(self, seen: Squashed) -> None:
        if not seen.output.numel():
            return
        output = seen.output
        is_channels_first = output.dim() > 2 and (self._has_channels_first or output.dim() == 4)
        by_unit = (output.movedim(1, -1) if is_channels_first else output).flatten(0, -2)  # (places, units)
        columns = {"function": _constant(FUNCTIONS[seen.function], output), **squashing(seen.function, by_unit)}
        columns |= dict.fromkeys(("dead", "looks"), _constant(math.nan, output))
        name = self._add("units", seen.module, columns)
        if name and seen.function == "relu":
            self._rows["units"][name] |= self._deaths(name, (by_unit > 0).any(0))
        self._last_squashed = (name, seen) if name and seen.function != "relu" else None

    def _deaths(self, name: str, is_active: Tensor) -> Columns:
        """A unit is dead when its last activity lies before all the looks that are remembered."""
        last, since = self._active.get(name, (is_active, 0))
        if last.dtype == torch.bool or last.shape != is_active.shape:
            last, since = torch.full_like(is_active, self._num_looks - 1, dtype=torch.int32), self._num_looks - 1
        last = torch.where(is_active, self._num_looks, last)
        self._active[name] = (last, since)
        looks = min(REMEMBERED, self._num_looks - since)
        return {"dead": (self._num_looks - last >= looks).float().mean(), "looks": _constant(looks, last)}

    def _judged(self, seen: Judged) -> None:
        if self._last_squashed is not None:
            name, squashed = self._last_squashed
            if squashed.output.data_ptr() == seen.predictions.data_ptr():
                del self._rows["units"][name]  # an output, not a hidden unit: it may be as sure as it likes
                self._logits |= outside(squashed.function, seen)
        if seen.function in ("cross_entropy", "nll_loss") and seen.predictions.numel() > self._num_logits:
            self._num_logits = seen.predictions.numel()
            self._logits |= classes(seen)


def sizes(seen: Passed, is_block: bool) -> Columns:
    left, entered = seen.left, seen.entered
    columns = {"rms": _rms(left), "peak": _norm(left, math.inf)}
    columns |= dict.fromkeys(("entered", "ratio"), _constant(math.nan, left))
    if is_block and entered is not None and entered.shape == left.shape and entered.is_floating_point():
        columns["entered"] = _rms(entered)
        columns["ratio"] = _norm(left - entered) / _norm(entered)
    return columns


def squashing(function: str, output: Tensor) -> Columns:
    """Of (places, units): the share of units that never spoke, the share of numbers at an end, the mean slope."""
    nan = _constant(math.nan, output)
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
    found["vocab"] = _constant(num_classes, lse)
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


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.full((), float(value), device=like.device)
