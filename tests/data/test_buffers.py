"""If this fails, a loss may write into the data set itself, or batches are copied once more than they need to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rung.data.buffers import empty, is_own, page_locked
from rung.engine.prefetch import to_device


def test_an_array_to_fill_is_of_the_shape_and_type_that_was_asked_for() -> None:
    array = empty((2, 3), np.float32)
    array[...] = 7
    assert (array.shape, array.dtype, array.sum()) == ((2, 3), np.float32, 42)
    assert is_own(array)


def test_views_of_others_are_not_ones_own(tmp_path: Path) -> None:
    np.arange(12, dtype=np.uint8).tofile(tmp_path / "data.bin")
    mapped = np.memmap(tmp_path / "data.bin", np.uint8, "r")
    assert not is_own(mapped[2:5])
    assert not is_own(np.frombuffer(b"abc", np.uint8))
    assert not is_own(np.arange(9).reshape(3, 3)[1:])
    assert is_own(torch.empty(6, dtype=torch.uint8).numpy().view(np.uint8).reshape(2, 3))


def test_what_a_loss_writes_does_not_reach_the_data() -> None:
    data = np.zeros(10, np.float32)
    batch, _ = to_device({"rows": data[2:4]}, torch.device("cpu"))
    batch["rows"].fill_(1)
    assert data.sum() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_way_to_a_gpu_memory_is_page_locked_in_this_thread_only() -> None:
    with page_locked():
        inside = empty((4, 4), np.float32)
    assert torch.from_numpy(inside).is_pinned()
    assert not torch.from_numpy(empty((4, 4), np.float32)).is_pinned()
