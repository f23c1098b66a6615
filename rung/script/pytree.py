"""Batches of any nesting: the tensors in them by name, the same batch with other tensors, and its nesting as JSON.

Dicts and whatever behaves like one, lists, tuples, named tuples and dataclasses are gone into; everything else that is
no tensor stays as it is. JSON and tensors are all that is written, so that reading a batch runs nobody's code.
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

CONSTANTS = (type(None), bool, int, float, str)
# What a safetensors file holds.
WRITABLE = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
})  # fmt: skip


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
        if type(batch) is dict:
            return items
        made: Any = copy.copy(batch)
        for key, value in items.items():
            made[key] = value
        return made
    if isinstance(batch, list | tuple):
        fields = getattr(batch, "_fields", range(len(batch)))
        values = [with_tensors(value, change, _join(name, key)) for key, value in zip(fields, batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if is_record(batch):
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


def to_json(batch: Any, prefix: str, tensors: dict[str, Tensor], lost: list[str], path: str = "") -> dict[str, Any]:
    """The nesting of a batch as JSON; its tensors and arrays go into `tensors`, under names that begin with `prefix`.

    What cannot be written is None there, and named in `lost`.
    """

    def inside(key: object, value: Any) -> dict[str, Any]:
        return to_json(value, prefix, tensors, lost, _join(path, key))

    name = f"{prefix}/{path or 'tensor'}"
    if isinstance(batch, Tensor) and batch.layout is torch.strided and batch.dtype in WRITABLE:
        tensors[name] = batch.detach()
        return {"tensor": name}
    if isinstance(batch, CONSTANTS):
        return {"value": batch}
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf" and batch.dtype.itemsize <= 8:
        tensors[name] = torch.from_numpy(batch.copy())
        return {"array": name}
    if isinstance(batch, Mapping):
        return {"dict": [[k if isinstance(k, CONSTANTS) else str(k), inside(k, v)] for k, v in batch.items()]}
    if is_record(batch) or hasattr(batch, "_fields"):
        names = getattr(batch, "_fields", None) or [field.name for field in dataclasses.fields(batch)]
        return {"record": type(batch).__name__, "fields": [[key, inside(key, getattr(batch, key))] for key in names]}
    if isinstance(batch, list | tuple):
        kind = "tuple" if isinstance(batch, tuple) else "list"
        return {kind: [inside(key, value) for key, value in enumerate(batch)]}
    lost.append(f"{path or 'the batch'} ({type(batch).__name__})")
    return {"value": None}


def from_json(stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Named tuples and dataclasses come back as named tuples of the same fields."""
    if "tensor" in stored:
        return tensors[stored["tensor"]]
    if "array" in stored:
        return tensors[stored["array"]].cpu().numpy()
    if "dict" in stored:
        return {key: from_json(value, tensors) for key, value in stored["dict"]}
    if "record" in stored:
        names, values = zip(*stored["fields"], strict=True) if stored["fields"] else ((), ())
        made: Any = namedtuple(stored["record"], names, rename=True)  # type: ignore[misc]
        return made(*(from_json(value, tensors) for value in values))
    for kind, make in (("list", list), ("tuple", tuple)):
        if kind in stored:
            return make(from_json(value, tensors) for value in stored[kind])
    return stored["value"]


def from_containers(stored: Any) -> Any:
    """Of the first format of captures: plain containers, with a mark in tuples that stand for something else."""
    if isinstance(stored, dict):
        return {key: from_containers(value) for key, value in stored.items()}
    if isinstance(stored, tuple) and stored[:1] == ("rung.named",):
        _, kind, names, values = stored
        return namedtuple(kind, names, rename=True)(*map(from_containers, values))
    if isinstance(stored, tuple) and stored[:1] == ("rung.array",):
        return stored[1].numpy()
    return type(stored)(map(from_containers, stored)) if isinstance(stored, list | tuple) else stored


def is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
