"""Exact averages over a fixed set, with the loss of training.

Sums and counts are added over the whole set (and all ranks) and divided once, so the result does not depend on the
batch size. Nothing of the run is touched: weights stay, the model's mode comes back, and random numbers are keyed by
the place in the set.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from rung.engine.contract import read_loss, read_parts
from rung.engine.guarded import ObjectiveState
from rung.engine.parallel import World
from rung.engine.precision import Precision
from rung.engine.prefetch import EvalPrefetcher
from rung.engine.step import Sums, seed_torch
from rung.random import Draw
from rung.recipe import Batch, Loss, Part, Recipe, Stream

T = TypeVar("T")
EVAL_STEP = -1  # the step of eval draws: an eval is the same whenever it happens


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; each module gets back the mode it had.

    Modules that were compiled run as they were written, as the loss of an eval does: evals and samples come in shapes
    of their own, and compiling for each of them takes longer than running it.
    """
    modes = [(module, module.training) for module in model.modules()]
    # (a forward that a user has put there stays)
    ours = [m for m, _ in modes if hasattr(m.__dict__.get("forward"), "_torchdynamo_orig_callable")]
    compiled = [(module, module.__dict__.pop("forward")) for module in ours]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for module, forward in compiled:
            module.forward = forward


class Evaluator:
    """Evaluates a model on every eval stream of a recipe."""

    def __init__(
        self,
        recipe: Recipe,
        streams: Mapping[str, Stream],
        objective: ObjectiveState,
        precision: Precision,
        world: World,
        batch_size: int,
        eval_iters: int,
        seed: int,
        workers: int = 0,
    ) -> None:
        self._recipe, self._objective, self._precision, self._world = recipe, objective, precision, world
        self.batch_size, self._eval_iters, self._seed, self._workers = batch_size, eval_iters, seed, workers
        self.streams = {name: stream for name, stream in streams.items() if name != "train"}

    def run(self, model: nn.Module, streams: Mapping[str, Stream] | None = None) -> dict[str, dict[str, float]]:
        """{set: {"loss": .., part: .., "targets": ..}}, sets in the recipe's order; `streams` in place of its own."""
        with eval_mode(model):
            chosen = self.streams if streams is None else streams
            return {name: self._one(model, stream) for name, stream in chosen.items()}

    def rows(self, stream: Stream) -> np.ndarray:
        """The fixed rows of this set: all, or `eval_iters` batches spread evenly over it."""
        wanted = self._eval_iters * self.batch_size
        if not wanted or wanted >= stream.num_rows:
            return np.arange(stream.num_rows)
        return np.arange(wanted) * stream.num_rows // wanted

    def forward(
        self, stream: Stream, rows: np.ndarray, places: Sequence[np.ndarray], function: Callable[[Batch, Draw], T]
    ) -> Generator[T]:
        """The function of each batch, rows[places], gathered ahead; the draw is that of an eval at these places."""
        batches = [(rows[some], Draw(self._seed, EVAL_STEP, some)) for some in places]
        with closing(iter(EvalPrefetcher(stream, batches, self._world.device, self._workers))) as micros:
            for _, draw, batch, *_ in micros:
                seed_torch("eval", draw)
                with self._precision.autocast():
                    result = function(batch, draw)
                yield result

    def _one(self, model: nn.Module, stream: Stream) -> dict[str, float]:
        loss, measure = self._objective.plain_loss, self._recipe.measure
        sums, rows = Sums(self._world.device), self.rows(stream)
        starts = range(self._world.rank * self.batch_size, len(rows), self._world.size * self.batch_size)
        places = [np.arange(start, min(start + self.batch_size, len(rows))) for start in starts]

        def measured_loss(batch: Batch, draw: Draw) -> tuple[Loss, Mapping[str, Part]]:
            return loss(batch, draw), measure(model, batch, draw)

        with closing(self.forward(stream, rows, places, measured_loss)) as results:
            for number, (summed, measured) in enumerate(results):
                if number == 0:
                    read_loss(loss, summed)
                    read_parts(measure, measured)
                sums.add(summed, measured)
        names = sums.names
        if self._world.size > 1:  # a rank without rows has seen no part; all ranks must sum the same ones
            names = list(dict.fromkeys(name for some in self._world.from_all(names) for name in some))
        packed = self._world.sums(sums.packed(names))
        result = {name: value / count for name, (value, count) in zip(names, packed, strict=True) if count}
        total, num_targets = packed[names.index("loss")]
        # The standard error of the loss, from how much batches differ: what a change must exceed to mean something.
        nothing = torch.zeros(0, 2, dtype=torch.float64, device=self._world.device)
        pairs = torch.stack(sums.micros) if sums.micros else nothing
        residuals = pairs[:, 0] - (total / num_targets if num_targets else 0.0) * pairs[:, 1]
        spread = torch.stack([residuals.square().sum(), residuals.new_tensor(float(len(pairs)))])
        squares, num_batches = self._world.sums(spread)
        if num_batches >= 2 and num_targets:
            result["loss_se"] = (squares * num_batches / (num_batches - 1)) ** 0.5 / num_targets
        return {"loss": float("nan"), **result, "targets": num_targets}
