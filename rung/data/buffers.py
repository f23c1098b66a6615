"""Where large batches are gathered: fresh memory on a CPU, recycled page-locked memory on the way to a GPU.

A stream that fills large arrays takes them from `empty`. While batches are gathered for a GPU, such an array is
page-locked memory of torch's own cache, which is neither mapped anew for each batch nor copied once more before it is
sent. A stream that does not ask works as well, a copy later.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import numpy as np

_here = threading.local()


def empty(shape: tuple[int, ...], dtype: type | np.dtype = np.uint8) -> np.ndarray:
    """An array to be filled, of whatever memory suits the one who asked for the batch."""
    if not getattr(_here, "is_locked", False):
        return np.empty(shape, dtype)
    import torch

    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return block.numpy().view(dtype).reshape(shape)


def is_own(array: np.ndarray) -> bool:
    """Whether nobody else can see a change of this array: it has its memory to itself, or from `empty`."""
    if array.flags.owndata:
        return True
    # A view of page-locked memory leads back to torch's tensor, one of a file to its map.
    base: object = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return type(base).__module__ == "torch"


@contextlib.contextmanager
def page_locked() -> Iterator[None]:
    """Inside, in this thread, `empty` gives page-locked memory."""
    _here.is_locked = True
    try:
        yield
    finally:
        _here.is_locked = False
