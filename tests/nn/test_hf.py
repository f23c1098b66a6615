"""If this fails, weights from Hugging Face compute something else here, or ours do there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rung.nn import hf
from rung.nn.transformer import Shape
from tests.errors import raises_code

transformers = pytest.importorskip("transformers")

NEOX = {
    "vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 24,
}  # fmt: skip
GPT2 = {"vocab_size": 31, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA = {**NEOX, "num_attention_heads": 4, "num_key_value_heads": 2}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2 exact gelu, untied": ("GPT2", {**GPT2, "activation_function": "gelu", "tie_word_embeddings": False}),
    "gpt2 scale 1": ("GPT2", {**GPT2, "scale_attn_weights": False, "n_inner": 40}),
    "neox parallel": ("GPTNeoX", NEOX),
    "neox serial": ("GPTNeoX", {**NEOX, "use_parallel_residual": False}),
    "neox no bias": ("GPTNeoX", {**NEOX, "attention_bias": False, "rotary_pct": 0.5, "rotary_emb_base": 500}),
    "llama untied": ("Llama", LLAMA),
    "llama tied": ("Llama", {**LLAMA, "tie_word_embeddings": True, "rope_theta": 100000.0}),
    "llama biases, wide heads": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
}


def theirs(name: str) -> Any:
    """A model of transformers in eval mode whose weights are all random and large enough to matter."""
    family, options = THEIRS[name]
    config = getattr(transformers, f"{family}Config")(**options)
    kind = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    theirs("llama untied").save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@torch.no_grad()
@pytest.mark.parametrize("name", THEIRS)
def test_their_checkpoints_give_their_logits_here_and_back_again(name: str, tmp_path: Path, make: Any) -> None:
    model = theirs(name)
    ids = make.ids(Shape(**make.small), length=20)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "theirs")
    ours = hf.load(tmp_path / "theirs").eval()
    torch.testing.assert_close(ours(ids), expected, atol=1e-4, rtol=1e-4)
    hf.save(ours, tmp_path / "ours", {"eos_token_id": 3})
    back = type(model).from_pretrained(tmp_path / "ours").eval()
    assert back.config.eos_token_id == 3
    torch.testing.assert_close(back(ids).logits, expected, atol=1e-4, rtol=1e-4)
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"bias": False},
        {"bias": False, "tied_head": False, "mlp": "gelu"},
        {"bias": False, "positions": "rotary", "rotary_fraction": 0.25, "parallel_residual": True},
        {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 1, "positions": "rotary", "norm_eps": 1e-6},
    ],
)
def test_our_models_open_in_transformers(changes: dict[str, Any], tmp_path: Path, make: Any) -> None:
    model = make.model(Shape(**make.small | changes))
    ids = make.ids(model.shape, length=20)
    hf.save(model, tmp_path)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(opened(ids).logits, model(ids), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hf.load(tmp_path).eval()(ids), model(ids), atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_half_precision_checkpoints_are_float32_in_memory(tmp_path: Path, make: Any) -> None:
    model = theirs("neox parallel").bfloat16()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    ours = hf.load(tmp_path).eval()
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    ids = make.ids(ours.shape)
    torch.testing.assert_close(ours(ids), model.float()(ids).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_shards_are_read_through_their_index(folder: Path, tmp_path: Path, make: Any) -> None:
    theirs("llama untied").save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    whole, sharded = hf.load(folder), hf.load(tmp_path / "shards")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), sharded.parameters(), strict=True))
    lost = sorted((tmp_path / "shards").glob("model-*.safetensors"))[1]
    lost.unlink()
    with raises_code("checkpoint-damaged") as caught:
        hf.load(tmp_path / "shards")
    assert lost.name in str(caught.value)


def test_an_index_cannot_point_outside_of_its_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises_code("untrusted"):
        hf.load(folder)


def test_older_spellings_are_understood(tmp_path: Path) -> None:
    model = theirs("gpt2")
    model.save_pretrained(tmp_path)

    def as_on_the_hub(weights: dict[str, torch.Tensor]) -> None:
        for key in list(weights):
            weights[key.removeprefix("transformer.")] = weights.pop(key)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
        weights["lm_head.weight"] = weights["wte.weight"].clone()

    change_weights(tmp_path, as_on_the_hub)
    block: Any = hf.load(tmp_path).blocks[0]
    assert torch.equal(block.attn.qkv.weight, model.transformer.h[0].attn.c_attn.weight.T)
    change_weights(tmp_path, lambda weights: weights["lm_head.weight"].add_(1))
    with raises_code("checkpoint-mismatch"):
        hf.load(tmp_path)


def test_dropout_is_the_callers_choice(folder: Path) -> None:
    assert hf.load(folder).shape.dropout == 0
    assert hf.load(folder, dropout=0.1).shape.dropout == 0.1


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (lambda w: w.pop(K), "checkpoint-damaged", K),
        (lambda w: w.update({"model.extra.weight": torch.ones(2)}), "checkpoint-mismatch", "model.extra.weight"),
        (lambda w: w.update({K: torch.ones(3, 3)}), "checkpoint-mismatch", K),
        (lambda w: w.update({K: torch.ones(16, 32, dtype=torch.int8)}), "not-supported", f"{K} is torch.int8"),
        (lambda w: w.pop("lm_head.weight"), "checkpoint-damaged", "lm_head.weight"),
    ],
)
def test_wrong_weights_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], code: str, named: str
) -> None:
    change_weights(folder, change)
    with raises_code(code) as caught:
        hf.load(folder)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"model_type": "bloom"}, "not-supported", "'bloom'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "not-supported", "rope_type='llama3'"),
        ({"hidden_act": "relu"}, "not-supported", "hidden_act='relu'"),
        ({"num_attention_heads": 3, "head_dim": None, "num_key_value_heads": 3}, "bad-value", "n_embd=32"),
        ({"hidden_size": None}, "bad-value", "config.json"),
    ],
)
def test_configs_that_cannot_be_built_are_refused(folder: Path, changes: dict[str, Any], code: str, named: str) -> None:
    change_config(folder, **changes)
    with raises_code(code) as caught:
        hf.load(folder)
    assert named in str(caught.value)


def test_missing_and_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    with raises_code("no-checkpoint"):
        hf.load(tmp_path / "nowhere")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with raises_code("checkpoint-damaged"):
        hf.load(folder)
    (folder / "model.safetensors").unlink()
    with raises_code("no-file"):
        hf.load(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with raises_code("checkpoint-damaged") as caught:
        hf.load(folder)
    assert "hidden_size" in str(caught.value)
    (folder / "config.json").write_text("{")
    with raises_code("checkpoint-damaged"):
        hf.load(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cross_width": 8}, "cross_width=8"), ({"causal": False}, "causal=False"),
        ({"positions": "none"}, "positions='none'"), ({"norm": "rmsnorm"}, "norm='rmsnorm'"),
        ({"n_kv_head": 2}, "n_kv_head"), ({"vocab_size": 0}, "vocab_size=0"),
    ],
)  # fmt: skip
def test_models_that_hugging_face_cannot_express_are_refused(
    changes: dict[str, Any], named: str, tmp_path: Path, make: Any
) -> None:
    with raises_code("not-supported") as caught:
        hf.save(make.model(Shape(**make.small | changes)), tmp_path)
    assert named in str(caught.value)
    assert not list(tmp_path.iterdir())
