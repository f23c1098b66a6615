"""How much arithmetic a row takes, and what share of the device's peak that is.

Counted, not estimated from the number of parameters: one forward and backward of one row under torch's counter, with
attention taken apart into matrix products, so that attention is counted in full and convolutions are right. The peak
is that of dense matrix products in the dtype at hand. A device that is not in the table has no utilisation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rung.recipe import Batch, Draw, Objective

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


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of the device in this dtype, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if any(word in name for word in EXCEPT):
        return None
    return next((tflops * 1e12 for (part, kind), tflops in PEAKS.items() if part in name and kind == dtype), None)


class Flops(NamedTuple):
    """Of one row: forward and backward of every objective, and the forward part of it by module."""

    per_row: float
    forward_by_module: dict[str, int]


def count_flops(objectives: Sequence[Objective], batch: Batch, draw: Draw) -> Flops:
    """Counts on the first row of this batch. Leaves no gradients behind."""
    row = {name: tensor[:1] for name, tensor in batch.items()}
    draw = Draw(draw.seed, draw.step, draw.rows[:1])
    total, by_module = 0.0, Counter[str]()
    for objective in objectives:
        parameters = [p for p in objective.parameters if p.requires_grad]
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                loss = objective.loss(row, draw)
            with FlopCounterMode(display=False) as backward:
                torch.autograd.grad(loss.sum, parameters, allow_unused=True)
        total += (forward.get_total_flops() + backward.get_total_flops()) / objective.every
        for name, counts in forward.get_flop_counts().items():
            by_module[name] += sum(counts.values())
    return Flops(total, {name: n for name, n in by_module.items() if name != "Global" and name.count(".") <= 2 and n})
