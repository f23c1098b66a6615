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

from rung.nn.generate import SamplingParams, generate
from rung.nn.transformer import Transformer
from rung.random import Draw
from rung.recipe import Sample
from rung.text import one_line, visible

if TYPE_CHECKING:
    from rung.data.tokenizer import Tokenizer

PROMPT_TOKENS = 32  # of a held-out document


@dataclass(frozen=True)
class Prompt:
    ids: np.ndarray
    origin: str  # for the caption


def samples(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Prompt], params: SamplingParams, draw: Draw
) -> list[Sample]:
    """One file per prompt. Prompts have lengths of their own, so that each is continued alone."""
    device = model.norm.weight.device
    generator = draw.generator("sample", device)
    # The rest of a table that is padded for speed means nothing.
    is_id = torch.arange(model.shape.vocab_size, device=device) < tokenizer.vocab_size
    made = []
    for number, prompt in enumerate(prompts):
        ids_BT = generate(
            model,
            torch.from_numpy(prompt.ids.astype(np.int64))[None].to(device),
            params.num_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            generator=generator,
            stop_id=tokenizer.end,
            allowed=None if bool(is_id.all()) else lambda ids: is_id,
        )
        ids = ids_BT[0].cpu().numpy()
        new = ids[len(prompt.ids) :]
        has_ended = tokenizer.end is not None and len(new) > 0 and bool(new[-1] == tokenizer.end)
        given, whole = tokenizer.decode(prompt.ids), tokenizer.decode(ids)
        # A character may be cut in two by the end of the prompt: then the parts cannot be told apart in the whole.
        continuation = whole[len(given) :] if whole.startswith(given) else tokenizer.decode(new)
        ending = ", then the end of the document" if has_ended else ""
        origin, heat = one_line(prompt.origin), f"temperature {params.temperature:g}"
        caption = f"{origin}, continued by {len(new)} tokens{ending}, {heat}"
        text = f"[{caption}]\n\n[prompt]\n{visible(given)}\n\n[continuation]\n{visible(continuation)}\n"
        made.append(Sample(f"sample-{number}.txt", text.encode("utf-8", "replace"), caption))
    return made
