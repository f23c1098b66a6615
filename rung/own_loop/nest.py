"""Batches of any nesting: the tensors in them by name, the same batch with other tensors, and a form for the disk.

Dicts and whatever behaves like one, lists, tuples, named tuples and dataclasses are gone into; everything else that is
no tensor stays as it is. On disk a batch is made of plain containers, so that reading it runs nobody's code; named
tuples and dataclasses come back as named tuples of the same fields.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAMED, ARRAY = "rung.named", "rung.array"  # what the first item of a tuple on disk says of the rest
CONSTANTS = (type(None), bool, int, float, str)


def tensors_of(batch: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        found[name] = tensor.detach()
        return tensor

    with_tensors(batch, note)
    return found


def with_tensors(batch: Any, change: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """The same batch with each tensor replaced; names are the keys on the way to it, joined by dots."""
    if isinstance(batch, Tensor):
        return change(name or "tensor", batch)
    if isinstance(batch, Mapping):
        items = {key: with_tensors(value, change, _join(name, key)) for key, value in batch.items()}
        return items if type(batch) is dict else _filled(batch, items)
    if isinstance(batch, list | tuple):
        fields = getattr(batch, "_fields", range(len(batch)))
        values = [with_tensors(value, change, _join(name, key)) for key, value in zip(fields, batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if _is_record(batch):
        made = copy.copy(batch)
        for field in dataclasses.fields(batch):
            value = with_tensors(getattr(batch, field.name), change, _join(name, field.name))
            object.__setattr__(made, field.name, value)
        return made
    return batch


def num_rows_of(tensors: Mapping[str, Tensor]) -> int:
    """The length of the first axis, where all tensors that have one agree; otherwise the batch is one piece."""
    lengths = Counter(tensor.shape[0] for tensor in tensors.values() if tensor.ndim)
    return next(iter(lengths)) if len(lengths) == 1 else 1


def to_disk(batch: Any, lost: list[str], name: str = "") -> Any:
    """Plain containers of tensors on the host; what cannot be written is None there and named in `lost`."""
    if isinstance(batch, Tensor):
        if batch.layout is torch.strided:
            return batch.detach().to("cpu", copy=True)
    elif isinstance(batch, CONSTANTS):
        return batch
    elif isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf":
        return (ARRAY, torch.from_numpy(batch.copy()))
    elif isinstance(batch, Mapping):
        return {key: to_disk(value, lost, _join(name, key)) for key, value in batch.items()}
    elif _is_record(batch) or hasattr(batch, "_fields"):
        names = getattr(batch, "_fields", None) or [field.name for field in dataclasses.fields(batch)]
        values = [to_disk(getattr(batch, key), lost, _join(name, key)) for key in names]
        return (NAMED, type(batch).__name__, list(names), values)
    elif isinstance(batch, list | tuple):
        return type(batch)(to_disk(value, lost, _join(name, key)) for key, value in enumerate(batch))
    lost.append(f"{name or 'the batch'} ({type(batch).__name__})")
    return None


def from_disk(stored: Any) -> Any:
    if isinstance(stored, dict):
        return {key: from_disk(value) for key, value in stored.items()}
    if isinstance(stored, tuple) and stored[:1] == (NAMED,):
        _, kind, names, values = stored
        return namedtuple(kind, names, rename=True)(*map(from_disk, values))
    if isinstance(stored, tuple) and stored[:1] == (ARRAY,):
        return stored[1].numpy()
    return type(stored)(map(from_disk, stored)) if isinstance(stored, list | tuple) else stored


def bytes_of(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch).values())


def _filled(batch: Any, items: Mapping[Any, Any]) -> Any:
    made = copy.copy(batch)
    for key, value in items.items():
        made[key] = value
    return made


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
