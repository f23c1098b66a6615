"""The guarded step: what happens between a backward and the next forward, the same in every loop.

    gradients -> norms, clip -> is it finite? (on the device) -> update or latch -> signals -> rows -> spike, failure

It is made of a model and of objectives (parameters with their optimizers); it knows no config, no recipe and no record.
A client (`fit`, `rung.guard`) runs its own forwards and backwards, calls `update` with what they left, and reads `rows`
when it likes; what becomes of a failure is the client's to decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rung.engine.layers import Layers
from rung.engine.optim import set_lr
from rung.engine.signals import Layered, Signals
from rung.errors import RecipeError
from rung.random import Draw
from rung.recipe import Batch, Loss
from rung.robust import Spikes
from rung.text import error_text

SPIKE = 8.0  # spreads above what was expected: see robust.surprise; a batch of one repeated token has 72 to 154
FIRST_STEPS = 20  # whose norms per tensor are all measured
LOW = (torch.float16, torch.bfloat16)
LARGE = 2**18  # elements of a buffer that is worth finding out whether it moves

Apply = Callable[[Sequence[torch.optim.Optimizer], Tensor], None]


@dataclass
class ObjectiveState:
    """An objective with what training it needs."""

    name: str
    loss: Callable[[Batch, Draw], Loss]  # compiled, if the user asked for it
    parameters: list[nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    every: int = 1
    eager: Callable[[Batch, Draw], Loss] | None = None  # as it was written, where `loss` is compiled

    @property
    def plain_loss(self) -> Callable[[Batch, Draw], Loss]:
        return self.eager or self.loss


class Diverged(Exception):
    """A step was not finite and was not applied, or would have broken the weights and was undone.

    Unless `is_broken`: then weights were found broken long after, and there is no state before it to continue from.
    """

    def __init__(self, step: int, why: str, is_broken: bool = False, **facts: Any) -> None:
        super().__init__(why)
        self.step, self.is_broken, self.facts = step, is_broken, facts


class Scaling(Protocol):
    """Multiplies losses so that small gradients survive in float16, and takes overflows for what they are."""

    scale: Tensor

    def is_fatal(self, bad_loss: Tensor, bad_norm: Tensor) -> Tensor:
        """Whether a step that is not finite can no longer be calibration."""

    def update(self, is_bad: Tensor, latch: Tensor) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


class Gradients(NamedTuple):
    """The gradients of one objective, in .grad, as the backwards of a step and the exchange over ranks left them."""

    objective: ObjectiveState
    names: list[str]
    packed: Tensor  # (names, 2) sums and counts over all ranks; the first is the loss
    micros: list[Tensor]  # (2,) sum and count of each micro of this rank
    factor: Tensor | None = None  # brings .grad to the gradient of sum / count; None: it is that already
    clip: float = 0.0  # the largest norm; 0 for none


class ClippedGrads(NamedTuple):
    """An objective whose gradients are those of sum / count, clipped, and wait to be applied."""

    of: Gradients
    norm: Tensor  # before clipping
    clipped: Tensor  # after
    norms: Tensor  # of each gradient, before clipping; parameters without one are left out


class Spike(NamedTuple):
    signal: str
    score: float
    value: float


@dataclass
class Row:
    """What a step left behind, on the host; `failure` where it was not applied and training cannot continue."""

    step: int
    values: dict[str, float]
    tables: dict[str, tuple[list[str], dict[str, list[float]]]] = field(default_factory=dict)
    spikes: list[Spike] = field(default_factory=list)
    failure: Diverged | None = None


class Snapshot:
    """A copy of what an update changes, which can be put back."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self.weights = [parameter.detach().clone() for parameter in parameters]
        self._states = [
            {p: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for p, s in o.state.items()}
            for o in optimizers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, weight in zip(self._parameters, self.weights, strict=True):
            parameter.copy_(weight)
        for optimizer, states in zip(self._optimizers, self._states, strict=True):
            for made in [key for key in optimizer.state if key not in states]:
                del optimizer.state[made]  # by the step that is undone
            for key, state in states.items():
                optimizer.state[key].update(state)


class Guard:
    """Keeps a bad step from the weights in three ways, from free to dear.

    A loss or gradient that is not finite: fused optimizers honour `found_inf`, a tensor on the device, and leave the
    whole update out. The latch is sticky, so that however late the host reads the signals, weights and optimizers are
    exactly those before the first bad step. Other optimizers make the host look before each update.
    Buffers that a forward moves (running statistics) are kept while the latch is open; large ones (tables, masks) only
    if they move in the first steps.
    Finite gradients that make bad weights (an eps that underflows): for some steps after a start and after a spike the
    guard is armed; weights and optimizers are copied before the update, checked after it, and a bad update is undone.
    """

    def __init__(self, device: torch.device, model: nn.Module, armed_steps: int = 0) -> None:
        self.latch = torch.zeros((), device=device)  # one tensor for good, so that a captured graph may hold it
        self._armed_steps, self._armed_until = armed_steps, 0
        self._model = model
        self._still: set[str] = set()  # large buffers that nothing writes into
        self._kept: dict[torch.dtype, tuple[list[tuple[str, torch.Size]], Tensor]] = {}
        self._at_first: dict[str, Tensor] | None = None

    def judge(self, is_bad: Tensor, is_fatal: Tensor) -> Tensor:
        """1 where this step must not be applied; after a fatal one, no step is."""
        torch.maximum(self.latch, is_fatal.to(self.latch.dtype), out=self.latch)
        return torch.maximum(self.latch, is_bad.to(self.latch.dtype))

    def apply(self, optimizers: Sequence[torch.optim.Optimizer], skip: Tensor) -> None:
        """Steps the optimizers of an objective, all or none."""
        all_fused = all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)
        if not all_fused and skip.item():
            return
        for optimizer in optimizers:
            if all_fused:
                optimizer.found_inf = skip  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.__dict__.pop("found_inf", None)  # whoever steps it next must not find our flag

    def open(self) -> None:
        """Forgets a bad step: the run continues without it."""
        self.latch.zero_()

    def arm(self, step: int) -> None:
        """From this step on, for a while, updates are looked at."""
        self._armed_until = max(self._armed_until, step + self._armed_steps)

    def is_armed(self, step: int) -> bool:
        return step < self._armed_until

    def keep_buffers(self) -> None:
        """Before a forward. By name, as a forward may also put a new tensor in place of the old; a dtype at a time,
        in one piece, because a model can have hundreds of them."""
        buffers = [(n, b) for n, b in self._model.named_buffers() if b.numel() and n not in self._still]
        if self._at_first is None:
            self._at_first = {name: b.clone() for name, b in buffers if b.numel() > LARGE}
        for dtype in {buffer.dtype for _, buffer in buffers}:
            some = [(name, buffer) for name, buffer in buffers if buffer.dtype == dtype]
            layout = [(name, buffer.shape) for name, buffer in some]
            flat = torch.cat([buffer.detach().reshape(-1) for _, buffer in some])
            before = self._kept.get(dtype)
            if before is not None and before[0] == layout:  # never by multiplication: 0 times NaN is NaN
                flat = torch.where(self.latch > 0, before[1], flat)
            self._kept[dtype] = (layout, flat)

    def forget_still_buffers(self) -> None:
        """After some steps: tables and masks that nothing wrote into need no copies."""
        now = dict(self._model.named_buffers())
        for name, at_first in (self._at_first or {}).items():
            if name in now and torch.equal(at_first, now[name]):
                self._still.add(name)
        self._at_first = {}

    @torch.no_grad()
    def restore_buffers(self) -> None:
        for layout, flat in self._kept.values():
            pieces = flat.split([shape.numel() for _, shape in layout])
            for (name, shape), piece in zip(layout, pieces, strict=True):
                owner, _, last = name.rpartition(".")
                buffers = self._model.get_submodule(owner)._buffers
                if (buffer := buffers.get(last)) is not None and buffer.shape == shape:
                    buffer.copy_(piece.view(shape))
                else:
                    buffers[last] = piece.view(shape).clone()


class GuardedStep:
    """Applies steps that are finite, and remembers that one was not.

    `broken` names tensors that the last armed update would have broken. `no_layers` says why norms per tensor are no
    longer measured.
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Sequence[ObjectiveState],
        device: torch.device,
        *,
        num_ranks: int = 1,
        armed_steps: int = 0,
        layers_every: int = 0,
        scaling: Scaling | None = None,
        apply: Apply | None = None,
    ) -> None:
        self.model, self.objectives, self.device = model, list(objectives), device
        self.guard = Guard(device, model, armed_steps)
        self.layers = Layers(model, self.objectives)
        self.broken: list[str] = []
        self.no_layers = ""
        self.layers_every, self.scaling = layers_every, scaling
        self._apply = apply or self.guard.apply
        self._is_shared = num_ranks > 1
        self._signals = Signals(fixed_lag=self._is_shared)
        self._first_step = self._next_step = 0
        self._spikes = {"loss": Spikes(), "norm": Spikes()}

    def start(self, step: int) -> None:
        """A loop begins, or continues after a resume, with this step."""
        self._first_step = self._next_step = step
        self.guard.arm(step)

    def replace_objectives(self, objectives: Sequence[ObjectiveState]) -> None:
        """Other parameters are trained from now on."""
        self.objectives = list(objectives)
        self.layers = Layers(self.model, self.objectives)

    def measures(self, step: int) -> bool:
        """Whether norms per tensor are wanted of this step: every so often, and in the first steps of an attempt."""
        every = self.layers_every
        return every > 0 and (step % every == 0 or step - self._first_step < min(FIRST_STEPS, every))

    def update(
        self, step: int, due: Sequence[Gradients], lr: float | None = None, measures: bool = False
    ) -> dict[str, Tensor]:
        """Updates the weights in place, or not; returns the signals of the step as tensors, still on the device.

        `lr` of None leaves the rates where the loop has set them. With `measures` the norms of each tensor are left in
        `layers.measured`.
        """
        ready = [_clip(gradients, self.device) for gradients in due]
        objectives = [gradients.objective for gradients in due]
        parameters = [p for o in objectives for p in o.parameters]
        optimizers = [x for o in objectives for x in o.optimizers]
        before = Snapshot(parameters, optimizers) if self.guard.is_armed(step) else None
        if measures:
            self.layers.begin(objectives, None if before is None else before.weights)
        scaled = self.scaling.state_dict() if self.scaling is not None else {}
        signals = self._update(ready, lr)
        if before is not None and self._undo_if_broken(before, parameters, optimizers) and self.scaling is not None:
            self.scaling.load_state_dict(scaled)
        if measures:
            try:
                self.layers.end({one.of.objective.name: one.norms for one in ready})
            except Exception as error:  # an optimizer with a state of its own kind: training is worth more than a table
                self.layers_every, self.layers.measured = 0, {}
                self.no_layers = error_text(error)
        return signals | {"diverged": self.guard.latch.clone()} | _merge(ready, self._is_shared)

    def _update(self, ready: Sequence[ClippedGrads], lr: float | None) -> dict[str, Tensor]:
        """Applies the step, unless it is bad; says so in `skipped` and, when training cannot continue, in the latch."""
        bad_loss = torch.stack([~torch.isfinite(one.of.packed[0, 0]) for one in ready]).any()
        bad_norm = torch.stack([~torch.isfinite(one.norm) for one in ready]).any()
        is_bad = is_fatal = bad_loss | bad_norm
        signals = {}
        if self.scaling is not None:  # an overflow of gradients is calibration, as long as there is room below
            is_fatal = self.scaling.is_fatal(bad_loss, bad_norm)
            signals["scale"] = self.scaling.scale
        skip = self.guard.judge(is_bad, is_fatal)
        if self.scaling is not None:
            self.scaling.update(is_bad, self.guard.latch)
        for one in ready:
            objective = one.of.objective
            if lr is not None:
                set_lr(objective.optimizers, lr)
            is_empty = (one.of.packed[0, 1] == 0).to(skip.dtype)  # no target, no update: not even the decay
            self._apply(objective.optimizers, torch.maximum(skip, is_empty))
        return signals | {"skipped": skip}

    def _undo_if_broken(
        self, before: Snapshot, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> bool:
        """An armed update that made weights or moments non-finite is taken back. Here the host waits.

        What was not finite before (a mask that is kept as a parameter) is not the update's doing.
        """
        bad = not_finite([p.detach() for p in parameters])
        if bad:
            odd = not_finite(before.weights)
            bad = [number for number in bad if number not in odd]
        state = [value for o in optimizers for values in o.state.values() for value in values.values()]
        moments = [t for t in state if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
        if not bad and not not_finite(moments):
            return False
        self.broken = self.layers.names_of([parameters[number] for number in bad]) or ["optimizer state"]
        before.restore()
        self.guard.latch.fill_(1.0)
        return True

    def tables(self) -> tuple[dict[str, Tensor], dict[str, Layered]]:
        """What the last update with `measures` left: a signal where a step has several micros, and the table."""
        layers = self.layers
        if not layers.measured:
            return {}, {}
        first = {} if layers.norm_first is None else {"norm_first": layers.norm_first}
        return first, {"tensors": Layered(layers.names, {**layers.measured, **layers.fixed})}

    def push(
        self, step: int, host: Mapping[str, float], signals: Mapping[str, Tensor], tables: Mapping[str, Layered]
    ) -> None:
        """Sends the numbers of a step on their way from the device; `rows` has them when they are there."""
        self._signals.push(step, host, signals, tables)
        self._next_step = step + 1

    def rows(self, wait: bool = False) -> Iterator[Row]:
        """Rows that have arrived, oldest first. After one with a failure the rest is dropped: it changed nothing."""
        for step, values, tables in self._signals.ready(wait=wait):
            has_diverged = values.pop("diverged") > 0
            bad_micro = max(
                (int(values.pop(name)) for name in list(values) if name.endswith("bad_micro")), default=None
            )
            row = Row(step, values, tables)
            if has_diverged:
                row.failure = self._failure(step, values, bad_micro)
                self.drop()
                yield row
                return
            for name, spikes in self._spikes.items():
                score = spikes.score(values[name])
                if score > SPIKE and math.isfinite(score):
                    # Updates are checked for a while; ranks see the same rows at the same time, and agree.
                    self.guard.arm(self._next_step)
                    row.spikes.append(Spike(name, score, values[name]))
            yield row

    def drop(self) -> None:
        self._signals.drop()

    def rewound(self) -> None:
        """The loop has gone back to a save: what was expected of later steps is no longer true."""
        self._spikes = {name: Spikes() for name in self._spikes}

    def _failure(self, step: int, values: Mapping[str, float], bad_micro: int | None) -> Diverged:
        broken, self.broken = self.broken, []
        if broken:
            shown = ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
            why = f"gradients were finite, but the update would have broken {shown} at step {step}; it was undone"
            return Diverged(step, why, tensors=broken)
        # (activation statistics may be NaN of something that is not there)
        bad = {k: v for k, v in values.items() if not math.isfinite(v) and not k.startswith("logits/")}
        names = sorted((name for name in bad if name != "norm_clipped"), key=lambda name: name != "loss")
        named = ", ".join(f"{name} {bad[name]:g}" for name in names)
        why = f"{named or 'float16 overflowed at every scale'} at step {step}; the update was not applied"
        # Without a number there was one micro only. Where no loss is bad, the gradients of all together are.
        return Diverged(step, why, values=bad, micro=0 if bad_micro is None else bad_micro)


def _clip(gradients: Gradients, device: torch.device) -> ClippedGrads:
    """Divides by the count and clips, in one pass over the gradients, or in none where there is nothing to do."""
    found = [p.grad for p in gradients.objective.parameters if p.grad is not None]
    norms = gradient_norms(found, device)
    norm = torch.linalg.vector_norm(norms)
    factor, shrink = gradients.factor, torch.ones_like(norm)
    if factor is not None:
        norm, norms = norm * factor, norms * factor
    if gradients.clip > 0:
        shrink = (gradients.clip / (norm + 1e-6)).clamp(max=1.0)
    if found and (factor is not None or gradients.clip > 0):
        by = shrink if factor is None else factor * shrink
        if all(g.layout is torch.strided and g.device == by.device for g in found):
            torch._foreach_mul_(found, by)
        else:
            for gradient in found:
                gradient.mul_(by.to(gradient.device))
    return ClippedGrads(gradients, norm, norm * shrink, norms)


def gradient_norms(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """(gradients,) the norm of each, on one device; in float32 at least: in float16 squares overflow."""
    if not gradients:
        return torch.zeros(0, device=device)
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    is_low = any(g.dtype in LOW for g in dense)
    norms = torch._foreach_norm(dense, 2, torch.float32) if is_low else torch._foreach_norm(dense)
    return torch.stack([norm.to(device) for norm in norms])


def _merge(ready: Sequence[ClippedGrads], is_shared: bool) -> dict[str, Tensor]:
    """The signals of all objectives; the first one's loss is the loss of the run and has no prefix."""
    merged: dict[str, Tensor] = {}
    for number, one in enumerate(ready):
        signals = {"norm": one.norm, "norm_clipped": one.clipped}
        for name, (value, count) in zip(one.of.names, one.of.packed, strict=True):
            signals[f"{name}/sum"], signals[f"{name}/count"] = value, count
        if len(one.of.micros) > 1 or (is_shared and one.of.micros):  # or which one was bad is known from their number
            sums, counts = torch.stack(one.of.micros).unbind(dim=1)
            is_bad = ~torch.isfinite(sums)
            signals["targets_min"] = counts.min()
            signals["bad_micro"] = torch.where(is_bad.any(), is_bad.int().argmax(), -1)
        prefix = "" if number == 0 else f"{one.of.objective.name}/"
        for name, value in signals.items():
            if prefix + name in merged:
                raise RecipeError(
                    f"two objectives have a signal {prefix + name!r}; rename a part or an objective", code="bad-loss"
                )
            merged[prefix + name] = value
    return merged


def not_finite(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers of the tensors with an element that is NaN or infinite. The host waits for it.

    Norms first, in one pass; only where one is not finite the elements are looked at, for it may just have overflowed.
    """
    if not tensors:
        return []
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(tensors))])
    odd = torch.nonzero(~torch.isfinite(norms)).flatten().tolist()
    return [number for number in odd if not torch.isfinite(tensors[number]).all()]
