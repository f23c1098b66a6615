"""How many CPU threads a run takes where system.threads leaves it open, and whether compiling pays on a CPU.

Both follow from the machine's cores and the arithmetic of a forward pass alone, not from how busy the machine is, so
that the same run takes the same number again: it moves the last digits of sums.
"""

from __future__ import annotations

import os
from pathlib import Path

# Of forward and backward of one batch, for each thread. A core does this in about 10 ms, which is what handing the
# several hundred operations of a step to other threads and back costs at 10 to 20 us each. Judged, not measured.
FLOPS_PER_THREAD = 0.5e9

FLOPS_PER_S = 50e9  # what a thread gets done in float32; two to four times less or more
COMPILE_S = 120  # a model of two layers took so long on two cores
SAVED_BY_COMPILING = 0.2  # of a step, at best


def cores() -> int:
    """Physical cores that this process may use; what torch would take where the machine does not say."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    found = set()
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            found.add((topology / "thread_siblings_list").read_text())
        except OSError:
            return len(usable)
    return max(1, len(found))


def choose_threads(flops_per_batch: float, num_cores: int) -> tuple[int, str]:
    """The number and why. `flops_per_batch` 0 means that nobody counted."""
    if not flops_per_batch:
        return num_cores, f"the machine's {num_cores} cores"
    wanted = max(1, round(flops_per_batch / FLOPS_PER_THREAD))
    if wanted >= num_cores:
        return num_cores, f"the machine's {num_cores} cores"
    return wanted, f"of {num_cores} cores: a batch of {flops_per_batch / 1e9:.2g} GFLOP is too small for more"


def compile_line(flops_per_step: float, num_steps: int | None, budget_s: float | None, num_threads: int) -> str:
    """What compiling costs and saves in a run on a CPU, as far as one can tell before."""
    step_s = flops_per_step / (FLOPS_PER_S * num_threads)
    lengths = [budget_s] if budget_s else []
    if num_steps is not None and step_s:
        lengths.append(num_steps * step_s)
    if not lengths:
        return ""
    length_s = min(lengths)
    saved_s = SAVED_BY_COMPILING * length_s
    begin = f"compiling on a CPU takes about {COMPILE_S / 60:.0f} min and saves at best {saved_s / 60:.2g} of the run's"
    ending = "pays" if saved_s > COMPILE_S else "will not pay: system.compile=false is faster"
    return f"{begin} {length_s / 60:.2g} min (predicted from its arithmetic): it {ending}"
