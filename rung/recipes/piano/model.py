"""The piano GPT and its loss: predict the next token of a performance, or of an answer.

The model is the shared transformer in the shape of GPT-2. The loss is the sum of cross entropies over the targets that
count, with the classes of tokens (which note, how loud, how long to wait) and the tasks as parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rung.nn.losses import sums_by_class, token_losses
from rung.nn.transformer import Shape, Transformer
from rung.recipe import Batch, Draw, Loss
from rung.recipes.piano.config import Model
from rung.recipes.piano.tokenizer import CLASS_OF_ID, CLASSES, EOGENAI, GENAI, PAD, VOCAB_SIZE


def build_model(cfg: Model, seed: int) -> Transformer:
    shape = Shape(
        vocab_size=VOCAB_SIZE,
        context_size=cfg.context_size,
        n_layer=cfg.n_layer,
        n_head=cfg.n_head,
        n_embd=cfg.n_embd,
        mlp=cfg.mlp,
        bias=cfg.bias,
        dropout=cfg.dropout,
        init=cfg.init,
    )
    return Transformer(shape, seed)


@dataclass(frozen=True)
class Counted:
    """Which targets count."""

    only_answers: bool = False  # loss_masking=finetuning
    num_given: int = 0  # targets at the beginning of each row that nobody is asked to predict: the prefix

    def weights(self, tokens_BT: Tensor) -> Tensor:
        """(B, T - 1) of 0 and 1: the answer begins after <GENAI> and ends with <EOGENAI>, which counts."""
        x_BT, y_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        counts_BT = y_BT != PAD
        counts_BT[:, : self.num_given] = False
        if self.only_answers:
            counts_BT &= (x_BT == GENAI).cumsum(dim=1) > 0
            counts_BT &= (x_BT == EOGENAI).cumsum(dim=1) == 0
        return counts_BT.float()


def losses_of(model: Transformer, batch: Batch, counted: Counted) -> tuple[Tensor, Tensor]:
    """Loss and weight of each target, (rows, positions)."""
    tokens = batch["tokens"].long()  # they travel as uint16
    return token_losses(model(tokens[:, :-1]), tokens[:, 1:], counted.weights(tokens))


class PianoLoss:
    """The one loss of training and eval, of both stages."""

    def __init__(self, model: Transformer, counted: Counted, tasks: Sequence[str] = ()) -> None:
        """`tasks` are the names of what batch["task"] counts; none in next-token training."""
        self.model, self.counted, self.tasks = model, counted, list(tasks)
        self.class_of_id = torch.from_numpy(CLASS_OF_ID.astype("int64")).to(model.norm.weight.device)

    def __call__(self, batch: Batch, draw: Draw) -> Loss:
        losses, weights = losses_of(self.model, batch, self.counted)
        parts = sums_by_class(losses, weights, self.class_of_id[batch["tokens"][:, 1:].long()], CLASSES)
        if self.tasks:
            which = batch["task"][:, None].expand_as(losses)
            parts |= sums_by_class(losses, weights, which, self.tasks)
        else:
            parts.pop("special")  # only <CLS> and the prefix, which are never targets
        return Loss(losses.sum(), weights.sum(), parts)
