"""If this fails, a model begins with weights that are not what its user was told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.nn import hf
from rung.nn.pretrained import VOCABULARY, config_from_pretrained, load_pretrained, shape_of, tokenizer_of
from rung.nn.transformer import Shape, Transformer
from tests.errors import raises_code

SMALL = Shape(vocab_size=31, context_size=24, n_layer=2, n_head=4, n_embd=32)


def nano_file(model: Transformer, file: Path) -> Path:
    """The model as nanoGPT would have saved it."""
    names = {"tokens": "wte", "places": "wpe", "norm": "ln_f", "blocks": "h", "norm1": "ln_1", "norm2": "ln_2"}
    names |= {"attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    weights = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in names.items():
            name = f".{name}.".replace(f".{ours}.", f".{theirs}.").strip(".")
        weights[f"_orig_mod.transformer.{name}"] = tensor
    torch.save({"model": weights, "model_args": {"n_head": model.shape.n_head}}, file)
    return file


@torch.no_grad()
def test_the_same_shape_takes_every_weight(make: Any, tmp_path: Path) -> None:
    shape = replace(SMALL, bias=False, mlp="gelu", dropout=0.1)
    theirs = make.model(shape)
    hf.save(theirs, tmp_path / "folder")
    for source in (tmp_path / "folder", nano_file(theirs, tmp_path / "ckpt.pt")):
        model = Transformer(shape, seed=7).eval()
        words = load_pretrained(model, source, has_same_ids=True)
        ids = make.ids(shape, length=24)
        torch.testing.assert_close(model(ids), theirs(ids), atol=0, rtol=0)
        assert words == f"weights of {source}: 2 blocks of 32, its token table of 31 ids"
        assert "if its ids mean the same" in load_pretrained(model, source)
        assert model.shape.dropout == 0.1


@torch.no_grad()
def test_another_vocabulary_keeps_its_own_table(make: Any, tmp_path: Path) -> None:
    theirs = make.model(SMALL)
    hf.save(theirs, tmp_path)
    model, before = (
        Transformer(replace(SMALL, vocab_size=50), seed=7),
        Transformer(replace(SMALL, vocab_size=50), seed=7),
    )
    assert "a token table initialised randomly (31 ids there, 50 here)" in load_pretrained(model, tmp_path)
    assert model.tokens is not None
    assert before.tokens is not None
    assert torch.equal(model.tokens.weight, before.tokens.weight)
    rest = {name: tensor for name, tensor in model.state_dict().items() if name != "tokens.weight"}
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in rest.items())
    embeddings = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.eval().hidden(embeddings=embeddings), theirs.hidden(embeddings=embeddings))
    alike = Transformer(SMALL, seed=7)
    assert "initialised randomly, since nothing says that its ids mean the same" in load_pretrained(
        alike, tmp_path, has_same_ids=False
    )
    assert alike.tokens is not None
    assert not torch.equal(alike.tokens.weight, theirs.tokens.weight)
    padded = Transformer(replace(SMALL, vocab_size=32), seed=7)
    assert "its token table of 31 ids" in load_pretrained(padded, tmp_path, has_same_ids=True)
    assert padded.tokens is not None
    assert torch.equal(padded.tokens.weight[:31], theirs.tokens.weight)


@torch.no_grad()
def test_of_more_positions_the_first_are_taken_and_fewer_are_refused(make: Any, tmp_path: Path) -> None:
    theirs = make.model(SMALL)
    hf.save(theirs, tmp_path)
    short = Transformer(replace(SMALL, context_size=10), seed=7).eval()
    assert "the first 10 of its 24 positions" in load_pretrained(short, tmp_path)
    ids = make.ids(SMALL, length=10)
    torch.testing.assert_close(short(ids), theirs(ids))
    with raises_code("checkpoint-mismatch") as caught:
        load_pretrained(Transformer(replace(SMALL, context_size=25), seed=7), tmp_path)
    assert "data.context_size=24" in str(caught.value)
    rotary = replace(SMALL, positions="rotary", rotary_fraction=0.5)
    hf.save(make.model(rotary), tmp_path / "rotary")
    assert "trained on 24 positions" in load_pretrained(
        Transformer(replace(rotary, context_size=48)), tmp_path / "rotary"
    )


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"n_layer": 3}, "model.n_layer=2"),
        ({"n_embd": 64}, "model.n_embd=32"),
        ({"n_head": 2}, "model.n_head=4"),
        ({"mlp": "gelu"}, "model.mlp=gelu_tanh"),
        ({"bias": False}, "model.bias=true"),
        ({"n_hidden": 100}, "n_hidden=128"),
        ({"positions": "rotary"}, 'positions="learned"'),
        ({"tied_head": False}, "tied_head=true"),
        ({"norm_eps": 1e-6}, "norm_eps=1e-05"),
    ],
)
def test_another_model_is_refused_and_nothing_is_taken(
    changes: dict[str, Any], remedy: str, make: Any, tmp_path: Path
) -> None:
    hf.save(make.model(SMALL), tmp_path)
    model = Transformer(replace(SMALL, **changes), seed=7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with raises_code("checkpoint-mismatch") as caught:
        load_pretrained(model, tmp_path)
    assert remedy in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_without_biases_comes_back_without(make: Any, tmp_path: Path) -> None:
    shape = replace(SMALL, bias=False)
    theirs = make.model(shape)
    hf.save(theirs, tmp_path)
    assert config_from_pretrained(tmp_path)["model"]["bias"] is False
    model = Transformer(shape, seed=7)
    load_pretrained(model, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), theirs.parameters(), strict=True))
    without = nano_file(theirs, tmp_path / "ckpt.pt")
    with raises_code("checkpoint-mismatch") as caught:
        load_pretrained(Transformer(replace(SMALL, mlp="gelu"), seed=7), without)
    assert "bias=false" in str(caught.value)


def test_keys_are_told_without_the_weights(make: Any, tmp_path: Path) -> None:
    hf.save(make.model(SMALL), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert config_from_pretrained(tmp_path) == {
        "model": {"n_layer": 2, "n_head": 4, "n_embd": 32, "bias": True, "mlp": "gelu_tanh"}
    }
    llama: dict[str, Any] = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rotary", "bias": False}
    hf.save(make.model(replace(SMALL, **llama)), tmp_path / "llama")
    with raises_code("checkpoint-mismatch"):
        config_from_pretrained(tmp_path / "llama")
    (tmp_path / "config.json").write_text("{}")
    with raises_code("not-supported"):
        shape_of(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"tokenizer": 3}', '{"tokenizer": {"hash": 5}}'])
def test_a_vocabulary_that_says_nothing_is_nobodys(text: str, tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path) is None
    assert tokenizer_of(tmp_path / "ckpt.pt") is None
    (tmp_path / VOCABULARY).write_text(text)
    assert tokenizer_of(tmp_path) is None
    (tmp_path / VOCABULARY).write_text(json.dumps({"tokenizer": {"hash": "abc"}}))
    assert tokenizer_of(tmp_path) == "abc"
