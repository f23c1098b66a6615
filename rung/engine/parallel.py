"""One process or many: who we are, and how sums are shared.

Every rank builds the same weights from the same seed and takes its own rows of one global batch, so ranks only ever
exchange sums: of losses and counts, and of gradients.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rung.engine.prefetch import BatchLayout
from rung.errors import ConfigError

AGREE_STEPS = 10
HASHED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_all_(self, tensors: Sequence[Tensor]) -> None:
        """Adds many tensors over all ranks, in place, as one message."""
        if self.size > 1 and tensors:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
                tensor.copy_(part.view_as(tensor))

    def agreed(self, flag: bool, step: int) -> bool:
        """Whether it holds on any rank. Every rank must ask; several wait for each other, so not at every step."""
        if self.size == 1:
            return flag
        return step % AGREE_STEPS == 0 and bool(self.sum_(torch.tensor(float(flag), device=self.device)).item())

    def wait(self) -> None:
        """Until every rank has come here."""
        if self.size > 1:
            dist.barrier()

    def differing(self, tensors: Sequence[Tensor]) -> list[int]:
        """Numbers of the tensors that are not the same on all ranks, to the bit. Every rank must ask."""
        if self.size == 1:
            return []
        plain = {n: t.detach() for n, t in enumerate(tensors) if t.dtype in HASHED and t.numel()}
        if not plain:
            return []
        mine = torch.stack([torch.hash_tensor(tensor) for tensor in plain.values()]).view(torch.int64)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everybody, mine)
        is_same = (torch.stack(everybody) == mine).all(dim=0)
        return [number for number, same in zip(plain, is_same.tolist()) if not same]

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


def join(device: torch.device, backend: str) -> World:
    """Joins the other processes that torchrun started, if it did."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(0, 1, device)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    return World(rank, size, device)


def share(batch_size: int, accumulation: int, world: World) -> BatchLayout:
    """The layout of batch_size x accumulation rows over the ranks; refuses what does not divide."""
    rows = batch_size * accumulation
    if rows % world.size:
        better = -(-rows // world.size) * world.size
        # the divisor that is closest to what was asked for
        steps = min((d for d in range(1, better + 1) if better % d == 0), key=lambda d: abs(d - accumulation))
        raise ConfigError(
            f"data.batch_size={batch_size} x optimizer.gradient_accumulation_steps={accumulation} = {rows} rows "
            f"cannot be shared by {world.size} ranks; {better} can: set batch_size={better // steps}, "
            f"gradient_accumulation_steps={steps}.",
            code="bad-batch-size",
        )
    return BatchLayout(rows, batch_size, world.rank, world.size)
