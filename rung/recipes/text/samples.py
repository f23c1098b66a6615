"""Continuations of a text, as text files.

A file holds the prompt and what the model made of it. Both are shown as they are: markup is not rendered, and what a
terminal would obey is replaced by a sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rung.nn.generate import How, generate
from rung.nn.transformer import Transformer
from rung.recipe import Draw, Sample
from rung.text import one_line, visible

if TYPE_CHECKING:
    from rung.recipes.text.tokenizer import Tokenizer

PROMPT_TOKENS = 32  # of a held-out document


@dataclass(frozen=True)
class Prompt:
    ids: np.ndarray
    origin: str  # in words


def samples(model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Prompt], how: How, draw: Draw) -> list[Sample]:
    """One file per prompt. Prompts have lengths of their own, so that each is continued alone."""
    device = model.norm.weight.device
    generator = draw.generator("sample", device)
    is_id = (
        torch.arange(model.shape.vocab_size, device=device) < tokenizer.vocab_size
    )  # the rest of the table is padding
    made = []
    for number, prompt in enumerate(prompts):
        ids = generate(
            model,
            torch.from_numpy(prompt.ids.astype(np.int64))[None].to(device),
            how.num_tokens,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            generator=generator,
            stop_id=tokenizer.end,
            allowed=None if bool(is_id.all()) else lambda ids: is_id,
        )
        made.append(_sample(number, prompt, ids[0].cpu().numpy(), tokenizer, how))
    return made


def _sample(number: int, prompt: Prompt, ids: np.ndarray, tokenizer: Tokenizer, how: How) -> Sample:
    new = ids[len(prompt.ids) :]
    has_ended = tokenizer.end is not None and len(new) > 0 and bool(new[-1] == tokenizer.end)
    given, whole = tokenizer.decode(prompt.ids), tokenizer.decode(ids)
    # A character may be cut in two by the end of the prompt: then the parts cannot be told apart in the whole.
    continuation = whole[len(given) :] if whole.startswith(given) else tokenizer.decode(new)
    ending = ", then the end of the document" if has_ended else ""
    caption = f"{one_line(prompt.origin)}, continued by {len(new)} tokens{ending}, temperature {how.temperature:g}"
    text = f"[{caption}]\n\n[prompt]\n{visible(given)}\n\n[continuation]\n{visible(continuation)}\n"
    return Sample(f"sample-{number}.txt", text.encode("utf-8", "replace"), caption)
