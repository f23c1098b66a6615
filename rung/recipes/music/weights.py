"""Reads the weights of a Dia that others have trained, from a Hugging Face folder, without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rung.errors import CheckpointError
from rung.nn.hf import FolderWeights
from rung.nn.hf_layouts import CONFIG, damaged, read_json
from rung.recipes.music.model import MusicModel

# Of a block, our module -> theirs; several, with spaces, where ours is fused.
SELF = {
    "attn.qkv": "self_attention.q_proj self_attention.k_proj self_attention.v_proj",
    "attn.out": "self_attention.o_proj",
}
MLP = {"mlp.up": "mlp.gate_up_proj", "mlp.down": "mlp.down_proj"}
BLOCKS = {
    "encoder": {"norm1": "pre_sa_norm", **SELF, "norm2": "post_sa_norm", **MLP},
    "decoder": {
        "norm1": "pre_sa_norm", **SELF, "norm_cross": "pre_ca_norm", "cross.q": "cross_attention.q_proj",
        "cross.kv": "cross_attention.k_proj cross_attention.v_proj", "cross.out": "cross_attention.o_proj",
        "norm2": "pre_mlp_norm", **MLP,
    },
}  # fmt: skip
WHOLE = {
    "encoder.tokens": "model.encoder.embedding", "encoder.norm": "model.encoder.norm",
    "decoder.norm": "model.decoder.norm", "codes": "model.decoder.embeddings.embed", "head": "logits_dense",
}  # fmt: skip


def config_from_dia(folder: Path) -> dict[str, Any]:
    """The keys that a model needs to take the weights in this folder."""
    config = read_json(folder / CONFIG)
    if config.get("model_type") != "dia":
        problem = f"{folder} holds a model of type {config.get('model_type')!r}; music takes weights of a dia"
        raise CheckpointError(problem, code="not-supported")
    try:
        text, decoder = config["encoder_config"], config["decoder_config"]
        for ours, theirs in (("num_attention_heads", "cross_num_attention_heads"), ("head_dim", "cross_head_dim")):
            if decoder[ours] != decoder[theirs]:
                problem = f"{folder}: {theirs}={decoder[theirs]} differs from {ours}={decoder[ours]}"
                remedy = "rung's cross attention has the heads of its self attention"
                raise CheckpointError(f"{problem}; {remedy}", code="not-supported")
        return {
            "model": {
                **_sizes(decoder), "n_kv_head": decoder["num_key_value_heads"], "attention_scale": 1.0,
                "text": _sizes(text),
            },
            "data": {"codebooks": decoder["num_channels"], "text_length": text["max_position_embeddings"]},
            "delay": {"pattern": list(config["delay_pattern"])},
        }  # fmt: skip
    except KeyError as error:
        raise damaged(f"{folder / CONFIG} has no {error}, which a dia needs") from None


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_layer": config["num_hidden_layers"], "n_head": config["num_attention_heads"],
        "n_embd": config["hidden_size"], "head_dim": config["head_dim"], "n_hidden": config["intermediate_size"],
    }  # fmt: skip


@torch.no_grad()
def load_dia(model: MusicModel, folder: Path) -> str:
    """Fills every weight of the model; a weight that is missing, left over or of another shape is refused."""
    names = dict(WHOLE)
    for side, block in BLOCKS.items():
        num_layers = len(getattr(model, side).blocks)
        for layer in range(num_layers):
            prefix = f"model.{side}.layers.{layer}."
            names |= {
                f"{side}.blocks.{layer}.{ours}": " ".join(prefix + one for one in theirs.split())
                for ours, theirs in block.items()
            }
    parameters, read = dict(model.named_parameters()), set[str]()
    with ExitStack() as stack:
        weights = FolderWeights(folder, stack)
        for ours, theirs in names.items():
            parameter = parameters.pop(f"{ours}.weight")
            module = model.get_submodule(ours)
            keys = [f"{one}.weight" for one in theirs.split()]
            parts = getattr(module, "parts", ()) if len(keys) > 1 else (len(parameter),)
            tensors = [weights.get(key, (rows, *parameter.shape[1:])) for key, rows in zip(keys, parts, strict=True)]
            parameter.copy_(torch.cat(tensors))
            read.update(keys)
        assert not parameters, f"no weights for {sorted(parameters)}"
        if left := sorted(set(weights.file_of) - read):
            problem = f"{folder} has a weight {left[0]} that a dia of this config does not have"
            raise CheckpointError(problem, code="checkpoint-mismatch")
    return f"weights of {folder}: {len(model.encoder.blocks)} layers of text, {len(model.decoder.blocks)} of codes"
