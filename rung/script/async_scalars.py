"""Rows on their way from a device to the record, in order, without making the device wait.

A row whose numbers are all on the host is written at once, unless an older one is still on its way. Numbers on a GPU
are packed into one tensor per row, copied in the background and read up to LAG rows later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rung.script.logged import is_away

LAG = 4  # rows that may be on their way before the host waits for the oldest

Write = Callable[[int, dict[str, float], dict[str, Any]], None]


class _Row(NamedTuple):
    step: int
    values: dict[str, Any]
    names: list[str]  # of the numbers that come from the device, in the order of `packed`
    packed: Any
    tables: dict[str, Any]
    copied: Any  # a CUDA event, or None where nothing has to arrive


class AsyncScalars:
    """`write(step, values, tables)` gets each row when it is complete; a table has `names` and `columns`."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._pending: deque[_Row] = deque()

    def push(self, step: int, values: dict[str, Any], tables: Mapping[str, Any] = {}) -> None:
        names = [name for name, value in values.items() if type(value) is not float and is_away(value)]
        if not names and not self._pending and not tables:
            self._write(step, values, {})
            return
        self._pending.append(_sent(step, values, names, dict(tables)))
        self.read()

    def read(self, wait: bool = False) -> None:
        while self._pending:
            row = self._pending[0]
            if row.copied is not None:
                if not wait and len(self._pending) <= LAG and not row.copied.query():
                    return
                row.copied.synchronize()
            self._pending.popleft()
            numbers = row.packed.tolist() if row.names else []
            values = {**row.values, **dict(zip(row.names, numbers, strict=True))}
            self._write(row.step, values, {kind: _listed(table) for kind, table in row.tables.items()})


def _sent(step: int, values: dict[str, Any], names: list[str], tables: dict[str, Any]) -> _Row:
    import torch

    packed: Any = None
    if names:
        wide = torch.float32 if any(values[name].device.type == "mps" for name in names) else torch.float64
        packed = torch.stack([values[name].to(wide) for name in names])
    columns = [c for table in tables.values() for c in table.columns.values() if hasattr(c, "is_cpu")]
    if not any(t.device.type == "cuda" for t in [*columns, *([] if packed is None else [packed])]):
        return _Row(step, values, names, packed, tables, None)
    packed = packed if packed is None else packed.to("cpu", non_blocking=True)
    tables = {
        kind: table._replace(
            columns={n: c.to("cpu", non_blocking=True) if is_away(c) else c for n, c in table.columns.items()}
        )
        for kind, table in tables.items()
    }
    copied = torch.cuda.Event()
    copied.record()
    return _Row(step, values, names, packed, tables, copied)


def _listed(table: Any) -> Any:
    return table._replace(
        columns={n: c.tolist() if hasattr(c, "tolist") else list(c) for n, c in table.columns.items()}
    )
