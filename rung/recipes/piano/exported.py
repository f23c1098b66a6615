"""The piano GPT for other programs, and weights of others for it.

`export_hf` writes a Hugging Face folder of a GPT-2 and, as transformers knows no tokenizer of notes, vocabulary.json:
the name of each id, what the names mean, and the ids that frame a prompt. `adopt_weights` begins with such a folder, or
with any GPT-2 or nanoGPT.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rung.nn.adopt import VOCABULARY, adopt, tokenizer_of
from rung.recipes.piano.tokenizer import CLS, EOGENAI, GENAI, PAD, Tokenizer

if TYPE_CHECKING:
    from rung.nn.transformer import Transformer


def export_hf(model: Transformer, tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Writes the model and its vocabulary into a folder; returns the names of the files."""
    from rung.nn import hf

    special = {"bos_token_id": CLS, "pad_token_id": PAD, "eos_token_id": EOGENAI}
    hf.save(model, folder, special)
    about = {
        "names": list(tokenizer.names),  # the id of a name is its place
        "special_ids": {tokenizer.name_of(id): id for id in (PAD, CLS, GENAI, EOGENAI)},
        "tokenizer": tokenizer.description,
    }
    (folder / VOCABULARY).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    return [hf.CONFIG, hf.WEIGHTS, VOCABULARY]


def adopt_weights(model: Transformer, tokenizer: Tokenizer, source: Path) -> str:
    """Fills the model with weights of others; the table of tokens too, where ids may mean the same."""
    theirs = tokenizer_of(source)
    return adopt(model, source, None if theirs is None else theirs == tokenizer.hash)
