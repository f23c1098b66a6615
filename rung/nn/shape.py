"""The shape of a transformer: one frozen record that covers GPT-2, GPT-NeoX, Llama, encoders and decoders.

The names are those users know from configs. Contradictions are refused here, before any weight exists. A field left at
None is derived by a property of another name (`kv_heads`, `head_width`, `hidden_width`, ...), so that the record always
shows what was asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rung.errors import ConfigError

NORMS = ("layernorm", "rmsnorm")
MLPS = ("gelu", "gelu_tanh", "swiglu")
POSITIONS = ("learned", "rotary", "none")
INITS = ("normal", "xavier", "depth_scaled")


@dataclass(frozen=True)
class Shape:
    """The defaults are GPT-2's."""

    vocab_size: int  # 0 = no token table and no head: the recipe feeds embeddings and reads hidden states
    context_size: int
    n_layer: int
    n_head: int
    n_embd: int
    n_kv_head: int | None = None  # None = n_head; fewer = grouped queries
    head_dim: int | None = None  # None = n_embd / n_head; another width has to be asked for
    n_hidden: int | None = None  # width inside the MLP; None = 4 n_embd, or 8/3 n_embd for swiglu
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    mlp: str = "gelu_tanh"
    positions: str = "learned"
    rotary_fraction: float = 1.0  # the part of each head that is rotated
    rope_theta: float = 10000.0
    parallel_residual: bool = False  # x + attention(norm x) + mlp(norm x), as in GPT-NeoX
    bias: bool = True  # in linear layers and norms, where the three below do not say otherwise
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_bias: bool | None = None  # rmsnorm has none
    tied_head: bool = True
    attention_scale: float | None = None  # None = 1/sqrt(head_dim); some released weights expect 1.0
    qk_norm: bool = False
    dropout: float = 0.0
    causal: bool = True
    cross_width: int | None = None  # width of the memory to attend to; None = no cross attention
    n_cross_kv_head: int | None = None  # None = n_head
    init: str = "normal"

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def cross_kv_heads(self) -> int:
        return self.n_head if self.n_cross_kv_head is None else self.n_cross_kv_head

    @property
    def head_width(self) -> int:
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def hidden_width(self) -> int:
        if self.n_hidden is not None:
            return self.n_hidden
        if self.mlp == "swiglu":  # three matrices instead of two: 8/3 keeps the count, 64 keeps kernels happy
            return 64 * math.ceil(self.n_embd * 8 / 3 / 64)
        return 4 * self.n_embd

    @property
    def rotary_width(self) -> int:
        return int(self.head_width * self.rotary_fraction)

    @property
    def has_attention_bias(self) -> bool:
        return self.bias if self.attention_bias is None else self.attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def has_norm_bias(self) -> bool:
        return self.norm == "layernorm" and (self.bias if self.norm_bias is None else self.norm_bias)

    def __post_init__(self) -> None:
        """Refuses what no transformer can be."""
        for name, choices in (("norm", NORMS), ("mlp", MLPS), ("positions", POSITIONS), ("init", INITS)):
            _check(getattr(self, name) in choices, f"{name}={getattr(self, name)!r}", f"one of {', '.join(choices)}")
        sizes = ("vocab_size", "context_size", "n_layer", "n_head", "n_embd")
        for name in sizes:
            value = getattr(self, name)
            _check(isinstance(value, int) and not isinstance(value, bool), f"{name}={value!r}", "a whole number")
        for name in (*sizes[1:], "n_kv_head", "head_dim", "n_hidden", "cross_width", "n_cross_kv_head"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"{name}={value}", "at least 1")
        _check(
            self.vocab_size >= 0, f"vocab_size={self.vocab_size}", "at least 1, or 0 for a model without token table"
        )
        _check(0 <= self.dropout < 1, f"dropout={self.dropout}", "at least 0 and below 1")
        for name in ("norm_eps", "rope_theta"):
            _check(getattr(self, name) > 0, f"{name}={getattr(self, name)}", "above 0")

        conflict = ""
        if self.head_dim is None and self.n_embd % self.n_head:
            wider = self.n_head * math.ceil(self.n_embd / self.n_head)
            conflict = (
                f"n_embd={self.n_embd} cannot be shared by n_head={self.n_head} heads; set n_embd={wider}, or head_dim "
                "to ask for another width"
            )
        for name, value in (("n_kv_head", self.kv_heads), ("n_cross_kv_head", self.cross_kv_heads)):
            if self.n_head % value:
                conflict = f"n_head={self.n_head} is not a multiple of {name}={value}; groups must be equal"
        if self.norm == "rmsnorm" and self.norm_bias:
            conflict = "norm_bias=true contradicts norm='rmsnorm', which has no bias; drop one of them"
        if self.parallel_residual and self.cross_width is not None:
            conflict = "parallel_residual=true contradicts cross_width: cross attention needs its own place"
        if self.n_cross_kv_head is not None and self.cross_width is None:
            conflict = "n_cross_kv_head is set but cross_width is not: there is no cross attention to share"
        if conflict:
            raise ConfigError(conflict, code="options-conflict")
        if self.positions == "rotary":
            fraction = f"rotary_fraction={self.rotary_fraction}"
            _check(0 < self.rotary_fraction <= 1, fraction, "above 0 and at most 1")
            rotated = f"{fraction} of heads of {self.head_width} rotates {self.rotary_width} numbers, which"
            _check(self.rotary_width >= 2 and self.rotary_width % 2 == 0, rotated, "an even number above 0")


def _check(is_valid: bool, given: str, limit: str) -> None:
    if not is_valid:
        raise ConfigError(f"{given} must be {limit}", code="bad-value")
