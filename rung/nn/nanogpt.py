"""Loads checkpoints of nanoGPT and its relatives, one file of torch.save, as the shared transformer.

`load` takes {"model": weights, "model_args": sizes}, or "model_cfg" instead of "model_args", and ignores the rest of
the file. Names may carry the prefixes of torch.compile and of DDP. A weight that is missing, left over or of another
shape is an error that names it; a file with more than tensors and plain values is refused, so nothing in it is run.
nanoGPT has the exact GELU where Hugging Face's GPT-2 has the tanh one, hence mlp="gelu": with the other the logits
would be slightly wrong, and no name or shape would show it.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.errors import CheckpointError, ConfigError
from rung.nn.hf_layouts import LAYOUTS, check_weight, damaged
from rung.nn.shape import Shape
from rung.nn.transformer import Transformer

SIZES = ("model_args", "model_cfg")
PREFIXES = re.compile(r"^((_orig_mod|module|model)\.)+")  # of torch.compile, of DDP, of a wrapper around the model
TOKENS, PLACES, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"


def load(file: Path | str, dropout: float = 0.0) -> Transformer:
    """The model of a checkpoint file, in float32 on the CPU. `dropout` is a choice of training, not of weights."""
    file = Path(file)
    weights, sizes = _read(file)
    model = Transformer(replace(_shape(file, weights, sizes), dropout=dropout), seed=None)
    ours = dict(model.named_parameters())
    # The names of Hugging Face's GPT-2, but matrices lie as ours do, and a model without biases has none.
    gpt2 = LAYOUTS["gpt2"]
    keys = {m.ours: gpt2.full_key(m.theirs[0]) for m in gpt2.mappings(model.shape) if m.ours in ours}
    for name, parameter in ours.items():
        tensor = _get(file, weights, keys[name])
        check_weight(file, keys[name], tensor, parameter.shape)
        parameter.data.copy_(tensor)
    for key in sorted(set(weights) - set(keys.values()) - {HEAD}):
        if not key.endswith(gpt2.ignored):  # buffers of implementations without a fused attention
            raise _of_another_model(f"{file} has a weight {key} that nanoGPT does not have")
    return model


def shape_of(file: Path | str) -> Shape:
    """What the checkpoint is made of; its weights are not read from the disk, where the format allows."""
    return _shape(Path(file), *_read(Path(file)))


def _read(file: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The weights under their plain names, and the sizes."""
    if file.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{file} is only a part of a model; name its folder, {file.parent}", code="bad-path")
    try:
        tree = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except FileNotFoundError:
        raise CheckpointError(f"no file {file}; name a checkpoint, such as out/ckpt.pt", code="no-file") from None
    except Exception as error:  # a file that is something else fails wherever the reader loses its way
        if isinstance(error, pickle.UnpicklingError) and (found := re.search(r"GLOBAL ([\w.]+)", str(error))):
            raise CheckpointError(
                f"{file} holds {found[1]}, and only tensors and plain values are read, as anything else could run "
                "code; if you trust it, open it once with torch.load(..., weights_only=False) and save "
                '{"model": ..., "model_args": ...} again, both as plain dicts',
                code="untrusted",
            ) from None
        reason = " ".join(str(error).split())[:200]
        raise damaged(f"{file} cannot be read as a file of torch.save ({reason})") from None

    weights = tree.get("model") if isinstance(tree, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(one, Tensor) for one in weights.values()):
        expected = '{"model": weights, "model_args": sizes}; name another file'
        raise CheckpointError(f"{file} is not a nanoGPT checkpoint, which holds {expected}", code="not-supported")
    sizes = next((tree[name] for name in SIZES if isinstance(tree.get(name), Mapping)), None)
    if sizes is None:
        raise _no_heads(f"{file} has neither {' nor '.join(SIZES)}")
    return {PREFIXES.sub("", str(name)): tensor for name, tensor in weights.items()}, sizes


def _get(file: Path, weights: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise damaged(f"{file} has no weight {name}: it is incomplete, or of another model")
    return weights[name]


def _of_another_model(problem: str) -> CheckpointError:
    return CheckpointError(f"{problem}; it belongs to another model", code="checkpoint-mismatch")


def _no_heads(problem: str) -> CheckpointError:
    remedy = 'add "model_args": {"n_head": ...} to what is saved'
    return CheckpointError(f"{problem}, and its weights cannot tell the number of heads; {remedy}", code="no-key")


def _shape(file: Path, weights: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> Shape:
    """From the weights, as they cannot be wrong; the number of heads, which they do not tell, from the sizes."""
    tokens, places = _get(file, weights, TOKENS), _get(file, weights, PLACES)
    if tokens.dim() != 2 or places.dim() != 2:
        raise _of_another_model(f"{file}: {TOKENS} and {PLACES} must be two-dimensional")
    layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    head = weights.get(HEAD, tokens)
    found: dict[str, Any] = {
        "n_layer": len(layers),
        "n_embd": tokens.shape[1],
        "bias": "transformer.ln_f.bias" in weights,
    }
    for name, value in found.items():
        if sizes.get(name, value) != value:
            raise damaged(f"{file} says {name}={sizes[name]}, but its weights have {value}")
    try:
        return Shape(
            vocab_size=tokens.shape[0], context_size=places.shape[0], n_head=sizes["n_head"], mlp="gelu",
            tied_head=head.data_ptr() == tokens.data_ptr() or torch.equal(head.float(), tokens.float()), **found,
        )  # fmt: skip
    except KeyError:
        raise _no_heads(f"{file} does not say n_head") from None
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{file} describes an impossible model: {error}", code="bad-value") from None
