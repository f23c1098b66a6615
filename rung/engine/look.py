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
from rung.engine.gauges import Columns, attention, classes, constant, outside, sizes, squashing
from rung.engine.lens import Attended, Judged, Lens, Passed, Seen, Squashed
from rung.engine.precision import Precision
from rung.engine.step import Trained, seed_torch

ENOUGH = 512  # numbers of the largest tensor of the batch: one long text is enough, of short rows it takes several
MOST_CALLS = 16  # of one module in one look: a loop over time is not told to its end
REMEMBERED = 50  # looks; a unit that was silent in all of them is dead
FUNCTIONS = {"relu": 0.0, "tanh": 1.0, "sigmoid": 2.0}
CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)

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
        self._needs_graph = False  # of a loss that differentiates inside itself, as a gradient penalty does

    def take(self, micro: Micro, step: int) -> Looked:
        """What there is to see at this step; nothing where the model cannot be looked at."""
        if self.reason:
            return Looked()
        self._num_looks += 1
        try:
            return self._take(few_rows(micro))
        except Exception as error:  # a look may fail in any way, and training must not notice
            self.reason = f"looking at the model failed at step {step}: {type(error).__name__}: {error}"
            return Looked()

    def _take(self, micro: Micro) -> Looked:
        try:
            return self._run(micro)
        except RuntimeError:
            if self._needs_graph:
                raise
        self._needs_graph = True
        return self._run(micro)

    def _run(self, micro: Micro) -> Looked:
        loss = getattr(self._objective, "eager", None) or self._objective.loss
        watch = _Watch(self._model, self._active, self._num_looks)
        with _same_buffers(self._model), eval_mode(self._model), self._precision.autocast():
            seed_torch(self._objective.name, micro.draw)
            with torch.set_grad_enabled(self._needs_graph), watch:
                loss(micro.batch, micro.draw)
        return watch.looked()


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
        with torch.no_grad():
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

    @torch.no_grad()
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
        output = seen.output if seen.output.dim() > 1 else seen.output.reshape(-1, 1)  # one unit: a hinge, a gate
        is_channels_first = output.dim() > 2 and (self._has_channels_first or output.dim() == 4)
        by_unit = (output.movedim(1, -1) if is_channels_first else output).flatten(0, -2)  # (places, units)
        columns = {"function": constant(FUNCTIONS[seen.function], output), **squashing(seen.function, by_unit)}
        columns |= dict.fromkeys(("dead", "looks"), constant(math.nan, output))
        # Outside of the model it is part of the loss: a margin that is kept everywhere is no dead unit.
        name = self._add("units", seen.module, columns) if self._stack else ""
        if name and seen.function == "relu":
            self._rows["units"][name] |= self._deaths(name, (by_unit > 0).any(0))
        self._last_squashed = (name, seen) if seen.function != "relu" else None

    def _deaths(self, name: str, is_active: Tensor) -> Columns:
        """A unit is dead when its last activity lies before all the looks that are remembered."""
        last, since = self._active.get(name, (is_active, 0))
        if last.dtype == torch.bool or last.shape != is_active.shape:
            last, since = torch.full_like(is_active, self._num_looks - 1, dtype=torch.int32), self._num_looks - 1
        last = torch.where(is_active, self._num_looks, last)
        self._active[name] = (last, since)
        looks = min(REMEMBERED, self._num_looks - since)
        return {"dead": (self._num_looks - last >= looks).float().mean(), "looks": constant(looks, last)}

    def _judged(self, seen: Judged) -> None:
        if self._last_squashed is not None:
            name, squashed = self._last_squashed
            if squashed.output.data_ptr() == seen.predictions.data_ptr():
                self._rows["units"].pop(name, None)  # an output, not a hidden unit: it may be as sure as it likes
                self._logits |= outside(squashed.function, seen)
        if seen.function in ("cross_entropy", "nll_loss") and seen.predictions.numel() > self._num_logits:
            self._num_logits = seen.predictions.numel()
            self._logits |= classes(seen)
