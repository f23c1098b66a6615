"""Takes one step again, as it was or under other conditions, and leaves everything as it found it.

It serves a captured step of a run and a step of somebody's own loop alike. Each try starts from zero gradients, goes
through the micros in order, computes the norm and, if asked, the update, and says where the first non-finite number
came up.

Compiled code is disabled through torch's own stance, which reaches every compiled function and lets hooks work again.
float64 means all of it: a model that asks for float32 somewhere inside (norms often do) gets float64 there too, or its
matrices would not fit together. Buffers that a forward makes, replaces or enlarges are put back afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rung.doctor.history import History
from rung.engine.guarded import ObjectiveState
from rung.engine.optim import set_lr
from rung.engine.precision import DTYPES, Precision
from rung.engine.prefetch import Micro
from rung.engine.step import seed_torch
from rung.forensics.first import Origin, error_line, first_nonfinite, is_finite, is_usable
from rung.random import Draw

Weights = Mapping[str, Tensor]


class Trial(NamedTuple):
    """Steps that were taken otherwise than they were."""

    how: str
    fails: bool
    lr: float = 0.0  # at its peak


class Conditions(NamedTuple):
    """Conditions of a try; None is as it was recorded."""

    dtype: str | None = None
    device: str | None = None
    is_compiled: bool = False


EAGER = Conditions()


@dataclass
class Try:
    """What became of one try. `place` is where it first went wrong; empty: nowhere."""

    place: str = ""  # error, loss, gradient, sum, norm, weights, state
    number: int | None = None  # of the micro
    objective: str = ""
    error: str = ""
    tensors: list[str] = field(default_factory=list)  # parameters whose gradient, weight or state is bad
    counts: list[float] = field(default_factory=list)  # of targets, in order of objectives and micros
    norm: float = math.nan
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # as the update got them

    @property
    def fails(self) -> bool:
        return bool(self.place)


@dataclass
class Rerun:
    """`micros` are those of all ranks, in order; `ranks` says whose each is. The model is in its training mode.

    `other_batches` gives micros of other steps with the draws of this one; `older_weights` names and weights of earlier
    states; `history` is the record of the run. `seed` is called before each forward. `masks` are parameters that hold
    -inf on purpose, from the start.
    """

    model: nn.Module
    objectives: list[ObjectiveState]
    micros: list[Micro]
    precision: Precision
    nominal: float = 1.0
    grad_clip: float = 0.0
    lr: float | None = None  # None: what the optimizers have
    step: int = 0
    is_compiled: bool = False
    ranks: list[int] = field(default_factory=list)
    other_batches: Callable[[], Iterable[list[Micro]]] | None = None
    older_weights: Callable[[], Iterable[tuple[str, Weights]]] | None = None
    seed: Callable[[ObjectiveState, Micro], None] = lambda objective, micro: seed_torch(objective.name, micro.draw)
    masks: frozenset[str] = frozenset()
    history: Callable[[], History] | None = None
    # Steps before this one with another learning rate, or with other inputs: how, in words, and whether they fail.
    slower: Callable[[], Trial | None] | None = None
    rescaled: Callable[[Mapping[str, float]], Trial | None] | None = None

    def __post_init__(self) -> None:
        self.ranks = self.ranks or [0] * len(self.micros)
        self.device = next(self.model.parameters()).device
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        # On the host: the device may have no room for two.
        self._weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors()}
        plain = [module for module in self.model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._buffers = [(module, dict(module._buffers)) for module in plain]
        self._optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in self._all_optimizers()]
        self._is_updated = False

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def _all_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for objective in self.objectives for optimizer in objective.optimizers]

    @property
    def dtype(self) -> str:
        """The smallest type in which much is computed: that of autocast, or of the weights."""
        small = {p.dtype for p in self.model.parameters()} & {torch.float16, torch.bfloat16}
        if self.precision.name != "float32" or not small:
            return self.precision.name
        return str(min(small, key=str)).removeprefix("torch.")

    @property
    def due(self) -> list[ObjectiveState]:
        return [objective for objective in self.objectives if self.step % objective.every == 0]

    @property
    def bad_weights(self) -> list[str]:
        """Parameters that are not finite, and buffers with NaN (infinities may be a mask)."""
        parameters = [n for n, p in self.model.named_parameters() if n not in self.masks and not is_usable(p)]
        return parameters + [name for name, b in self.model.named_buffers() if bool(torch.isnan(b).any())]

    @property
    def bad_state(self) -> list[str]:
        return [
            f"{key} of {self._names.get(parameter, '?')}"
            for optimizer in self._all_optimizers()
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor) and not is_usable(value)
        ]

    def take(
        self,
        conditions: Conditions = EAGER,
        micros: Sequence[Micro] | None = None,
        weights: Weights | None = None,
        with_update: bool = False,
    ) -> Try:
        """The step, or what is left of it with fewer or other micros; stops at the first thing that is bad."""
        micros = self.micros if micros is None else micros
        tried = Try()
        with self._under(conditions, weights) as resolved:
            for objective in self.due:
                total: dict[nn.Parameter, Tensor] = {}
                for number, micro in enumerate(micros):
                    tried.objective, tried.number = objective.name, number
                    try:
                        here = micro._replace(batch=resolved.moved(micro.batch))
                        scalar, value, count = self._forward(objective, here, resolved)
                        tried.counts.append(count)
                        if not math.isfinite(value):
                            tried.place = "loss"
                            return tried
                        torch.autograd.backward(scalar, inputs=objective.parameters)
                    except Exception as error:  # of the model's own code; it is what is to be found out
                        tried.place, tried.error = "error", error_line(error)
                        return tried
                    gradients = {p: p.grad for p in objective.parameters if p.grad is not None}
                    tried.tensors = [self._names.get(p, "?") for p, g in gradients.items() if not is_finite(g)]
                    if tried.tensors:
                        tried.place = "gradient"
                        return tried
                    for parameter, gradient in gradients.items():
                        total[parameter] = total[parameter].add_(gradient) if parameter in total else gradient
                        parameter.grad = None
                tried.number = None
                tried.tensors = [self._names.get(p, "?") for p, g in total.items() if not is_finite(g)]
                if tried.tensors:
                    tried.place = "sum"
                    return tried

                # As a Stepper does: divides by the count, takes the norm, clips. Clipping takes the norm in the type of
                # the gradients, and may fail by it; a norm for our eyes only must not.
                count = sum(tried.counts[-len(micros) :])
                factor = self.nominal / (count if count > 0 else 1.0) / resolved.scale
                small = () if self.grad_clip > 0 else (torch.float16, torch.bfloat16)
                widened = [g.float() if g.dtype in small else g for g in total.values()]
                tried.norm = float(torch.nn.utils.get_total_norm(widened)) * factor if total else 0.0
                if not math.isfinite(tried.norm):
                    tried.place = "norm"
                    return tried
                shrink = min(1.0, self.grad_clip / (tried.norm + 1e-6)) if self.grad_clip > 0 else 1.0
                tried.gradients |= {parameter: gradient * (factor * shrink) for parameter, gradient in total.items()}
            if with_update:
                bad_weights, bad_state = self.update(tried.gradients)
                tried.place = "weights" if bad_weights else "state" if bad_state else ""
                tried.tensors = bad_weights or bad_state
        return tried

    def first(self, micro: Micro, objective: ObjectiveState) -> Origin | None:
        """The first operation that made something not finite, of one micro, eager."""
        with self._under(EAGER) as resolved:
            here = micro._replace(batch=resolved.moved(micro.batch))
            return first_nonfinite(
                self.model, here.batch, lambda: self._forward(objective, here, resolved)[0], objective.parameters
            )

    @contextlib.contextmanager
    def _under(self, conditions: Conditions, weights: Weights | None = None) -> Iterator[_Resolved]:
        """The model as a try wants it; afterwards as it was."""
        device = torch.device(conditions.device) if conditions.device else self.device
        scale = self.precision.loss_scale if conditions.dtype in (None, "float16") else None
        wide = {"float32": torch.float32, "float64": torch.float64}.get(conditions.dtype or "")
        dtype, factor = conditions.dtype or self.precision.name, 1.0 if scale is None else float(scale.scale)
        with self.undone(), contextlib.ExitStack() as stack:
            if not conditions.is_compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if device != self.device:
                self.model.to(device)
            if weights is not None:
                with torch.no_grad():
                    for name, tensor in self._tensors():
                        if name in weights and weights[name].shape == tensor.shape:
                            tensor.copy_(weights[name])
            if conditions.dtype == "float32":  # weights that are smaller, too
                self.model.float()
            if conditions.dtype == "float64":
                self.model.double()
                stack.enter_context(_AllDouble())
            yield _Resolved(dtype, device, wide, conditions.is_compiled, factor)

    def _forward(self, objective: ObjectiveState, micro: Micro, resolved: _Resolved) -> tuple[Tensor, float, float]:
        """The scalar to differentiate, the sum and the count."""
        self.seed(objective, micro)
        with resolved.autocast():
            loss = (objective.loss if resolved.is_compiled else objective.plain_loss)(micro.batch, micro.draw)
        return loss.sum / self.nominal * resolved.scale, float(loss.sum.detach()), float(loss.count)

    def update(self, gradients: Mapping[nn.Parameter, Tensor]) -> tuple[list[str], list[str]]:
        """Applies gradients; what weights and what of the optimizers' state is bad afterwards. Nothing is restored."""
        self._is_updated = True
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.clone()
        for objective in self.due:
            if self.lr is not None:
                set_lr(objective.optimizers, self.lr)
            for optimizer in objective.optimizers:
                optimizer.__dict__.pop("found_inf", None)  # what the guard left there belongs to another step
                optimizer.step()
        return self.bad_weights, self.bad_state

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Weights, buffers, gradients and optimizers are afterwards as they were when this was made."""
        try:
            yield
        finally:
            for module, buffers in self._buffers:
                module._buffers.clear()
                module._buffers.update(buffers)
            with torch.no_grad():
                for name, tensor in self._tensors():
                    saved = self._weights.get(name)
                    if saved is None:  # nor can it be taken away
                        continue
                    if (tensor.dtype, tensor.shape, tensor.device) != (saved.dtype, saved.shape, self.device):
                        tensor.data = saved.to(self.device, copy=True)
                    else:
                        tensor.copy_(saved)
                    tensor.grad = None
            if self._is_updated:
                for optimizer, state in zip(self._all_optimizers(), self._optimizers, strict=True):
                    optimizer.load_state_dict(copy.deepcopy(state))
                self._is_updated = False


def rows_of(micro: Micro, rows: np.ndarray) -> Micro:
    """Some rows of a micro, with the draws they had."""
    num_rows, draw = len(micro.ids), micro.draw
    place = torch.from_numpy(np.asarray(rows, np.int64))
    batch = {
        name: tensor[place.to(tensor.device)] if tensor.ndim and tensor.shape[0] == num_rows else tensor
        for name, tensor in micro.batch.items()
    }
    return Micro(micro.ids[rows], Draw(draw.seed, draw.step, draw.rows[rows]), batch)


def with_size_one(micro: Micro, rms: Mapping[str, float]) -> Micro:
    """A micro whose arrays of these names are divided by these numbers."""
    return micro._replace(batch={name: t / rms[name] if name in rms else t for name, t in micro.batch.items()})


class _Resolved(NamedTuple):
    """The conditions of a try, with what was recorded in place of None."""

    dtype: str
    device: torch.device
    floats: torch.dtype | None  # what all floats become; None leaves them
    is_compiled: bool
    scale: float  # of the loss

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if DTYPES.get(self.dtype, torch.float32) is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.dtype])

    def moved(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy: a loss may write into its batch, and the next try must not see that."""
        return {
            name: t.to(self.device, (self.floats or t.dtype) if t.is_floating_point() else t.dtype, copy=True)
            for name, t in batch.items()
        }


class _AllDouble(TorchFunctionMode):
    """Whoever asks for a smaller float gets float64."""

    SMALL = (torch.float32, torch.float16, torch.bfloat16)
    CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
    MAKERS = {torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn, torch.linspace, torch.arange}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.CASTS:
            return args[0].double()
        kwargs = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        made = function(*map(self._wide, args), **kwargs)
        is_small = function in self.MAKERS and isinstance(made, Tensor) and made.dtype in self.SMALL
        return made.double() if is_small else made

    def _wide(self, value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in self.SMALL else value
