"""Questions that a curve cannot answer, asked of the model itself at some of the evals.

Each is a few forwards more, changes nothing, and names a cause: how large an update would have been best, and what each
input that the recipe declares is worth.
"""

from __future__ import annotations

import torch

from rung.data.prefetch import Feed, Micro, Origin
from rung.engine.ablation import ablate, held_out
from rung.engine.build import Setup
from rung.engine.clock import Clock
from rung.engine.evaluate import eval_mode
from rung.engine.guard import bring_back, copy_before
from rung.engine.state import set_training
from rung.engine.step import seed_torch

SCALES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
OFTEN, SELDOM = 5, 5  # at the first five evals after the warm-up, then at every fifth
NUM_ROWS = 32  # of the eval set, for the worth of an input


def probe(setup: Setup) -> dict[str, float]:
    """What there is to know at this state, as rows of the record name it; nothing when it is not the time."""
    progress = setup.state.progress
    after_warmup = sum(step > setup.schedule.warmup_steps for step in progress.eval_steps)
    if setup.world.size > 1 or not after_warmup or (after_warmup > OFTEN and after_warmup % SELDOM):
        return {}  # several ranks would have to take the trial step together
    found = worth_of_inputs(setup)
    if after_warmup <= OFTEN and (setup.num_steps is None or progress.step < 0.8 * setup.num_steps):
        found["probe/k"] = best_scale(setup)
    return found


def best_scale(setup: Setup) -> float:
    """The multiple of the next update that is best for rows it was not made from; much more than 1: the rate is low.

    The update is made for once, and taken back: weights, optimizers, buffers and scale end as they began.
    """
    state, stepper, step = setup.state, setup.stepper, setup.state.progress.step
    parameters = [p for o in stepper.objectives for p in o.parameters]
    optimizers = [x for o in stepper.objectives for x in o.optimizers]
    cut, seed, device = setup.cut, setup.cfg.seed, setup.world.device
    feed = Feed(setup.streams["train"], cut, seed, device, 0, Origin(step, state.progress.position))
    before, latch = copy_before(parameters, optimizers), stepper.guard.latch.clone()
    scale = state.loss_scale.state_dict() if state.loss_scale is not None else None
    set_training(state.model)
    try:
        stepper.step(step, feed.take(step), setup.schedule.lr(step, state.progress.evals), Clock())
        change = torch._foreach_sub([p.detach() for p in parameters], before.weights)
        fresh = feed.take(step + 1)[0]
        losses = {k: _loss_at(setup, parameters, before.weights, change, k, fresh) for k in SCALES}
    finally:
        bring_back(before, parameters, optimizers)
        stepper.guard.latch.copy_(latch)
        stepper.guard.restore_buffers()
        for parameter in parameters:  # of a trial that ended half-way, for lack of memory say
            parameter.grad = None
        if state.loss_scale is not None and scale is not None:
            state.loss_scale.load_state_dict(scale)
    return min(losses, key=lambda k: losses[k])


@torch.no_grad()
def _loss_at(
    setup: Setup,
    parameters: list[torch.nn.Parameter],
    weights: list[torch.Tensor],
    change: tuple[torch.Tensor, ...],
    k: float,
    micro: Micro,
) -> float:
    for parameter, weight, moved in zip(parameters, weights, change, strict=True):
        parameter.copy_(torch.add(weight, moved, alpha=k))
    objective = setup.stepper.objectives[0]
    with eval_mode(setup.state.model), setup.precision.autocast():
        seed_torch(objective.name, micro.draw)
        value = float(objective.plain_loss(micro.batch, micro.draw).sum)
    return value if value == value else float("inf")


def worth_of_inputs(setup: Setup) -> dict[str, float]:
    """By how much the loss rises when each declared input is taken away, on held-out rows, with its interval."""
    inputs, streams = setup.recipe.inputs(), setup.evaluator.streams
    if not inputs or not streams:
        return {}
    device, loss = setup.world.device, setup.stepper.objectives[0].plain_loss
    batch, draw = held_out(next(iter(streams.values())), NUM_ROWS, setup.cfg.seed, device)
    found: dict[str, float] = {}
    with eval_mode(setup.state.model), setup.precision.autocast():
        for name, (mean, low, high) in ablate(loss, batch, draw, inputs).items():
            found |= {
                f"probe/without_{name}": mean,
                f"probe/without_{name}_low": low,
                f"probe/without_{name}_high": high,
            }
    return found
