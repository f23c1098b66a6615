"""The benchmarks of `rung bench`: each measures rung, and where torch alone makes a peer, that peer in turns with it.

Each takes one CPU thread, so that what it says does not depend on how many cores are free.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rung.bench import loader, logging, overhead, throughput
from rung.bench.page import Figure
from rung.bench.report import in_turns, pairwise
from rung.nn.generate import generate
from rung.nn.transformer import Shape, Transformer

GPT = Shape(4096, 1024, n_layer=6, n_head=6, n_embd=384)  # 12M parameters
TINY_GPT = Shape(64, 128, n_layer=1, n_head=2, n_embd=32)


def measure(name: str, device: str, is_quick: bool) -> list[Figure]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return PARTS[name](Path(folder), device, is_quick)
    finally:
        torch.set_num_threads(num_threads)


def step(folder: Path, device: str, is_quick: bool) -> list[Figure]:
    rounds, chunk, batch = (2, 2, 2) if is_quick else (10, 10, None)
    setup = throughput.set_up(folder, "piano", device, 1, batch)
    spent = throughput.measure(folder, setup, rounds, chunk)
    targets = setup.rate.rows_per_step * setup.rate.targets_per_row
    ratios = pairwise([s.wall for s in spent["bare"]], [s.wall for s in spent["rung"]])
    return [
        Figure("step/vs_bare", ratios, "x", "training with everything on / a bare PyTorch loop, piano tiny"),
        Figure("step/targets_per_s", [targets / s.wall for s in spent["rung"]], "targets/s", "the same, piano tiny"),
    ]


def diagnostics(folder: Path, device: str, is_quick: bool) -> list[Figure]:
    chunk, per_round, rounds, until, batch = (1, 2, 2, 1, 2) if is_quick else (20, 5, 3, 50, None)
    throughput.write_store(folder / "ids", throughput.VOCAB_SIZE)
    parties = [
        overhead.Party(
            name, *overhead.built(folder, name, "piano", device, 1, batch), chunk, 1 + rounds * per_round, until
        )
        for name in overhead.PARTIES
    ]
    overhead.compete(parties)
    spent = {party.name: overhead.rounds_of(party.spent[1:], per_round) for party in parties}
    about = {"everything": "all signals and the doctor", "latch": "the check of each step and its row alone"}
    return [
        Figure(
            f"diagnostics/{name}", pairwise([s.wall for s in spent["bare"]], [s.wall for s in spent[name]]), "x",
            f"a step without any / with {what}",
        )
        for name, what in about.items()
    ]  # fmt: skip


def load(folder: Path, device: str, is_quick: bool) -> list[Figure]:
    num_ids, num_batches, rounds = (2_000_000, 20, 2) if is_quick else (100_000_000, 400, 7)
    store = loader.write_store(folder / "ids", num_ids)
    makers: dict[str, Callable[[], loader.Batches]] = {
        "rung": lambda: loader.through_feed(store, "uint16"),
        "torch": lambda: loader.through_loader(store, "int64", 0),
    }
    figures = in_turns(rounds, {name: lambda m=make: loader.rate(m, num_batches) for name, make in makers.items()})  # type: ignore[misc]
    ratios = pairwise(figures["rung"], figures["torch"])
    return [
        Figure("loader/vs_dataloader", ratios, "x", "windows of 1024 through the prefetch thread / torch's DataLoader"),
        Figure("loader/windows_per_s", figures["rung"], "windows/s", "the same, 32 a batch"),
    ]


def generation(folder: Path, device: str, is_quick: bool) -> list[Figure]:
    """On a CPU a second is one of the process's CPU time, which other processes disturb less."""
    shape, num_new, rounds = (TINY_GPT, 4, 2) if is_quick else (GPT, 128, 5)
    clock = time.perf_counter if device == "cuda" else time.process_time
    model = Transformer(shape).to(device).eval()
    generator = torch.Generator(device).manual_seed(1)

    def rate(num_rows: int) -> float:
        prompt = torch.zeros(num_rows, 64, dtype=torch.long, device=device)
        begun = clock()
        generate(model, prompt, num_new, top_k=50, generator=generator).cpu()
        return num_rows * num_new / (clock() - begun)

    figures = in_turns(rounds, {str(num_rows): lambda n=num_rows: rate(n) for num_rows in (1, 8)})  # type: ignore[misc]
    return [
        Figure(f"generation/batch_{rows}", values, "tokens/s", f"{rows} rows, GPT of 12M in float32, top-k 50")
        for rows, values in figures.items()
    ]


def log(folder: Path, device: str, is_quick: bool) -> list[Figure]:
    rounds, num_steps = (2, 100) if is_quick else (10, 3000)
    record = logging.new_record(folder / "runs")
    figures = in_turns(rounds, {"rung": lambda: logging.cost_us(record.log, num_steps)})
    record.finish("finished")
    return [Figure("logging/step", figures["rung"], "us", "CPU time of a logged step of 30 numbers", "lower")]


PARTS: dict[str, Callable[[Path, str, bool], list[Figure]]] = {
    "step": step,
    "diagnostics": diagnostics,
    "loader": load,
    "generation": generation,
    "logging": log,
}
