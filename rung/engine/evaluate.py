"""Exact averages over a fixed set, with the loss of training.

Sums and counts are added over the whole set (and all ranks) and divided once, so the result does not depend on the
batch size. Nothing of the run is touched: weights stay, the model's mode comes back, and random numbers are keyed by
the place in the set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rung.data.prefetch import to_device
from rung.engine.parallel import World
from rung.engine.precision import Precision
from rung.engine.step import Trained, seed_torch
from rung.engine.sums import Sums
from rung.recipe import Draw, Recipe, Stream

EVAL_STEP = -1  # the step of eval draws: an eval is the same whenever it happens


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; each module gets back the mode it had.

    Modules that were compiled run as they were written: evals and samples come in shapes of their own, and compiling
    for each of them takes longer than running it.
    """
    modes = [(module, module.training) for module in model.modules()]
    compiled = [(module, module.__dict__.pop("forward")) for module, _ in modes if _is_compiled(module)]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for module, forward in compiled:
            module.forward = forward


def _is_compiled(module: nn.Module) -> bool:
    """Whether its forward was compiled by us; one that a user has put there stays."""
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


class Evaluator:
    """Evaluates a model on every eval stream of a recipe."""

    def __init__(
        self,
        recipe: Recipe,
        streams: Mapping[str, Stream],
        objective: Trained,
        precision: Precision,
        world: World,
        batch_size: int,
        eval_iters: int,
        seed: int,
    ) -> None:
        self._recipe, self._objective, self._precision, self._world = recipe, objective, precision, world
        self._batch_size, self._eval_iters, self._seed = batch_size, eval_iters, seed
        self.streams = {name: stream for name, stream in streams.items() if name != "train"}

    def run(self, model: nn.Module, streams: Mapping[str, Stream] | None = None) -> dict[str, dict[str, float]]:
        """{set: {"loss": .., part: .., "targets": ..}}, sets in the recipe's order; `streams` in place of its own."""
        with eval_mode(model):
            chosen = self.streams if streams is None else streams
            return {name: self._one(model, stream) for name, stream in chosen.items()}

    def rows(self, stream: Stream) -> np.ndarray:
        """The fixed rows of this set: all, or `eval_iters` batches spread evenly over it."""
        wanted = self._eval_iters * self._batch_size
        if not wanted or wanted >= stream.num_rows:
            return np.arange(stream.num_rows)
        return np.arange(wanted) * stream.num_rows // wanted

    def _one(self, model: nn.Module, stream: Stream) -> dict[str, float]:
        sums = Sums(self._world.device)
        rows = self.rows(stream)
        for start in range(self._world.rank * self._batch_size, len(rows), self._world.size * self._batch_size):
            places = np.arange(start, min(start + self._batch_size, len(rows)))
            draw = Draw(self._seed, EVAL_STEP, places)
            batch, _ = to_device(stream.gather(rows[places], draw), self._world.device)
            seed_torch("eval", draw)
            with self._precision.autocast():
                sums.add(self._objective.loss(batch, draw), self._recipe.measure(model, batch, draw))
        names = self._same_names(sums.names)
        packed = self._world.sum_(sums.packed(names)).tolist()
        result = {name: value / count for name, (value, count) in zip(names, packed, strict=True) if count}
        result |= self._error(sums.micros, *packed[names.index("loss")])
        return {"loss": float("nan"), **result, "targets": packed[names.index("loss")][1]}

    def _error(self, batches: list[Tensor], total: float, count: float) -> dict[str, float]:
        """The standard error of the loss, from how much batches differ: what a change must exceed to mean something."""
        pairs = torch.stack(batches) if batches else torch.zeros(0, 2, dtype=torch.float64, device=self._world.device)
        residuals = pairs[:, 0] - (total / count if count else 0.0) * pairs[:, 1]
        spread = torch.stack([residuals.square().sum(), residuals.new_tensor(float(len(batches)))])
        squares, num_batches = self._world.sum_(spread).tolist()
        if num_batches < 2 or not count:
            return {}
        return {"loss_se": (squares * num_batches / (num_batches - 1)) ** 0.5 / count}

    def _same_names(self, names: list[str]) -> list[str]:
        """A rank without rows has seen no part; all ranks must sum the same ones."""
        if self._world.size == 1:
            return names
        gathered: list[list[str]] = [[] for _ in range(self._world.size)]
        torch.distributed.all_gather_object(gathered, names)
        return list(dict.fromkeys(name for some in gathered for name in some))
