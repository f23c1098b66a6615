"""The piano GPT and its loss: predict the next token of a performance.

The model is the shared transformer in the shape of GPT-2. The loss is the sum of cross entropies over all targets that
are not padding, with the four classes of tokens (which note, how loud, how long to wait) as parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rung.nn.losses import sums_by_class, token_losses
from rung.nn.transformer import Shape, Transformer
from rung.recipe import Batch, Draw, Loss
from rung.recipes.piano.config import Model
from rung.recipes.piano.tokenizer import CLASS_OF_ID, CLASSES, PAD, VOCAB_SIZE


def build_model(cfg: Model, seed: int) -> Transformer:
    shape = Shape(
        vocab_size=VOCAB_SIZE,
        context_size=cfg.context_size,
        n_layer=cfg.n_layer,
        n_head=cfg.n_head,
        n_embd=cfg.n_embd,
        bias=cfg.bias,
        dropout=cfg.dropout,
        init=cfg.init,
    )
    return Transformer(shape, seed)


def losses_of(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss and weight of each target, (rows, positions)."""
    tokens = batch["tokens"].long()  # they travel as uint16
    return token_losses(model(tokens[:, :-1]), tokens[:, 1:], ignore=PAD)


class NextToken:
    """The one loss of training and eval."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.class_of_id = torch.from_numpy(CLASS_OF_ID.astype("int64")).to(model.norm.weight.device)

    def __call__(self, batch: Batch, draw: Draw) -> Loss:
        losses, weights = losses_of(self.model, batch)
        parts = sums_by_class(losses, weights, self.class_of_id[batch["tokens"][:, 1:].long()], CLASSES)
        parts.pop("special")  # only <CLS>, which starts a record and is never a target
        return Loss(losses.sum(), weights.sum(), parts)
