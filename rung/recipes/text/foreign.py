"""Language models that others have trained, as modules that make logits of ids.

GPT-2, GPT-NeoX and Llama folders become the shared transformer; any other causal model goes through `transformers`. A
model is refused where its figures would mean nothing: another tokenizer, a vocabulary without some ids of the data, a
context shorter than a row. Weights that are missing are an error, never drawn at random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from rung.data.store import Store
from rung.errors import CheckpointError, UserError
from rung.nn import hf
from rung.nn.hf_layouts import LAYOUTS

PADDING = 512  # rows by which a table may be longer than its vocabulary; 50304 - 50254 is usual
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class Causal(nn.Module):
    """A causal model of transformers, reduced to logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids_BT: Tensor) -> Tensor:
        return cast(Tensor, self.inner(input_ids=ids_BT, use_cache=False).logits)


def load_foreign(folder: Path, store: Store, context: int) -> nn.Module:
    """The model of a Hugging Face folder, if it can read the data."""
    config = _config(folder)
    _check_vocabulary(folder, config, store)
    _check_context(folder, config, context)
    return hf.load(folder) if _is_ours(config) else _through_transformers(folder)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / hf.CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder} is no folder of a Hugging Face model: it has no {hf.CONFIG}; name another")
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); copy it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no JSON object; copy it again")
    nested = config.get("text_config")  # of models that also see or hear
    return {**nested, **config} if isinstance(nested, dict) else config


def _check_vocabulary(folder: Path, config: dict[str, Any], store: Store) -> None:
    needed, has = int(store.info["vocab_size"]), config.get("vocab_size")
    remedy = f"prepare the data with dataset.tokenizer={folder} under another --name, and name it here"
    if not isinstance(has, int) or has < needed:
        raise CheckpointError(
            f"{folder} has a vocabulary of {has}, the data in {store.path} has {needed} ids; {remedy}"
        )
    theirs = folder / "tokenizer.json"
    if theirs.is_file():
        if not is_same(theirs, store):
            raise CheckpointError(
                f"{theirs} is not the tokenizer of {store.path}: the ids of the data mean other text to it; {remedy}"
            )
    elif has > needed + PADDING:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and a vocabulary of {has} where the data in {store.path} has {needed} "
            "ids; copy the model's tokenizer.json into it"
        )


def is_same(file: Path, store: Store) -> bool:
    """Whether ids mean the same: equal files, or equal once what does not touch ids is left out."""
    ours = [store.path / name for name in store.info["tokenizer"].get("files", []) if name.endswith("tokenizer.json")]
    return any(_meaning(path) == _meaning(file) for path in ours)


def _meaning(file: Path) -> object:
    try:
        tree = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}); copy it again") from None
    if isinstance(tree, dict):
        for key in ("padding", "truncation", "version"):  # settings of whoever saved it last
            tree.pop(key, None)
    return tree


def _check_context(folder: Path, config: dict[str, Any], context: int) -> None:
    limits = [config[key] for key in CONTEXT_KEYS if isinstance(config.get(key), int)]
    if limits and min(limits) < context:
        raise CheckpointError(
            f"{folder} has {min(limits)} positions, a row here has data.context_size={context}; evaluate a run with "
            f"data.context_size={min(limits)} or less"
        )


def _is_ours(config: dict[str, Any]) -> bool:
    """Whether the shared transformer can be this model; a damaged folder of such a model is reported by nn.hf."""
    layout = LAYOUTS.get(str(config.get("model_type")))
    if layout is None:
        return False
    try:
        layout.shape(config)
    except CheckpointError:  # a variant of the architecture
        return False
    except Exception:  # a config that is not whole: nn.hf says what is missing
        return True
    return True


def _through_transformers(folder: Path) -> nn.Module:
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UserError(
            f"the model in {folder} needs transformers, which is not installed; pip install 'rung[llm]'"
        ) from None
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # its reasons are many, and each is a mistake in the folder
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"transformers cannot load the model in {folder}: {reason}; name another folder"
        ) from None
    if missing := sorted(info.get("missing_keys", ())):
        raise CheckpointError(f"{folder} has no weight {missing[0]}; the checkpoint is not whole: copy it again")
    return Causal(model.eval())
