"""The piano GPT and its loss: predict the next token of a performance, or of an answer.

The model is the shared transformer in the shape of GPT-2. With `model.sounding_keys` it is also given which keys sound
and for how long; with `loss_grammar` the loss compares only tokens that the encoder could have written next, as
sampling does. The loss is the sum of cross entropies over the targets that count, with the classes of tokens (which
note, how loud, how long to wait) and the tasks as parts.

Shapes: B rows, T positions, C width of the stream, K keys of the piano, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rung.nn.init import Projection, initialise
from rung.nn.losses import sums_by_class, token_losses
from rung.nn.transformer import Shape, Transformer
from rung.random import Draw
from rung.recipe import Batch, Loss, TargetLosses
from rung.recipes.piano.config import Model
from rung.recipes.piano.grammar import allowed, follow, start
from rung.recipes.piano.notes import UNIT_S
from rung.recipes.piano.tokenizer import CLASS_OF_ID, CLASSES, EOGENAI, GENAI, NUM_PITCHES, PAD, VOCAB_SIZE

LONGEST_S = 4.0  # a key that sounds for longer counts as one that sounds for so long
MASKED = -1e9  # logit of a token that cannot come next; -inf would give NaN where nothing can, as after the end


class KeysTransformer(Transformer):
    """A transformer that is given which keys sound after each token, and for how many seconds.

    Without `age_BTK` (see grammar.State) it works them out from the ids, as if nothing sounded before the first.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__(shape, None)
        self.keys = Projection(2 * NUM_PITCHES, (shape.n_embd,), bias=False)
        initialise(self, shape.init, shape.n_layer, seed)

    def embed(self, ids_BT: Tensor, age_BTK: Tensor) -> Tensor:
        assert self.tokens is not None
        sounds_BTK = (age_BTK >= 0).to(self.keys.weight.dtype)
        seconds_BTK = age_BTK.clamp(0, round(LONGEST_S / UNIT_S)).to(sounds_BTK) * UNIT_S
        embedded_BTC: Tensor = self.tokens(ids_BT) + self.keys(torch.cat([sounds_BTK, seconds_BTK], dim=2))
        return embedded_BTC

    def hidden(
        self,
        ids_BT: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        age_BTK: Tensor | None = None,
        **arguments: Any,
    ) -> Tensor:
        if embeddings is None:
            assert ids_BT is not None, "give either ids or embeddings"
            assert arguments.get("cache") is None, "what sounded before these ids is not known; give embeddings"
            embeddings = self.embed(ids_BT, follow(ids_BT).age_BTK if age_BTK is None else age_BTK)
        return super().hidden(embeddings=embeddings, **arguments)


def build_model(cfg: Model, seed: int) -> Transformer:
    keys = {field.name: getattr(cfg, field.name) for field in fields(Model)}
    has_keys = keys.pop("sounding_keys")
    shape = Shape(vocab_size=VOCAB_SIZE, **keys)
    return KeysTransformer(shape, seed) if has_keys else Transformer(shape, seed)


class PianoLoss:
    """The one loss of training and eval, of both stages."""

    def __init__(
        self,
        model: Transformer,
        only_answers: bool = False,
        num_given: int = 0,
        tasks: Sequence[str] = (),
        has_grammar: bool = False,
        has_end: bool = False,
    ) -> None:
        """`only_answers` is loss_masking=finetuning. `num_given` targets at the beginning of each row, the prefix, are
        not predicted. `tasks` are the names of what batch["task"] counts; none in next-token training, whose rows may
        end with <EOGENAI> (`has_end`). `has_grammar` is loss_grammar."""
        self.model, self.only_answers, self.num_given, self.tasks = model, only_answers, num_given, list(tasks)
        self.has_grammar, self.has_end = has_grammar, has_end
        self.has_keys = isinstance(model, KeysTransformer)
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
        x_BT, arguments, can_BTV = tokens[:, :-1], {}, None
        if self.has_keys or self.has_grammar:
            state = follow(x_BT, start(len(x_BT), x_BT.device, batch.get("sounding")))
            if self.has_keys:
                arguments["age_BTK"] = state.age_BTK
            if self.has_grammar:
                can_BTV = allowed(state, may_end=self.has_end, may_ask=bool(self.tasks))
        logits_BTV = self.model(x_BT, **arguments)
        if can_BTV is not None:
            logits_BTV = logits_BTV[:, :, : can_BTV.shape[2]].float().masked_fill(~can_BTV, MASKED)
        losses, weights = token_losses(logits_BTV, tokens[:, 1:], self.weights(tokens))
        parts = sums_by_class(losses, weights, self.class_of_id[tokens[:, 1:]], CLASSES)
        if self.tasks:
            which = batch["task"][:, None].expand_as(losses)
            parts |= sums_by_class(losses, weights, which, self.tasks)
        elif not self.has_end:
            parts.pop("special")  # only <CLS> and the prefix, which are never targets
        return Loss(losses.sum(), weights.sum(), parts, TargetLosses(losses.detach(), weights))
