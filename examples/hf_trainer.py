"""The Hugging Face Trainer with rung's lab book: python examples/hf_trainer.py

Trains a tiny GPT-2 from scratch to count; downloads nothing.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rung
from rung.script.huggingface import RungCallback


def rows(num_rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up modulo 32, in steps of 1 to 3."""
    numbers = torch.Generator().manual_seed(seed)
    first, by = (
        torch.randint(32, (num_rows, 1), generator=numbers),
        torch.randint(1, 4, (num_rows, 1), generator=numbers),
    )
    ids = (first + by * torch.arange(16)) % 32
    return [{"input_ids": row, "labels": row} for row in ids]


with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder,
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
    )
    sizes = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        model=GPT2LMHeadModel(sizes),
        args=args,
        train_dataset=rows(256, seed=0),
        eval_dataset=rows(64, seed=1),
        callbacks=[RungCallback("counting", why="does it learn to count?")],
    )
    trainer.train()
    trainer.evaluate()
rung.finish()
