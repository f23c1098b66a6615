"""The piano GPT and its loss: predict the next token of a performance, or of an answer.

The model is the shared transformer in the shape of GPT-2. The loss is the sum of cross entropies over the targets that
count, with the classes of tokens (which note, how loud, how long to wait) and the tasks as parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from rung.nn.losses import sums_by_class, token_losses
from rung.nn.transformer import Shape, Transformer
from rung.random import Draw
from rung.recipe import Batch, Loss, TargetLosses
from rung.recipes.piano.config import Model
from rung.recipes.piano.tokenizer import CLASS_OF_ID, CLASSES, EOGENAI, GENAI, PAD, VOCAB_SIZE


def build_model(cfg: Model, seed: int) -> Transformer:
    keys = {field.name: getattr(cfg, field.name) for field in fields(Model)}
    return Transformer(Shape(vocab_size=VOCAB_SIZE, **keys), seed)


class PianoLoss:
    """The one loss of training and eval, of both stages."""

    def __init__(
        self, model: Transformer, only_answers: bool = False, num_given: int = 0, tasks: Sequence[str] = ()
    ) -> None:
        """`only_answers` is loss_masking=finetuning. `num_given` targets at the beginning of each row, the prefix, are
        not predicted. `tasks` are the names of what batch["task"] counts; none in next-token training."""
        self.model, self.only_answers, self.num_given, self.tasks = model, only_answers, num_given, list(tasks)
        self.class_of_id = torch.from_numpy(CLASS_OF_ID.astype("int64")).to(model.norm.weight.device)

    def weights(self, tokens_BT: Tensor) -> Tensor:
        """(B, T - 1) of 0 and 1: the answer begins after <GENAI> and ends with <EOGENAI>, which counts."""
        x_BT, y_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        counts_BT = y_BT != PAD
        counts_BT[:, : self.num_given] = False
        if self.only_answers:
            counts_BT &= (x_BT == GENAI).cumsum(dim=1) > 0
            counts_BT &= (x_BT == EOGENAI).cumsum(dim=1) == 0
        return counts_BT.float()

    def __call__(self, batch: Batch, draw: Draw) -> Loss:
        tokens = batch["tokens"].long()  # they travel as uint16
        losses, weights = token_losses(self.model(tokens[:, :-1]), tokens[:, 1:], self.weights(tokens))
        parts = sums_by_class(losses, weights, self.class_of_id[tokens[:, 1:]], CLASSES)
        if self.tasks:
            which = batch["task"][:, None].expand_as(losses)
            parts |= sums_by_class(losses, weights, which, self.tasks)
        else:
            parts.pop("special")  # only <CLS> and the prefix, which are never targets
        return Loss(losses.sum(), weights.sum(), parts, TargetLosses(losses.detach(), weights))
