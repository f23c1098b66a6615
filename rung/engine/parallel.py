"""One process or many: who we are, and how sums are shared.

Every rank builds the same weights from the same seed and takes its own rows of one global batch, so ranks only ever
exchange sums: of losses and counts, and of gradients. A rank that fails leaves word of it, so that the others can name
it in place of a broken connection; see watchdog.py for one that hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rung.engine.prefetch import BatchLayout
from rung.engine.watchdog import Watchdog, store_of
from rung.errors import ConfigError, UserError
from rung.text import error_text

AGREE_STEPS = 10
HASHED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class RankError(UserError):
    """Another rank failed; this one can only say which and why."""

    code = "rank-failed"


class Difference(NamedTuple):
    """Tensors that are not the same on all ranks."""

    ranks: list[int]  # those that differ from most
    numbers: list[int]


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    watchdog: Watchdog | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def waiting(self, what: str, exchanges: bool = True) -> contextlib.AbstractContextManager[None]:
        """Around whatever ends only when the other ranks come to the same place."""
        return contextlib.nullcontext() if self.watchdog is None else self.watchdog.waiting(what, exchanges)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds a tensor over all ranks, in place."""
        if self.size > 1:
            with self.waiting("a sum over all ranks"):
                dist.all_reduce(tensor)
        return tensor

    def sums(self, tensor: Tensor) -> Any:
        """The sum of a tensor over all ranks, as plain numbers. (Under NCCL one waits where they are read.)"""
        with self.waiting("a sum over all ranks"):
            return self.sum_(tensor).tolist()

    def agreed(self, flag: bool, step: int) -> bool:
        """Whether it holds on any rank. Every rank must ask; several wait for each other, so not at every step."""
        if self.size == 1:
            return flag
        return step % AGREE_STEPS == 0 and self.any(flag)

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank. Every rank must ask."""
        if self.size == 1:
            return flag
        with self.waiting("an agreement of all ranks"):
            return bool(self.sum_(torch.tensor(float(flag), device=self.device)).item())

    def from_first(self, value: Any) -> Any:
        """What the first rank has. Every rank must ask."""
        if self.size == 1:
            return value
        shared = [value]
        with self.waiting("word from rank 0"):
            dist.broadcast_object_list(shared, device=self.device)
        return shared[0]

    def from_all(self, value: Any) -> list[Any]:
        """What each rank has. Every rank must ask."""
        gathered: list[Any] = [value] * self.size
        if self.size > 1:
            with self.waiting("word from all ranks"):
                dist.all_gather_object(gathered, value)
        return gathered

    def raise_together(self, error: UserError | None) -> None:
        """Raises what went wrong on the first rank, which works alone, on all of them. Every rank must call it."""
        told = self.from_first(None if error is None else (str(error), error.code))
        if error is not None:
            raise error
        if told is not None:
            text, code = told
            raise UserError(text, code=code)

    def wait(self) -> None:
        """Until every rank has come here."""
        if self.size > 1:
            with self.waiting("all ranks to come to one place"):
                dist.barrier()

    def difference(self, tensors: Sequence[Tensor]) -> Difference | None:
        """Which ranks and which tensors are not as on most ranks, to the bit. Every rank must ask."""
        plain = {n: t.detach() for n, t in enumerate(tensors) if t.dtype in HASHED and t.numel()}
        if self.size == 1 or not plain:
            return None
        mine = torch.stack([torch.hash_tensor(tensor) for tensor in plain.values()]).view(torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        with self.waiting("hashes of the weights"):
            dist.all_gather(gathered, mine)
            hashes = [tuple(row.tolist()) for row in gathered]
        usual, times = Counter(hashes).most_common(1)[0]  # of equally many, those of the lowest rank
        if times == self.size:
            return None
        ranks = [rank for rank, row in enumerate(hashes) if row != usual]
        return Difference(ranks, [n for n, column in zip(plain, zip(*hashes)) if len(set(column)) > 1])

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Leaves word for the other ranks of an error that ends this one, or raises theirs in its place."""
        try:
            yield
        except BaseException as error:
            if (failed := self.explain(error)) is not None:
                raise failed from None
            raise

    def explain(self, error: BaseException) -> RankError | None:
        """The failure of another rank that this error only follows from; leaves word of one that is our own."""
        if self.watchdog is None or isinstance(error, RankError):
            return None
        is_ours = not self.watchdog.is_broken or isinstance(error, UserError | KeyboardInterrupt)
        if is_ours:
            text, code = (str(error), error.code) if isinstance(error, UserError) else (error_text(error), "")
            self.watchdog.leave_word(text, code)
            return None
        other = self.watchdog.word_of_other(wait_s=5.0)
        if other is None:
            what = f"rank {self.rank} lost another rank while it waited for {self.watchdog.broken_in}"
            return RankError(f"{what} ({error_text(error)}); that rank was killed, or its machine is gone: see its log")
        self.watchdog.wait_until_gone(other["rank"], 5.0)
        text, code = other["text"], other["code"]
        return RankError(text, code=code) if code else RankError(f"rank {other['rank']} failed: {text}")

    def leave(self, is_orderly: bool = True) -> None:
        """Ends the connection; orderly when all ranks come here, as they do unless one has failed."""
        if self.size == 1 or not dist.is_initialized():
            return
        if is_orderly:
            with contextlib.suppress(RuntimeError):  # a rank that died here has said all it had to say
                self.wait()
        if self.watchdog is not None:
            self.watchdog.stop()
        # Under NCCL it would wait for ranks that are stuck in a collective; the end of the process ends it as well.
        if is_orderly or dist.get_backend() != "nccl":
            dist.destroy_process_group()


def join(device: torch.device, backend: str, timeout_minutes: float) -> World:
    """Joins the other processes that torchrun or `rung train --nproc` started, if there are any."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(0, 1, device)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ConfigError(
                f"rank {rank} is number {local_rank} on this machine, counted from 0, which has {num_gpus} GPUs; start "
                f"{num_gpus} ranks on it, or set system.device=cpu",
                code="no-device",
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif backend == "nccl":
        raise ConfigError(
            f"ddp.backend=nccl connects GPUs, and system.device is {device.type} here; use ddp.backend=gloo",
            code="options-conflict",
        )
    # Its functions take the group of their module's import as a default. Imported later, by torch itself, they keep the
    # group alive until the interpreter ends, when its threads can end the process with SIGABRT after a good run.
    importlib.import_module("torch.distributed.nn.functional")

    limit_s = 60 * timeout_minutes or None
    # Ours comes first and says more. (None would be the backend's own limit.)
    timeout = timedelta(seconds=1.5 * limit_s + 60) if limit_s else timedelta(days=365)
    dist.init_process_group(backend, timeout=timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = store_of(attempt, dist.TCPStore(address, port, is_master=False))
    watchdog = Watchdog(rank, size, store, limit_s)
    world = World(rank, size, device, watchdog)
    atexit.register(watchdog.say_gone)
    atexit.register(world.leave, is_orderly=False)  # of a process that ends before or beside the training
    return world


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
