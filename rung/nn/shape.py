"""What a transformer is made of: one frozen record that covers GPT-2, GPT-NeoX, Llama, encoders and decoders.

The names are those users know from configs. Whatever contradicts itself is refused here, before any weight exists.
How a run trains (learning rates, precision, parallelism) is not here.

The one surprising thing: what is left at None is derived by a property of another name (`kv_heads`, `head_width`,
`hidden_width`, ...), so that a record always shows what was asked for and not what came of it.
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

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_heads()
        self._check_combinations()

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

    def _check_ranges(self) -> None:
        for name, choices in (("norm", NORMS), ("mlp", MLPS), ("positions", POSITIONS), ("init", INITS)):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name}={value!r} is not a choice; use one of {', '.join(choices)}")
        sizes = ("context_size", "n_layer", "n_head", "n_embd", "n_kv_head", "head_dim", "n_hidden", "cross_width")
        for name in ("vocab_size", "context_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be a whole number")
        for name in (*sizes, "n_cross_kv_head"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.vocab_size < 0:
            raise ConfigError(f"vocab_size={self.vocab_size} must be at least 1, or 0 for a model without token table")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} must be at least 0 and below 1")
        for name in ("norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")

    def _check_heads(self) -> None:
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd={self.n_embd} cannot be shared by n_head={self.n_head} heads; "
                f"set n_embd={self.n_head * math.ceil(self.n_embd / self.n_head)}, or head_dim to ask for another width"
            )
        for name, value in (("n_kv_head", self.kv_heads), ("n_cross_kv_head", self.cross_kv_heads)):
            if self.n_head % value:
                raise ConfigError(f"n_head={self.n_head} is not a multiple of {name}={value}; groups must be equal")
        if self.positions == "rotary":
            if not 0 < self.rotary_fraction <= 1:
                raise ConfigError(f"rotary_fraction={self.rotary_fraction} must be above 0 and at most 1")
            if self.rotary_width < 2 or self.rotary_width % 2:
                raise ConfigError(
                    f"rotary_fraction={self.rotary_fraction} of heads of {self.head_width} rotates {self.rotary_width} "
                    "numbers, which must be an even number above 0"
                )

    def _check_combinations(self) -> None:
        if self.norm == "rmsnorm" and self.norm_bias:
            raise ConfigError("norm_bias=true contradicts norm='rmsnorm', which has no bias; drop one of them")
        if self.parallel_residual and self.cross_width is not None:
            raise ConfigError("parallel_residual=true contradicts cross_width: cross attention needs its own place")
        if self.n_cross_kv_head is not None and self.cross_width is None:
            raise ConfigError("n_cross_kv_head is set but cross_width is not: there is no cross attention to share")
