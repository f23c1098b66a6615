"""One forward of a run's loss, as it was written, looked at through a tracer.

The loss is the eager one, the model is in eval mode unless asked otherwise, torch is seeded as the engine seeds it, and
the batch is a copy, because a loss may write into its own. What a forward moves all the same (running statistics,
random states) is put back by whoever runs the checks; see checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from rung.doctor.preflight.result import CheckContext
from rung.engine.contract import read_loss
from rung.engine.evaluate import EVAL_STEP, eval_mode
from rung.engine.op_tracer import OpTracer
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.engine.state import set_training
from rung.engine.step import seed_torch
from rung.recipe import Loss


def forward(
    context: CheckContext,
    micro: Micro,
    tracer: OpTracer | None = None,
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


def in_eval(micro: Micro) -> Micro:
    """The same rows under the draw of an eval."""
    return micro._replace(draw=replace(micro.draw, step=EVAL_STEP))


def mean_of(total: Tensor, count: Tensor) -> float:
    return float(total.detach()) / float(count.detach()) if float(count.detach()) else 0.0


def gap_of(a: float, b: float) -> float:
    """How far two numbers are apart, relative to the larger."""
    return abs(a - b) / max(abs(a), abs(b), 1e-12)
