"""One forward of a run's loss, as it was written, looked at through a tracer.

The loss is the eager one, the model is in eval mode unless asked otherwise, torch is seeded as the engine seeds it, and
the batch is a copy, because a loss may write into its own. What a forward moves all the same (running statistics,
random states) is put back by whoever runs the checks; see checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rung.doctor.preflight.result import CheckContext
from rung.engine.contract import read_loss
from rung.engine.evaluate import EVAL_STEP, eval_mode
from rung.engine.op_tracer import DROPOUTS, OpTracer
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.engine.state import set_training
from rung.engine.step import seed_torch
from rung.random import Draw, key_of
from rung.recipe import Loss


def forward(
    context: CheckContext,
    micro: Micro,
    tracer: TorchFunctionMode | None = None,
    is_training: bool = False,
    is_exact: bool = False,
) -> Loss:
    """The first objective's loss of this micro. `is_exact` computes in float32 whatever the config.

    With gradients always: under a training draw a loss may take some of its own.
    """
    setup = context.setup
    objective = setup.state.objectives[0]
    precision = Precision("float32", setup.world.device) if is_exact else setup.precision
    batch = {name: tensor.clone() for name, tensor in micro.batch.items()}
    with eval_mode(setup.state.model), torch.enable_grad():
        if is_training:
            set_training(setup.state.model)
        seed_torch(objective.name, micro.draw)
        with precision.autocast(), tracer or nullcontext():
            return read_loss(objective.plain_loss, objective.plain_loss(batch, micro.draw))


def watch(
    context: CheckContext, micro: Micro, is_training: bool = False, is_exact: bool = False
) -> tuple[Loss, OpTracer]:
    tracer = OpTracer(context.setup.state.model)
    return forward(context, micro, tracer, is_training, is_exact), tracer


@contextmanager
def no_tf32() -> Iterator[None]:
    """Convolutions in full float32: on a GPU cuDNN takes TF32 by default, whose rounding is a gradient's 1e-2."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def rows_of(micro: Micro, start: int, stop: int) -> Micro:
    """Some rows of a micro; every tensor of a batch has one row per id on its first axis."""
    batch = {name: tensor[start:stop] for name, tensor in micro.batch.items()}
    return Micro(micro.ids[start:stop], replace(micro.draw, rows=micro.draw.rows[start:stop]), batch)


@dataclass(frozen=True, slots=True)
class EvalLike(Draw):
    """The draw of an eval with the random numbers of a training step."""

    of_step: int = 0

    def key(self, name: str) -> int:
        return key_of(self.seed, self.of_step, name)


@dataclass(frozen=True, slots=True)
class StillDraw(EvalLike):
    """All uniform numbers are one value."""

    value: float = 0.5

    def uniform(self, name: str, num_values: int = 1) -> np.ndarray:
        return np.full((len(self.rows), num_values), self.value)

    def noise(self, name: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        return torch.full((len(self.rows), *shape), self.value, device=device)


class Still(TorchFunctionMode):
    """Takes the chance out of torch: dropout keeps everything, uniform numbers are one value, normal ones their mean.

    What a kernel draws inside of itself (dropout between the layers of an LSTM) it cannot reach.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, value = kwargs or {}, self._value
        if function in DROPOUTS or function in (torch.dropout, torch.feature_dropout):
            return args[0] if args else kwargs["input"]
        if function is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            return function(*args, **{**kwargs, **({} if len(args) > 4 else {"dropout_p": 0.0})})
        found = function(*args, **kwargs)
        if function in (torch.rand, torch.rand_like):
            return found.fill_(value)
        if function in (torch.randn, torch.randn_like):
            return found.fill_(0.0)
        if function is torch.bernoulli:
            return (value < args[0]).to(found.dtype)
        if function is Tensor.bernoulli_:
            return found.fill_(float(value < (args[1] if len(args) > 1 else kwargs.get("p", 0.5))))
        if function is Tensor.uniform_:
            low, high = (
                (*args[1:3], 0.0, 1.0)[:2] if len(args) > 2 else (kwargs.get("from", 0.0), kwargs.get("to", 1.0))
            )
            return found.fill_(low + (high - low) * value)
        if function is Tensor.normal_:
            return found.fill_(args[1] if len(args) > 1 else kwargs.get("mean", 0.0))
        if function is torch.randperm:
            return found.sort().values
        if function is torch.randint:
            bounds = [a for a in args if isinstance(a, int)] or [kwargs.get("low", 0), kwargs["high"]]
            low, high = (0, bounds[0]) if len(bounds) < 2 else bounds[:2]
            return found.fill_(int(low + (high - low) * value))
        return found


def stilled_forward(context: CheckContext, micro: Micro, value: float, is_training: bool = False) -> Loss:
    """The loss of this micro without chance; every uniform number is `value`."""
    draw = micro.draw
    of_step = draw.of_step if isinstance(draw, EvalLike) else draw.step
    still = micro._replace(draw=StillDraw(draw.seed, draw.step, draw.rows, of_step, value))
    return forward(context, still, Still(value), is_training)


def at_step(micro: Micro, more: int) -> Micro:
    """The same rows under the draw of a later step of training."""
    return micro._replace(draw=replace(micro.draw, step=micro.draw.step + more))


def paired(micro: Micro) -> Micro:
    """The same rows under the draw of an eval, with the random numbers of this step of training."""
    draw = micro.draw
    return micro._replace(draw=EvalLike(draw.seed, EVAL_STEP, draw.rows, draw.step))


def in_eval(micro: Micro) -> Micro:
    """The same rows under the draw of an eval."""
    return micro._replace(draw=replace(micro.draw, step=EVAL_STEP))


def mean_of(total: Tensor, count: Tensor) -> float:
    return float(total.detach()) / float(count.detach()) if float(count.detach()) else 0.0


def gap_of(a: float, b: float) -> float:
    """How far two numbers are apart, relative to the larger."""
    return abs(a - b) / max(abs(a), abs(b), 1e-12)
