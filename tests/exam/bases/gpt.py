"""A character model in the style of nanoGPT."""

import argparse
import math
import textwrap
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import rung

seed = 1337
batch_size, block_size, accumulation = 16, 32, 1
n_layer, n_head, n_embd, dropout = 2, 2, 32, 0.0
learning_rate, min_lr, warmup_iters, max_iters = 3e-3, 3e-4, 20, 300
grad_clip, eval_interval, eval_iters = 1.0, 50, 8
config = {name: value for name, value in globals().items() if isinstance(value, int | float)}

torch.manual_seed(seed)
text = "".join(Path(module.__file__).read_text() for module in (argparse, textwrap))
chars = sorted(set(text))
stoi = {ch: i for i, ch in enumerate(chars)}
data = torch.tensor([stoi[ch] for ch in text])
n = int(0.9 * len(data))
train_data, val_data = data[:n], data[n:]


def get_batch(split):
    part = train_data if split == "train" else val_data
    ix = torch.randint(len(part) - block_size - 1, (batch_size,))
    x = torch.stack([part[i : i + block_size] for i in ix])
    y = torch.stack([part[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, n_head, C // n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd), Attention()
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        x = x + self.drop(self.mlp(self.ln_2(x)))
        return x


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, len(chars), bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
run = rung.init("gpt", config=config)
run.data("train", train_data, tokenizer="characters")
run.data("val", val_data, tokenizer="characters")
run.watch(model, optimizer)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.stack([model(*get_batch("val")) for _ in range(eval_iters)])
    model.train()
    return losses.mean()


for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0:
        run.log({"val/loss": estimate_loss()}, step=it)
    for _ in range(accumulation):
        loss = model(*get_batch("train")) / accumulation
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    run.log(
        {
            "loss": loss * accumulation,
            "grad_norm": norm,
            "lr": get_lr(it),
            "targets": batch_size * block_size * accumulation,
        },
        step=it,
    )
run.log({"val/loss": estimate_loss()}, step=max_iters)
run.finish()
