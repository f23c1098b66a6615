"""One transformer for every recipe; shape.py says what it can be.

`model(ids)` gives logits, `model.hidden(ids)` the normalised stream before the head; both take `embeddings` in place of
ids. Weights are float32 and depend on (seed, parameter name) only: two transformers in one model need two seeds, such
as key_of(seed, "encoder"). Activations follow autocast. A tied head has no parameter of its own: the token embedding is
used twice, and checkpoints hold it once.

Shapes: B rows, T positions, S keys (cached ones included), M positions of a memory, W its width, C width of the stream,
V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rung.errors import DataError
from rung.nn.attention import Angles, Cache, CrossAttention, Mask, Rope, SelfAttention, cross_mask, self_mask, step_mask
from rung.nn.init import Embedding, Norm, Projection, initialise
from rung.nn.shape import Shape
from rung.recipe import ParameterGroup

__all__ = ["Shape", "Transformer"]


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind = shape.mlp
        hidden = shape.hidden_width
        parts = (hidden, hidden) if shape.mlp == "swiglu" else (hidden,)  # gate, then value
        self.up = Projection(shape.n_embd, parts, shape.has_mlp_bias)
        self.down = Projection(hidden, (shape.n_embd,), shape.has_mlp_bias, role="residual")

    def forward(self, x_BTC: Tensor) -> Tensor:
        h = self.up(x_BTC)
        if self.kind == "swiglu":
            gate, value = h.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)
        return self.down(F.gelu(h, approximate="tanh" if self.kind == "gelu_tanh" else "none"))


class Block(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.is_parallel = shape.parallel_residual
        self.norm1, self.attn = _norm(shape), SelfAttention(shape, layer)
        self.norm_cross: Norm | None = None
        self.cross: CrossAttention | None = None
        if shape.cross_width is not None:
            self.norm_cross, self.cross = _norm(shape), CrossAttention(shape, layer)
        self.norm2, self.mlp = _norm(shape), Mlp(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(
        self, x_BTC: Tensor, angles: Angles | None, mask: Mask, cache: Cache | None, memory: Tensor | None, seen: Mask
    ) -> Tensor:
        attended_BTC = self.drop(self.attn(self.norm1(x_BTC), angles, mask, cache))
        if self.is_parallel:
            return x_BTC + attended_BTC + self.drop(self.mlp(self.norm2(x_BTC)))
        x_BTC = x_BTC + attended_BTC
        if self.cross is not None and self.norm_cross is not None:
            x_BTC = x_BTC + self.drop(self.cross(self.norm_cross(x_BTC), memory, seen, cache))
        return x_BTC + self.drop(self.mlp(self.norm2(x_BTC)))


class Transformer(nn.Module):
    def __init__(self, shape: Shape, seed: int | None = 0) -> None:
        """`seed` None leaves the weights undrawn, for a caller who fills them."""
        super().__init__()
        self.shape = shape
        has_vocab = shape.vocab_size > 0
        self.tokens = Embedding(shape.vocab_size, shape.n_embd, is_head=shape.tied_head) if has_vocab else None
        self.places = Embedding(shape.context_size, shape.n_embd) if shape.positions == "learned" else None
        is_rotary = shape.positions == "rotary"
        self.rope = Rope(shape.rotary_width, shape.context_size, shape.rope_theta) if is_rotary else None
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.n_layer))
        self.norm = _norm(shape)
        has_head = has_vocab and not shape.tied_head
        self.head = Projection(shape.n_embd, (shape.vocab_size,), bias=False, role="head") if has_head else None
        if seed is not None:
            initialise(self, shape.init, shape.n_layer, seed)

    def forward(self, ids_BT: Tensor | None = None, **arguments: Any) -> Tensor:
        """Logits (B, T, V); the arguments are those of `hidden`."""
        return self.logits(self.hidden(ids_BT, **arguments))

    def hidden(
        self,
        ids_BT: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The normalised stream (B, T, C) before the head.

        `positions` (T,) or (B, T) replaces counting on from the cache's length. `mask` is True where a key is real
        (B, S), or where query t may see key s (B, T, S). `memory` (B, M, W) is what cross attention reads, with a
        `memory_mask` alike; with a cache it is read at the first call and can be left out afterwards.
        """
        assert (ids_BT is None) != (embeddings is None), "give either ids or embeddings"
        if embeddings is not None:
            x_BTC = embeddings
        else:
            assert self.tokens is not None, "a model with vocab_size=0 has no token table; give embeddings"
            x_BTC = self.tokens(ids_BT)
        num_rows, num_new = x_BTC.shape[:2]
        start = 0
        if cache is not None:
            assert self.shape.causal, "a bidirectional model cannot be cached: every position sees every other"
            cache.check_room(num_new, num_rows)
            start = cache.length
        if start + num_new > self.shape.context_size and self.shape.positions != "none":
            problem = f"{start + num_new} positions do not fit context_size={self.shape.context_size}"
            raise DataError(f"{problem}; cut the sequence, or train a model with a larger one", code="too-many")

        place_1 = None if cache is None else cache.place_1
        if place_1 is not None:
            assert num_new == 1, "a cache with a place on the device takes one position at a time"
            positions = place_1 if positions is None else positions
        if self.places is not None:
            end = start + num_new
            x_BTC = x_BTC + (self.places.weight[start:end] if positions is None else self.places(positions))
        x_BTC = self.drop(x_BTC)
        angles = None if self.rope is None else self.rope(start, num_new, positions)
        if cache is not None and place_1 is not None:
            allowed = step_mask(place_1, cache.capacity, mask)
        else:
            allowed = self_mask(self.shape.causal, start, num_new, mask, x_BTC.device)
        seen = self._cross_mask(memory, memory_mask, cache, num_new)
        for block in self.blocks:
            x_BTC = block(x_BTC, angles, allowed, cache, memory, seen)
        if cache is not None and place_1 is None:
            cache.length += num_new
        return self.norm(x_BTC)

    def logits(self, x_BTC: Tensor) -> Tensor:
        """The head alone, for those who need logits at a few positions only."""
        if self.head is not None:
            return self.head(x_BTC)
        assert self.tokens is not None, "a model with vocab_size=0 has no head; use hidden()"
        return F.linear(x_BTC, self.tokens.weight)

    def parameter_groups(self) -> list[ParameterGroup]:
        """The weights of the linear layers inside blocks, which Muon may take, and the rest."""
        linears = (module for module in self.blocks.modules() if isinstance(module, nn.Linear))
        matrices = [weight for linear in linears if isinstance(weight := linear.weight, nn.Parameter)]
        taken = {id(weight) for weight in matrices}
        rest = [p for p in self.parameters() if id(p) not in taken]
        return [ParameterGroup("matrices", matrices, muon=True), ParameterGroup("rest", rest)]

    def new_cache(self, num_rows: int, length: int | None = None) -> Cache:
        """An empty cache for `num_rows` rows of up to `length` positions (None = context_size)."""
        shape, weight = self.shape, self.norm.weight
        sizes = (shape.n_layer, num_rows, shape.kv_heads, length or shape.context_size, shape.head_width)
        return Cache(sizes, weight.device, weight.dtype)

    def _cross_mask(self, memory: Tensor | None, mask: Tensor | None, cache: Cache | None, num_new: int) -> Mask:
        if self.shape.cross_width is None:
            assert memory is None, "this model has no cross attention: cross_width is not set"
            return Mask()
        if cache is not None and cache.cross:
            assert memory is None or memory is cache.memory, "a cache keeps its first memory; make a new one"
            if mask is not None:
                return cross_mask(mask, num_new, cache.cross[0][0].shape[2])
            assert cache.cross_mask is not None, "memory_mask by pair (B, T, M) must be given at every call"
            return cache.cross_mask
        assert memory is not None, "this model attends to a memory (cross_width is set); give memory="
        seen = cross_mask(mask, num_new, memory.shape[1])
        if cache is not None:
            cache.memory = memory
            cache.cross_mask = seen if mask is None or mask.dim() == 2 else None
        return seen


def _norm(shape: Shape) -> Norm:
    return Norm(shape.norm, shape.n_embd, shape.norm_eps, shape.has_norm_bias)
