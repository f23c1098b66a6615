"""If this fails, a run starts from weights that depend on more than its seed, or from a loss far from ln V."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rung.nn.init import Embedding, Projection, initialise, std_of
from rung.nn.losses import cross_entropy_sums
from rung.nn.shape import INITS, Shape
from rung.nn.transformer import Transformer

LLAMA: dict[str, Any] = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rotary", "n_kv_head": 2, "bias": False}


@torch.no_grad()
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_the_first_loss_is_ln_v(init: str, tied_head: bool, width: int, style: str) -> None:
    num_classes = 1241
    options = LLAMA if style == "llama" else {}
    shape = Shape(num_classes, 64, 4, 4, width, tied_head=tied_head, init=init, **options)
    model = Transformer(shape, seed=3).eval()
    ids = torch.randint(num_classes, (16, 65), generator=torch.Generator().manual_seed(0))
    total, count = cross_entropy_sums(model(ids[:, :-1]), ids[:, 1:])
    assert abs(float(total / count) / math.log(num_classes) - 1) < 0.01


@torch.no_grad()
@pytest.mark.parametrize("init", INITS)
def test_measured_deviations_are_those_of_each_part_of_a_fused_kernel(init: str) -> None:
    shape = Shape(500, 16, 3, 8, 256, n_kv_head=2, head_dim=64, n_hidden=600, mlp="swiglu", cross_width=96, init=init)
    model = Transformer(shape, seed=1)
    block: Any = model.blocks[1]
    q, k, v = block.attn.qkv.weight.split(block.attn.qkv.parts)
    gate, value = block.mlp.up.weight.split(600)
    cross_k, cross_v = block.cross.kv.weight.split(512)
    scaled = {"normal": 0.02 / math.sqrt(6), "xavier": None, "depth_scaled": 1 / math.sqrt(6)}[init]
    for weight, fan_in, fan_out, is_residual in (
        (q, 256, 512, False), (k, 256, 128, False), (v, 256, 128, False), (block.attn.out.weight, 512, 256, True),
        (gate, 256, 600, False), (value, 256, 600, False), (block.mlp.down.weight, 600, 256, True),
        (block.cross.q.weight, 256, 512, False), (cross_k, 96, 512, False), (cross_v, 96, 512, False),
        (block.cross.out.weight, 512, 256, True),
    ):  # fmt: skip
        expected = 0.02 if init == "normal" else math.sqrt(2 / (fan_in + fan_out))
        if is_residual and scaled is not None:
            expected = scaled if init == "normal" else expected * scaled
        assert float(weight.std()) == pytest.approx(expected, rel=0.02)
        assert abs(float(weight.mean())) < 0.03 * expected
    assert all(float(p.abs().max()) == 0 for name, p in model.named_parameters() if name.endswith("bias"))


@torch.no_grad()
def test_the_residual_stream_hardly_grows_with_depth_when_scaled() -> None:
    def spread(init: str, num_layers: int) -> float:
        shape = Shape(200, 64, num_layers, 4, 128, init=init, **LLAMA)
        model = Transformer(shape, seed=0).eval()
        seen: list[torch.Tensor] = []
        model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(torch.randint(200, (4, 64), generator=torch.Generator().manual_seed(0)))
        return float(seen[0].std())

    assert spread("depth_scaled", 24) < 2 * spread("depth_scaled", 2)
    assert spread("xavier", 24) > 2 * spread("xavier", 2)  # without the scaling it does grow


@torch.no_grad()
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_attention_logits_have_variance_one_for_any_head_width(head_dim: int) -> None:
    shape = Shape(100, 64, 1, 256 // head_dim, 256, init="xavier", positions="rotary")
    attn: Any = Transformer(shape, seed=2).blocks[0]
    x = torch.randn(8, 64, 256, generator=torch.Generator().manual_seed(0))
    q, k, _ = attn.attn.qkv(attn.norm1(x)).split(256, dim=-1)
    q, k = (y.unflatten(-1, (-1, head_dim)).transpose(1, 2) for y in (q, k))
    logits = q @ k.transpose(2, 3) / math.sqrt(head_dim)
    assert 0.8 < float(logits.var()) < 1.25


def test_gradients_do_not_grow_with_the_head_width() -> None:
    def norm(head_dim: int) -> float:
        model = Transformer(Shape(100, 32, 2, 256 // head_dim, 256, init="xavier", positions="rotary"), seed=0)
        ids = torch.randint(100, (4, 33), generator=torch.Generator().manual_seed(0))
        total, count = cross_entropy_sums(model(ids[:, :-1]), ids[:, 1:])
        (total / count).backward()
        return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())

    assert norm(128) < 1.2 * norm(32)


def test_weights_depend_on_seed_and_name_only(variant: Shape) -> None:
    state = torch.get_rng_state()
    first = Transformer(variant, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)  # building a model draws nothing from the global generator
    torch.manual_seed(1)
    again = Transformer(variant, seed=7).state_dict()
    other = Transformer(variant, seed=8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens.weight"], other["tokens.weight"])
    names = [name for name, value in first.items() if name.endswith("qkv.weight")]
    assert not torch.equal(first[names[0]], first[names[1]])


def test_the_order_of_construction_does_not_matter() -> None:
    def pair(first: str, second: str) -> dict[str, torch.Tensor]:
        modules = torch.nn.ModuleDict()
        for name in (first, second):
            modules[name] = Projection(8, (8,), bias=True) if name == "line" else Embedding(8, 8)
        initialise(modules, "xavier", 1, seed=4)
        return modules.state_dict()

    one, two = pair("line", "table"), pair("table", "line")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_layer_keeps_its_weights_when_layers_are_added() -> None:
    small, large = (Transformer(Shape(50, 16, n, 2, 16, init="xavier"), seed=1).state_dict() for n in (2, 4))
    assert all(torch.equal(small[name], large[name]) for name in small)


def test_xavier_ignores_depth_and_gpt2_does_not() -> None:
    assert std_of("xavier", "residual", 4, 4, 2) == std_of("xavier", "residual", 4, 4, 24) == 0.5
    assert std_of("normal", "residual", 4, 4, 8) == pytest.approx(0.02 / 4)
    assert std_of("depth_scaled", "residual", 4, 4, 8) == pytest.approx(0.5 / 4)
