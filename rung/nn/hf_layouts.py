"""How Hugging Face names, shapes and orders the weights of GPT-2, GPT-NeoX and Llama.

A layout turns a config.json into a Shape and back, and maps each of our parameters to its keys, for loading and saving
alike. Imports no torch, so that a config.json can be read where nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung import parse
from rung.errors import CheckpointError, ConfigError
from rung.nn.shape import Shape

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, Any]
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ZERO_BIASES = "zero_biases"  # our own key: the model has no biases, the format wants some, so they are all 0
HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class WeightMapping:
    """One parameter of ours and the keys it is stored under, one after the other along the first axis."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    sizes: tuple[int, ...]  # of each of theirs along that axis
    is_transposed: bool = False
    interleaved_heads: int = 0  # queries, keys and values head by head, where ours come one after the other

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Theirs as ours."""
        import torch

        joined = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
        if self.interleaved_heads:
            return joined.unflatten(0, (self.interleaved_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return joined.T if self.is_transposed else joined

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Ours as theirs."""
        if self.interleaved_heads:
            tensor = tensor.unflatten(0, (3, self.interleaved_heads, -1)).transpose(0, 1).flatten(0, 2)
        return [tensor.T] if self.is_transposed else tensor.split(list(self.sizes))


@dataclass(frozen=True)
class Layout:
    model_type: str
    architecture: str
    prefix: str  # of all keys but the head's; some hub folders leave it out
    shape: Callable[[Config], Shape]
    config: Callable[[Shape], dict[str, Any]]
    names: Mapping[str, str]  # our module -> theirs, {i} for the layer; several, with spaces, where ours is fused
    always_biased: tuple[str, ...] = ()  # parts of a block that have biases whatever the config says
    is_transposed: bool = False  # the matrices of the blocks
    is_interleaved: bool = False  # the fused queries, keys and values
    ignored: tuple[str, ...] = ()  # endings of keys that hold no weights
    alias: Mapping[str, str] = field(default_factory=dict)

    def full_key(self, key: str) -> str:
        return key if key in HEADS else self.prefix + key

    def mappings(self, shape: Shape) -> Iterator[WeightMapping]:
        width, hidden = shape.n_embd, shape.hidden_width
        inner, kv = shape.n_head * shape.head_width, shape.kv_heads * shape.head_width
        sizes = {  # of each of ours: the outputs that are fused in it, and its inputs
            "tokens": ((shape.vocab_size,), width), "places": ((shape.context_size,), width),
            "attn.qkv": ((inner, kv, kv), width), "attn.out": ((width,), inner),
            "mlp.up": ((hidden, hidden) if shape.mlp == "swiglu" else (hidden,), width), "mlp.down": ((width,), hidden),
            "head": ((shape.vocab_size,), width),
        }  # fmt: skip
        biases = {"attn": shape.has_attention_bias, "mlp": shape.has_mlp_bias} | dict.fromkeys(self.always_biased, True)
        for name, theirs in self.names.items():
            if name == "head" and shape.tied_head:
                continue
            module = name.removeprefix("blocks.{i}.")
            is_norm = module.startswith("norm")
            outs, num_in = ((width,), 0) if is_norm else sizes[module]
            has_bias = shape.norm == "layernorm" if is_norm else biases.get(module.split(".")[0], False)
            modules = theirs.split()
            for layer in range(shape.n_layer) if "{i}" in name else [0]:
                for kind in ("weight", "bias") if has_bias else ("weight",):
                    is_matrix = kind == "weight" and not is_norm
                    yield WeightMapping(
                        f"{name}.{kind}".format(i=layer),
                        (sum(outs), num_in) if is_matrix else (sum(outs),),
                        tuple(f"{their}.{kind}".format(i=layer) for their in modules),
                        outs if len(modules) > 1 else (sum(outs),),
                        is_transposed=self.is_transposed and is_matrix and "{i}" in name,
                        interleaved_heads=shape.n_head if self.is_interleaved and module == "attn.qkv" else 0,
                    )


def read_layout(folder: Path) -> tuple[Layout, Shape]:
    """What the config.json of a folder says of its model."""
    config = read_json(folder / CONFIG)
    layout = LAYOUTS.get(str(config.get("model_type")))
    if layout is None:
        problem = f"{folder} holds a model of type {config.get('model_type')!r}"
        raise CheckpointError(f"{problem}; only {', '.join(LAYOUTS)} can be loaded", code="not-supported")
    try:
        return layout, layout.shape(config)
    except KeyError as error:
        raise damaged(f"{folder / CONFIG} has no {error}, which a {layout.model_type} needs") from None
    except (ConfigError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{folder / CONFIG} describes an impossible model: {error}", code="bad-value") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse.loose_json(parse.read_bytes(path))
    except FileNotFoundError:
        problem = f"{path} is missing"
        raise CheckpointError(f"{problem}; give a folder with {CONFIG} and {WEIGHTS}", code="no-checkpoint") from None
    except (OSError, ValueError) as error:
        raise damaged(f"{path} cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(f"{path} holds no JSON object")
    return value


def check_weight(source: Path, key: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if not tensor.is_floating_point():
        problem = f"{source}: weight {key} is {tensor.dtype}"
        raise CheckpointError(f"{problem}; only float weights can be loaded", code="not-supported")
    if tuple(tensor.shape) != tuple(shape):
        problem = f"{source}: weight {key} is {tuple(tensor.shape)}, the config asks for {tuple(shape)}"
        raise CheckpointError(problem, code="checkpoint-mismatch")


def damaged(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem}; copy it again", code="checkpoint-damaged")


def layout_for(shape: Shape) -> Layout:
    """The layout that can express a shape, or an error that says what stands in the way."""
    wanted: dict[str, tuple[Any, ...]] = {"qk_norm": (False,), "causal": (True,), "cross_width": (None,)}
    if shape.positions == "learned":
        name = "gpt2"
        wanted |= {"norm": ("layernorm",), "mlp": ("gelu", "gelu_tanh"), "parallel_residual": (False,)}
        wanted |= {"attention_scale": (None, 1.0)}
    elif shape.norm == "rmsnorm":
        name = "llama"
        wanted |= {"positions": ("rotary",), "mlp": ("swiglu",), "rotary_fraction": (1.0,)}
        wanted |= {"parallel_residual": (False,), "attention_scale": (None,)}
    else:
        name = "gpt_neox"
        wanted |= {"positions": ("rotary",), "mlp": ("gelu", "gelu_tanh"), "attention_scale": (None,)}
    obstacles = [
        f"{key}={getattr(shape, key)!r} cannot be saved as {name}, which has {values[-1]!r}"
        for key, values in wanted.items()
        if getattr(shape, key) not in values
    ]
    if shape.vocab_size == 0:
        obstacles.append(f"vocab_size=0 cannot be saved as {name}, which needs a token table")
    if name != "llama" and (shape.kv_heads != shape.n_head or shape.n_head * shape.head_width != shape.n_embd):
        obstacles.append(f"n_kv_head or head_dim of its own cannot be saved as {name}; only llama knows them")
    if shape.n_embd % shape.n_head:  # transformers would refuse to open it
        obstacles.append(f"n_embd={shape.n_embd} is not a multiple of n_head={shape.n_head}, as {name} requires")
    if obstacles:
        raise CheckpointError(obstacles[0], code="not-supported")
    return LAYOUTS[name]


def _supported(config: Config, key: str, *allowed: Any, default: Any = None) -> Any:
    """The value of a key; without one, the default or the first that is allowed."""
    value = config.get(key, default or allowed[0])
    if value not in allowed:
        known = ", ".join(map(repr, allowed))
        raise CheckpointError(f"{key}={value!r} in config.json is not supported; choose {known}", code="not-supported")
    return value


_FROM_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_TO_GELU = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def _rope(config: Config, theta_key: str, theta: float, fraction: float) -> tuple[float, float]:
    """(rope_theta, rotary fraction) out of either generation of configs."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _supported(values, "rope_type" if "rope_type" in values else "type", "default")
    found = {"rope_theta": theta, "partial_rotary_factor": fraction}
    for source, key, name in (
        (config, theta_key, "rope_theta"), (config, "rope_theta", "rope_theta"), (values, "rope_theta", "rope_theta"),
        (config, "rotary_pct", "partial_rotary_factor"), (values, "partial_rotary_factor", "partial_rotary_factor"),
    ):  # fmt: skip
        if source.get(key) is not None:  # later ones win
            found[name] = float(source[key])
    return found["rope_theta"], found["partial_rotary_factor"]


# GPT-2


def _gpt2_shape(config: Config) -> Shape:
    _supported(config, "scale_attn_by_inverse_layer_idx", False)
    _supported(config, "add_cross_attention", False)
    return Shape(
        vocab_size=config["vocab_size"], context_size=config["n_positions"], n_layer=config["n_layer"],
        n_head=config["n_head"], n_embd=config["n_embd"], n_hidden=config.get("n_inner"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        mlp=_FROM_GELU[_supported(config, "activation_function", *_FROM_GELU, default="gelu_new")],
        attention_scale=None if config.get("scale_attn_weights", True) else 1.0,
        tied_head=config.get("tie_word_embeddings", True),
    )  # fmt: skip


def _gpt2_config(shape: Shape) -> dict[str, Any]:
    return {
        "n_positions": shape.context_size, "n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.n_embd,
        "n_inner": shape.hidden_width, "layer_norm_epsilon": shape.norm_eps,
        "activation_function": _TO_GELU[shape.mlp], "scale_attn_weights": shape.attention_scale is None,
        "resid_pdrop": shape.dropout, "embd_pdrop": shape.dropout, "attn_pdrop": shape.dropout,
    }  # fmt: skip


# GPT-NeoX


def _neox_shape(config: Config) -> Shape:
    theta, fraction = _rope(config, "rotary_emb_base", 10000.0, 0.25)
    return Shape(
        vocab_size=config["vocab_size"], context_size=config["max_position_embeddings"],
        n_layer=config["num_hidden_layers"], n_head=config["num_attention_heads"], n_embd=config["hidden_size"],
        n_hidden=config["intermediate_size"], norm_eps=config.get("layer_norm_eps", 1e-5),
        mlp=_FROM_GELU[_supported(config, "hidden_act", *_FROM_GELU)], positions="rotary", rope_theta=theta,
        rotary_fraction=fraction, parallel_residual=config.get("use_parallel_residual", True),
        attention_bias=config.get("attention_bias", True), tied_head=config.get("tie_word_embeddings", False),
    )  # fmt: skip


def _neox_config(shape: Shape) -> dict[str, Any]:
    return {
        "max_position_embeddings": shape.context_size, "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head, "hidden_size": shape.n_embd, "intermediate_size": shape.hidden_width,
        "layer_norm_eps": shape.norm_eps, "hidden_act": _TO_GELU[shape.mlp],
        "rotary_pct": shape.rotary_fraction, "rotary_emb_base": shape.rope_theta,
        "use_parallel_residual": shape.parallel_residual, "attention_bias": shape.has_attention_bias,
        "hidden_dropout": shape.dropout, "attention_dropout": shape.dropout,
    }  # fmt: skip


# Llama


def _llama_shape(config: Config) -> Shape:
    _supported(config, "hidden_act", "silu", "swish")
    _supported(config, "rope_interleaved", False, None)
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


LAYOUTS = {
    "gpt2": Layout(
        "gpt2", "GPT2LMHeadModel", "transformer.", _gpt2_shape, _gpt2_config,
        {
            "tokens": "wte", "places": "wpe",
            "blocks.{i}.norm1": "h.{i}.ln_1", "blocks.{i}.norm2": "h.{i}.ln_2",
            "blocks.{i}.attn.qkv": "h.{i}.attn.c_attn", "blocks.{i}.attn.out": "h.{i}.attn.c_proj",
            "blocks.{i}.mlp.up": "h.{i}.mlp.c_fc", "blocks.{i}.mlp.down": "h.{i}.mlp.c_proj",
            "norm": "ln_f", "head": "lm_head",
        },
        always_biased=("attn", "mlp"), is_transposed=True,
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "gpt_neox": Layout(
        "gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.", _neox_shape, _neox_config,
        {
            "tokens": "embed_in",
            "blocks.{i}.norm1": "layers.{i}.input_layernorm", "blocks.{i}.norm2": "layers.{i}.post_attention_layernorm",
            "blocks.{i}.attn.qkv": "layers.{i}.attention.query_key_value",
            "blocks.{i}.attn.out": "layers.{i}.attention.dense",
            "blocks.{i}.mlp.up": "layers.{i}.mlp.dense_h_to_4h", "blocks.{i}.mlp.down": "layers.{i}.mlp.dense_4h_to_h",
            "norm": "final_layer_norm", "head": "embed_out",
        },
        always_biased=("mlp",), is_interleaved=True,
        ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
        alias={"embed_out.weight": "lm_head.weight"},  # newer writers
    ),
    "llama": Layout(
        "llama", "LlamaForCausalLM", "model.", _llama_shape, _llama_config,
        {
            "tokens": "embed_tokens",
            "blocks.{i}.norm1": "layers.{i}.input_layernorm", "blocks.{i}.norm2": "layers.{i}.post_attention_layernorm",
            "blocks.{i}.attn.qkv":
                "layers.{i}.self_attn.q_proj layers.{i}.self_attn.k_proj layers.{i}.self_attn.v_proj",
            "blocks.{i}.attn.out": "layers.{i}.self_attn.o_proj",
            "blocks.{i}.mlp.up": "layers.{i}.mlp.gate_proj layers.{i}.mlp.up_proj",
            "blocks.{i}.mlp.down": "layers.{i}.mlp.down_proj",
            "norm": "norm", "head": "lm_head",
        },
        ignored=(".rotary_emb.inv_freq",),
    ),
}  # fmt: skip
