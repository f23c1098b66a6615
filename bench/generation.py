"""Generated tokens per second of models of one shape: rung's generate / transformers.generate, in turns.

    python -m bench.generation [--quick] [--threads N] [--size 10m|124m] [--batch 1] [--device cuda --dtype bfloat16]

Both draw with top-k 50 at temperature 1 after a prompt of 64 ids, and take a fixed number of new ids. transformers runs
as it comes (a cache that grows) and with `cache_implementation="static"`, which it compiles on a GPU. The prompt's
forward is in the figures of all parties. On a CPU a second is one of the process's CPU time, which other processes
disturb less; on a GPU it is one of wall time.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from rung.bench.report import facts, in_turns, pairwise, spread, verdict
from rung.nn.generate import generate
from rung.nn.transformer import Shape, Transformer

PROMPT, TOP_K = 64, 50
SHAPES = {
    "10m": Shape(4096, 1024, n_layer=6, n_head=6, n_embd=384),
    "124m": Shape(50304, 1024, n_layer=12, n_head=12, n_embd=768),
    "quick": Shape(64, 128, n_layer=2, n_head=2, n_embd=32),
}
BAR = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and few ids: does it run at all?")
    parser.add_argument("--size", choices=("10m", "124m"), default="10m")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument("--new", type=int, default=192, help="new ids of a figure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size, num_new, rounds = ("quick", 8, 2) if args.quick else (args.size, args.new, args.rounds)
    print(
        facts(
            "torch", "transformers", threads=args.threads, device=args.device, dtype=args.dtype, size=size,
            batch=args.batch, new=num_new, rounds=rounds,
        ),
        flush=True,
    )  # fmt: skip
    parties = parties_of(SHAPES[size], args.batch, num_new, torch.device(args.device), getattr(torch, args.dtype))
    num_ids = args.batch * num_new
    figures = in_turns(rounds, {name: rate_of(make, num_ids, args.device) for name, make in parties.items()})
    for name, values in figures.items():
        print(f"{name:<24} {spread(values, ',.0f')} tokens/s")
    for name, values in figures.items():
        if name != "rung":
            print(f"rung / {name}: {spread(pairwise(figures['rung'], values), '.2f')}")
    best = list(map(max, *(values for name, values in figures.items() if name != "rung")))
    print(verdict("generation", pairwise(figures["rung"], best), BAR, form=".2f"))


def parties_of(
    shape: Shape, num_rows: int, num_new: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], Any]]:
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    prompt = torch.randint(shape.vocab_size, (num_rows, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    ours = Transformer(shape).to(device, dtype).eval()
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocab_size, n_positions=shape.context_size, n_layer=shape.n_layer, n_head=shape.n_head,
            n_embd=shape.n_embd, bos_token_id=0, eos_token_id=0,
        )
    ).to(device, dtype).eval()  # fmt: skip
    generator = torch.Generator(device).manual_seed(1)
    common: dict[str, Any] = {
        "do_sample": True, "top_k": TOP_K, "max_new_tokens": num_new, "min_new_tokens": num_new, "pad_token_id": 0,
    }  # fmt: skip
    seen = torch.ones_like(prompt)

    def transformers(**more: Any) -> Any:
        return theirs.generate(prompt, attention_mask=seen, generation_config=GenerationConfig(**common, **more))

    return {
        "rung": lambda: generate(ours, prompt, num_new, top_k=TOP_K, generator=generator),
        "transformers": transformers,
        "transformers, static": lambda: transformers(cache_implementation="static"),
    }


def rate_of(make: Callable[[], Any], num_ids: int, device: str) -> Callable[[], float]:
    def rate() -> float:
        clock = time.perf_counter if device == "cuda" else time.process_time
        begun = clock()
        ids = make()
        assert ids.numel() >= num_ids
        if device == "cuda":
            torch.cuda.synchronize()
        return num_ids / (clock() - begun)

    return rate


if __name__ == "__main__":
    main()
