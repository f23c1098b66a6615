"""A GPT in one file, in the style of nanoGPT, trained on standard-library docstrings, with rung's lab book.

    python examples/nano_gpt.py
    python examples/nano_gpt.py --n_layer=3 --parent=nano/1 --why="does a third layer pay?"

Calls to rung begin with `rung.` or `run.`; the rest would be the same without rung.
"""

from __future__ import annotations

import argparse
import importlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rung

MODULES = ("argparse", "collections", "decimal", "json", "logging", "random", "re", "string", "textwrap", "threading")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small GPT.")
    for name, default in {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 48, "batch_size": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--max_iters", type=int, default=120)
    parser.add_argument("--warmup_iters", type=int, default=10)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--eval_interval", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--why", default=None)
    parser.add_argument("--parent", default=None)
    return parser.parse_args()


def docstrings() -> str:
    texts = []
    for module in map(importlib.import_module, MODULES):
        parts = [module, *(vars(module)[name] for name in sorted(vars(module)) if name[0] != "_")]
        texts += [part.__doc__ for part in parts if isinstance(part.__doc__, str)]
    return "\n".join(texts).encode("ascii", "ignore").decode()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, args.n_embd), nn.Embedding(args.block_size, args.n_embd)
        self.blocks = nn.Sequential(*(Block(args.n_embd, args.n_head) for _ in range(args.n_layer)))
        self.ln = nn.LayerNorm(args.n_embd)
        self.head = nn.Linear(args.n_embd, vocab, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        logits: Tensor = self.head(self.ln(self.blocks(x)))
        return logits


args = arguments()
config = {name: value for name, value in vars(args).items() if name not in ("why", "parent")}
run = rung.init("nano", config=config, why=args.why, parent=args.parent)
run.define_metric("val/loss", better="lower", reduction="mean over all windows", unit="nats per character")

torch.manual_seed(args.seed)
text = docstrings()
letters = sorted(set(text))
ids = torch.tensor([letters.index(letter) for letter in text])
cut = len(ids) * 9 // 10
train, val = ids[:cut], ids[cut:]
run.data("train", train, source="docstrings", tokenizer="characters")
run.data("val", val, source="docstrings", tokenizer="characters")
model = GPT(len(letters), args)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
run.watch(model, optimizer)
order = torch.Generator().manual_seed(args.seed)


def batch(part: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    windows = torch.stack([part[start : start + args.block_size + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def loss_of(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def rate(step: int) -> float:
    if step < args.warmup_iters:
        return args.learning_rate * (step + 1) / args.warmup_iters
    done = (step - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return args.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def evaluate(step: int) -> None:
    starts = torch.arange(0, len(val) - args.block_size - 1, 4 * args.block_size)
    run.log({"val/loss": loss_of(*batch(val, starts))}, step=step)


@torch.no_grad()
def sample(step: int, length: int = 120) -> None:
    drawn, found = torch.Generator().manual_seed(step), torch.zeros(1, 1, dtype=torch.long)
    for _ in range(length):
        chances = model(found[:, -args.block_size :])[0, -1].softmax(-1)
        found = torch.cat([found, torch.multinomial(chances, 1, generator=drawn)[None]], dim=1)
    run.sample("text.txt", "".join(letters[i] for i in found[0].tolist()), caption=f"{length} letters", step=step)


for step in range(args.max_iters):
    if step % args.eval_interval == 0:
        evaluate(step)
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    x, y = batch(train, torch.randint(len(train) - args.block_size - 1, (args.batch_size,), generator=order))
    loss = loss_of(x, y)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    optimizer.step()
    run.log({"loss": loss, "grad_norm": norm, "targets": y.numel()}, step=step)
evaluate(args.max_iters)
sample(args.max_iters)
run.finish()
