"""How Hugging Face names, shapes and orders the weights of GPT-2, GPT-NeoX and Llama.

A layout turns a config.json into a Shape and back, and lists, for every parameter of ours, the keys it comes from. One
list serves loading and saving. Imports no torch, so that a config.json can be read where nothing is computed.

The surprising things: GPT-2 stores its matrices transposed, and GPT-NeoX interleaves queries, keys and values head by
head where ours come one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.errors import CheckpointError, ConfigError
from rung.nn.shape import Shape

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, Any]
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ZERO_BIASES = "zero_biases"  # our own key: the model has no biases, the format wants some, so they are all 0
HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, the keys it is stored under, and the way there and back."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda tensors: tensors[0]
    split: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: (tensor,)


@dataclass(frozen=True)
class Layout:
    model_type: str
    architecture: str
    prefix: str  # of all keys but the head's; some hub folders leave it out
    shape: Callable[[Config], Shape]
    config: Callable[[Shape], dict[str, Any]]
    entries: Callable[[Shape], Iterator[Entry]]
    has_biases: bool = True  # whether a model without any cannot be expressed but by zeros
    ignored: tuple[str, ...] = ()  # endings of keys that hold no weights
    alias: Mapping[str, str] = field(default_factory=dict)

    def prefix_of(self, key: str) -> str:
        return "" if key in HEADS else self.prefix


def layout_of(config: Config, folder: Path) -> Layout:
    """The layout that a config.json names."""
    model_type = config.get("model_type")
    if model_type not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise CheckpointError(f"{folder} holds a model of type {model_type!r}; only {known} can be loaded")
    return LAYOUTS[model_type]


def described(folder: Path) -> tuple[Layout, Shape]:
    """What the config.json of a folder says of its model."""
    config = read_json(folder / CONFIG)
    layout = layout_of(config, folder)
    try:
        return layout, layout.shape(config)
    except KeyError as error:
        raise CheckpointError(f"{folder / CONFIG} has no {error}, which a {layout.model_type} needs") from None
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG} describes no model that can be built: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; give a folder with {CONFIG} and {WEIGHTS}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; copy it again")
    return value


def layout_for(shape: Shape) -> Layout:
    """The layout that can express a shape, or an error that says what stands in the way."""
    if shape.positions == "learned":
        wanted: dict[str, tuple[Any, ...]] = {"norm": ("layernorm",), "mlp": ("gelu", "gelu_tanh")}
        wanted |= {"parallel_residual": (False,), "attention_scale": (None, 1.0)}
        name = "gpt2"
    elif shape.norm == "rmsnorm":
        wanted = {"positions": ("rotary",), "mlp": ("swiglu",), "rotary_fraction": (1.0,)}
        wanted |= {"parallel_residual": (False,), "attention_scale": (None,)}
        name = "llama"
    else:
        wanted = {"positions": ("rotary",), "mlp": ("gelu", "gelu_tanh"), "attention_scale": (None,)}
        name = "gpt_neox"
    wanted |= {"qk_norm": (False,), "causal": (True,), "cross_width": (None,)}
    for key, values in wanted.items():
        if getattr(shape, key) not in values:
            raise CheckpointError(f"{key}={getattr(shape, key)!r} cannot be saved as {name}, which has {values[-1]!r}")
    if shape.vocab_size == 0:
        raise CheckpointError(f"vocab_size=0 cannot be saved as {name}, which needs a token table")
    if name != "llama" and (shape.kv_heads != shape.n_head or shape.n_head * shape.head_width != shape.n_embd):
        raise CheckpointError(f"n_kv_head or head_dim of its own cannot be saved as {name}; only llama knows them")
    if shape.n_embd % shape.n_head:  # transformers would refuse to open it
        raise CheckpointError(f"n_embd={shape.n_embd} is not a multiple of n_head={shape.n_head}, as {name} requires")
    return LAYOUTS[name]


def has_biases(shape: Shape) -> bool:
    return shape.has_attention_bias or shape.has_mlp_bias or shape.has_norm_bias


def _must(config: Config, key: str, *allowed: Any) -> None:
    if key in config and config[key] not in allowed:
        raise CheckpointError(f"{key}={config[key]!r} in config.json is not supported; only {allowed[0]!r} is")


def _activation(config: Config, key: str, default: str) -> str:
    names = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
    value = config.get(key, default)
    if value not in names:
        raise CheckpointError(f"{key}={value!r} in config.json is not supported; only {', '.join(names)} are")
    return names[value]


_ACTIVATION = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def _rope(config: Config, theta_key: str, theta: float, fraction: float) -> tuple[float, float]:
    """(rope_theta, rotary fraction) out of either generation of configs."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"rope_type={kind!r} in config.json is not supported; only 'default' is")
    found = {"rope_theta": theta, "partial_rotary_factor": fraction}
    for source, key, name in (
        (config, theta_key, "rope_theta"), (config, "rope_theta", "rope_theta"), (values, "rope_theta", "rope_theta"),
        (config, "rotary_pct", "partial_rotary_factor"), (values, "partial_rotary_factor", "partial_rotary_factor"),
    ):  # fmt: skip
        if source.get(key) is not None:  # later ones win
            found[name] = float(source[key])
    return found["rope_theta"], found["partial_rotary_factor"]


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat(list(tensors))


def _norms(shape: Shape, ours: str, theirs: str) -> Iterator[Entry]:
    yield Entry(f"{ours}.weight", (shape.n_embd,), (f"{theirs}.weight",))
    if shape.norm == "layernorm":
        yield Entry(f"{ours}.bias", (shape.n_embd,), (f"{theirs}.bias",))


def _plain(ours: str, theirs: str, num_out: int, num_in: int, bias: bool) -> Iterator[Entry]:
    yield Entry(f"{ours}.weight", (num_out, num_in), (f"{theirs}.weight",))
    if bias:
        yield Entry(f"{ours}.bias", (num_out,), (f"{theirs}.bias",))


# GPT-2


def _gpt2_shape(config: Config) -> Shape:
    _must(config, "scale_attn_by_inverse_layer_idx", False)
    _must(config, "add_cross_attention", False)
    return Shape(
        vocab_size=config["vocab_size"], context_size=config["n_positions"], n_layer=config["n_layer"],
        n_head=config["n_head"], n_embd=config["n_embd"], n_hidden=config.get("n_inner"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5), mlp=_activation(config, "activation_function", "gelu_new"),
        attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
        tied_head=config.get("tie_word_embeddings", True),
    )  # fmt: skip


def _gpt2_config(shape: Shape) -> dict[str, Any]:
    return {
        "n_positions": shape.context_size, "n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.n_embd,
        "n_inner": shape.hidden_width, "layer_norm_epsilon": shape.norm_eps,
        "activation_function": _ACTIVATION[shape.mlp], "scale_attn_weights": shape.attention_scale is None,
        "resid_pdrop": shape.dropout, "embd_pdrop": shape.dropout, "attn_pdrop": shape.dropout,
    }  # fmt: skip


def _gpt2_entries(shape: Shape) -> Iterator[Entry]:
    width, hidden = shape.n_embd, shape.hidden_width

    def turned(ours: str, theirs: str, num_out: int, num_in: int) -> Iterator[Entry]:
        key = f"{theirs}.weight"
        yield Entry(f"{ours}.weight", (num_out, num_in), (key,), lambda tensors: tensors[0].T, lambda x: (x.T,))
        yield Entry(f"{ours}.bias", (num_out,), (f"{theirs}.bias",))

    yield Entry("tokens.weight", (shape.vocab_size, width), ("wte.weight",))
    yield Entry("places.weight", (shape.context_size, width), ("wpe.weight",))
    for i in range(shape.n_layer):
        ours, theirs = f"blocks.{i}", f"h.{i}"
        yield from _norms(shape, f"{ours}.norm1", f"{theirs}.ln_1")
        yield from turned(f"{ours}.attn.qkv", f"{theirs}.attn.c_attn", 3 * width, width)
        yield from turned(f"{ours}.attn.out", f"{theirs}.attn.c_proj", width, width)
        yield from _norms(shape, f"{ours}.norm2", f"{theirs}.ln_2")
        yield from turned(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", hidden, width)
        yield from turned(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", width, hidden)
    yield from _norms(shape, "norm", "ln_f")
    if not shape.tied_head:
        yield Entry("head.weight", (shape.vocab_size, width), ("lm_head.weight",))


# GPT-NeoX


def _neox_shape(config: Config) -> Shape:
    theta, fraction = _rope(config, "rotary_emb_base", 10000.0, 0.25)
    return Shape(
        vocab_size=config["vocab_size"], context_size=config["max_position_embeddings"],
        n_layer=config["num_hidden_layers"], n_head=config["num_attention_heads"], n_embd=config["hidden_size"],
        n_hidden=config["intermediate_size"], norm_eps=config.get("layer_norm_eps", 1e-5),
        mlp=_activation(config, "hidden_act", "gelu"), positions="rotary", rope_theta=theta, rotary_fraction=fraction,
        parallel_residual=config.get("use_parallel_residual", True),
        attention_bias=config.get("attention_bias", True), tied_head=config.get("tie_word_embeddings", False),
    )  # fmt: skip


def _neox_config(shape: Shape) -> dict[str, Any]:
    return {
        "max_position_embeddings": shape.context_size, "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head, "hidden_size": shape.n_embd, "intermediate_size": shape.hidden_width,
        "layer_norm_eps": shape.norm_eps, "hidden_act": _ACTIVATION[shape.mlp],
        "rotary_pct": shape.rotary_fraction, "rotary_emb_base": shape.rope_theta,
        "use_parallel_residual": shape.parallel_residual, "attention_bias": shape.has_attention_bias,
        "hidden_dropout": shape.dropout, "attention_dropout": shape.dropout,
    }  # fmt: skip


def _neox_entries(shape: Shape) -> Iterator[Entry]:
    width, hidden, heads = shape.n_embd, shape.hidden_width, shape.n_head

    def to_ours(tensors: Sequence[Tensor]) -> Tensor:  # (H, qkv, D, ...) -> (qkv, H, D, ...)
        return tensors[0].unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    def to_theirs(tensor: Tensor) -> Sequence[Tensor]:
        return (tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2),)

    yield Entry("tokens.weight", (shape.vocab_size, width), ("embed_in.weight",))
    for i in range(shape.n_layer):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        yield from _norms(shape, f"{ours}.norm1", f"{theirs}.input_layernorm")
        fused = f"{theirs}.attention.query_key_value"
        yield Entry(f"{ours}.attn.qkv.weight", (3 * width, width), (f"{fused}.weight",), to_ours, to_theirs)
        if shape.has_attention_bias:
            yield Entry(f"{ours}.attn.qkv.bias", (3 * width,), (f"{fused}.bias",), to_ours, to_theirs)
        bias = shape.has_attention_bias
        yield from _plain(f"{ours}.attn.out", f"{theirs}.attention.dense", width, width, bias)
        yield from _norms(shape, f"{ours}.norm2", f"{theirs}.post_attention_layernorm")
        yield from _plain(f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h", hidden, width, True)
        yield from _plain(f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h", width, hidden, True)
    yield from _norms(shape, "norm", "final_layer_norm")
    if not shape.tied_head:
        yield Entry("head.weight", (shape.vocab_size, width), ("embed_out.weight",))


# Llama


def _llama_shape(config: Config) -> Shape:
    _must(config, "hidden_act", "silu", "swish")
    _must(config, "rope_interleaved", False, None)
    theta, _ = _rope(config, "rope_theta", 10000.0, 1.0)
    return Shape(
        vocab_size=config["vocab_size"], context_size=config["max_position_embeddings"],
        n_layer=config["num_hidden_layers"], n_head=config["num_attention_heads"], n_embd=config["hidden_size"],
        n_kv_head=config.get("num_key_value_heads"), head_dim=config.get("head_dim"),
        n_hidden=config["intermediate_size"], norm="rmsnorm", norm_eps=config.get("rms_norm_eps", 1e-6), mlp="swiglu",
        positions="rotary", rope_theta=theta, bias=False, attention_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False), tied_head=config.get("tie_word_embeddings", False),
    )  # fmt: skip


def _llama_config(shape: Shape) -> dict[str, Any]:
    return {
        "max_position_embeddings": shape.context_size, "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head, "num_key_value_heads": shape.kv_heads, "hidden_size": shape.n_embd,
        "head_dim": shape.head_width, "intermediate_size": shape.hidden_width, "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu", "rope_theta": shape.rope_theta, "attention_bias": shape.has_attention_bias,
        "mlp_bias": shape.has_mlp_bias, "attention_dropout": shape.dropout,
    }  # fmt: skip


def _llama_entries(shape: Shape) -> Iterator[Entry]:
    width, hidden = shape.n_embd, shape.hidden_width
    inner, kv = shape.n_head * shape.head_width, shape.kv_heads * shape.head_width

    def fused(ours: str, num_in: int, theirs: Mapping[str, int], bias: bool) -> Iterator[Entry]:
        sizes = tuple(theirs.values())
        for kind, rest in (("weight", (num_in,)), ("bias", ())) if bias else (("weight", (num_in,)),):
            keys = tuple(f"{key}.{kind}" for key in theirs)
            yield Entry(f"{ours}.{kind}", (sum(sizes), *rest), keys, _cat, lambda x: x.split(sizes))

    yield Entry("tokens.weight", (shape.vocab_size, width), ("embed_tokens.weight",))
    for i in range(shape.n_layer):
        ours, attn, mlp = f"blocks.{i}", f"layers.{i}.self_attn", f"layers.{i}.mlp"
        yield from _norms(shape, f"{ours}.norm1", f"layers.{i}.input_layernorm")
        parts = {f"{attn}.q_proj": inner, f"{attn}.k_proj": kv, f"{attn}.v_proj": kv}
        yield from fused(f"{ours}.attn.qkv", width, parts, shape.has_attention_bias)
        yield from _plain(f"{ours}.attn.out", f"{attn}.o_proj", width, inner, shape.has_attention_bias)
        yield from _norms(shape, f"{ours}.norm2", f"layers.{i}.post_attention_layernorm")
        parts = {f"{mlp}.gate_proj": hidden, f"{mlp}.up_proj": hidden}
        yield from fused(f"{ours}.mlp.up", width, parts, shape.has_mlp_bias)
        yield from _plain(f"{ours}.mlp.down", f"{mlp}.down_proj", width, hidden, shape.has_mlp_bias)
    yield from _norms(shape, "norm", "norm")
    if not shape.tied_head:
        yield Entry("head.weight", (shape.vocab_size, width), ("lm_head.weight",))


LAYOUTS = {
    "gpt2": Layout(
        "gpt2", "GPT2LMHeadModel", "transformer.", _gpt2_shape, _gpt2_config, _gpt2_entries,
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "gpt_neox": Layout(
        "gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.", _neox_shape, _neox_config, _neox_entries,
        ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
        alias={"embed_out.weight": "lm_head.weight"},  # newer writers
    ),
    "llama": Layout(
        "llama", "LlamaForCausalLM", "model.", _llama_shape, _llama_config, _llama_entries, has_biases=False,
        ignored=(".rotary_emb.inv_freq",),
    ),
}  # fmt: skip
