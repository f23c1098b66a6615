"""Checkpoints of nanoGPT and its relatives, one file of torch.save, as the shared transformer.

`load` takes {"model": weights, "model_args": sizes}, or "model_cfg" in the place of "model_args"; whatever else is in
the file (an optimizer, losses, a config) is passed over. Names may carry the prefixes of torch.compile and of DDP. A
weight that is missing, left over or of another shape is an error that names it. Nothing in the file is run: one that
wants more than tensors and plain values is refused.

The surprising thing: the bend inside its blocks is the exact GELU, where the GPT-2 of Hugging Face has the tanh one.
Hence mlp="gelu"; with the other the logits would be slightly wrong, and no name or shape would show it.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.errors import CheckpointError, ConfigError
from rung.nn.shape import Shape
from rung.nn.transformer import Transformer

SIZES = ("model_args", "model_cfg")
PREFIXES = ("_orig_mod.", "module.", "model.")  # of torch.compile, of DDP, of those who wrap the model once more
MASKS = (".attn.bias", ".attn.masked_bias")  # buffers of implementations without a fused attention
TOKENS, PLACES, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"


def load(file: Path | str, dropout: float = 0.0) -> Transformer:
    """The model of a checkpoint file, in float32 on the CPU. `dropout` is a choice of training, not of weights."""
    weights, sizes = _read(Path(file))
    shape = replace(_shape(Path(file), weights, sizes), dropout=dropout)
    model = Transformer(shape, seed=None)
    ours = dict(model.named_parameters())
    names = dict(_names(shape))
    with torch.no_grad():
        for name, theirs in names.items():
            parameter = ours.pop(name)
            tensor = _get(Path(file), weights, theirs)
            if tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"{file}: weight {theirs} is {tuple(tensor.shape)}, but its sizes ask for {tuple(parameter.shape)}"
                )
            parameter.copy_(tensor)
    assert not ours, f"no name for {sorted(ours)}"
    for key in sorted(set(weights) - set(names.values()) - {HEAD}):
        if not key.endswith(MASKS):
            raise CheckpointError(f"{file} has a weight {key} that nanoGPT has not; it is of another model")
    return model


def shape_of(file: Path | str) -> Shape:
    """What the checkpoint is made of; its weights are not read from the disk, where the format allows."""
    return _shape(Path(file), *_read(Path(file)))


def _read(file: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The weights under their plain names, and the sizes."""
    tree = _open(file)
    weights = tree.get("model") if isinstance(tree, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(one, Tensor) for one in weights.values()):
        raise CheckpointError(
            f'{file} is no nanoGPT checkpoint, which holds {{"model": weights, "model_args": sizes}}; name another file'
        )
    sizes = next((tree[name] for name in SIZES if isinstance(tree.get(name), Mapping)), None)
    if sizes is None:
        raise CheckpointError(
            f"{file} has neither {' nor '.join(SIZES)}, so the number of heads is not known; add "
            '"model_args": {"n_head": ...} to what is saved'
        )
    return {_plain(str(name)): tensor for name, tensor in weights.items()}, sizes


def _open(file: Path) -> Any:
    if file.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{file} is only a part of a model; name its folder, {file.parent}")
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {file}; name a checkpoint, such as out/ckpt.pt") from None
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise CheckpointError(f"{file} cannot be read as a file of torch.save; copy it again") from None
        raise CheckpointError(
            f"{file} holds {found[1]}, and only tensors and plain values are read, as anything else could run code; "
            'if you trust it, open it once with torch.load(..., weights_only=False) and save {"model": ..., '
            '"model_args": ...} again, both as plain dicts'
        ) from None
    except Exception as error:  # a file that is something else fails wherever the reader loses its way
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file} cannot be read as a file of torch.save ({reason}); copy it again") from None


def _plain(name: str) -> str:
    while name.startswith(PREFIXES):
        name = name.removeprefix(next(prefix for prefix in PREFIXES if name.startswith(prefix)))
    return name


def _get(file: Path, weights: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise CheckpointError(f"{file} has no weight {name}; it is not whole, or of another model")
    if not weights[name].is_floating_point():
        raise CheckpointError(f"{file}: weight {name} is {weights[name].dtype}; only float weights can be loaded")
    return weights[name]


def _shape(file: Path, weights: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> Shape:
    """From the weights, as they cannot be wrong; the number of heads, which they do not tell, from the sizes."""
    tokens, places = _get(file, weights, TOKENS), _get(file, weights, PLACES)
    if tokens.dim() != 2 or places.dim() != 2:
        raise CheckpointError(f"{file}: {TOKENS} and {PLACES} must be tables; it is of another model")
    layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    head = weights.get(HEAD, tokens)
    found: dict[str, Any] = {
        "n_layer": len(layers),
        "n_embd": tokens.shape[1],
        "bias": "transformer.ln_f.bias" in weights,
    }
    for name, value in found.items():
        if sizes.get(name, value) != value:
            raise CheckpointError(f"{file} says {name}={sizes[name]}, but its weights have {value}; it is damaged")
    try:
        return Shape(
            vocab_size=tokens.shape[0], context_size=places.shape[0], n_head=sizes["n_head"], mlp="gelu",
            tied_head=head.data_ptr() == tokens.data_ptr() or torch.equal(head.float(), tokens.float()), **found,
        )  # fmt: skip
    except KeyError:
        raise CheckpointError(
            f"{file} does not say n_head, which its weights do not tell; add it to model_args"
        ) from None
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{file} describes no model that can be built: {error}") from None


def _names(shape: Shape) -> Iterator[tuple[str, str]]:
    """Each parameter of ours with the name it has there; matrices are stored as ours are."""
    kinds = ("weight", "bias") if shape.bias else ("weight",)
    yield "tokens.weight", TOKENS
    yield "places.weight", PLACES
    modules = [("norm", "transformer.ln_f")]
    for i in range(shape.n_layer):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        modules += [
            (f"{ours}.norm1", f"{theirs}.ln_1"), (f"{ours}.attn.qkv", f"{theirs}.attn.c_attn"),
            (f"{ours}.attn.out", f"{theirs}.attn.c_proj"), (f"{ours}.norm2", f"{theirs}.ln_2"),
            (f"{ours}.mlp.up", f"{theirs}.mlp.c_fc"), (f"{ours}.mlp.down", f"{theirs}.mlp.c_proj"),
        ]  # fmt: skip
    for ours, theirs in modules:
        yield from ((f"{ours}.{kind}", f"{theirs}.{kind}") for kind in kinds)
    if not shape.tied_head:
        yield "head.weight", HEAD
