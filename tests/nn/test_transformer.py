"""If this fails, a model sees the future or padding, or a cached sample is not what was learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.nn.attention import Mask, Rope, attend, rotate, self_mask
from rung.nn.transformer import Shape, Transformer
from tests.errors import raises_code


@torch.no_grad()
def test_cached_decoding_equals_the_full_forward_at_every_step(variant: Shape, make: Any) -> None:
    model, ids, memory = make.model(variant), make.ids(variant), make.memory(variant)
    full = model(ids, memory=memory)
    cache = model.new_cache(2, ids.shape[1])
    for t in range(ids.shape[1]):
        step = model(ids[:, t : t + 1], cache=cache, memory=memory if t == 0 else None)
        torch.testing.assert_close(step[:, 0], full[:, t], atol=1e-5, rtol=1e-5)
    assert cache.length == ids.shape[1]


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(5, 7), (1, 4, 7), (3, 1, 1, 7)])
def test_prefill_in_chunks_equals_the_full_forward(variant: Shape, make: Any, cuts: tuple[int, ...]) -> None:
    model, ids, memory = make.model(variant), make.ids(variant), make.memory(variant)
    cache = model.new_cache(2)
    chunks = [model(chunk, cache=cache, memory=memory) for chunk in ids.split(list(cuts), dim=1)]
    torch.testing.assert_close(torch.cat(chunks, 1), model(ids, memory=memory), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_left_padded_rows_in_a_cache_equal_each_row_alone(variant: Shape, make: Any) -> None:
    model, ids, memory = make.model(variant), make.ids(variant), make.memory(variant)
    pad, length = 4, ids.shape[1]
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :pad] = False
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = model.new_cache(2)
    model(ids[:, :9], positions=positions[:, :9], mask=mask[:, :9], memory=memory, cache=cache)
    last = model(ids[:, 9:], positions=positions[:, 9:], mask=mask, cache=cache)
    alone = model(ids[:1, pad:], memory=None if memory is None else memory[:1])
    torch.testing.assert_close(last[0], alone[0, 9 - pad :], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_future_changes_nothing_and_the_past_does(variant: Shape, make: Any) -> None:
    model, ids, memory = make.model(variant), make.ids(variant), make.memory(variant)
    before = model(ids, memory=memory)
    for t in (3, 11):
        changed = ids.clone()
        changed[:, t] = (changed[:, t] + 1) % variant.vocab_size
        after = model(changed, memory=memory)
        torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=1e-6)
        assert ((after - before)[:, t:].abs().amax(-1) > 1e-4).all()


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_padded_content_does_not_reach_real_positions_of_an_encoder(make: Any, positions: str) -> None:
    shape = Shape(**make.small | {"causal": False, "positions": positions, "n_kv_head": 2})
    model, ids = make.model(shape), make.ids(shape)
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    before = model.hidden(ids, mask=mask)
    changed = ids.clone()
    changed[1, 7:] = 3
    after = model.hidden(changed, mask=mask)
    torch.testing.assert_close(after[mask], before[mask], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(before[1, :7], model.hidden(ids[1:, :7])[0], atol=1e-5, rtol=1e-5)
    changed[1, 6] = (ids[1, 6] + 1) % shape.vocab_size
    assert (model.hidden(changed, mask=mask)[1, 0] - before[1, 0]).abs().max() > 1e-4  # it does look ahead


@torch.no_grad()
def test_masked_places_of_the_memory_are_not_seen(make: Any) -> None:
    shape = Shape(**make.small | {"cross_width": 20})
    model, ids, memory = make.model(shape), make.ids(shape), make.memory(shape)
    mask = torch.arange(7) < torch.tensor([[7], [3]])
    before = model(ids, memory=memory, memory_mask=mask)
    other = memory.clone()
    other[1, 3:] += 5
    torch.testing.assert_close(model(ids, memory=other, memory_mask=mask), before)
    other[1, 2] += 5
    assert (model(ids, memory=other, memory_mask=mask)[1] - before[1]).abs().max() > 1e-3
    cache = model.new_cache(2)
    first = model(ids[:, :6], memory=memory, memory_mask=mask, cache=cache)
    rest = model(ids[:, 6:], cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), before, atol=1e-5, rtol=1e-5)


def test_rows_that_may_see_nothing_are_zero_with_finite_gradients(make: Any) -> None:
    q, k, v = (torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3))
    allow = torch.ones(2, 5, 5, dtype=torch.bool)
    allow[0, 2] = False
    allow[1] = False
    y = attend(q, k, v, self_mask(False, 0, 5, allow, q.device), None, 0.0)
    assert (y[0, :, 2] == 0).all()
    assert (y[1] == 0).all()
    torch.testing.assert_close(y[0, :, :2], F.scaled_dot_product_attention(q, k, v)[0, :, :2])
    y.sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v) if x.grad is not None)
    assert q.grad is not None
    assert (q.grad[1] == 0).all()

    shape = Shape(**make.small | {"cross_width": 20})
    model, ids, memory = make.model(shape), make.ids(shape), make.memory(shape)
    nothing = torch.zeros(2, 7, dtype=torch.bool)
    logits = model(ids, memory=memory, memory_mask=nothing, mask=torch.zeros(2, 12, dtype=torch.bool))
    logits.logsumexp(-1).sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    other = model(ids, memory=memory + 1, memory_mask=nothing, mask=nothing.new_zeros(2, 12))
    torch.testing.assert_close(logits, other)


def test_a_memory_without_places_gives_zeros(make: Any) -> None:
    shape = Shape(**make.small | {"cross_width": 20})
    model, ids = make.model(shape), make.ids(shape)
    empty = torch.zeros(2, 0, 20)
    some = model(ids, memory=make.memory(shape), memory_mask=torch.zeros(2, 7, dtype=torch.bool))
    torch.testing.assert_close(model(ids, memory=empty), some)


@settings(max_examples=25, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4]), start=st.integers(0, 3), num_new=st.integers(1, 5),
    causal=st.booleans(), padded=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_equals_the_formula(
    groups: int, start: int, num_new: int, causal: bool, padded: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_keys = start + num_new
    q = torch.randn(2, 4, num_new, 8, generator=generator)
    k, v = (torch.randn(2, 4 // groups, num_keys, 8, generator=generator) for _ in range(2))
    mask = torch.rand(2, num_keys, generator=generator) < 0.5 if padded else None
    y = attend(q, k, v, self_mask(causal, start, num_new, mask, q.device), 0.3, 0.0)
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * 0.3
    allow = torch.ones(2, 1, num_new, num_keys, dtype=torch.bool)
    if causal:
        allow &= torch.ones(num_new, num_keys, dtype=torch.bool).tril(start)
    if mask is not None:
        allow &= mask[:, None, None]
    weights = scores.masked_fill(~allow, -torch.inf).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(y, weights @ v.repeat_interleave(groups, 1), atol=1e-5, rtol=1e-5)


def test_grouped_heads_in_half_precision_equal_repeated_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 6, 8, generator=generator).bfloat16()
    k, v = (torch.randn(1, 2, 6, 8, generator=generator).bfloat16() for _ in range(2))
    y = attend(q, k, v, Mask(is_causal=True), None, 0.0)
    expected = attend(q.float(), k.float(), v.float(), Mask(is_causal=True), None, 0.0)
    torch.testing.assert_close(y.float(), expected, atol=2e-2, rtol=2e-2)


def test_rotation_depends_on_distance_only_and_survives_casts() -> None:
    rope = Rope(8, 16, 10000.0)
    q, k = torch.randn(1, 1, 1, 12), torch.randn(1, 1, 1, 12)

    def score(i: int, j: int) -> torch.Tensor:
        return (rotate(q, rope(i, 1, None)) * rotate(k, rope(j, 1, None))).sum()

    torch.testing.assert_close(score(3, 1), score(13, 11))
    assert (score(3, 1) - score(3, 2)).abs() > 1e-4
    table = rope.cos_SR.clone()
    rope.bfloat16()
    assert rope.cos_SR.dtype == torch.float32
    assert torch.equal(rope.cos_SR, table)
    with torch.device("meta"):
        empty = Rope(8, 16, 10000.0)
    assert torch.equal(empty.to_empty(device="cpu").cos_SR, table)
    assert not Rope(8, 16, 1e4).state_dict()


def test_gpt2_equals_torchs_own_encoder_layers(make: Any) -> None:
    """An independent implementation: nn.TransformerEncoderLayer in pre-norm form."""
    model = make.model(Shape(**make.small | {"mlp": "gelu", "positions": "none"}))
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    expected = x
    for block in model.blocks:
        layer = torch.nn.TransformerEncoderLayer(32, 4, 128, 0.0, F.gelu, batch_first=True, norm_first=True)
        pairs = {
            "self_attn.in_proj_": block.attn.qkv, "self_attn.out_proj.": block.attn.out, "linear1.": block.mlp.up,
            "linear2.": block.mlp.down, "norm1.": block.norm1, "norm2.": block.norm2,
        }  # fmt: skip
        layer.load_state_dict({k + n: p for k, m in pairs.items() for n, p in m.named_parameters()})
        causal = torch.nn.Transformer.generate_square_subsequent_mask(9)
        expected = layer(expected, src_mask=causal, is_causal=True)
    torch.testing.assert_close(model.hidden(embeddings=x), model.norm(expected), atol=1e-5, rtol=1e-5)


def test_embeddings_stand_in_for_ids_and_a_model_can_lack_a_vocabulary(variant: Shape, make: Any) -> None:
    model, ids, memory = make.model(variant), make.ids(variant), make.memory(variant)
    torch.testing.assert_close(model(embeddings=model.tokens(ids), memory=memory), model(ids, memory=memory))
    bare = Transformer(Shape(**{**vars(variant), "vocab_size": 0}))
    assert bare.hidden(embeddings=torch.randn(2, 5, 32), memory=memory).shape == (2, 5, 32)
    assert not any("tokens" in name or "head" in name for name, _ in bare.named_parameters())


def test_every_parameter_gets_a_gradient_position_zero_included(variant: Shape, make: Any) -> None:
    model, ids, memory = make.model(variant).train(), make.ids(variant), make.memory(variant)
    model(ids, memory=memory).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    if model.places is not None:
        assert model.places.weight.grad[0].abs().max() > 0


def test_the_training_forward_compiles_to_one_graph(variant: Shape, make: Any) -> None:
    shape = replace(variant, n_layer=1)  # tracing takes most of the time of this file
    model, ids, memory = make.model(shape).train(), make.ids(shape), make.memory(shape)
    has_padding = shape.cross_width is not None or shape.bias
    padding = torch.arange(12) < torch.tensor([[12], [7]]) if has_padding else None
    torch.compiler.reset()
    compiled = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager")
    y = compiled(ids, memory=memory, mask=padding)
    y.logsumexp(-1).sum().backward()
    torch.testing.assert_close(y, model(ids, memory=memory, mask=padding))


def test_muon_may_take_the_linear_layers_of_the_blocks(variant: Shape, make: Any) -> None:
    model = make.model(variant)
    muon, rest = model.parameter_groups()
    matrices = list(muon.parameters)
    assert (muon.muon, rest.muon) == (True, False)
    assert {id(p) for p in [*matrices, *rest.parameters]} == {id(p) for p in model.parameters()}
    inside = {id(p) for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}
    assert {id(p) for p in matrices} == inside
    assert len(matrices) == variant.n_layer * (7 if variant.cross_width else 4)


def test_activations_follow_autocast_and_a_cast_model(variant: Shape, make: Any) -> None:
    model, ids, memory = make.model(variant), make.ids(variant), make.memory(variant)
    exact = model(ids, memory=memory)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids, memory=memory).dtype == torch.bfloat16
        assert model.hidden(ids, memory=memory).dtype == torch.float32  # the stream stays wide
        cache = model.new_cache(2)
        model(ids[:, :5], memory=memory, cache=cache)
        assert model(ids[:, 5:6], cache=cache).isfinite().all()
    cast = model.bfloat16()(ids, memory=None if memory is None else memory.bfloat16())
    assert cast.dtype == torch.bfloat16
    assert (cast.float() - exact).abs().mean() < 0.2 * exact.std()


def test_dropout_acts_in_training_only(make: Any) -> None:
    model = make.model(Shape(**make.small | {"dropout": 0.5}))
    ids = make.ids(model.shape)
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("changes", "code", "part"),
    [
        ({"n_embd": 30}, "options-conflict", "n_embd=32"),
        ({"n_kv_head": 3}, "options-conflict", "n_kv_head=3"),
        ({"norm": "batchnorm"}, "bad-value", "layernorm, rmsnorm"),
        ({"mlp": "relu"}, "bad-value", "swiglu"),
        ({"positions": "alibi"}, "bad-value", "rotary"),
        ({"init": "zeros"}, "bad-value", "depth_scaled"),
        ({"positions": "rotary", "rotary_fraction": 0.4}, "bad-value", "rotary_fraction=0.4"),
        ({"positions": "rotary", "rotary_fraction": 1.5}, "bad-value", "rotary_fraction=1.5"),
        ({"dropout": 1.0}, "bad-value", "dropout=1.0"),
        ({"n_layer": 0}, "bad-value", "n_layer=0"),
        ({"norm": "rmsnorm", "norm_bias": True}, "options-conflict", "rmsnorm"),
        ({"parallel_residual": True, "cross_width": 8}, "options-conflict", "cross_width"),
        ({"n_cross_kv_head": 2}, "options-conflict", "cross_width"),
        ({"rope_theta": 0.0}, "bad-value", "rope_theta=0.0"),
    ],
)
def test_contradictions_are_refused(make: Any, changes: dict[str, Any], code: str, part: str) -> None:
    with raises_code(code) as caught:
        Shape(**make.small | changes)
    assert part in str(caught.value)


def test_another_head_width_must_be_asked_for(make: Any) -> None:
    assert Shape(**make.small | {"n_embd": 30, "head_dim": 8}).head_width == 8


def test_what_does_not_fit_is_refused(make: Any) -> None:
    model = make.model(Shape(**make.small))
    with raises_code("too-many"):
        model(torch.zeros(1, 25, dtype=torch.long))
    with raises_code("too-many"):
        model(torch.zeros(1, 4, dtype=torch.long), cache=model.new_cache(1, 3))
    with raises_code("bad-shape"):
        model(torch.zeros(2, 3, dtype=torch.long), cache=model.new_cache(1, 3))
    for bad in (torch.ones(2, 12), torch.ones(2, 11, dtype=torch.bool), torch.ones(12, dtype=torch.bool)):
        with raises_code("bad-shape"):
            model(torch.zeros(2, 12, dtype=torch.long), mask=bad)
