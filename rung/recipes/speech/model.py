"""Ears for a language model: features of a frozen encoder, windows, a Q-Former, a projection, then the model's words.

    prompt before the speech | speech | prompt after it | answer

The prompt is pushed to the right, so that the answers of all rows begin in one column; what is left of a prompt and
right of an answer is masked. The last token of the prompt is the first column of `tokens`, whose other columns are the
answer and its end: those are the targets, and nothing else is.

Shapes: B rows, T frames, F width of the features, W windows, N frames of a window, Q queries, H width of the Q-Former,
S vectors of speech (W x Q), P columns of the prompt, L columns of tokens, D width of the language model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.nn.attention import kernels_for_masks
from rung.nn.losses import token_losses
from rung.nn.transformer import Shape, Transformer
from rung.random import Draw, key_of
from rung.recipe import Batch, Loss, ParameterGroup, Part, TargetLosses
from rung.recipes.speech import config as keys
from rung.recipes.speech.encoders import Encoder
from rung.recipes.speech.windows import Windows


class SpeechModel(nn.Module):
    def __init__(
        self, cfg: keys.Model, lm: Any, *, widths: Sequence[int], windows: Windows, max_frames: int,
        encoders: Sequence[Encoder] = (), seed: int,
    ) -> None:  # fmt: skip
        """`encoders` only where they run at every step; else their features come from the store."""
        super().__init__()
        from transformers import Blip2QFormerConfig, Blip2QFormerModel

        self.widths, self.windows, self.stack = list(widths), windows, cfg.audio.stack
        self.encoders = nn.ModuleList(encoders)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)
        width = sum(widths)
        self.front: nn.Linear | None = None
        self.audio: Transformer | None = None
        if cfg.audio.n_layer:
            shape = Shape(
                0, -(-max_frames // self.stack) + 1, cfg.audio.n_layer, cfg.audio.n_head, cfg.audio.n_embd,
                norm="layernorm", mlp="gelu", positions="rotary", bias=True, dropout=cfg.dropout, causal=False,
            )  # fmt: skip
            self.front, width = nn.Linear(width * self.stack, cfg.audio.n_embd), cfg.audio.n_embd
            self.audio = Transformer(shape, key_of(seed, "audio"))
        bridge = cfg.qformer
        self.queries_1QH = nn.Parameter(torch.randn(1, bridge.queries, bridge.n_embd) * 0.02)
        self.qformer = Blip2QFormerModel(
            Blip2QFormerConfig(
                vocab_size=1, hidden_size=bridge.n_embd, num_hidden_layers=bridge.n_layer,
                num_attention_heads=bridge.n_head, intermediate_size=4 * bridge.n_embd, cross_attention_frequency=1,
                encoder_hidden_size=width, hidden_dropout_prob=cfg.dropout, attention_probs_dropout_prob=cfg.dropout,
            )
        )  # fmt: skip
        if bridge.queries == 1:  # one vector attends to itself alone, whatever its queries and keys are
            for layer in self.qformer.encoder.layer:
                layer.attention.attention.query.requires_grad_(False)
                layer.attention.attention.key.requires_grad_(False)
        self.lm = lm
        self.projection = nn.Linear(bridge.n_embd, lm.get_input_embeddings().embedding_dim)

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B, L - 1, V) of all tokens but the first."""
        prompt_BPD, mask_BP = self.prompt(batch)
        tokens_BL = batch["tokens"].long()
        given_BLD = self.lm.get_input_embeddings()(tokens_BL[:, :-1])
        places_L = torch.arange(tokens_BL.shape[1] - 1, device=tokens_BL.device)
        mask = torch.cat([mask_BP, places_L < batch["answer_length"].long()[:, None]], dim=1)
        with kernels_for_masks(mask.device):
            out = self.lm(
                inputs_embeds=torch.cat([prompt_BPD.to(given_BLD.dtype), given_BLD], dim=1), attention_mask=mask.long(),
                position_ids=positions_of(mask), use_cache=False, logits_to_keep=tokens_BL.shape[1] - 1,
            )  # fmt: skip
        logits: Tensor = out.logits
        return logits

    def prompt(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The embedded prompt (B, P, D) but its last token, pushed to the right, and where it is real (B, P)."""
        speech_BSD, num_speech_B = self.speech(*self.features(batch))
        embed = self.lm.get_input_embeddings()
        before, after = embed(batch["before"].long()), embed(batch["after"].long())
        parts = (before, speech_BSD.to(before.dtype), after)
        lengths = (batch["before_length"].long(), num_speech_B, batch["after_length"].long())
        source_BPD = torch.cat(parts, dim=1)
        num_columns, total_B = source_BPD.shape[1], sum(lengths[1:], lengths[0])
        # Column p of a row holds the item p - (P - total) of its parts, one after the other.
        item_BP = torch.arange(num_columns, device=source_BPD.device) - (num_columns - total_B)[:, None]
        index_BP, start_B, offset = torch.zeros_like(item_BP), torch.zeros_like(total_B), 0
        for part, length_B in zip(parts, lengths):
            inside = (item_BP >= start_B[:, None]) & (item_BP < (start_B + length_B)[:, None])
            index_BP = torch.where(inside, item_BP - start_B[:, None] + offset, index_BP)
            start_B, offset = start_B + length_B, offset + part.shape[1]
        index = index_BP[..., None].expand(-1, -1, source_BPD.shape[2])
        return source_BPD.gather(1, index), item_BP >= 0

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Features (B, T, F) and how many of a row are real: from the store, or by the encoders, each clip alone."""
        if "features" in batch:
            return batch["features"].float(), batch["frames"].long()
        from rung.recipes.speech.encoders import features_of

        rows = []
        for sound_N, num in zip(batch["sound"], batch["samples"].tolist()):
            own = features_of(list(self.encoders), sound_N[:num].float() / 32767)  # type: ignore[arg-type]
            rows.append(own.half().float())  # as a store keeps them
        frames = torch.tensor([len(row) for row in rows], device=rows[0].device)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), frames

    def speech(self, features_BTF: Tensor, frames_B: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors for the language model (B, S, D), and how many of each row are real."""
        parts = features_BTF.split(self.widths, dim=-1)
        x_BTF = torch.cat([norm(part) for norm, part in zip(self.norms, parts)], dim=-1)
        if self.audio is not None and self.front is not None:
            x_BTF, frames_B = self._stacked(x_BTF, frames_B)
            is_real = torch.arange(x_BTF.shape[1], device=x_BTF.device) < frames_B[:, None]
            x_BTF = self.audio.hidden(embeddings=self.front(x_BTF), mask=is_real)
        num_rows, num_windows = len(x_BTF), self.windows.count(x_BTF.shape[1])
        needed = (num_windows - 1) * self.windows.stride + self.windows.size
        x_BTF = F.pad(x_BTF, (0, 0, 0, max(0, needed - x_BTF.shape[1])))
        x_BWFN = x_BTF.unfold(1, self.windows.size, self.windows.stride)
        first_W1 = torch.arange(num_windows, device=x_BTF.device)[:, None] * self.windows.stride
        frame_WN = first_W1 + torch.arange(self.windows.size, device=x_BTF.device)
        mask_BWN = frame_WN < frames_B[:, None, None]
        with kernels_for_masks(x_BTF.device):
            out = self.qformer(
                query_embeds=self.queries_1QH.expand(num_rows * num_windows, -1, -1),
                encoder_hidden_states=x_BWFN.transpose(2, 3).flatten(0, 1),
                encoder_attention_mask=mask_BWN.flatten(0, 1).long(),
            ).last_hidden_state
        speech_BSD = self.projection(out).unflatten(0, (num_rows, num_windows)).flatten(1, 2)
        return speech_BSD, self.windows.count_of(frames_B) * self.queries_1QH.shape[1]

    def _stacked(self, x_BTF: Tensor, frames_B: Tensor) -> tuple[Tensor, Tensor]:
        """Several frames side by side; what a row lacks to a whole number of them is zeros, as it is in padding."""
        is_real = torch.arange(x_BTF.shape[1], device=x_BTF.device) < frames_B[:, None]
        x_BTF = F.pad(x_BTF * is_real[..., None], (0, 0, 0, -x_BTF.shape[1] % self.stack))
        return x_BTF.unflatten(1, (-1, self.stack)).flatten(2), -(-frames_B // self.stack)

    def parameter_groups(self, qformer_lr_scale: float, lora_lr_scale: float) -> list[ParameterGroup]:
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]

        def of(*prefixes: str) -> list[nn.Parameter]:
            return [p for name, p in trained if name.startswith(prefixes)]

        groups = [
            ParameterGroup("qformer", of("qformer.", "queries_1QH"), lr_scale=qformer_lr_scale),
            ParameterGroup("projection", of("projection.", "norms.", "front.", "audio.")),
            ParameterGroup("lm", of("lm."), lr_scale=lora_lr_scale),
        ]
        return [group for group in groups if group.parameters]


def positions_of(mask_BP: Tensor) -> Tensor:
    """Positions count what is real, so that padding moves nobody."""
    return (mask_BP.long().cumsum(dim=1) - 1).clamp(min=0)


class SpeechLoss:
    """The one loss of training and eval: cross entropy of answers and their ends. `accuracy` counts right guesses."""

    def __init__(self, model: SpeechModel, tasks: Sequence[str]) -> None:
        self.model, self.tasks = model, list(tasks)

    def __call__(self, batch: Batch, draw: Draw) -> Loss:
        targets_BL = batch["tokens"].long()[:, 1:]
        places_L = torch.arange(targets_BL.shape[1], device=targets_BL.device)
        is_answer = places_L < batch["answer_length"].long()[:, None]
        logits_BLV = self.model(batch)
        losses, weights = token_losses(logits_BLV, targets_BL, is_answer)
        is_right = (logits_BLV.detach().argmax(dim=-1) == targets_BL).float() * weights
        whole = losses.sum(), weights.sum()
        parts: dict[str, Part] = {"accuracy": (is_right.sum(), weights.sum())}
        if len(self.tasks) > 1:
            for number, task in enumerate(self.tasks):
                is_in = (batch["task"].long() == number).float()[:, None]
                parts[f"task/{task}"] = (losses * is_in).sum(), (weights * is_in).sum()
                parts[f"accuracy/{task}"] = (is_right * is_in).sum(), (weights * is_in).sum()
        return Loss(*whole, parts, TargetLosses(losses.detach(), weights))


@torch.no_grad()
def answer(model: SpeechModel, batch: Batch, end: int, num_tokens: int, beams: int = 1) -> list[list[int]]:
    """The ids of each row's answer without its end, by greedy or beam search; the model is in eval mode."""
    from transformers import GenerationConfig

    prompt_BPD, mask_BP = model.prompt(batch)
    first_B1D = model.lm.get_input_embeddings()(batch["tokens"].long()[:, :1])
    mask = F.pad(mask_BP, (0, 1), value=True)
    settings = GenerationConfig(
        max_new_tokens=num_tokens, num_beams=beams, do_sample=False, eos_token_id=end, pad_token_id=end, use_cache=True
    )
    ids = model.lm.generate(
        inputs_embeds=torch.cat([prompt_BPD.to(first_B1D.dtype), first_B1D], dim=1), attention_mask=mask.long(),
        generation_config=settings,
    )  # fmt: skip
    return [row[: row.index(end)] if end in row else row for row in ids.tolist()]
