"""Self and cross attention on torch's scaled_dot_product_attention, rotary positions, and the key/value cache.

A row that may attend to nothing gives zeros, never NaN, on every backend and in the gradient: such a row is let see
everything and its result is dropped. Which positions may be seen is decided once per forward, in `self_mask` and
`cross_mask`, not in each layer.

Shapes: L layers, B rows, T queries, S keys (cached ones included), M positions of a memory, C width of the stream,
H query heads, K key/value heads, D head width, R half of the rotated width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rung.errors import DataError
from rung.nn.init import Norm, Projection, widen
from rung.nn.shape import Shape

Angles = tuple[Tensor, Tensor]  # cos and sin, (T, R) or (B, 1, T, R)


class Rope(nn.Module):
    """Turns each head by an angle that grows with the position (half-split layout, as in GPT-NeoX).

    The tables are buffers that no checkpoint holds, and are computed again whenever the module moves: a cast to
    bfloat16 must not round the angles, and a move off the meta device must not leave them empty.
    """

    cos_SR: Tensor
    sin_SR: Tensor

    def __init__(self, width: int, context_size: int, theta: float) -> None:
        super().__init__()
        self.width, self.context_size, self.theta = width, context_size, theta
        cos_SR, sin_SR = self._tables(torch.get_default_device())
        self.register_buffer("cos_SR", cos_SR, persistent=False)
        self.register_buffer("sin_SR", sin_SR, persistent=False)

    def forward(self, start: int, num_positions: int, positions: Tensor | None) -> Angles:
        """The angles of positions [start, start + num_positions), or of `positions` (T,) or (B, T) where given."""
        if positions is None:
            end = start + num_positions
            return self.cos_SR[start:end], self.sin_SR[start:end]
        if positions.dim() == 2:
            positions = positions[:, None]
        return self.cos_SR[positions], self.sin_SR[positions]

    def _tables(self, device: torch.device) -> Angles:
        powers_R = torch.arange(0, self.width, 2, dtype=torch.float32, device=device) / self.width
        places_S = torch.arange(self.context_size, dtype=torch.float32, device=device)
        angles_SR = places_S[:, None] * (1.0 / self.theta**powers_R)
        return angles_SR.cos(), angles_SR.sin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.cos_SR, self.sin_SR = self._tables(self.cos_SR.device)
        return self


def rotate(x_BHTD: Tensor, angles: Angles) -> Tensor:
    """Turns the first 2R numbers of each head and leaves the rest; computed in float32."""
    cos, sin = angles
    half = cos.shape[-1]
    wide = widen(x_BHTD)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        turned.append(rest)
    return torch.cat(turned, dim=-1).to(x_BHTD.dtype)


class Mask(NamedTuple):
    """Who sees whom. `allow` has no empty row; the rows that were empty are False in `live`."""

    is_causal: bool = False  # where this says it all, the kernels need no tensor
    allow_B1TS: Tensor | None = None
    live_B1T1: Tensor | None = None


def self_mask(causal: bool, start: int, num_queries: int, mask: Tensor | None, device: torch.device) -> Mask:
    """`mask` is True where a key is real (B, S), or where query t may see key s (B, T, S); S counts cached keys too."""
    num_keys = start + num_queries
    if mask is None and (not causal or num_queries == 1 or start == 0):
        return Mask(is_causal=causal and num_queries > 1)
    allow = _by_key_or_pair(mask, num_queries, num_keys, "mask") if mask is not None else None
    if causal:
        queries_T1 = torch.arange(start, num_keys, device=device)[:, None]
        causal_11TS = (torch.arange(num_keys, device=device) <= queries_T1)[None, None]
        allow = causal_11TS if allow is None else allow & causal_11TS
    assert allow is not None
    return Mask(allow_B1TS=allow) if mask is None else _with_live(allow)


def cross_mask(memory_mask: Tensor | None, num_queries: int, num_places: int) -> Mask:
    """`memory_mask` is True where a place of the memory is real (B, M), or where query t may see it (B, T, M)."""
    if memory_mask is None:
        return Mask()
    return _with_live(_by_key_or_pair(memory_mask, num_queries, num_places, "memory_mask"))


def step_mask(place_1: Tensor, num_keys: int, mask: Tensor | None) -> Mask:
    """For one query at a place that only the device knows: all `num_keys` of a cache are given, later ones masked."""
    allow = (torch.arange(num_keys, device=place_1.device) <= place_1)[None, None, None]
    if mask is None:
        return Mask(allow_B1TS=allow)
    return _with_live(_by_key_or_pair(mask, 1, num_keys, "mask") & allow)


class Cache:
    """Keys and values of the positions seen so far, so that the next position costs one forward of length one.

    Memory is allocated once, for sizes (L, B, K, S, D); a step writes its slice and copies nothing. Keys and values of
    a cross attention's memory are computed at the first call and kept. Use it without gradients, and pass only the new
    positions. `length` moves at the end of a forward, so one that raises does not count.

    With `place_1` set, a forward takes one position, writes it at that place and attends to all S with a mask: the same
    work at every step, as a CUDA graph needs it. The caller then moves `place_1` and `length`.
    """

    def __init__(self, sizes: tuple[int, int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        # Zeros rather than empty: unused places are never read, but a NaN in a dump would send people hunting.
        self.keys_LBKSD = torch.zeros(sizes, device=device, dtype=dtype)
        self.values_LBKSD = torch.zeros(sizes, device=device, dtype=dtype)
        self.length = 0
        self.place_1: Tensor | None = None
        self.memory: Tensor | None = None  # what the cross keys were computed from
        self.cross_mask: Mask | None = None  # None where it held for the first queries only
        self.cross: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def capacity(self) -> int:
        return self.keys_LBKSD.shape[3]

    def clear(self) -> None:
        """Begins anew; a memory's keys and values stay."""
        self.length, self.place_1 = 0, None

    def check_room(self, num_new: int, num_rows: int) -> None:
        _, made_for, _, capacity, _ = self.keys_LBKSD.shape
        if self.length + num_new > capacity:
            problem = f"{num_new} positions after {self.length} do not fit a cache of {capacity}"
            raise DataError(f"{problem}; make a longer one", code="too-many")
        if num_rows != made_for:
            raise DataError(f"{num_rows} rows do not fit a cache made for {made_for}", code="bad-shape")

    def extend(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new positions of one layer; returns views of all of them, (B, K, length + T, D)."""
        end = self.length + k_BKTD.shape[2]
        keys_BKSD, values_BKSD = self.keys_LBKSD[layer], self.values_LBKSD[layer]
        if self.place_1 is not None:
            keys_BKSD.index_copy_(2, self.place_1, k_BKTD.to(keys_BKSD.dtype))
            values_BKSD.index_copy_(2, self.place_1, v_BKTD.to(values_BKSD.dtype))
            return keys_BKSD.to(k_BKTD.dtype), values_BKSD.to(v_BKTD.dtype)
        keys_BKSD[:, :, self.length : end] = k_BKTD
        values_BKSD[:, :, self.length : end] = v_BKTD
        return keys_BKSD[:, :, :end].to(k_BKTD.dtype), values_BKSD[:, :, :end].to(v_BKTD.dtype)


def kernels_for_masks(device: torch.device) -> AbstractContextManager[None]:
    """Inside of it, attention with a mask uses kernels whose gradients can be trusted.

    cuDNN's backward gives NaN to queries that see next to nothing if there are 64, 192, 320, .. keys (torch 2.11 and
    later on Hopper, where it is the default). Without a mask it is right, and the fastest.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def attend(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Mask, scale: float | None, dropout: float) -> Tensor:
    """softmax(scale q k) v per head; fully masked rows are 0."""
    if k_BKSD.shape[2] == 0:
        return q_BHTD * 0.0  # nothing to see; not every backend takes an empty axis
    num_groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    if num_groups > 1 and q_BHTD.shape[2] == 1 and not mask.is_causal:
        # One query a head: those that share keys become the queries of one head, and no key is copied.
        q_BKGD = q_BHTD.reshape(len(q_BHTD), k_BKSD.shape[1], num_groups, -1)
        return attend(q_BKGD, k_BKSD, v_BKSD, mask, scale, dropout).reshape(q_BHTD.shape)
    # Grouped kernels exist for half precision without a mask; elsewhere torch would fall back to the T x S matrix.
    has_grouped_kernel = mask.allow_B1TS is None and q_BHTD.dtype in (torch.bfloat16, torch.float16)
    is_grouped = num_groups > 1 and has_grouped_kernel
    if num_groups > 1 and not is_grouped:
        k_BKSD = k_BKSD.repeat_interleave(num_groups, dim=1)
        v_BKSD = v_BKSD.repeat_interleave(num_groups, dim=1)
    with nullcontext() if mask.allow_B1TS is None else kernels_for_masks(q_BHTD.device):
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BKSD, v_BKSD, mask.allow_B1TS, dropout, mask.is_causal, scale=scale, enable_gqa=is_grouped
        )
    if mask.live_B1T1 is not None:
        y_BHTD = y_BHTD.masked_fill(~mask.live_B1T1, 0.0)
    return y_BHTD


class SelfAttention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer, self.num_heads, self.kv_heads = layer, shape.n_head, shape.kv_heads
        self.scale, self.dropout = shape.attention_scale, shape.dropout
        inner, kv = shape.n_head * shape.head_width, shape.kv_heads * shape.head_width
        self.qkv = Projection(shape.n_embd, (inner, kv, kv), shape.has_attention_bias)
        self.out = Projection(inner, (shape.n_embd,), shape.has_attention_bias, role="residual")
        self.q_norm, self.k_norm = _qk_norms(shape)

    def forward(self, x_BTC: Tensor, angles: Angles | None, mask: Mask, cache: Cache | None) -> Tensor:
        q, k, v = self.qkv(x_BTC).split(self.qkv.parts, dim=-1)
        q_BHTD, k_BKTD, v_BKTD = _heads(q, self.num_heads), _heads(k, self.kv_heads), _heads(v, self.kv_heads)
        q_BHTD, k_BKTD = self.q_norm(q_BHTD), self.k_norm(k_BKTD)
        if angles is not None:
            q_BHTD, k_BKTD = rotate(q_BHTD, angles), rotate(k_BKTD, angles)
        if cache is not None:
            k_BKTD, v_BKTD = cache.extend(self.layer, k_BKTD, v_BKTD)
        y_BHTD = attend(q_BHTD, k_BKTD, v_BKTD, mask, self.scale, self.dropout if self.training else 0.0)
        return self.out(y_BHTD.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Queries from the stream, keys and values from a memory of another width; carries no positions."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        assert shape.cross_width is not None
        self.layer, self.num_heads, self.kv_heads = layer, shape.n_head, shape.cross_kv_heads
        self.scale, self.dropout = shape.attention_scale, shape.dropout
        inner, kv = shape.n_head * shape.head_width, shape.cross_kv_heads * shape.head_width
        self.q = Projection(shape.n_embd, (inner,), shape.has_attention_bias)
        self.kv = Projection(shape.cross_width, (kv, kv), shape.has_attention_bias)
        self.out = Projection(inner, (shape.n_embd,), shape.has_attention_bias, role="residual")
        self.q_norm, self.k_norm = _qk_norms(shape)

    def forward(self, x_BTC: Tensor, memory_BMW: Tensor | None, mask: Mask, cache: Cache | None) -> Tensor:
        q_BHTD = self.q_norm(_heads(self.q(x_BTC), self.num_heads))
        known = None if cache is None else cache.cross.get(self.layer)
        if known is not None:
            k_BKMD, v_BKMD = known
        else:
            assert memory_BMW is not None  # checked by Transformer.hidden
            k, v = self.kv(memory_BMW).split(self.kv.parts, dim=-1)
            k_BKMD, v_BKMD = self.k_norm(_heads(k, self.kv_heads)), _heads(v, self.kv_heads)
        if cache is not None:
            cache.cross[self.layer] = k_BKMD, v_BKMD
        y_BHTD = attend(q_BHTD, k_BKMD, v_BKMD, mask, self.scale, self.dropout if self.training else 0.0)
        return self.out(y_BHTD.transpose(1, 2).flatten(2))


def _qk_norms(shape: Shape) -> tuple[nn.Module, nn.Module]:
    if not shape.qk_norm:
        return nn.Identity(), nn.Identity()
    q_norm, k_norm = (Norm(shape.norm, shape.head_width, shape.norm_eps, shape.has_norm_bias) for _ in range(2))
    return q_norm, k_norm


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, T, heads * D) -> (B, heads, T, D)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _by_key_or_pair(mask: Tensor, num_queries: int, num_keys: int, name: str) -> Tensor:
    expected = (num_queries, num_keys)[-(mask.dim() - 1) :]
    if mask.dtype != torch.bool or mask.dim() not in (2, 3) or tuple(mask.shape[1:]) != expected:
        raise DataError(
            f"{name} is {mask.dtype} of {tuple(mask.shape)}; it must be bool, (batch, {num_keys}) with True where a "
            f"key is real, or (batch, {num_queries}, {num_keys}) with True where it may be seen",
            code="bad-shape",
        )
    return mask[:, None, None] if mask.dim() == 2 else mask[:, None]


def _with_live(allow: Tensor) -> Mask:
    live = allow.any(dim=-1, keepdim=True)
    return Mask(allow_B1TS=allow | ~live, live_B1T1=live)
