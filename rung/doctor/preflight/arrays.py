"""Arrays of a stream as a check sees them: some rows, with channels on the last axis, and what the store says of them.

The rows come in stretches of neighbours, each as long as the smallest eval set: how far these lie apart says what such
a set may be like, without anything being wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rung.doctor.preflight.result import Bench
from rung.engine.evaluate import EVAL_STEP
from rung.recipe import Draw

NUM_ROWS, QUICK_ROWS, AGAIN_ROWS = 256, 64, 1024
NUM_STRETCHES = 8
MOST_BYTES, QUICK_BYTES = 200_000_000, 30_000_000
MOST_CHANNELS = 64  # a last axis longer than this is not one of channels
TINY = 1e-6  # of max(1, |mean|): rounding
MASKS = ("mask", "valid", "pad")


class Look(NamedTuple):
    """An array of some rows, as float64 with its channels on the last axis, and what is known of it."""

    name: str
    array: np.ndarray
    is_ids: bool
    is_mask: bool
    channels: np.ndarray  # (numbers, channels); one channel where there are none

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self.channels.mean(0))

    @property
    def std(self) -> np.ndarray:
        return np.asarray(self.channels.std(0))

    @property
    def still(self) -> np.ndarray:
        """Channels that do not vary."""
        return np.asarray(self.std <= TINY * np.maximum(1, np.abs(self.mean)))

    def line(self) -> str:
        a = self.array
        shape = "x".join(map(str, a.shape[1:])) or "1"
        return f"{self.name}: {a.dtype} {shape}, {a.min():.4g} .. {a.max():.4g}, mean {a.mean():.4g}, std {a.std():.4g}"


def look_at(name: str, array: np.ndarray) -> Look:
    is_mask = array.dtype == np.bool_ or any(word in name.lower() for word in MASKS)
    is_ids = np.issubdtype(array.dtype, np.integer) and array.ndim <= 2
    values = array.astype(np.float64)
    if is_ids or array.ndim < 2:
        return Look(name, array, is_ids, is_mask, values.reshape(-1, 1))
    if array.ndim == 4 and array.shape[1] in (1, 3, 4) and array.shape[-1] not in (1, 3, 4):
        values = np.moveaxis(values, 1, -1)
    few = values.shape[-1] <= MOST_CHANNELS and not (array.ndim > 2 and array.dtype == np.uint8 and array.shape[-1] > 4)
    return Look(name, array, is_ids, is_mask, values.reshape(-1, values.shape[-1] if few else 1))


def rows_of(bench: Bench, stream: str, num_rows: int) -> dict[str, np.ndarray]:
    """So many rows, or as many as fit the limit: eight stretches, or of a set with few rows those spread over all.

    The quick form keeps them for the next check: it has few, and a slow stream should not be asked twice.
    """
    kept = ("rows", stream, num_rows)
    if kept in bench.shared:
        return dict(bench.shared[kept])
    of, seed = bench.setup.streams[stream], bench.setup.cfg.seed
    step = 0 if stream == "train" else EVAL_STEP
    one = of.gather(np.zeros(1, np.int64), Draw(seed, step, np.arange(1)))
    num_bytes = sum(np.asarray(array).nbytes for array in one.values())
    most = (QUICK_BYTES if bench.is_quick else MOST_BYTES) // max(1, num_bytes)
    ids = _spread(of.num_rows, max(1, min(num_rows, most)), _stretch(bench))
    arrays = of.gather(ids, Draw(seed, step, np.arange(len(ids))))
    if bench.is_quick:
        bench.shared[kept] = arrays
    return dict(arrays)


def _stretch(bench: Bench) -> int:
    """Rows in a stretch of train that are as many as the smallest eval set has: what such a set can be like."""
    held = [stream.num_rows for stream in bench.setup.evaluator.streams.values()]
    return min([bench.setup.streams["train"].num_rows // NUM_STRETCHES, *held])


def _spread(num_rows: int, wanted: int, stretch: int) -> np.ndarray:
    """Rows in NUM_STRETCHES equal stretches, one after the other; spread evenly where these do not fit."""
    each = wanted // NUM_STRETCHES
    if each < 1 or stretch < each or num_rows < NUM_STRETCHES * stretch:
        wanted = min(wanted, num_rows)
        return np.arange(wanted) * num_rows // wanted
    starts = np.linspace(0, num_rows - stretch, NUM_STRETCHES).astype(np.int64)
    return (starts[:, None] + np.arange(each) * stretch // each).reshape(-1)


def declared(bench: Bench) -> dict[str, Any]:
    """What the store of the data says of channels: mean, std and the names of those that do not vary, if anything."""
    for owner in (bench.setup.streams["train"], bench.setup.recipe):
        info = getattr(getattr(owner, "store", None), "info", None)
        if isinstance(info, Mapping) and isinstance(info.get("statistics"), Mapping):
            return {"names": info.get("controls", ()), **info["statistics"]}
    return {}
