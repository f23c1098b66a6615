"""The language model and its loss: predict the next token of a text.

The model is the shared transformer in the shape of GPT-2, GPT-NeoX or Llama. The loss is the sum of cross entropies
over all targets that are text, with the components of the mixture as parts. `next_token_losses` takes any module that
makes logits of ids, so that models of others are measured by the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rung.nn.losses import token_losses
from rung.nn.transformer import Transformer
from rung.recipe import Batch, Draw, Loss, Part
from rung.recipes.text.config import Model
from rung.text import one_line

MOST_PARTS = 64  # beyond it a step's row of figures is no longer read by anybody; `rung eval` has them all


def build_model(cfg: Model, vocab_size: int, seed: int) -> Transformer:
    return Transformer(cfg.shape(vocab_size), seed)


def next_token_losses(model: nn.Module, batch: Batch, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The loss of each target and its weight, both (rows, L): 1, or 0 where a tile is padded."""
    tokens = batch["tokens"].long()  # they travel as uint16 or uint32
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    inputs = inputs.masked_fill(inputs == vocab_size, 0)  # nothing that counts comes after padding
    return token_losses(model(inputs), targets, ignore=vocab_size)


class NextToken:
    """The one loss of training and eval."""

    def __init__(self, model: nn.Module, vocab_size: int, components: Sequence[str]) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.parts = part_names(components)

    def __call__(self, batch: Batch, draw: Draw) -> Loss:
        losses, weights = next_token_losses(self.model, batch, self.vocab_size)
        whole = Loss(losses.sum(), weights.sum())
        if len(self.parts) == 1:
            return whole._replace(parts={self.parts[0]: (whole.sum, whole.count)})
        rows = torch.stack([losses.sum(dim=1), weights.sum(dim=1)], dim=1)
        return whole._replace(parts=self._by_component(rows, batch["component"]) if self.parts else {})

    def _by_component(self, rows: Tensor, component: Tensor) -> dict[str, Part]:
        nothing = torch.zeros(len(self.parts), 2, device=rows.device)
        sums = nothing.scatter_add(0, component.long()[:, None].expand(-1, 2), rows)
        return {name: (sums[number, 0], sums[number, 1]) for number, name in enumerate(self.parts)}


def part_names(components: Sequence[str]) -> list[str]:
    """component/<name>, on one line, each once, and none that means something else to the engine."""
    if len(components) > MOST_PARTS:
        return []
    names: list[str] = []
    for component in components:
        name = f"component/{one_line(component)}"
        while name in names or name.endswith(("/sum", "/count")):
            name += "_"
        names.append(name)
    return names
