"""What watching a run costs: `fit` with all signals and the doctor on, with the latch alone, and with neither.

    python -m bench.overhead [--quick] [--threads N]
    python -m bench.overhead --device cuda --size gpt2

The three parties and how they take turns are in rung.bench.overhead.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rung.bench.overhead import PARTIES, Party, built, compete, rounds_of
from rung.bench.report import facts, pairwise, spread, verdict
from rung.bench.throughput import GPT2_VOCAB, Spent, write_store
from rung.recipes.piano.tokenizer import VOCAB_SIZE

BARS = {"everything": 0.99, "latch": 0.998}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps: does it run at all?")
    parser.add_argument("--size", choices=("piano", "gpt2"), default="piano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--rounds", type=int, default=3, help="figures of 100 steps")
    parser.add_argument("--batch", type=int, help="rows a step; default: the size's own")
    args = parser.parse_args()
    chunk, per_round, rounds, until = (1, 2, 2, 1) if args.quick else (20, 5, args.rounds, 50)
    batch = args.batch or (2 if args.quick else None)
    steps = f"{rounds} x {chunk * per_round} steps"
    print(facts("torch", threads=args.threads, size=args.size, device=args.device, steps=steps), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_store(Path(folder) / "ids", VOCAB_SIZE if args.size == "piano" else GPT2_VOCAB)
        parties = [
            Party(
                name,
                *built(Path(folder), name, args.size, args.device, args.threads, batch),
                chunk,
                1 + rounds * per_round,
                until,
            )
            for name in PARTIES
        ]
        compete(parties)
    report({p.name: rounds_of(p.spent[1:], per_round) for p in parties})


def report(spent: Mapping[str, list[Spent]]) -> None:
    for name, values in spent.items():
        wall, cpu = ([1e3 * s[n] for s in values] for n in range(2))
        print(f"{name:<12}{spread(wall, '.2f')} ms a step, {spread(cpu, '.2f')} ms of CPU time")
    ratios = {name: (spent[base], spent[name]) for name, base in (("everything", "bare"), ("latch", "bare"))}
    for name, (base, ours) in ratios.items():
        cpu = pairwise([s.cpu for s in base], [s.cpu for s in ours])
        print(f"{name} in CPU time of the process, which other processes disturb less: {spread(cpu, '.4f')}")
    for name, (base, ours) in ratios.items():
        print(verdict(name, pairwise([s.wall for s in base], [s.wall for s in ours]), BARS[name], form=".4f"))


if __name__ == "__main__":
    main()
