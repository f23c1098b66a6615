"""Checks that the gradient of a step does not depend on how its rows are cut into micros.

Runs the engine's own step, with an optimizer that keeps the gradients instead of applying them, in float32 and without
dropout. A loss that fails here often trains well enough, but not as the config says, and differently on another number
of GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rung.doctor.preflight.forward import gap_of, no_tf32, rows_of
from rung.doctor.preflight.result import CheckContext, NotApplicable, Result, check
from rung.engine.clock import Clock
from rung.engine.contract import place_of, read_loss
from rung.engine.evaluate import eval_mode
from rung.engine.guarded import ObjectiveState
from rung.engine.parallel import World
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.engine.step import Stepper
from rung.random import Draw
from rung.recipe import Batch, Loss

SAME_GRADIENT = 1e-3  # means of means over uneven masks differ by 0.3, no division by 3, sums over sums by 1e-7


class _Catch(torch.optim.Optimizer):
    """Keeps gradients instead of applying them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.caught: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.caught = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.param_groups[0]["params"]
        ]


class _Step(NamedTuple):
    gradients: list[list[Tensor]]  # per objective
    sums: list[tuple[float, float]]  # of the first objective, per micro


@check("same gradient in any cut", "O12")
def cut(context: CheckContext) -> Result:
    """The gradient of one micro of n rows against that of n micros of one row, through the engine's own step."""

    class WatchedDraw(Draw):
        """Records when bulk noise is drawn, which depends on the cut."""

        def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
            noise.append(f"through draw.generator({name!r})")
            return Draw.generator(self, name, device)

    objectives, num_rows, draw = context.setup.state.objectives, len(context.micro.ids), context.micro.draw
    if num_rows < 2:
        raise NotApplicable("a micro has one row")
    noise: list[str] = []
    micro = context.micro._replace(draw=WatchedDraw(draw.seed, draw.step, draw.rows))
    whole = take_step(context, [micro], noise)
    parts = take_step(context, [rows_of(micro, i, i + 1) for i in range(num_rows)], noise)
    place = place_of(objectives[0].plain_loss)
    if len(counts := {count for _, count in (*whole.sums, *parts.sums)}) == 1 and counts != {0.0}:
        # Where all rows have as many targets the gradient is right all the same: only the count shows the mean.
        seen = f"{place} returns the count {counts.pop():g} for one row and for {num_rows}"
        remedy = "return the sum of the losses and the number of targets, not a mean: the engine divides"
        return Result("fail", seen, remedy)
    for name, module in context.setup.state.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise NotApplicable(f"rows see each other through BatchNorm {name or 'the model'}")
    if noise:
        drawn = f"the loss draws random numbers {noise[0]}, which depend on the cut"
        raise NotApplicable(f"{drawn}; those of draw.noise do not")
    gaps = {o.name: gradient_gap(a, b) for o, a, b in zip(objectives, whole.gradients, parts.gradients)}
    worst = max(gaps, key=lambda name: gaps[name])
    seen = f"gradients of 1 x {num_rows} and {num_rows} x 1 rows differ by {gaps[worst]:.1e} ({worst})"
    if gaps[worst] <= SAME_GRADIENT:
        return Result("pass", seen)

    # The cause, from sums and counts. Rows that see each other, as in a contrastive loss, may be intended.
    seen, (in_one, count_in_one) = f"{place}: {seen}", whole.sums[0]
    total, count = (sum(column) for column in zip(*parts.sums, strict=True))
    sums, num_targets = np.array(parts.sums).T
    means = (float((sums * num_targets).sum() / num_targets.sum()), total / num_rows)  # over targets, and over rows
    if gap_of(count, count_in_one) > SAME_GRADIENT:
        seen += f"; counts {count_in_one:g} in one, {count:g} together"
        return Result("fail", seen, "return the number of targets as the count")
    if min(gap_of(mean, in_one) for mean in means) <= SAME_GRADIENT:
        seen += f"; the loss is a mean: {in_one:.4g} in one, {total:.4g} added up"
        return Result("fail", seen, "return the sum of the losses, not their mean: the engine divides")
    if gap_of(total, in_one) <= SAME_GRADIENT:
        return Result("fail", f"{seen}, though the losses add up", "look for gradients that mix rows")
    remedy = (
        "if rows should not see each other, look for a mean over rows or a wrong axis; if they should, the loss "
        "depends on data.batch_size"
    )
    return Result("warn", f"{seen}; losses are {in_one:.4g} in one, {total:.4g} added up", remedy)


def take_step(context: CheckContext, micros: list[Micro], noise: list[str]) -> _Step:
    """One step of the engine that keeps the gradients; appends to `noise` where random numbers come from."""
    setup, device, sums = context.setup, context.setup.world.device, list[tuple[float, float]]()
    catches = [_Catch(list(o.parameters)) for o in setup.state.objectives]

    def random_state() -> Tensor:
        states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
        return torch.cat(states)

    def noted(objective: ObjectiveState, is_first: bool) -> Any:
        def loss(batch: Batch, draw: Draw) -> Loss:
            before = random_state()
            found = read_loss(objective.plain_loss, objective.plain_loss(batch, draw))
            if not torch.equal(before, random_state()):
                noise.append("of torch")
            if is_first:
                sums.append((float(found.sum.detach()), float(found.count.detach())))
            return found

        return loss

    objectives = [
        replace(objective, loss=noted(objective, number == 0), eager=None, optimizers=[catch])
        for number, (objective, catch) in enumerate(zip(setup.state.objectives, catches))
    ]
    world, precision = World(0, 1, device), Precision("float32", device)
    nominal = max(1.0, len(micros) * setup.streams["train"].targets_per_row)
    stepper = Stepper(setup.state.model, objectives, precision, world, nominal, 0.0)
    copies = [m._replace(batch={name: tensor.clone() for name, tensor in m.batch.items()}) for m in micros]
    with eval_mode(setup.state.model), torch.enable_grad(), no_tf32():
        stepper.step(0, copies, 0.0, Clock())
    return _Step([catch.caught for catch in catches], sums)


def gradient_gap(a: list[Tensor], b: list[Tensor]) -> float:
    if not a or not b:
        raise NotApplicable("the step of these rows was skipped: no targets, or a gradient that is not finite")
    difference = torch.stack([(x - y).norm() for x, y in zip(a, b)]).norm()
    return float(difference / torch.stack([x.norm() for x in a]).norm().clamp(min=1e-30))
