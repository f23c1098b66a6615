"""What the lab book costs in a loop of one's own: a plain PyTorch loop / the same with rung.init, watch and log.

    python -m bench.script [--quick] [--threads N] [--device cuda --width 512 --rows 192]

Both train the same small transformer with AdamW at about 10 ms a step. With rung, each step logs its loss and its
targets, and the optimizer is watched as by default. The two take 20 steps each, in turns, and change who begins; a
figure is of 100 steps, after the first 40, in which more is measured. `--parts` adds what the calls into rung take, by
their own clock, in a loop of their own: the way to tell where the time goes on a machine that is not quiet.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import rung
from rung.bench.report import facts, pairwise, spread, verdict
from rung.bench.throughput import Spent, now, since
from rung.script.run import OwnRun

BAR = 0.99
VOCAB, LENGTH = 96, 64


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight
        out: Tensor = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return out


class Party:
    """One loop; what it does besides training is said by its name."""

    def __init__(self, name: str, runs: Path, rows: int, width: int, device: str) -> None:
        torch.manual_seed(0)
        self.name, self.run = name, None
        self.model = Model(width).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = torch.randint(VOCAB, (8, rows, LENGTH + 1), device=device)
        self.num_steps = 0
        if name != "plain":
            self.run: OwnRun | None = rung.init(name, config={"lr": 1e-3}, runs=runs, code=False)
            self.run.watch(self.model, self.optimizer)

    def steps(self, count: int) -> Spent:
        begun = now()
        for _ in range(count):
            batch = self.batches[self.num_steps % len(self.batches)]
            loss = nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.run is not None:
                self.run.log({"loss": loss, "targets": batch[:, 1:].numel()})
            self.num_steps += 1
        if self.batches.is_cuda:
            torch.cuda.synchronize()
        return since(begun, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps: does it run at all?")
    parser.add_argument("--parts", action="store_true", help="also what each call takes")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--rounds", type=int, default=8, help="figures of 100 steps")
    parser.add_argument("--rows", type=int, default=4, help="rows a step")
    parser.add_argument("--width", type=int, default=64, help="channels of the model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chunk, per_round, rounds, first = (2, 1, 2, 2) if args.quick else (20, 5, args.rounds, 40)
    print(facts("torch", threads=args.threads, steps=f"{rounds} x {chunk * per_round} steps"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = 2 if args.quick else args.rows
        parties = [Party(name, Path(folder), rows, args.width, args.device) for name in ("plain", "rung")]
        spent = compete(parties, chunk, per_round, rounds, first)
        if args.parts:
            where(parties[1], 20 * chunk)
        if parties[1].run is not None:
            parties[1].run.finish(quiet=True)
    report(spent)


def compete(parties: Sequence[Party], chunk: int, per_round: int, rounds: int, first: int) -> dict[str, list[Spent]]:
    """Seconds a step of each party in each round."""
    for party in parties:
        party.steps(first)
    spent: dict[str, list[Spent]] = {party.name: [] for party in parties}
    for _ in range(rounds):
        found: dict[str, list[Spent]] = {party.name: [] for party in parties}
        for turn in range(per_round):
            for party in parties if turn % 2 else reversed(parties):
                found[party.name].append(party.steps(chunk))
        for name, parts in found.items():
            spent[name].append(Spent(*(sum(part) / len(parts) for part in zip(*parts))))
    return spent


def where(party: Party, num_steps: int) -> None:
    """What the calls into rung take of a step, in the middle of training, where nothing of theirs is in the caches."""
    spent: dict[str, list[int]] = {"before the update": [], "after the update": [], "log": []}
    assert party.run is not None
    watch = party.run._watches[0]

    def timed(name: str, act: Callable[..., None]) -> Callable[..., None]:
        def call(*words: object, **more: object) -> None:
            begun = time.perf_counter_ns()
            act(*words, **more)
            spent[name].append(time.perf_counter_ns() - begun)

        return call

    watch._before = timed("before the update", watch._before)  # type: ignore[method-assign]
    watch._after = timed("after the update", watch._after)  # type: ignore[method-assign]
    party.run.log = timed("log", party.run.log)  # type: ignore[method-assign]
    steps = sorted(party.steps(1).wall for _ in range(num_steps))
    print(f"a step takes {1e3 * statistics.median(steps):.2f} ms in the median; of that")
    for name, values in spent.items():
        median, mean = 1e-3 * statistics.median(values), 1e-9 * sum(values) / sum(steps)
        print(f"  {name:<18}{median:6.1f} us in the median, {mean:.2%} of the time in all")


def report(spent: dict[str, list[Spent]]) -> None:
    for name, values in spent.items():
        wall, cpu = ([1e3 * s[n] for s in values] for n in range(2))
        print(f"{name:<8}{spread(wall, '.3f')} ms a step, {spread(cpu, '.3f')} ms of CPU time")
    for name in list(spent)[1:]:
        cpu = pairwise([s.cpu for s in spent["plain"]], [s.cpu for s in spent[name]])
        print(f"{name} in CPU time of the process, which other processes disturb less: {spread(cpu, '.4f')}")
    ratio = pairwise([s.wall for s in spent["plain"]], [s.wall for s in spent["rung"]])
    print(verdict("own-loop", ratio, BAR, form=".4f"))


if __name__ == "__main__":
    main()
