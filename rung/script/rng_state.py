"""The states of the random generators around a forward: torch's on the host and on the GPU, Python's, numpy's.

In a loop that is not ours nobody says when a forward begins. So the state is read at the end of each step, which is the
state before the next forward unless the data loader draws from the same generators; `begin` says it exactly.
Whether a replay drew the same numbers can be told afterwards: it must leave the generators as the step had left them.

Reading the states of Python and numpy takes 0.1 ms, of torch a few us. If the first steps leave the former where they
were, they are not read again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LEARNING = 4  # reads after which it is known whether anything draws from Python or numpy


class RngState(NamedTuple):
    host: Tensor
    device: Tensor | None
    python: Any
    numpy: Any

    def is_same_for_torch(self, other: RngState) -> bool:
        if (self.device is None) != (other.device is None) or not torch.equal(self.host, other.host):
            return False
        return self.device is None or other.device is None or torch.equal(self.device, other.device)

    def to_json(self, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        kind, keys, *rest = self.numpy
        tensors[f"{name}.host"] = self.host
        if self.device is not None:
            tensors[f"{name}.device"] = self.device
        return {"name": name, "python": self.python, "numpy": [kind, keys.tolist(), *rest]}


def from_json(stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RngState:
    name, (version, keys, gauss) = stored["name"], stored["python"]
    kind, numbers, *rest = stored["numpy"]
    python, numpy = (version, tuple(keys), gauss), (kind, np.asarray(numbers, np.uint32), *rest)
    return RngState(tensors[f"{name}.host"].cpu(), tensors.get(f"{name}.device"), python, numpy)


def from_containers(stored: tuple[Any, ...]) -> RngState:
    """Of the first format of captures."""
    host, device, python, (kind, keys, *rest) = stored
    return RngState(host, device, python, (kind, np.asarray(keys, np.uint32), *rest))


class Generators:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_reads, self._moved = 0, False
        self._python: Any = random.getstate()
        self._numpy: Any = np.random.get_state()

    def read(self) -> RngState:
        if self._num_reads < LEARNING or self._moved:
            python, numpy = random.getstate(), np.random.get_state()
            self._moved |= python != self._python or not _is_same(numpy, self._numpy)
            self._python, self._numpy = python, numpy
            self._num_reads += 1
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return RngState(torch.get_rng_state(), on_device, self._python, self._numpy)

    def set(self, state: RngState) -> None:
        torch.set_rng_state(state.host)
        if state.device is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(state.device, self._device)
        random.setstate(state.python)
        np.random.set_state(state.numpy)

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Afterwards they are as they were."""
        before = Generators(self._device).read()
        try:
            yield
        finally:
            self.set(before)


def _is_same(a: Any, b: Any) -> bool:
    return bool(a[2:] == b[2:] and np.array_equal(a[1], b[1]))
