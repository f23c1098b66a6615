"""The loss of the text recipe: predict the next token.

The sum of cross entropies over all targets that are text, with the components of the mixture as parts. It takes any
module that makes logits of ids, so that models of others are measured by the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rung.nn.losses import token_losses
from rung.random import Draw
from rung.recipe import Batch, Loss, Part, TargetLosses
from rung.text import one_line

MOST_PARTS = 64  # beyond it a step's row of figures is no longer read by anybody; `rung eval` has them all


class NextToken:
    """The one loss of training and eval."""

    def __init__(self, model: nn.Module, vocab_size: int, components: Sequence[str]) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.parts = part_names(components)

    def __call__(self, batch: Batch, draw: Draw) -> Loss:
        tokens = batch["tokens"].long()  # they travel as uint16 or uint32
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        inputs = inputs.masked_fill(inputs == self.vocab_size, 0)  # nothing that counts comes after padding
        losses, weights = token_losses(self.model(inputs), targets, ignore=self.vocab_size)
        whole = losses.sum(), weights.sum()
        parts: dict[str, Part] = {}
        if len(self.parts) == 1:
            parts[self.parts[0]] = whole
        elif self.parts:
            rows = torch.stack([losses.sum(dim=1), weights.sum(dim=1)], dim=1)
            nothing = torch.zeros(len(self.parts), 2, device=rows.device)
            sums = nothing.scatter_add(0, batch["component"].long()[:, None].expand(-1, 2), rows)
            parts = {name: (sums[number, 0], sums[number, 1]) for number, name in enumerate(self.parts)}
        targets_of = TargetLosses(losses.detach(), weights)
        return Loss(*whole, parts, targets_of)  # made at once: torch 2.11 cannot compile NamedTuple._replace


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
