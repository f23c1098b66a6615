"""Brings a step's numbers from the device to the record without making the device wait.

A step leaves its scalars as tensors. Here they are packed into one, copied in the background and read a step or two
later, when the copy is done. On the CPU there is nothing to wait for and the row is ready at once. Numbers per layer
travel the same way, at the steps that have some. Non-finite numbers are passed on as they are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LAG = 4  # steps a row may stay unread before the host waits for it


class Layered(NamedTuple):
    """A table on its way: one number per name and column."""

    names: Sequence[str]
    columns: Mapping[str, Tensor | Sequence[float]]


class Arrived(NamedTuple):
    """What a step left behind, on the host."""

    step: int
    values: dict[str, float]
    tables: dict[str, tuple[list[str], dict[str, list[float]]]]


class _Pending(NamedTuple):
    step: int
    host: dict[str, float]
    names: list[str]
    values: Tensor
    tables: dict[str, Layered]
    copied: torch.cuda.Event | None


class Signals:
    def __init__(self, fixed_lag: bool = False) -> None:
        """With `fixed_lag` rows are read LAG steps late, never earlier, so that ranks act on them at the same step."""
        self._pending: deque[_Pending] = deque()
        self._fixed_lag = fixed_lag

    def push(
        self,
        step: int,
        host: Mapping[str, float],
        device: Mapping[str, Tensor],
        tables: Mapping[str, Layered] = {},
    ) -> None:
        wide = torch.float32 if any(value.device.type == "mps" for value in device.values()) else torch.float64
        packed = torch.stack([value.detach().to(wide).reshape(()) for value in device.values()])
        copied = None
        if packed.device.type == "cuda":
            stream = torch.cuda.current_stream(packed.device)
            packed = packed.to("cpu", non_blocking=True)
            tables = {
                kind: Layered(
                    names,
                    {n: c.to("cpu", non_blocking=True) if isinstance(c, Tensor) else c for n, c in columns.items()},
                )
                for kind, (names, columns) in tables.items()
            }
            copied = torch.cuda.Event()
            copied.record(stream)
        self._pending.append(_Pending(step, dict(host), list(device), packed, dict(tables), copied))

    def drop(self) -> None:
        """Forgets what has not been read: steps after a bad one changed nothing and count for nothing."""
        self._pending.clear()

    def ready(self, wait: bool = False) -> Iterator[Arrived]:
        """Rows whose numbers have arrived, oldest first."""
        while self._pending:
            row = self._pending[0]
            if row.copied is not None and not wait:
                is_early = len(self._pending) <= LAG
                if is_early and (self._fixed_lag or not row.copied.query()):
                    return
            if row.copied is not None:
                row.copied.synchronize()
            self._pending.popleft()
            tables = {
                kind: (list(names), {n: c.tolist() if isinstance(c, Tensor) else list(c) for n, c in columns.items()})
                for kind, (names, columns) in row.tables.items()
            }
            yield Arrived(row.step, {**_divide(dict(zip(row.names, row.values.tolist()))), **row.host}, tables)


def _divide(values: dict[str, float]) -> dict[str, float]:
    """Each name/sum and name/count becomes name, their quotient; counts of the losses themselves are kept."""
    row: dict[str, float] = {}
    for name, value in values.items():
        if name.endswith("/sum"):
            count = values[f"{name[:-4]}/count"]
            if count:  # of what has no targets in this step there is nothing to say
                row[name[:-4]] = value / count
        elif not name.endswith("/count"):
            row[name] = value
    row.setdefault("loss", math.nan)  # a step without any target
    row["targets"] = values.get("loss/count", 0.0)
    row.setdefault("targets_min", row["targets"])
    return row
