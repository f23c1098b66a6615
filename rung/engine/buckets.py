"""Sums gradients over ranks while the backward still runs.

Parameters are put into buckets in the order in which a backward finishes them, last layers first. When all gradients
of a bucket are there, its sum over the ranks starts, beside the rest of the backward. Buckets start in one order on
every rank, whatever order gradients come in, since collectives are matched by their order. The result is the sum of all
ranks, undivided: whoever knows the global count divides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rung.engine.parallel import World
from rung.errors import RecipeError

BUCKET_BYTES = 25 << 20  # large enough that a message is bound by bandwidth, small enough that most overlap
ALIGNED = 16  # elements: fused optimizers read whole vectors, also from the middle of a bucket


class Bucket:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.starts: list[int] = []
        end = 0
        for parameter in parameters:
            self.starts.append(end)
            end += -(-parameter.numel() // ALIGNED) * ALIGNED
        self.numel = end
        self.flat: Tensor | None = None  # from the first gradient of a step to its update
        self.num_missing = len(parameters)
        self.work: Any = None

    def place(self, number: int) -> Tensor:
        """Where a gradient lies; zero until it comes."""
        parameter = self.parameters[number]
        if self.flat is None:
            self.flat = torch.zeros(self.numel, dtype=parameter.dtype, device=parameter.device)
        start = self.starts[number]
        place = self.flat[start : start + parameter.numel()]
        if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
            return place.view(parameter.shape)
        return place.as_strided(parameter.shape, parameter.stride())  # fused optimizers walk both in one order


class GradientBuckets:
    """`begin` before the last backward of a step, `end` right after it, before the next exchange of whatever kind, and
    `finish` when the sums are needed: then every .grad is the sum over all ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._world, self._parameters = world, list(parameters)
        self.buckets: list[Bucket] = []
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in reversed(parameters):
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for some in kinds.values():
            taken: list[nn.Parameter] = []
            for parameter in some:
                taken.append(parameter)
                if sum(p.numel() * p.element_size() for p in taken) >= bucket_bytes:
                    self.buckets.append(Bucket(taken))
                    taken = []
            if taken:
                self.buckets.append(Bucket(taken))
        self._place_of = {id(p): (b, n) for b in self.buckets for n, p in enumerate(b.parameters)}
        self._is_last = False  # whether the backward that runs completes the gradients
        self._arrived: set[int] = set()
        self._num_started = 0
        self._unused: list[bool] = []  # parameters that this rank's rows gave no gradient
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    @property
    def num_bytes(self) -> int:
        """Of the gradients that a step exchanges."""
        return sum(b.numel * b.parameters[0].element_size() for b in self.buckets)

    def begin(self) -> None:
        self._is_last = True
        self._arrived.clear()
        self._num_started = 0
        for bucket in self.buckets:
            bucket.flat, bucket.work, bucket.num_missing = None, None, len(bucket.parameters)

    @torch.no_grad()
    def _arrive(self, parameter: Tensor) -> None:
        if not self._is_last:
            return
        if id(parameter) in self._arrived:
            raise RecipeError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} comes twice in one backward, as it "
                "does with torch.utils.checkpoint(use_reentrant=True), and several ranks sum it when it first comes; "
                "use use_reentrant=False",
                code="bad-loss",
            )
        self._arrived.add(id(parameter))
        bucket, number = self._place_of[id(parameter)]
        self._take(bucket, number)
        bucket.num_missing -= 1
        while self._num_started < len(self.buckets) and not self.buckets[self._num_started].num_missing:
            self._start()

    def _take(self, bucket: Bucket, number: int) -> None:
        """Moves a gradient into its bucket, where .grad stays."""
        parameter = bucket.parameters[number]
        place = bucket.place(number)
        if parameter.grad is not None:
            place.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        parameter.grad = place

    def _start(self) -> None:
        bucket = self.buckets[self._num_started]
        self._num_started += 1
        with self._world.waiting("the sum of gradients"):
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)

    @torch.no_grad()
    def end(self) -> None:
        """Sends what the backward did not: every rank sends all, whether its rows used a parameter or not."""
        self._is_last = False
        self._unused = [p.grad is None for p in self._parameters]
        for bucket in self.buckets:
            for number, parameter in enumerate(bucket.parameters):
                if id(parameter) not in self._arrived:
                    self._take(bucket, number)
        while self._num_started < len(self.buckets):
            self._start()

    @torch.no_grad()
    def finish(self, sums: Tensor) -> Tensor:
        """Waits for all gradients, and returns the sum of `sums` over all ranks.

        What no rank used has no gradient afterwards, as in one process, where an optimizer leaves it alone.
        """
        for bucket in self.buckets:
            with self._world.waiting("the sum of gradients"):
                bucket.work.wait()
            bucket.flat, bucket.work = None, None  # .grad holds it from here on
        if any(self._unused):
            used = torch.tensor([not one for one in self._unused], dtype=sums.dtype, device=sums.device)
        else:
            used = torch.ones(len(self._unused), dtype=sums.dtype, device=sums.device)
        message = self._world.sum_(torch.cat([sums.reshape(-1), used]))
        if any(self._unused):  # else this rank used all, and nobody need wait for the device
            with self._world.waiting("the sum of gradients"):  # under NCCL the host waits here
                all_used = message[sums.numel() :].tolist()
            for parameter, is_used in zip(self._parameters, all_used):
                if not is_used:
                    parameter.grad = None
        return message[: sums.numel()].view_as(sums)
