"""Loads and saves Hugging Face folders of GPT-2, GPT-NeoX and Llama without importing transformers.

`load` reads config.json and safetensors, whole or in shards; a key that is missing, left over or of the wrong shape is
an error that names it. `save` writes a folder that transformers opens and that computes the same logits. Weights are
float32 in memory and on disk, whatever dtype a config declares. GPT-2 and GPT-NeoX have no layers without bias: a model
without biases is saved with zeros and comes back with biases of zero. Key names are in hf_layouts.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rung.errors import CheckpointError
from rung.nn.hf_layouts import (
    CONFIG,
    HEADS,
    WEIGHTS,
    ZERO_BIASES,
    Layout,
    check_weight,
    damaged,
    layout_for,
    read_json,
    read_layout,
)  # fmt: skip
from rung.nn.transformer import Transformer

INDEX = "model.safetensors.index.json"


def load(folder: Path | str, dropout: float = 0.0) -> Transformer:
    """The model of a checkpoint folder, in float32 on the CPU. `dropout` is a choice of training, not of weights."""
    folder = Path(folder)
    layout, shape = read_layout(folder)
    model = Transformer(replace(shape, dropout=dropout), seed=None)
    with ExitStack() as stack:
        _fill(model, layout, FolderWeights(folder, stack))
    return model


def save(model: Transformer, folder: Path | str, extra: Mapping[str, Any] | None = None) -> None:
    """Writes config.json and model.safetensors; `extra` are further keys of the config, such as eos_token_id."""
    layout = layout_for(model.shape)
    ours = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for mapping in layout.mappings(model.shape):
        parameter = ours.get(mapping.ours)
        value = torch.zeros(mapping.shape) if parameter is None else parameter.detach().float().cpu()
        for key, tensor in zip(mapping.theirs, mapping.split(value), strict=True):
            tensors[layout.full_key(key)] = tensor.contiguous()
    config = {
        "architectures": [layout.architecture], "model_type": layout.model_type, "torch_dtype": "float32",
        "bos_token_id": None, "eos_token_id": None, "vocab_size": model.shape.vocab_size,
        "tie_word_embeddings": model.shape.tied_head, **layout.config(model.shape), **(extra or {}),
    }  # fmt: skip
    has_biases = model.shape.has_attention_bias or model.shape.has_mlp_bias or model.shape.has_norm_bias
    if layout.always_biased and not has_biases:
        config[ZERO_BIASES] = True
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Written beside and moved, the config last: a folder with a config has its weights.
    save_file(tensors, folder / f"{WEIGHTS}.part", metadata={"format": "pt"})
    (folder / f"{CONFIG}.part").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copymode(folder / f"{CONFIG}.part", folder / f"{WEIGHTS}.part")  # safetensors lets only its owner read
    os.replace(folder / f"{WEIGHTS}.part", folder / WEIGHTS)
    os.replace(folder / f"{CONFIG}.part", folder / CONFIG)


class FolderWeights:
    """The tensors of a folder by key, read when asked for, so that a large checkpoint is not in memory twice."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        names = [WEIGHTS]
        if not (folder / WEIGHTS).exists():
            if not (folder / INDEX).exists():
                problem = f"{folder} has neither {WEIGHTS} nor {INDEX}"
                raise CheckpointError(f"{problem}; convert its weights to safetensors", code="no-file")
            weight_map = read_json(folder / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise damaged(f"{folder / INDEX} has no weight_map")
            names = sorted({str(name) for name in weight_map.values()})
        self.file_of: dict[str, Any] = {}
        for name in names:
            if Path(name).name != name:
                problem = f"{folder / INDEX} points to {name!r}, outside of its folder"
                raise CheckpointError(f"{problem}; do not use it", code="untrusted")
            try:
                file = stack.enter_context(safe_open(folder / name, framework="pt"))
            except FileNotFoundError:
                raise damaged(f"{folder / name} is missing, though {INDEX} lists it") from None
            except (SafetensorError, OSError) as error:
                raise damaged(f"{folder / name} is damaged ({error})") from None
            self.file_of |= dict.fromkeys(file.keys(), file)

    def get(self, key: str, shape: Sequence[int]) -> Tensor:
        try:
            tensor: Tensor = self.file_of[key].get_tensor(key)
        except KeyError:
            raise damaged(f"{self.folder} has no weight {key}") from None
        except SafetensorError as error:
            raise damaged(f"{self.folder}: weight {key} cannot be read ({error})") from None
        check_weight(self.folder, key, tensor, shape)
        return tensor.float()


@torch.no_grad()
def _fill(model: Transformer, layout: Layout, weights: FolderWeights) -> None:
    ours = dict(model.named_parameters())
    is_prefixed = any(key.startswith(layout.prefix) for key in weights.file_of)
    read: set[str] = set()
    for mapping in layout.mappings(model.shape):
        keys = [layout.full_key(key) if is_prefixed else key for key in mapping.theirs]
        keys = [key if key in weights.file_of else layout.alias.get(key, key) for key in keys]
        expected = mapping.split(torch.empty(mapping.shape, device="meta"))
        tensors = [weights.get(key, like.shape) for key, like in zip(keys, expected, strict=True)]
        ours.pop(mapping.ours).copy_(mapping.join(tensors))
        read.update(keys)
    assert not ours, f"no layout mapping for {sorted(ours)}"

    for key in sorted(set(weights.file_of) - read):
        if key.endswith(layout.ignored):
            continue
        problem = f" has a weight {key} that a {layout.model_type} of this config does not have"
        if key in HEADS and model.tokens is not None and model.shape.tied_head:
            if torch.equal(weights.get(key, model.tokens.weight.shape), model.tokens.weight):
                continue  # some writers store a tied head a second time
            problem = f": {key} differs from the token table, but the config says tie_word_embeddings=true"
        raise CheckpointError(f"{weights.folder}{problem}", code="checkpoint-mismatch")
