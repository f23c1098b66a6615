"""Weights that others have trained, as the beginning of a model of ours.

A source is a Hugging Face folder (hf.py) or a file of nanoGPT (nanogpt.py). What does not fit is refused, but for two
things: of more positions the first are taken, and unless ids mean the same, the token table (with the head) keeps its
new draw while blocks, positions and norms are theirs. So a GPT-2 of text can be the start of one of piano.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung import parse
from rung.errors import CheckpointError
from rung.nn.hf_layouts import CONFIG, ZERO_BIASES, read_json, read_layout
from rung.nn.shape import Shape

if TYPE_CHECKING:
    from rung.nn.transformer import Transformer

VOCABULARY = "vocabulary.json"  # beside weights that rung has exported: what their ids mean
KEYS = ("n_layer", "n_head", "n_embd", "bias", "mlp")  # of a model section like piano's, that decide what fits
# Parts of a shape that must be equal, in the order in which a person would look at them.
PARTS = {
    "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd", "n_hidden": "hidden_width", "n_kv_head": "kv_heads",
    "head_dim": "head_width", "mlp": "mlp", "norm": "norm", "norm_eps": "norm_eps", "positions": "positions",
    "parallel_residual": "parallel_residual", "attention_scale": "attention_scale", "qk_norm": "qk_norm",
    "causal": "causal", "cross_width": "cross_width",
}  # fmt: skip
TABLES = ("tokens.weight", "head.weight")
ROTARY = {"rotary_fraction": "rotary_fraction", "rope_theta": "rope_theta"}


def shape_of(source: Path) -> Shape:
    """What the model of a source is made of, without its weights; torch is needed for a file only."""
    if not source.is_dir():
        from rung.nn import nanogpt

        return nanogpt.shape_of(source)
    _, shape = read_layout(source)
    if read_json(source / CONFIG).get(ZERO_BIASES) is True:
        return replace(shape, bias=False, attention_bias=None)
    return shape


def config_from_pretrained(source: Path) -> dict[str, Any]:
    """The model section of a recipe whose model is a GPT-2 with KEYS."""
    shape = shape_of(source)
    if shape.positions != "learned" or shape.norm != "layernorm":
        problem = (
            f"{source} is no GPT-2, as this recipe's model is: it has {shape.positions} positions and {shape.norm}"
        )
        remedy = "name a folder of a GPT-2 or a file of nanoGPT"
        raise CheckpointError(f"{problem}; {remedy}", code="checkpoint-mismatch")
    return {"model": {name: getattr(shape, name) for name in KEYS}}


def tokenizer_of(source: Path) -> str | None:
    """The hash of the tokenizer whose ids these weights know; None where no file says."""
    try:
        about = parse.loose_json(parse.read_bytes(source / VOCABULARY))["tokenizer"]["hash"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return about if isinstance(about, str) else None


def load_pretrained(
    model: Transformer, source: Path, has_same_ids: bool | None = None, keys: Container[str] = KEYS
) -> str:
    """Fills the model with the weights of a source; returns what was taken and what was not.

    `has_same_ids` says whether ids mean the same there: then the token table is taken too. None is for a caller who
    cannot know: it is taken where it has as many rows, and the line says so. `keys` are those of the recipe's model
    section, for remedies.
    """
    if source.is_dir():
        from rung.nn import hf

        theirs = hf.load(source)
    else:
        from rung.nn import nanogpt

        theirs = nanogpt.load(source)
    here, there = model.shape, theirs.shape
    parts = PARTS | (ROTARY if here.positions == there.positions == "rotary" else {})
    for name, part in parts.items():
        _check_same(source, name, getattr(here, part), getattr(there, part), keys)
    for part in ("has_attention_bias", "has_mlp_bias", "has_norm_bias"):
        if getattr(here, part) and not getattr(there, part):
            _check_same(source, "bias", True, False, keys)
    if there.positions == "learned" and there.context_size < here.context_size:
        problem = f"{source} has {there.context_size} positions, this model has {here.context_size}"
        remedy = f"set data.context_size={there.context_size} or less"
        raise CheckpointError(f"{problem}; {remedy}", code="checkpoint-mismatch")
    has_same_size = here.vocab_size == there.vocab_size
    takes_table = has_same_size if has_same_ids is None else has_same_ids
    if takes_table:
        _check_same(source, "tied_head", here.tied_head, there.tied_head, keys)
    ours, given = dict(model.named_parameters()), dict(theirs.named_parameters())
    if any(given[name].any() for name in given.keys() - ours.keys() - {"head.weight"}):
        _check_same(source, "bias", False, True, keys)

    for name, parameter in ours.items():
        if takes_table or name not in TABLES:
            num_rows = min(len(parameter), len(given[name]))  # they differ for tables only
            parameter.data[:num_rows].copy_(given[name][:num_rows])

    if takes_table:
        unknown = ", if its ids mean the same, which the source does not say" if has_same_ids is None else ""
        table = f"its token table of {min(here.vocab_size, there.vocab_size)} ids{unknown}"
    elif has_same_size:
        table = "a token table initialised randomly, since nothing says that its ids mean the same"
    else:
        table = f"a token table initialised randomly ({there.vocab_size} ids there, {here.vocab_size} here)"
    taken = f"weights of {source}: {there.n_layer} blocks of {there.n_embd}, {table}"
    if there.context_size != here.context_size:
        which = f"the first {here.context_size} of its" if there.context_size > here.context_size else "trained on"
        taken += f", {which} {there.context_size} positions"
    return taken


def _check_same(source: Path, name: str, ours: Any, theirs: Any, keys: Container[str]) -> None:
    if ours == theirs:
        return
    written = json.dumps(theirs)
    remedy = f"set model.{name}={written.strip(chr(34))}, or leave the key out and it follows the weights"
    if name not in keys:
        remedy = "no key changes that: name weights of the same kind"
    problem = f"{source} has {name}={written}, this model has {name}={json.dumps(ours)}"
    raise CheckpointError(f"{problem}; {remedy}", code="checkpoint-mismatch")
