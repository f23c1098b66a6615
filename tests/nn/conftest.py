"""The architectures that every test of the transformer goes through."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from rung.nn.transformer import Shape, Transformer

os.environ["HF_HUB_OFFLINE"] = "1"

SMALL: dict[str, Any] = {"vocab_size": 31, "context_size": 24, "n_layer": 2, "n_head": 4, "n_embd": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2_no_bias": {"bias": False},
    "neox": {
        "positions": "rotary", "rotary_fraction": 0.25, "mlp": "gelu", "parallel_residual": True, "tied_head": False,
    },
    "llama": {
        "norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 2, "positions": "rotary", "rope_theta": 1e5, "bias": False,
    },
    "wide_heads": {
        "head_dim": 16, "n_kv_head": 1, "qk_norm": True, "attention_scale": 1.0, "positions": "rotary",
        "rotary_fraction": 0.5, "tied_head": False,
    },
    "no_positions": {"positions": "none"},
    "decoder": {
        "cross_width": 20, "n_kv_head": 2, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rotary", "bias": False,
    },
}  # fmt: skip


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Shape:
    return Shape(**SMALL | VARIANTS[request.param])


def lively(shape: Shape, seed: int = 0) -> Transformer:
    """A model in eval mode whose weights are all random and large enough for every part to matter."""
    model = Transformer(shape, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def some_ids(shape: Shape, num_rows: int = 2, length: int = 12, seed: int = 5) -> torch.Tensor:
    return torch.randint(shape.vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def some_memory(shape: Shape, num_rows: int = 2, length: int = 7) -> torch.Tensor | None:
    if shape.cross_width is None:
        return None
    return torch.randn(num_rows, length, shape.cross_width, generator=torch.Generator().manual_seed(9))


@pytest.fixture
def make() -> Any:
    """The three helpers above, for test modules (which cannot import each other here)."""

    class Make:
        model = staticmethod(lively)
        ids = staticmethod(some_ids)
        memory = staticmethod(some_memory)
        small = SMALL

    return Make
