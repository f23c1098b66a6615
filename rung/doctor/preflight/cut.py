"""Asks whether the gradient of a step depends on how its rows are cut into micros.

It goes through the engine's own step, with an optimizer that catches the gradients instead of applying them, in float32
and without dropout. The surprising thing: a loss that fails here often trains well enough, only not as the config says,
and differently on another number of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rung.data.prefetch import Micro
from rung.doctor.preflight.forward import NotAsked, exact, gap_of, has_class, rows_of
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.clock import Clock
from rung.engine.evaluate import eval_mode
from rung.engine.parallel import World
from rung.engine.step import Stepper, Trained
from rung.recipe import Batch, Draw, Loss

SAME_GRADIENT = 1e-3  # means of means over uneven masks differ by 0.3, no division by 3, sums over sums by 1e-7


class _Catch(torch.optim.Optimizer):
    """An optimizer that keeps gradients instead of applying them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.caught: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.caught = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.param_groups[0]["params"]
        ]


def _watched(draw: Draw, used: list[str]) -> Draw:
    """A draw that notes when bulk noise is drawn, which depends on the cut."""

    class Watched(Draw):
        def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
            used.append(f"through draw.generator({name!r})")
            return Draw.generator(self, name, device)

    return Watched(draw.seed, draw.step, draw.rows)


def _random_state(device: torch.device) -> Tensor:
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return torch.cat(states)


class _Step(NamedTuple):
    gradients: list[list[Tensor]]  # per objective
    sums: list[tuple[float, float]]  # of the first objective, per micro


def cut(bench: Bench) -> Iterator[Result]:
    """The gradient of one micro of n rows against that of n micros of one row, through the engine's own step (O12)."""
    model = bench.setup.state.model
    if name := has_class(model, nn.modules.batchnorm._BatchNorm):
        raise NotAsked(f"rows see each other through the BatchNorm {name}")
    num_rows = len(bench.micro.ids)
    if num_rows < 2:
        raise NotAsked("a micro has one row")
    noise: list[str] = []
    micro = bench.micro._replace(draw=_watched(bench.micro.draw, noise))
    whole = _step(bench, [micro], noise)
    parts = _step(bench, [rows_of(micro, i, i + 1) for i in range(num_rows)], noise)
    if noise:
        raise NotAsked(f"the loss draws random numbers {noise[0]}, which depend on the cut; draw.noise does not")
    gaps = {o.name: _distance(a, b) for o, a, b in zip(bench.setup.state.objectives, whole.gradients, parts.gradients)}
    worst = max(gaps, key=lambda name: gaps[name])
    seen = f"gradients of 1 x {num_rows} and {num_rows} x 1 rows differ by {gaps[worst]:.1e} ({worst})"
    if gaps[worst] <= SAME_GRADIENT:
        yield Result("same gradient in any cut", "pass", seen, rule="O12")
        return
    yield _explain(seen, whole.sums[0], parts.sums)


def _step(bench: Bench, micros: list[Micro], noise: list[str]) -> _Step:
    setup, sums = bench.setup, list[tuple[float, float]]()
    catches = [_Catch(list(o.parameters)) for o in setup.state.objectives]

    def noted(objective: Trained, is_first: bool) -> Any:
        def loss(batch: Batch, draw: Draw) -> Loss:
            before = _random_state(setup.world.device)
            found = objective.plain_loss(batch, draw)
            if not torch.equal(before, _random_state(setup.world.device)):
                noise.append("of torch")
            if is_first:
                sums.append((float(found.sum.detach()), float(found.count.detach())))
            return found

        return loss

    objectives = [
        replace(objective, loss=noted(objective, number == 0), eager=None, optimizers=[catch])
        for number, (objective, catch) in enumerate(zip(setup.state.objectives, catches))
    ]
    world, nominal = World(0, 1, setup.world.device), len(micros) * setup.streams["train"].targets_per_row
    stepper = Stepper(setup.state.model, objectives, exact(bench), world, max(1.0, nominal), 0.0)
    copies = [m._replace(batch={name: tensor.clone() for name, tensor in m.batch.items()}) for m in micros]
    with eval_mode(setup.state.model), torch.enable_grad():
        stepper.step(0, copies, 0.0, Clock())
    return _Step([catch.caught for catch in catches], sums)


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    if not a or not b:
        raise NotAsked("the step of these rows was left out: no targets, or a gradient that is not finite")
    difference = torch.stack([(x - y).norm() for x, y in zip(a, b)]).norm()
    return float(difference / torch.stack([x.norm() for x in a]).norm().clamp(min=1e-30))


def _explain(seen: str, whole: tuple[float, float], parts: list[tuple[float, float]]) -> Result:
    """What sums and counts say about the cause. Rows that judge each other, as in a contrastive loss, may be meant."""
    total, count = (sum(column) for column in zip(*parts, strict=True))
    sums, counts = np.array(parts).T
    name = "same gradient in any cut"
    if gap_of(count, whole[1]) > SAME_GRADIENT:
        return Result(name, "fail", f"{seen}; counts {whole[1]:g} in one, {count:g} together",
                      "return the number of targets as the count", "O12")  # fmt: skip
    if gap_of(float((sums * counts).sum() / counts.sum()), whole[0]) <= SAME_GRADIENT:
        return Result(name, "fail", f"{seen}; the loss is a mean: {whole[0]:.4g} in one, {total:.4g} added up",
                      "return the sum of the losses, not their mean: the engine divides, once", "O12")  # fmt: skip
    if gap_of(total, whole[0]) <= SAME_GRADIENT:
        return Result(name, "fail", f"{seen}, though the losses add up", "look for what backward sees of other rows",
                      "O12")  # fmt: skip
    return Result(name, "warn", f"{seen}; losses are {whole[0]:.4g} in one, {total:.4g} added up",
                  "if rows are not meant to see each other, look for a mean over rows or a wrong axis; if they are, "
                  "the loss depends on data.batch_size", "O12")  # fmt: skip


CHECKS = [Check("same gradient in any cut", cut)]
