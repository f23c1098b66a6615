"""Language models for other programs, and models of others for ours.

`export_hf` writes a Hugging Face folder with its tokenizer, so that AutoTokenizer opens that too; bytes and characters
are no tokenizers of transformers, and vocabulary.json says what the ids are. `load_pretrained_weights` starts a model
of ours from such a folder: the token table is taken where ids mean the same text, and drawn anew where they do not.
`load_external_model` gives the model of a folder as it is, to be evaluated. Imports no torch: keys are read without it.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung import parse
from rung.errors import CheckpointError, UserError
from rung.nn.hf_layouts import CONFIG, LAYOUTS, WEIGHTS, read_json
from rung.nn.pretrained import VOCABULARY, load_pretrained, shape_of, tokenizer_of
from rung.recipes.text.config import Model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rung.data.store import Store
    from rung.data.tokenizer import Tokenizer
    from rung.nn.transformer import Transformer

PADDING = 512  # rows by which a table may be longer than its vocabulary; 50304 - 50254 is usual
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def config_from_pretrained(source: Path) -> dict[str, Any]:
    """The model section of what a source holds."""
    shape = shape_of(source)
    is_rotary = shape.positions == "rotary"
    architecture = "llama" if shape.norm == "rmsnorm" else "gpt_neox" if is_rotary else "gpt2"
    keys = {name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd", "bias", "tied_head")}
    keys |= {"architecture": architecture, "n_hidden": shape.n_hidden or 0}
    if architecture == "gpt2":
        keys["mlp"] = shape.mlp
    return {"model": {**keys, "rotary_fraction": shape.rotary_fraction if is_rotary else None}}


def load_pretrained_weights(model: Transformer, source: Path, store: Store) -> str:
    file = source / "tokenizer.json"
    has_same_ids = tokenizer_of(source) == store.info["tokenizer"]["hash"] or (
        file.is_file() and is_same_tokenizer(file, store)
    )
    return load_pretrained(model, source, has_same_ids, keys=[one.name for one in fields(Model)])


def export_hf(model: Transformer, folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Writes the model and its tokenizer into a folder; returns the names of the files."""
    from rung.nn import hf

    def to_json(tree: dict[str, Any]) -> bytes:
        return (json.dumps(tree, indent=1) + "\n").encode()

    hf.save(model, folder, {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end})
    files = {VOCABULARY: to_json({"tokenizer": tokenizer.description}), **tokenizer.files}
    if "tokenizer.json" in files and "tokenizer_config.json" not in files:
        # What AutoTokenizer asks for besides the tokenizer.json itself.
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        names = {one["id"]: one["content"] for one in parse.loose_json(files["tokenizer.json"]).get("added_tokens", ())}
        if tokenizer.end in names:
            about["eos_token"] = names[tokenizer.end]
        files["tokenizer_config.json"] = to_json(about)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [CONFIG, WEIGHTS, *files]


def is_same_tokenizer(file: Path, store: Store) -> bool:
    """Whether ids mean the same: equal files, or equal once what does not touch ids is left out."""

    def meaning(path: Path) -> dict[str, Any]:  # without the settings of whoever saved it last
        tree = read_json(path)
        return {key: value for key, value in tree.items() if key not in ("padding", "truncation", "version")}

    ours = [store.path / name for name in store.info["tokenizer"].get("files", []) if name.endswith("tokenizer.json")]
    return any(meaning(path) == meaning(file) for path in ours)


def load_external_model(folder: Path, store: Store, context: int) -> nn.Module:
    """The model of a Hugging Face folder, as a module that makes logits of ids.

    GPT-2, GPT-NeoX and Llama become the shared transformer; any other causal model goes through `transformers`. A
    model is refused where its figures would mean nothing: another tokenizer, a vocabulary without some ids of the
    data, a context shorter than a row.
    """
    if not (folder / CONFIG).is_file():
        problem = f"{folder} is not a folder of a Hugging Face model: it has no {CONFIG}"
        raise CheckpointError(f"{problem}; name another", code="no-checkpoint")
    config = read_json(folder / CONFIG)
    if isinstance(nested := config.get("text_config"), dict):  # of models that also see or hear
        config = {**nested, **config}
    needed, has = int(store.info["vocab_size"]), config.get("vocab_size")
    remedy = f"prepare the data with dataset.tokenizer={folder} under another --name, and name it here"
    theirs = folder / "tokenizer.json"
    problem = ""
    if not isinstance(has, int) or has < needed:
        problem = f"{folder} has a vocabulary of {has}, the data in {store.path} has {needed} ids; {remedy}"
    elif theirs.is_file() and not is_same_tokenizer(theirs, store):
        problem = f"{theirs} is not the tokenizer of {store.path}: the ids of the data mean other text to it; {remedy}"
    elif not theirs.is_file() and has > needed + PADDING:
        problem = (
            f"{folder} has no tokenizer.json, and a vocabulary of {has} where the data in {store.path} has {needed} "
            "ids; copy the model's tokenizer.json into it"
        )
    if problem:
        raise CheckpointError(problem, code="tokenizer-mismatch")
    limits = [config[key] for key in CONTEXT_KEYS if isinstance(config.get(key), int)]
    if limits and min(limits) < context:
        problem = f"{folder} has {min(limits)} positions, a row here has data.context_size={context}"
        remedy = f"evaluate a run with data.context_size={min(limits)} or less"
        raise CheckpointError(f"{problem}; {remedy}", code="checkpoint-mismatch")

    is_ours = config.get("model_type") in LAYOUTS
    try:
        if is_ours:
            LAYOUTS[config["model_type"]].shape(config)
    except CheckpointError:  # a variant of the architecture
        is_ours = False
    except Exception:  # a config that is not whole: nn.hf says what is missing
        pass
    if is_ours:
        from rung.nn import hf

        return hf.load(folder)
    return _through_transformers(folder)


def _through_transformers(folder: Path) -> nn.Module:
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        problem = f"the model in {folder} needs transformers, which is not installed"
        raise UserError(f"{problem}; pip install 'rung[llm]'", code="not-installed") from None
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # its reasons are many, and each is a mistake in the folder
        reason = " ".join(str(error).split())[:300]
        problem = f"transformers cannot load the model in {folder}: {reason}"
        raise CheckpointError(f"{problem}; name another folder", code="not-supported") from None
    if missing := sorted(info.get("missing_keys", ())):  # they would be drawn at random
        problem = f"{folder} has no weight {missing[0]}; the checkpoint is incomplete"
        raise CheckpointError(f"{problem}: copy it again", code="checkpoint-damaged")

    class Causal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.eval()

        def forward(self, ids_BT: Tensor) -> Tensor:
            logits: Tensor = self.inner(input_ids=ids_BT, use_cache=False).logits
            return logits

    return Causal().eval()
