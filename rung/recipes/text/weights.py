"""Language models for other programs, and weights of others for ours.

`export_hf` writes a Hugging Face folder with its tokenizer, so that AutoTokenizer opens that too; bytes and characters
are no tokenizers of transformers, and vocabulary.json says what the ids are. `adopt_weights` begins with such a folder.
The token table is taken where ids mean the same text, and drawn anew where they do not.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.nn.adopt import VOCABULARY, adopt, shape_of, tokenizer_of
from rung.recipes.text.config import Model

if TYPE_CHECKING:
    from rung.data.store import Store
    from rung.nn.transformer import Transformer
    from rung.recipes.text.tokenizer import Tokenizer


def keys_of(source: Path) -> dict[str, Any]:
    """The model section of what a source holds."""
    shape = shape_of(source)
    is_rotary = shape.positions == "rotary"
    architecture = "llama" if shape.norm == "rmsnorm" else "gpt_neox" if is_rotary else "gpt2"
    keys = {name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd", "bias", "tied_head")}
    keys |= {"architecture": architecture, "n_hidden": shape.n_hidden or 0}
    if architecture == "gpt2":
        keys["mlp"] = shape.mlp
    return {"model": {**keys, "rotary_fraction": shape.rotary_fraction if is_rotary else None}}


def adopt_weights(model: Transformer, source: Path, store: Store) -> str:
    from rung.recipes.text.foreign import is_same

    file = source / "tokenizer.json"
    has_same_ids = tokenizer_of(source) == store.info["tokenizer"]["hash"] or (file.is_file() and is_same(file, store))
    return adopt(model, source, has_same_ids, keys=[one.name for one in fields(Model)])


def export_hf(model: Transformer, folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Writes the model and its tokenizer into a folder; returns the names of the files."""
    from rung.nn import hf

    hf.save(model, folder, {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end})
    files = {VOCABULARY: _json({"tokenizer": tokenizer.description}), **tokenizer.files}
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        files["tokenizer_config.json"] = _described(tokenizer)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [hf.CONFIG, hf.WEIGHTS, *files]


def _described(tokenizer: Tokenizer) -> bytes:
    """What AutoTokenizer asks for besides the tokenizer.json itself."""
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    inner = json.loads(tokenizer.files["tokenizer.json"])
    names = {one["id"]: one["content"] for one in inner.get("added_tokens", ())}
    if tokenizer.end in names:
        about["eos_token"] = names[tokenizer.end]
    return _json(about)


def _json(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, indent=1) + "\n").encode()
