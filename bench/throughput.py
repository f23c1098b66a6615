"""Targets per second of `fit` with everything on, against a bare PyTorch loop, in turns and in one process.

    python -m bench.throughput [--quick] [--threads N]
    python -m bench.throughput --device cuda --size gpt2

Both loops are in rung.bench.throughput. Sizes: `piano`, the tiny preset of the piano recipe itself; `gpt2`, 124M
parameters in bfloat16, compiled. Data are random ids in a temporary store.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rung.bench.report import facts, pairwise, spread, verdict
from rung.bench.throughput import Spent, measure, set_up
from rung.engine.build import Setup
from rung.units import count

BAR = 0.98


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two short rounds: does it run at all?")
    parser.add_argument("--size", choices=("piano", "gpt2"), default="piano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunk", type=int, default=10, help="steps of each party in a round")
    parser.add_argument("--batch", type=int, help="rows a step; default: the size's own")
    args = parser.parse_args()
    rounds, chunk = (2, 2) if args.quick else (args.rounds, args.chunk)
    print(facts("torch", threads=args.threads, size=args.size, rounds=rounds, chunk=f"{chunk} steps"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        batch = args.batch or (2 if args.quick else None)
        setup = set_up(Path(folder), args.size, args.device, args.threads, batch)
        print("  " + "\n  ".join(setup.chosen), flush=True)
        seconds = measure(Path(folder), setup, rounds, chunk)
    report(setup, seconds)


def report(setup: Setup, spent: Mapping[str, list[Spent]]) -> None:
    targets = setup.rate.rows_per_step * setup.rate.targets_per_row
    for name, values in spent.items():
        rates = sorted(targets / s.wall for s in values)
        line = f"{name}  {count(rates[len(rates) // 2])} targets/s [{count(rates[0])} {count(rates[-1])}]"
        if setup.flops.peak is not None:
            flops = setup.flops.per_row * setup.rate.rows_per_step
            shares = [100 * flops / (s.wall * setup.flops.peak) for s in values]
            line += f"  mfu {spread(shares, '.1f')} %, attention counted in full"
        print(line)
    wall = pairwise([s.wall for s in spent["bare"]], [s.wall for s in spent["rung"]])
    cpu = pairwise([s.cpu for s in spent["bare"]], [s.cpu for s in spent["rung"]])
    print(f"in CPU time of the process, which other processes disturb less: {spread(cpu)}")
    print(verdict("throughput", wall, BAR))


if __name__ == "__main__":
    main()
