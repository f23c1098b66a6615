"""Hugging Face checkpoint folders of GPT-2, GPT-NeoX and Llama, in and out, without importing transformers.

`load` reads config.json and safetensors, whole or in shards; a key that is missing, left over or of the wrong shape is
an error that names it. `save` writes a folder that transformers opens and that computes the same logits. Tokenizers are
not handled here. What each key means, and a config.json alone, are in hf_layouts.py.

Two surprising things. Weights are float32 in memory and on disk, whatever dtype a config declares. And GPT-2 and
GPT-NeoX know no layers without bias: a model without is saved with zeros there and comes back with biases of zero.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
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
    Entry,
    Layout,
    described,
    has_biases,
    layout_for,
    read_json,
)
from rung.nn.transformer import Transformer

INDEX = "model.safetensors.index.json"


def load(folder: Path | str, dropout: float = 0.0) -> Transformer:
    """The model of a checkpoint folder, in float32 on the CPU. `dropout` is a choice of training, not of weights."""
    folder = Path(folder)
    layout, shape = described(folder)
    model = Transformer(replace(shape, dropout=dropout), seed=None)
    with ExitStack() as stack:
        weights = _Weights(folder, stack)
        _fill(model, layout, weights)
    return model


def save(model: Transformer, folder: Path | str, extra: Mapping[str, Any] | None = None) -> None:
    """Writes config.json and model.safetensors; `extra` are further keys of the config, such as eos_token_id."""
    layout = layout_for(model.shape)
    ours = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for entry in layout.entries(model.shape):
        parameter = ours.get(entry.ours)
        value = torch.zeros(entry.shape) if parameter is None else parameter.detach().float().cpu()
        for key, tensor in zip(entry.theirs, entry.split(value), strict=True):
            tensors[layout.prefix_of(key) + key] = tensor.contiguous()
    config = {
        "architectures": [layout.architecture], "model_type": layout.model_type, "torch_dtype": "float32",
        "bos_token_id": None, "eos_token_id": None, "vocab_size": model.shape.vocab_size,
        "tie_word_embeddings": model.shape.tied_head, **layout.config(model.shape), **(extra or {}),
    }  # fmt: skip
    if layout.has_biases and not has_biases(model.shape):
        config[ZERO_BIASES] = True
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Written beside and moved, the config last: a folder with a config has its weights.
    save_file(tensors, folder / f"{WEIGHTS}.part", metadata={"format": "pt"})
    (folder / f"{CONFIG}.part").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copymode(folder / f"{CONFIG}.part", folder / f"{WEIGHTS}.part")  # safetensors lets only its owner read
    os.replace(folder / f"{WEIGHTS}.part", folder / WEIGHTS)
    os.replace(folder / f"{CONFIG}.part", folder / CONFIG)


class _Weights:
    """The tensors of a folder by key, read when asked for, so that a large checkpoint is not in memory twice."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.files = {}
        for name in self._file_names(folder):
            try:
                self.files[name] = stack.enter_context(safe_open(folder / name, framework="pt"))
            except FileNotFoundError:
                raise CheckpointError(f"{folder / name} is missing, though {INDEX} lists it; copy it again") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / name} is damaged ({error}); copy it again") from None
        self.file_of = {key: file for file in self.files.values() for key in file.keys()}  # noqa: SIM118

    def get(self, key: str) -> Tensor:
        try:
            tensor: Tensor = self.file_of[key].get_tensor(key)
        except KeyError:
            raise CheckpointError(f"{self.folder} has no weight {key}; the checkpoint is not whole") from None
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder}: weight {key} cannot be read ({error}); copy it again") from None
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self.folder}: weight {key} is {tensor.dtype}; only float weights can be loaded")
        return tensor.float()

    @staticmethod
    def _file_names(folder: Path) -> list[str]:
        if (folder / WEIGHTS).exists():
            return [WEIGHTS]
        if not (folder / INDEX).exists():
            raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}; convert its weights to safetensors")
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX} has no weight_map; copy it again")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{folder / INDEX} points to {name!r}, outside of its folder; do not use it")
        return names


def _fill(model: Transformer, layout: Layout, weights: _Weights) -> None:
    ours = dict(model.named_parameters())
    prefix_is_bare = layout.prefix and not any(key.startswith(layout.prefix) for key in weights.file_of)
    read: set[str] = set()

    def fetch(entry: Entry) -> list[Tensor]:
        keys = []
        for key in entry.theirs:
            full = key if prefix_is_bare else layout.prefix_of(key) + key
            keys.append(layout.alias.get(full, full) if full not in weights.file_of else full)
        read.update(keys)
        tensors = [weights.get(key) for key in keys]
        sizes = [tuple(x.shape) for x in entry.split(torch.empty(entry.shape, device="meta"))]
        for key, tensor, size in zip(keys, tensors, sizes, strict=True):
            if tuple(tensor.shape) != size:
                raise CheckpointError(
                    f"{weights.folder}: weight {key} is {tuple(tensor.shape)}, but the config asks for {size}"
                )
        return tensors

    for entry in layout.entries(model.shape):
        with torch.no_grad():
            ours.pop(entry.ours).copy_(entry.join(fetch(entry)))
    assert not ours, f"no layout entry for {sorted(ours)}"
    _check_rest(model, layout, weights, read)


def _check_rest(model: Transformer, layout: Layout, weights: _Weights, read: set[str]) -> None:
    for key in sorted(set(weights.file_of) - read):
        if key.endswith(layout.ignored):
            continue
        if key in HEADS and model.shape.tied_head:
            assert model.tokens is not None
            if torch.equal(weights.get(key), model.tokens.weight):
                continue  # some writers store a tied head a second time
            raise CheckpointError(
                f"{weights.folder}: {key} differs from the token table, but the config says tie_word_embeddings=true"
            )
        raise CheckpointError(f"{weights.folder} has a weight {key} that a {layout.model_type} of this config has not")
