"""If this fails, a checkpoint of nanoGPT computes something else here, or a file runs code when it is opened."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rung.nn import nanogpt
from rung.nn.transformer import Transformer
from tests.errors import raises_code

SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 31, "dropout": 0.1}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        each = [part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2)]
        scores = each[0] @ each[1].transpose(2, 3) / math.sqrt(width / self.heads)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ each[2]
        return self.c_proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.attn = Attention(width, heads, bias)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias=bias), "c_proj": nn.Linear(4 * width, width, bias=bias)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Gpt(nn.Module):
    """The same arithmetic from torch's own modules, under the names that nanoGPT gives them."""

    def __init__(self, bias: bool, tied: bool = True) -> None:
        super().__init__()
        width, heads = SIZES["n_embd"], SIZES["n_head"]
        assert isinstance(width, int)
        assert isinstance(heads, int)
        parts: dict[str, Any] = {
            "wte": nn.Embedding(31, width), "wpe": nn.Embedding(24, width), "ln_f": nn.LayerNorm(width, bias=bias),
            "h": nn.ModuleList(Block(width, heads, bias) for _ in range(3)),
        }  # fmt: skip
        self.transformer = nn.ModuleDict(parts)
        self.blocks = list(parts["h"])
        self.lm_head = nn.Linear(width, 31, bias=False)
        if tied:
            self.lm_head.weight = parts["wte"].weight
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():  # large enough for the two kinds of GELU to differ
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def tree_of(gpt: nn.Module, **changes: Any) -> dict[str, Any]:
    """A checkpoint as its training script leaves it."""
    optimizer = torch.optim.AdamW(gpt.parameters())
    tree = {
        "model": gpt.state_dict(), "optimizer": optimizer.state_dict(), "model_args": dict(SIZES), "iter_num": 2000,
        "best_val_loss": torch.tensor(1.4), "config": {"dataset": "shakespeare", "learning_rate": 1e-3},
    }  # fmt: skip
    return tree | changes


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def write(tree: Any, **options: Any) -> Path:
        torch.save(tree, tmp_path / "ckpt.pt", **options)
        return tmp_path / "ckpt.pt"

    return write


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_its_logits_are_ours(bias: bool, tied: bool, save: Callable[..., Path], make: Any) -> None:
    theirs = Gpt(bias, tied)
    ours = nanogpt.load(save(tree_of(theirs, model_args={**SIZES, "bias": bias}))).eval()
    assert (ours.shape.bias, ours.shape.tied_head, ours.shape.mlp) == (bias, tied, "gelu")
    ids = make.ids(ours.shape, length=24)
    expected = theirs(ids)
    torch.testing.assert_close(ours(ids), expected, atol=1e-4, rtol=1e-4)
    other = Transformer(replace(ours.shape, mlp="gelu_tanh"), seed=None).eval()
    other.load_state_dict(ours.state_dict())
    assert (other(ids) - expected).abs().max() > 1e-3  # so that the kind of GELU matters here


def test_what_wraps_the_names_and_the_sizes_makes_no_difference(save: Callable[..., Path]) -> None:
    model = Gpt(bias=False)
    plain = nanogpt.load(save(tree_of(model)))
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in model.state_dict().items()}
    wrapped["_orig_mod.module.transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24)  # the mask of old versions
    era = {
        "model": wrapped,
        "model_cfg": {"n_head": 4, "n_layer": 3, "context_size": 24, "bias": False},
        "val_loss": 1.0,
    }
    for tree, options in ((era, {}), (era, {"_use_new_zipfile_serialization": False})):
        other = nanogpt.load(save(tree, **options))
        assert other.shape == plain.shape
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    assert nanogpt.shape_of(save(era)) == plain.shape
    assert nanogpt.load(save(era), dropout=0.2).shape.dropout == 0.2


def test_half_precision_is_float32_in_memory(save: Callable[..., Path]) -> None:
    model = nanogpt.load(save(tree_of(Gpt(bias=True).bfloat16())))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class Odd:
    """An object of a class, as a config of OmegaConf is one."""


class Trap:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("sprung"),))


def test_nothing_but_tensors_and_plain_values_is_read(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises_code("untrusted") as caught:
        nanogpt.load(save(tree_of(Gpt(bias=False), config=Odd())))
    assert "Odd" in str(caught.value)
    assert "weights_only=False" in str(caught.value)
    with raises_code("untrusted"):
        nanogpt.load(save(tree_of(Gpt(bias=False), config=Trap())))
    assert not (tmp_path / "sprung").exists()


def test_an_omegaconf_config_is_named(save: Callable[..., Path]) -> None:
    from omegaconf import OmegaConf

    file = save(tree_of(Gpt(bias=False), model_cfg=OmegaConf.create({"n_head": 4})))
    with raises_code("untrusted") as caught:
        nanogpt.load(file)
    assert "omegaconf.dictconfig.DictConfig" in str(caught.value)


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in Gpt(bias=False).state_dict().items() if key != name}


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        (
            {"model": without("transformer.h.1.mlp.c_fc.weight")},
            "checkpoint-damaged",
            "transformer.h.1.mlp.c_fc.weight",
        ),
        ({"model": without("transformer.wte.weight")}, "checkpoint-damaged", "transformer.wte.weight"),
        (
            {"model": {**without(""), "transformer.odd.weight": torch.ones(2)}},
            "checkpoint-mismatch",
            "transformer.odd.weight",
        ),
        (
            {"model": {**without(""), "transformer.h.0.ln_1.weight": torch.ones(2)}},
            "checkpoint-mismatch",
            "ln_1.weight is (2,)",
        ),
        (
            {"model": {**without(""), "transformer.ln_f.weight": torch.ones(32, dtype=torch.int8)}},
            "not-supported",
            "torch.int8",
        ),
        (
            {"model": {"transformer.wte.weight": torch.ones(2), "transformer.wpe.weight": torch.ones(2)}},
            "checkpoint-mismatch",
            "transformer.wte.weight",
        ),
        ({"model": 3}, "not-supported", "model_args"),
        ({"model_args": None}, "no-key", "model_cfg"),
        ({"model_args": {}}, "no-key", "n_head"),
        ({"model_args": {"n_head": 5}}, "bad-value", "n_head=5"),
        ({"model_args": {"n_head": "four"}}, "bad-value", "four"),
        ({"model_args": {"n_head": 0}}, "bad-value", "n_head=0"),
        ({"model": {**without(""), "transformer.h": torch.ones(2)}}, "checkpoint-mismatch", "transformer.h "),
        ({"model_args": {"n_head": 4, "n_layer": 12}}, "checkpoint-damaged", "n_layer=12"),
        ({"model_args": {"n_head": 4, "bias": True}}, "checkpoint-damaged", "bias=True"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], code: str, named: str, save: Callable[..., Path]) -> None:
    with raises_code(code) as caught:
        nanogpt.load(save(tree_of(Gpt(bias=False), **changes)))
    assert named in str(caught.value)


def test_files_that_are_no_checkpoints_are_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    with raises_code("not-supported"):
        nanogpt.load(save([1, 2, 3]))
    with raises_code("no-file"):
        nanogpt.load(tmp_path / "nowhere.pt")
    whole = save(tree_of(Gpt(bias=False))).read_bytes()
    users = b"root:x:0:0:root:/root:/bin/bash\n"  # begins like a pickle that takes from an empty stack
    for data in (b"", users, b"hello, this is text", b"PK\x03\x04 and then", whole[: len(whole) // 2], whole[:100]):
        (tmp_path / "ckpt.pt").write_bytes(data)
        with raises_code("checkpoint-damaged"):
            nanogpt.load(tmp_path / "ckpt.pt")
    with raises_code("bad-path"):
        nanogpt.load(tmp_path / "model.safetensors")
