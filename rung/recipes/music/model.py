"""A text-conditioned decoder over codes, in Dia's shape, and its loss.

The encoder reads the bytes of a text; the decoder reads C codes a step, whose embeddings are summed, attends to the
text, and predicts C codes. A row without text (length 0) gives zeros from its cross attention: that is the
unconditional model, in training, eval and sampling alike.

Shapes: B rows, S steps, C channels, V ids of a channel, L bytes of text, W width of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rung.nn.attention import Cache
from rung.nn.init import Embedding, Projection, initialise
from rung.nn.losses import token_losses
from rung.nn.transformer import Shape, Transformer
from rung.random import Draw, key_of
from rung.recipe import Batch, Loss, ParameterGroup, Part, TargetLosses
from rung.recipes.music import config as keys
from rung.recipes.music.delay import Specials

NUM_BYTES = 256


class MusicModel(nn.Module):
    offsets_C: Tensor

    def __init__(
        self, cfg: keys.Model, *, num_channels: int, vocab_size: int, num_steps: int, text_length: int, seed: int | None
    ) -> None:
        """`seed` None leaves the weights undrawn, for a caller who fills them."""
        super().__init__()
        self.num_channels, self.vocab_size = num_channels, vocab_size
        shared = {
            "norm": "rmsnorm", "mlp": "swiglu", "positions": "rotary", "bias": False, "dropout": cfg.dropout,
            "attention_scale": cfg.attention_scale or None, "init": cfg.init,
        }  # fmt: skip
        text = cfg.text
        encoder = Shape(
            NUM_BYTES, text_length, text.n_layer, text.n_head, text.n_embd, head_dim=text.head_dim or None,
            n_hidden=text.n_hidden or None, causal=False, **shared,  # type: ignore[arg-type]
        )  # fmt: skip
        decoder = Shape(
            0, num_steps, cfg.n_layer, cfg.n_head, cfg.n_embd, n_kv_head=cfg.n_kv_head, head_dim=cfg.head_dim or None,
            n_hidden=cfg.n_hidden or None, cross_width=text.n_embd, **shared,  # type: ignore[arg-type]
        )  # fmt: skip
        self.encoder = Transformer(encoder, None if seed is None else key_of(seed, "encoder"))
        self.codes = Embedding(num_channels * vocab_size, cfg.n_embd)
        self.decoder = Transformer(decoder, None if seed is None else key_of(seed, "decoder"))
        self.head = Projection(cfg.n_embd, (vocab_size,) * num_channels, bias=False, role="head")
        if seed is not None:
            for name in ("codes", "head"):
                initialise(getattr(self, name), cfg.init, cfg.n_layer, key_of(seed, name))
        self.register_buffer("offsets_C", torch.arange(num_channels) * vocab_size, persistent=False)

    def forward(self, ids_BSC: Tensor, text_BL: Tensor, text_length_B: Tensor) -> Tensor:
        """Logits (B, S, C, V)."""
        memory, mask = self.encode(text_BL, text_length_B)
        return self.logits(self.hidden(ids_BSC, memory, mask))

    def encode(self, text_BL: Tensor, text_length_B: Tensor) -> tuple[Tensor, Tensor]:
        """What the decoder attends to, and where it is text."""
        mask_BL = torch.arange(text_BL.shape[1], device=text_BL.device) < text_length_B[:, None]
        return self.encoder.hidden(text_BL, mask=mask_BL), mask_BL

    def hidden(self, ids_BSC: Tensor, memory: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
        x_BSW = self.codes(ids_BSC + self.offsets_C).sum(dim=2)
        return self.decoder.hidden(embeddings=x_BSW, memory=memory, memory_mask=mask, cache=cache)

    def logits(self, x_BSW: Tensor) -> Tensor:
        return self.head(x_BSW).unflatten(-1, (self.num_channels, self.vocab_size))

    def parameter_groups(self, text_lr_scale: float) -> list[ParameterGroup]:
        """Those of the text, with a learning rate of their own, and those of the decoder; of each, Muon's apart."""
        own = self.encoder.parameter_groups()
        text = [group._replace(name=f"text {group.name}", lr_scale=text_lr_scale) for group in own]
        codes = ParameterGroup("codes", [*self.codes.parameters(), *self.head.parameters()])
        return [*text, *self.decoder.parameter_groups(), codes]


class MusicLoss:
    """The one loss of training and eval.

    `masking` says what counts: codes, the ends of pieces too, or every target. Parts, all unweighted: each codebook's
    codes, all codes (`codes_only`), special tokens whether they count or not (`special`), and the output entropy of the
    predictions of what counts (`entropy`).
    """

    def __init__(
        self, model: MusicModel, specials: Specials, masking: str, weights: Sequence[float], names: Sequence[str]
    ) -> None:
        self.model, self.specials, self.masking, self.names = model, specials, masking, list(names)
        device = model.offsets_C.device
        self.weights_C = torch.tensor(list(weights) or [1.0] * len(names), device=device)

    def __call__(self, batch: Batch, draw: Draw) -> Loss:
        rows_BSC = batch["codes"].long()  # they travel as uint16
        inputs, targets = rows_BSC[:, :-1], rows_BSC[:, 1:]
        logits = self.model(inputs, batch["text"].long(), batch["text_length"].long())
        each, _ = token_losses(logits, targets)
        is_code = (targets < self.specials.eos).float()
        counted = is_code
        if self.masking == "all":
            counted = torch.ones_like(is_code)
        elif self.masking == "codes_eos":
            counted = (targets <= self.specials.eos).float()
        weights = counted * self.weights_C.to(counted.device)
        losses, of_codes = each * weights, each * is_code
        by_channel, codes_in = of_codes.sum(dim=(0, 1)), is_code.sum(dim=(0, 1))
        parts: dict[str, Part] = {f"codebook/{name}": (by_channel[c], codes_in[c]) for c, name in enumerate(self.names)}
        parts["codes_only"] = by_channel.sum(), codes_in.sum()
        parts["special"] = each.sum() - by_channel.sum(), (1 - is_code).sum()
        parts["entropy"] = (entropies(logits, targets, each) * counted).sum(), counted.sum()
        return Loss(losses.sum(), weights.sum(), parts, TargetLosses(losses.detach(), weights, self.names))


@torch.no_grad()
def entropies(logits: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
    """The entropy of each prediction in nats, float32, in the shape of `targets`; `losses` are their cross entropies.

    A loss is the logsumexp less the logit of the target, so the logsumexp is had back for nothing.
    """
    logits = logits.float()
    lse = losses + logits.gather(-1, targets[..., None])[..., 0]
    log_shares = logits - lse[..., None]
    return -(log_shares.exp() * log_shares).sum(dim=-1)
