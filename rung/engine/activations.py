"""Looks inside the model now and then: how large activations and logits are, who attends to what, which units are dead.

Each look is a separate forward on a few rows of the step, eager, in eval mode and without gradients: it works for any
recipe and leaves training as it was. Each tensor is reduced to a few scalars while the forward is running, and those
stay on the device until they are copied, so a look needs less memory than a step and never makes the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rung.engine.evaluate import eval_mode
from rung.engine.guarded import ObjectiveState
from rung.engine.op_tracer import ActivationCall, AttentionCall, LossCall, ModuleOutput, OpTracer, Seen
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.engine.step import seed_torch
from rung.text import error_text

QUERIES, PLACES = 64, 512  # that are judged in one attention, and in one cross entropy
CHUNK = 2**20  # numbers that are worked on at once: 4 MB
RULED_OUT = -1e8  # a logit as low is a mask's

Columns = dict[str, Tensor]
ENOUGH = 512  # numbers of the largest tensor of the batch: one long text is enough, of short rows it takes several
MOST_CALLS = 16  # of one module in one look: a loop over time is not followed to its end
REMEMBERED = 50  # looks; a unit that was silent in all of them is dead
FUNCTIONS = {"relu": 0.0, "tanh": 1.0, "sigmoid": 2.0}
CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)

Active = dict[str, tuple[Tensor, int]]  # for each unit the last look at which it was active; the look before the first


@dataclass
class ActivationSummary:
    """Scalars by name, and per kind of table the names of its rows and one tensor per column."""

    scalars: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, tuple[list[str], Columns]] = field(default_factory=dict)


class ActivationStats:
    """`take` measures the model as it is; it remembers only when each unit was last active."""

    def __init__(self, model: nn.Module, objective: ObjectiveState, precision: Precision) -> None:
        self.reason = ""  # why there are no more looks
        self._model, self._objective, self._precision = model, objective, precision
        self._active: Active = {}
        self._num_looks = 0
        self._needs_graph = False  # of a loss that differentiates inside itself, as a gradient penalty does

    def take(self, micro: Micro, step: int) -> ActivationSummary:
        """What there is to see at this step; nothing where the model cannot be looked at."""
        if self.reason:
            return ActivationSummary()
        self._num_looks += 1
        try:
            micro = few_rows(micro)
            try:
                return self._look(micro)
            except RuntimeError:
                if self._needs_graph:
                    raise
                self._needs_graph = True
                return self._look(micro)
        except Exception as error:  # a look may fail in any way, and training must not notice
            self.reason = f"looking at the model failed at step {step}: {error_text(error)}"
            return ActivationSummary()

    def _look(self, micro: Micro) -> ActivationSummary:
        watch = _Watch(self._model, self._active, self._num_looks)
        with _same_buffers(self._model), eval_mode(self._model), self._precision.autocast():
            seed_torch(self._objective.name, micro.draw)  # not restored: the engine seeds torch before every micro
            with torch.set_grad_enabled(self._needs_graph), watch:
                self._objective.plain_loss(micro.batch, micro.draw)
        return watch.summary()


def few_rows(micro: Micro) -> Micro:
    """Copies of as many of the first rows as hold ENOUGH numbers, at least one; a loss may write into its batch."""
    num_rows = len(micro.draw.rows)
    by_row = {name: t for name, t in micro.batch.items() if t.dim() and t.shape[0] == num_rows}
    largest = max((t[0].numel() for t in by_row.values() if num_rows), default=ENOUGH)
    few = min(num_rows, max(1, math.ceil(ENOUGH / max(1, largest))))
    batch = {name: (t[:few] if name in by_row else t).clone() for name, t in micro.batch.items()}
    return Micro(micro.ids[:few], replace(micro.draw, rows=micro.draw.rows[:few]), batch)


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Puts back what a forward wrote into a buffer, in place or over it, even in eval mode."""
    before = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, version, copy in before:
                if buffer._version != version:
                    buffer.copy_(copy)
                module._buffers[name] = buffer


class _Watch(OpTracer):
    """A tracer that keeps numbers instead of tensors."""

    def __init__(self, model: nn.Module, active: Active, num_looks: int) -> None:
        super().__init__(model, keeps_modules=True)
        self._modules = dict(model.named_modules())
        self._active, self._num_looks = active, num_looks
        self._rows: dict[str, dict[str, Columns]] = {"modules": {}, "attention": {}, "units": {}}
        self._logits: Columns = {}
        self._num_logits = 0
        self._has_channels_first = False
        self._last_bounded: tuple[str, ActivationCall] | None = None  # a tanh or sigmoid, which may be the output

    @torch.no_grad()
    def note(self, seen: Seen) -> None:
        if isinstance(seen, ModuleOutput):
            module = self._modules[seen.module]
            if isinstance(module, CHANNELS_FIRST):
                self._has_channels_first = True
            elif next(module.parameters(recurse=False), None) is not None:
                self._has_channels_first = False
            if seen.module and seen.left.numel():  # of the whole there is nothing to say that its parts do not
                parent = self._modules.get(seen.module.rpartition(".")[0])
                has_children = next(module.children(), None) is not None
                is_block = isinstance(parent, nn.ModuleList | nn.Sequential) and has_children
                self._add("modules", seen.module, sizes(seen, is_block))
        elif isinstance(seen, AttentionCall):
            self._add("attention", seen.module, attention(seen))
        elif isinstance(seen, ActivationCall) and seen.output.numel():
            self._note_activation(seen)
        elif isinstance(seen, LossCall):
            if self._last_bounded is not None:
                name, activation = self._last_bounded
                if activation.output.data_ptr() == seen.predictions.data_ptr():
                    self._rows["units"].pop(name, None)  # an output, not a hidden unit: it may be as sure as it likes
                    self._logits |= outside(activation.function, seen)
            if seen.function in ("cross_entropy", "nll_loss") and seen.predictions.numel() > self._num_logits:
                self._num_logits = seen.predictions.numel()
                self._logits |= classes(seen)

    def summary(self) -> ActivationSummary:
        tables = {}
        for kind, rows in self._rows.items():
            if rows:
                columns = next(iter(rows.values())).keys()
                tables[kind] = (
                    list(rows),
                    {c: torch.stack([row[c].float() for row in rows.values()]) for c in columns},
                )
        return ActivationSummary({f"logits/{name}": value for name, value in self._logits.items()}, tables)

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

    def _note_activation(self, seen: ActivationCall) -> None:
        output = seen.output if seen.output.dim() > 1 else seen.output.reshape(-1, 1)  # one unit: a hinge, a gate
        is_channels_first = output.dim() > 2 and (self._has_channels_first or output.dim() == 4)
        by_unit = (output.movedim(1, -1) if is_channels_first else output).flatten(0, -2)  # (places, units)
        columns = {"function": constant(FUNCTIONS[seen.function], output), **squashing(seen.function, by_unit)}
        columns |= dict.fromkeys(("dead", "looks"), constant(math.nan, output))
        # Outside of the model it is part of the loss: a margin that is kept everywhere is no dead unit.
        name = self._add("units", seen.module, columns) if self._stack else ""
        if name and seen.function == "relu":
            # A unit is dead when its last activity lies before all the looks that are remembered.
            is_active, now = (by_unit > 0).any(0), self._num_looks
            last, since = self._active.get(name, (is_active, 0))
            if last.dtype == torch.bool or last.shape != is_active.shape:
                last, since = torch.full_like(is_active, now - 1, dtype=torch.int32), now - 1
            last = torch.where(is_active, now, last)
            self._active[name] = (last, since)
            looks = min(REMEMBERED, now - since)
            columns |= {"dead": (now - last >= looks).float().mean(), "looks": constant(looks, last)}
        self._last_bounded = (name, seen) if seen.function != "relu" else None


def sizes(seen: ModuleOutput, is_block: bool) -> Columns:
    left, entered = seen.left, seen.entered
    columns = {"rms": _rms(left), "peak": _norm(left, math.inf)}
    columns |= dict.fromkeys(("entered", "ratio"), constant(math.nan, left))
    if is_block and entered is not None and entered.shape == left.shape and entered.is_floating_point():
        columns["entered"] = _rms(entered)
        columns["ratio"] = _norm(left - entered) / _norm(entered)
    return columns


def squashing(function: str, output: Tensor) -> Columns:
    """Of (places, units): the share of units that were never active, the share of numbers at an end, the mean slope."""
    nan = constant(math.nan, output)
    if function == "relu":
        return {"silent": (output <= 0).all(0).float().mean(), "saturated": nan, "slope": nan}
    values = output.float()
    if function == "tanh":
        at_end, slope = values.abs() > 0.97, 1 - values.square()
    else:  # a sigmoid is a tanh of half the argument: .97 there is .985 here
        at_end, slope = (values < 0.015) | (values > 0.985), values * (1 - values)
    return {"silent": nan, "saturated": at_end.float().mean(), "slope": slope.mean()}


def outside(function: str, seen: LossCall) -> Columns:
    """The share of targets that a tanh or a sigmoid can never reach."""
    if not seen.targets.is_floating_point() or not seen.targets.numel():
        return {}
    low = -1.0 if function == "tanh" else 0.0
    return {"outside": ((seen.targets < low - 1e-3) | (seen.targets > 1 + 1e-3)).float().mean()}


def attention(seen: AttentionCall) -> Columns | None:
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


def _logits_of(seen: AttentionCall) -> tuple[Tensor, Tensor]:
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


def classes(seen: LossCall) -> Columns:
    """What a classifier says, as means over a few places.

    Those that the loss ignores have no weight: cutting them out would make the host wait for their number.
    """
    logits, targets = seen.predictions.detach(), seen.targets
    if logits.dim() == 1:
        logits, targets = logits[None], targets[None]
    logits = logits.movedim(1, -1)
    by_class = not targets.is_floating_point()
    if not by_class:
        targets = targets.movedim(1, -1).argmax(-1)  # only to know where; the loss of such targets is not reported
    stride = max(1, math.ceil(targets.numel() / PLACES))
    # No divisor of the number of places: it would fall on the same few of a last axis, such as codebooks, each time.
    while math.gcd(stride, targets.numel()) > 1:
        stride += 1
    logits, targets = logits.reshape(-1, logits.shape[-1])[::stride], targets.reshape(-1)[::stride]
    weights = torch.ones_like(targets, dtype=torch.float32)
    if by_class and seen.ignore_index is not None:
        weights = (targets != seen.ignore_index).float()
    num_classes = logits.shape[-1]
    targets = targets.clamp(0, num_classes - 1)
    rows = max(1, CHUNK // num_classes)
    chunks = []
    for start in range(0, len(targets), rows):
        part = logits[start : start + rows].float()
        lse = part.logsumexp(-1)
        # A class that a mask rules out, by -inf or by a number as low, says nothing of the logits.
        is_out = part <= RULED_OUT
        of_others = part.masked_fill(is_out, 0.0).sum(-1) / (~is_out).sum(-1).clamp(min=1)
        mean_logit = torch.where(is_out.any(-1), of_others, part.mean(-1))
        log_shares = part - lse[:, None]
        entropy = -(log_shares.exp() * log_shares).nansum(-1)  # a class that is ruled out has -inf, and adds nothing
        losses = -log_shares.gather(1, targets[start : start + rows, None])[:, 0]
        chunks.append((lse, mean_logit, entropy, part.argmax(-1), losses))
    lse, mean, entropy, top, losses = (torch.cat(parts) for parts in zip(*chunks, strict=True))

    def average(values: Tensor, weights: Tensor = weights) -> Tensor:
        return (values * weights).sum() / weights.sum()

    given, asked = (torch.zeros(num_classes, device=lse.device).index_add_(0, ids, weights) for ids in (top, targets))
    found = {"entropy": average(entropy), "top1": given.max() / given.sum(), "targets": weights.sum()}
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


def _norm(x: Tensor, order: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x, order, dtype=torch.float32)


def _rms(x: Tensor) -> Tensor:
    return _norm(x) / math.sqrt(x.numel())


def constant(value: float, like: Tensor) -> Tensor:
    return torch.full((), float(value), device=like.device)
