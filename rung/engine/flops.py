"""How much arithmetic a row takes, and what share of the device's peak that is.

Counted, not estimated from the number of parameters: one forward and backward of one row under torch's counter, with
attention taken apart into matrix products, so that attention is counted in full and convolutions are right. The peak
is that of dense matrix products in the dtype at hand. A device that is not in the table has no utilisation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rung.engine.contract import read_loss
from rung.random import Draw
from rung.recipe import Batch, Objective

# Dense TFLOP/s by (part of the device's name, dtype), from the vendors' data sheets.
PEAKS = {
    ("H200", "bfloat16"): 989.0, ("H200", "float16"): 989.0,
    ("H100", "bfloat16"): 989.0, ("H100", "float16"): 989.0,
    ("A100", "bfloat16"): 312.0, ("A100", "float16"): 312.0,
    ("L40S", "bfloat16"): 362.0, ("L40S", "float16"): 362.0,
    ("4090", "bfloat16"): 165.0, ("4090", "float16"): 165.0,
}  # fmt: skip
# H100 boards other than SXM have lower peaks; they are left out rather than guessed.
EXCEPT = ("PCIe", "NVL", "GH200")


class Flops(NamedTuple):
    """Of one row: forward and backward of every objective, and the forward part of it by module."""

    per_row: float = 0.0
    forward_by_module: Mapping[str, int] = {}
    row_shapes: Mapping[str, tuple[int, ...]] = {}  # of the row that was counted
    peak: float | None = None  # FLOP/s of the device in the dtype of the run, where that is known


def row_shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape[1:]) for name, tensor in batch.items()}


def count_flops(objectives: Sequence[Objective], batch: Batch, draw: Draw, device: torch.device, dtype: str) -> Flops:
    """Counts on the first row of this batch. Leaves no gradients behind."""
    row = {name: tensor[:1] for name, tensor in batch.items()}
    draw = Draw(draw.seed, draw.step, draw.rows[:1])
    total, by_module = 0.0, Counter[str]()
    for objective in objectives:
        parameters = [p for p in objective.parameters if p.requires_grad]
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                loss = read_loss(objective.loss, objective.loss(row, draw))
            with FlopCounterMode(display=False) as backward:
                torch.autograd.grad(loss.sum, parameters, allow_unused=True)
        total += (forward.get_total_flops() + backward.get_total_flops()) / objective.every
        for name, counts in forward.get_flop_counts().items():
            by_module[name] += sum(counts.values())
    named = {name: n for name, n in by_module.items() if name != "Global" and name.count(".") <= 2 and n}
    peak = None
    if device.type == "cuda":
        model = torch.cuda.get_device_name(device)
        known = [tflops for (part, kind), tflops in PEAKS.items() if part in model and kind == dtype]
        peak = known[0] * 1e12 if known and not any(word in model for word in EXCEPT) else None
    return Flops(total, named, row_shapes(batch), peak)
